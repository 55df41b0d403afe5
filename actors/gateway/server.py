"""The HTTP door of rollouts: any client of OpenAI's or Anthropic's API talks to the policy, one key for each rollout.

POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/messages/count_tokens; GET /v1/models
GET  /v1/session            the task: prompt, metadata, label, whether turns are replayed
POST /v1/session/reward     {"reward": 1.0}, or {"reward": 0.5, "answer": ID} for one turn (`myxa.answers` in an answer)
POST /v1/session/end        {"reward": 1.0, "failure": "..."}: both may be left out
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from ...core.errors import FailureKind
from ...core.samples import Prompt
from .answering import COUNT_PATH, MODELS_PATH, PATHS, Answering, fault_body, models, num_tokens, read_exchange
from .exchange import STATUS, read_body
from .session import AgentSession, RequestFault

MAX_BODY_BYTES = 16 << 20
BODY_S = 60.0
"""For a client to send its body."""
READ_S = 60.0
"""For a client to take a part of a stream."""
POLL_S = 25.0
"""For a service that polls to be told that there is no task."""
MAX_ENDED = 10_000
"""Keys of ended sessions that are remembered."""
MAX_UNDER_WAY = 64
"""Turns of one session that may be drawn at a time."""
_log = logging.getLogger(__name__)


class Reward(msgspec.Struct, forbid_unknown_fields=True):
    """A turn's, or the rollout's."""

    reward: float
    answer: str | None = None


class SessionEnd(msgspec.Struct, forbid_unknown_fields=True):
    """How a rollout ended."""

    reward: float | None = None
    failure: str | None = None
    """Why it is none: the member is tried again, or masked."""
    kind: FailureKind = "environment"


@dataclass(eq=False)
class OpenSession:
    """A rollout that clients talk to."""

    session: AgentSession
    prompt: Prompt
    is_replay: bool = False
    """Turns that an earlier attempt recorded are answered from the record."""
    reward: float | None = None
    end: SessionEnd | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """The client has said that it is over."""
    num_under_way: int = 0
    heard_s: float = 0.0
    """When its client asked for something last, or got it; monotonic."""


class Offer:
    """A task that waits for a service."""

    def __init__(self, task: dict[str, Any], key: str) -> None:
        self.task = task
        self.key = key
        self.taken = asyncio.Event()


class Gateway:
    """The door of one process. Sessions come and go; the server stays."""

    def __init__(self) -> None:
        self._open: dict[str, OpenSession] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._services: dict[str, set[str]] = {}
        """Keys of services that poll; with the keys of the sessions that each has taken."""
        self._offered: asyncio.Queue[Offer] = asyncio.Queue()
        self.num_taken = 0
        """Tasks that services took."""
        self.app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_in_dialect])
        for path in PATHS:
            self.app.router.add_post(path, self._answer)
        self.app.router.add_post(COUNT_PATH, self._count)
        self.app.router.add_get(MODELS_PATH, self._models)
        self.app.router.add_get("/v1/session", self._task)
        self.app.router.add_post("/v1/session/reward", self._reward)
        self.app.router.add_post("/v1/session/end", self._end)
        self.app.router.add_post("/v1/tasks/next", self._next_task)
        self.app.router.add_get("/health", _health)

    def open(self, one: OpenSession, prefix: str = "") -> str:
        """The key of a new session. `prefix`: says which process has it."""
        key = f"sk-myxa-{prefix}{secrets.token_urlsafe(24)}"
        self._open[key] = one
        return key

    async def close(self, key: str) -> None:
        """Its key is refused from now on; its turns under way end."""
        one = self._open.pop(key, None)
        for taken in self._services.values():
            taken.discard(key)
        self._ended[key] = None
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        if one is not None:
            await one.session.close()

    def offer(self, task: dict[str, Any], key: str) -> Offer:
        """Put a task where services that poll get it."""
        one = Offer(task, key)
        self._offered.put_nowait(one)
        return one

    def add_service(self) -> str:
        """The key of a service that polls."""
        key = f"sk-myxa-tasks-{secrets.token_urlsafe(24)}"
        self._services[key] = set()
        return key

    def drop_service(self, key: str, why: str) -> None:
        """It has ended: what it has taken fails."""
        for taken in self._services.pop(key):
            if (one := self._open.get(taken)) is not None and not one.ended.is_set():
                one.end = SessionEnd(failure=why)
                one.ended.set()

    def refuse_offers(self, why: str) -> None:
        """Nothing will ever take the tasks that wait: their rollouts fail."""
        while not self._offered.empty():
            offer = self._offered.get_nowait()
            if (one := self._open.get(offer.key)) is not None:
                one.end = SessionEnd(failure=why, kind="user-code")
                one.ended.set()
                offer.taken.set()

    async def _next_task(self, request: web.Request) -> web.Response:
        key = _key(request)
        if key not in self._services:
            raise RequestFault("auth", "tasks are given for the key of a service alone")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                while True:
                    offer = await self._offered.get()
                    if offer.key in self._open:  # else its rollout has ended
                        offer.taken.set()
                        self.num_taken += 1
                        self._services.get(key, set()).add(offer.key)
                        return _json(offer.task)
        return web.Response(status=204)

    def _session(self, request: web.Request) -> OpenSession:
        """Raises RequestFault."""
        key = _key(request)
        found = self._open.get(key)
        if found is not None:
            found.heard_s = asyncio.get_running_loop().time()
            return found
        if key in self._ended:
            raise RequestFault("auth", "the session of this key has ended")
        raise RequestFault("auth", "no session has this key: send the one that the task came with")

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        one = self._session(request)
        body = await _body(request)
        if one.num_under_way >= MAX_UNDER_WAY:
            raise RequestFault("busy", f"this session has {MAX_UNDER_WAY} requests under way: wait for one to end")
        retry_key = request.headers.get("Idempotency-Key", "")
        exchange = read_exchange(request.path, body, one.session, retry_key)
        one.num_under_way += 1
        try:
            answering = Answering(exchange, one.session)
            if exchange.is_stream:
                return await _streamed(request, answering)
            response = _json(await answering.whole())
            await response.prepare(request)
            async with asyncio.timeout(READ_S):
                await response.write_eof()
            answering.delivered()
            return response
        finally:
            one.num_under_way -= 1
            one.heard_s = asyncio.get_running_loop().time()

    async def _count(self, request: web.Request) -> web.Response:
        return _json(num_tokens(await _body(request), self._session(request).session))

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        return _json(models("anthropic-version" in request.headers))

    async def _task(self, request: web.Request) -> web.Response:
        one = self._session(request)
        return _json(
            {
                **task_of(one.prompt),
                "is_replay": one.is_replay,
                "reward": one.reward,
                "counts": dict(one.session.counts),
            }
        )

    async def _reward(self, request: web.Request) -> web.Response:
        one, said = self._session(request), read_body(await _body(request), Reward)
        _check_reward(said.reward)
        if said.answer is None:
            one.reward = said.reward
        else:
            one.session.reward_turn(said.answer, said.reward)
        return _json({"ok": True})

    async def _end(self, request: web.Request) -> web.Response:
        one = self._session(request)
        end = read_body(await _body(request) or b"{}", SessionEnd)
        if end.reward is not None:
            _check_reward(end.reward)
            one.reward = end.reward
        one.end = end
        one.ended.set()
        return _json({"ok": True})


def task_of(prompt: Prompt) -> dict[str, Any]:
    """What an agent is told of its row."""
    return {
        "messages": [message.as_template_sees() for message in prompt.messages],
        "tools": list(prompt.tools),
        "label": prompt.label,
        "metadata": prompt.metadata,
    }


def _key(request: web.Request) -> str:
    kind, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "")


def _check_reward(reward: float) -> None:
    if not math.isfinite(reward):
        raise RequestFault("invalid", f"reward is {reward}: send a finite number", param="reward")


async def _health(request: web.Request) -> web.Response:
    return _json({"ok": True})


def _json(data: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(data), status=status, content_type="application/json")


async def _body(request: web.Request) -> bytes:
    """Raises RequestFault."""
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise RequestFault("too-large", f"the body is larger than {MAX_BODY_BYTES >> 20} MiB") from None
    except TimeoutError:
        raise RequestFault("invalid", f"the body did not come within {BODY_S:g} s") from None


async def _streamed(request: web.Request, answering: Answering) -> web.StreamResponse:
    """Events as they come. A client that takes nothing for READ_S loses its connection, not its turn."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    async with contextlib.aclosing(answering.events()) as events:
        async for text in events:
            async with asyncio.timeout(READ_S):
                await response.write(text.encode())
    async with asyncio.timeout(READ_S):
        await response.write_eof()
    answering.delivered()
    return response


@web.middleware
async def _in_dialect(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Errors in the form of the dialect that the path belongs to."""
    try:
        return await handler(request)
    except RequestFault as fault:
        return _json(fault_body(request.path, fault), STATUS[fault.kind])
    except web.HTTPException as error:
        kind = "not-found" if error.status == 404 else "invalid"
        fault = RequestFault(kind, f"{request.method} {request.path}: {error.reason}")
        return _json(fault_body(request.path, fault), error.status)
    except (ConnectionError, TimeoutError) as error:
        _log.info("a client of %s left: %s", request.path, error or type(error).__name__)
        raise
