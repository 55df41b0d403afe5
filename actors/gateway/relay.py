"""The gateway role: one address of the run, in front of the gateways of all rollout actors.

The key of a session begins with the number of the rollout actor that has it. Requests with the run's eval key go to
each actor in turn; services that poll get tasks of all. Address and keys are in a file: a gateway that is started again
has the same ones, and its clients ask again for what was under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections import Counter
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from ...core.activity import ActivityMeter, TelemetryBuffer
from ...core.actor import PeerEvent
from ...core.clock import Clock
from ...core.errors import CallError
from ...core.messages import GatewayPlace
from ...core.retry import until_answered
from ..contracts import GatewayContract, MonitorContract
from ..http_client import client_session, stream_timeout
from ..http_guard import same
from ..telemetry import REPORT_S, report_forever
from .server import (
    KEY_PREFIX,
    MAX_BODY_BYTES,
    POLL_S,
    READ_S,
    Listener,
    ListenOptions,
    body_of,
    health,
    in_dialect,
    key_of,
    send_whole,
)
from .session import RequestFault

CONNECT_S = 5.0
"""For an actor to take a connection."""
LOOK_S = 0.1
"""Between two looks for tasks while a service waits."""
ASK_S = 10.0
"""For an actor to say whether it has a task."""
ROLLOUTS = "rollout/"
_SESSION_KEY = re.compile(rf"{KEY_PREFIX}r(\d{{1,6}})-")
_PASSED_ON = ("Content-Type", "Anthropic-Version", "Idempotency-Key", "x-stainless-retry-count")


@dataclass(eq=False, slots=True)
class _Behind:
    """A rollout actor's gateway."""

    place: GatewayPlace
    http: aiohttp.ClientSession


class GatewayRelay(GatewayContract):
    """See the module's head."""

    mailbox_size = 4096

    def __init__(self, options: ListenOptions, clock: Clock) -> None:
        self._clock = clock
        self._behind: dict[str, _Behind] = {}
        """By the actor's name."""
        self._turns = itertools.count()
        self._turn = asyncio.Lock()
        """Services get tasks in the order in which they asked."""
        self._tasks: list[bytes] = []
        """Taken, and not given to a service yet: the one that asked has left."""
        self._look: asyncio.Task[None] | None = None
        self.counts = Counter[str](requests=0, away=0)
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[in_dialect])
        app.router.add_get("/health", health)
        app.router.add_post("/v1/tasks/next", self._next_task)
        app.router.add_route("*", "/v1/{path:.*}", self._relay)
        self._listener = Listener(app, options)

    async def on_start(self) -> None:
        self._meter = ActivityMeter(self.ctx.name, self._clock)
        self._telemetry = TelemetryBuffer(self.ctx.name, self._clock, meter=self._meter)
        self._meter.switch("wait-data", "requests")
        self.ctx.watch(ROLLOUTS)
        meetings = [self.ctx.spawn(self._meet(name), name=f"meet {name}") for name in self.ctx.peers(ROLLOUTS)]
        if meetings:  # clients that asked the process before this one come at once
            await asyncio.wait(meetings, timeout=CONNECT_S)
        await self._listener.open()
        self.ctx.spawn(self._gauge_forever(), name="gateway-gauges")
        send = self.ctx.ref(MonitorContract, "monitor").telemetry
        self.ctx.spawn(report_forever(self._telemetry, send), name="gateway-telemetry")

    async def on_stop(self, why: str) -> None:
        await self._listener.close()
        for name in tuple(self._behind):
            await self._forget(name)

    async def gateway_place(self) -> GatewayPlace:
        return self._listener.place

    async def _gauge_forever(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            self._telemetry.metric(-1, {f"gateway/{name}": float(count) for name, count in self.counts.items()})

    # -- who is there

    async def on_peer(self, event: PeerEvent) -> None:
        if event.kind in ("up", "restarted"):
            self.ctx.spawn(self._meet(event.name), name=f"meet {event.name}")
        elif event.kind == "down":
            await self._forget(event.name)

    async def _meet(self, name: str) -> None:
        ask = self.ctx.ref(GatewayContract, name).gateway_place
        try:
            place = await until_answered(ask, who=name, clock=self._clock, log=self.ctx.log)
        except CallError as error:
            self.ctx.log.warning("%s is not served: %s", name, error)
            return
        await self._forget(name)
        self._behind[name] = _Behind(place, client_session(keepalive_s=15.0))

    async def _forget(self, name: str) -> None:
        """What is under way with it ends."""
        if (gone := self._behind.pop(name, None)) is not None:
            await gone.http.close()

    def _find(self, key: str) -> tuple[_Behind, str]:
        """Who is asked, and with which key. Raises RequestFault."""
        eval_key = self._listener.place.eval_key
        if eval_key and same(key, eval_key):
            able = [behind for behind in self._behind.values() if behind.place.eval_key]
            if not able:
                raise RequestFault("busy", "no rollout actor serves now: ask again in a moment")
            behind = able[next(self._turns) % len(able)]
            return behind, behind.place.eval_key
        match = _SESSION_KEY.match(key)
        if match is None:
            raise RequestFault("auth", "no session has this key: send the one that the task came with")
        name = f"{ROLLOUTS}{int(match[1])}"
        if name not in self._behind:
            raise RequestFault("busy", f"{name}, which has this session, is not there: ask again in a moment")
        return self._behind[name], key

    # -- requests

    async def _relay(self, request: web.Request) -> web.StreamResponse:
        behind, key = self._find(key_of(request))
        self.counts["requests"] += 1
        body = await body_of(request)
        headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
        headers["Authorization"] = f"Bearer {key}"
        response: web.StreamResponse | None = None
        try:
            async with self._ask(behind, request.method, str(request.rel_url), body, headers) as answer:
                kind = answer.headers.get("Content-Type", "application/json")
                response = web.StreamResponse(status=answer.status, headers={"Content-Type": kind})
                response.content_length = answer.content_length
                await response.prepare(request)
                async for part in answer.content.iter_any():
                    async with asyncio.timeout(READ_S):
                        await response.write(part)
                async with asyncio.timeout(READ_S):
                    await response.write_eof()
                return response
        except aiohttp.ClientError as error:
            self.counts["away"] += 1
            reason = f"the rollout actor that answers is gone: {error}"
            if response is not None:  # no status can be told any more: the connection ends in the middle
                raise ConnectionResetError(reason) from error
            raise RequestFault("busy", f"{reason}; ask again in a moment") from error

    def _ask(
        self, behind: _Behind, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return behind.http.request(
            method, f"{behind.place.base_url}{path}", data=body, headers=headers,
            allow_redirects=False, timeout=stream_timeout(CONNECT_S),
        )  # fmt: skip

    # -- tasks

    async def _next_task(self, request: web.Request) -> web.StreamResponse:
        if not same(key_of(request), self._listener.place.tasks_key):
            return await self._relay(request)
        try:
            async with asyncio.timeout(POLL_S), self._turn:
                while not self._tasks:
                    if self._look is None or self._look.done():
                        self._look = self.ctx.spawn(self._look_for_task(), name="look for a task")
                    await asyncio.wait([self._look])  # it continues where this service leaves
                    if not self._tasks:
                        await asyncio.sleep(LOOK_S)
                task = self._tasks.pop()
        except TimeoutError:
            return web.Response(status=204)
        try:
            return await send_whole(request, web.Response(body=task, content_type="application/json"))
        except BaseException:
            self._tasks.append(task)
            raise

    async def _look_for_task(self) -> None:
        """Take one, from actors in turn."""
        all_behind = list(self._behind.values())
        first = next(self._turns)
        for number in range(len(all_behind)):
            behind = all_behind[(first + number) % len(all_behind)]
            headers = {"Authorization": f"Bearer {behind.place.tasks_key}"}
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with (
                    asyncio.timeout(ASK_S),
                    self._ask(behind, "POST", "/v1/tasks/next?now", b"{}", headers) as answer,
                ):
                    if answer.status == 200:
                        self._tasks.append(await answer.read())
                        return
