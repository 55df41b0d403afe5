"""The HTTP door of rollouts: any client of OpenAI's or Anthropic's API talks to the policy, one key for each rollout.

POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/messages/count_tokens; GET /v1/models
GET  /v1/session            the task: prompt, metadata, label, whether turns are replayed
POST /v1/session/reward     {"reward": 1.0}, or {"reward": 0.5, "answer": ID} for one turn (`myxa.answers` in an answer)
POST /v1/session/end        {"reward": 1.0, "failure": "..."}: both may be left out
POST /v1/tasks/next         for services that poll

The run's own eval key belongs to no rollout: each request with it is a conversation of its own, which is recorded
nowhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import socket
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from aiohttp import web
from msgspec.structs import replace

from ...core.errors import ConfigError, FailureKind
from ...core.files import write_durably
from ...core.messages import GatewayPlace
from ...core.protocols import Tokenizer
from ...core.samples import Prompt
from ...transport.address import hold_port
from ..http_guard import same
from ..workflows.episode import Episode, ModelAccess, ModelsOfRollout
from .answering import (
    COUNT_PATH,
    MODELS_PATH,
    PATHS,
    Answering,
    answer_of,
    fault_body,
)
from .exchange import STATUS, read_body
from .session import AgentSession, RequestFault, checked_reward, task_of

MAX_BODY_BYTES = 16 << 20
BODY_S = 60.0
"""For a client to send its body."""
READ_S = 60.0
"""For a client to take a part of a stream."""
POLL_S = 25.0
"""For a service that polls to be told that there is no task."""
MAX_ENDED = 10_000
"""Keys of ended sessions that are remembered."""
REST_S = 1.0
"""For the rest of a body that is refused: it is unpacked, and others wait."""
STOP_S = 2.0
"""For requests under way, once the server stops."""
KEY_PREFIX = "sk-myxa-"
KNOWN_PATHS = f"there are POST {', '.join((*PATHS, COUNT_PATH))}, GET {MODELS_PATH}"
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


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """Where a gateway listens, and what is kept of it for one that starts again."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: any free one; that of `file`, if it is free."""
    key: str = "agent.port"
    """Of the run file: what says `port`."""
    file: str = ""
    """Address and keys as JSON, for its owner alone; empty: nowhere."""
    has_eval_key: bool = False


class Listener:
    """An HTTP server with an address and keys."""

    def __init__(self, app: web.Application, options: ListenOptions) -> None:
        self.options = options
        self.place = GatewayPlace()
        """Once it is open."""
        self.is_open = asyncio.Event()
        # A handler ends with its connection: what its client does not get was not delivered.
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=STOP_S, lingering_time=REST_S
        )

    async def open(self) -> GatewayPlace:
        """Listen. Raises ConfigError where the address is taken."""
        options, earlier = self.options, GatewayPlace()
        if options.file:
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                earlier = msgspec.json.decode(Path(options.file).read_bytes(), type=GatewayPlace)
        await self._runner.setup()
        try:
            await self._listen(options.port or earlier.port)
        except OSError as error:
            if options.port or not earlier.port:
                await self._runner.cleanup()
                is_host = isinstance(error, socket.gaierror)
                place = options.host if is_host else f"{options.key} = {options.port}"
                remedy = "name an address of this machine" if is_host else "use 0: any free port"
                raise ConfigError(f"{place}: {error.strerror}", remedy=remedy) from error
            _log.warning("port %d, which this gateway had before, is taken: it gets another one", earlier.port)
            await self._listen(0)
        port: int = self._runner.addresses[0][1]
        host = socket.gethostname() if options.host in ("0.0.0.0", "::") else options.host
        eval_key = (earlier.eval_key or _new_key("eval-")) if options.has_eval_key else ""
        self.place = GatewayPlace(
            base_url=f"http://{f'[{host}]' if ':' in host else host}:{port}",
            port=port,
            tasks_key=earlier.tasks_key or _new_key("tasks-"),
            eval_key=eval_key,
        )
        if options.file:
            write_durably(Path(options.file), msgspec.json.encode(self.place), 0o600)
        self.is_open.set()
        return self.place

    async def _listen(self, port: int) -> None:
        if not port:
            with hold_port(self.options.host) as holder:
                return await self._listen(holder.getsockname()[1])
        return await web.TCPSite(self._runner, self.options.host, port, backlog=4096).start()

    @contextlib.asynccontextmanager
    async def serving(self, listening: socket.socket) -> AsyncGenerator[None]:
        """Meanwhile it answers there too: inside of a sandbox."""
        site = web.SockSite(self._runner, listening)
        await site.start()
        try:
            yield
        finally:
            await site.stop()

    async def close(self) -> None:
        await self._runner.cleanup()


def _new_key(prefix: str) -> str:
    return f"{KEY_PREFIX}{prefix}{secrets.token_urlsafe(24)}"


@dataclass(frozen=True, slots=True)
class EvalAccess:
    """How requests with the eval key are answered."""

    tokenizer: Tokenizer
    model: ModelAccess
    limit: Callable[[], int]
    is_serving: Callable[[], bool]


@dataclass(eq=False)
class OpenSession:
    """A rollout that clients talk to."""

    session: AgentSession
    prompt: Prompt
    models: ModelsOfRollout = field(default_factory=ModelsOfRollout)
    """Of the run's own: requests may name one."""
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

    def __init__(self, options: ListenOptions | None = None, *, prefix: str = "", is_behind: bool = False) -> None:
        """`prefix`: of keys, says whose session it is. `is_behind`: agents get the gateway role's address."""
        self._eval: EvalAccess | None = None
        """None: there is no engine yet."""
        self._num_eval = 0
        self._numbers = itertools.count(1)
        self._prefix = prefix
        self._address: asyncio.Future[str] | None = None
        self.is_behind = is_behind
        self._open: dict[str, OpenSession] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._services: dict[str, set[str]] = {}
        """Keys of services that poll; with the keys of the sessions that each has taken."""
        self._offered: dict[str, Offer] = {}
        """By the keys of their sessions."""
        self._has_offers = asyncio.Event()
        self.num_taken = 0
        """Tasks that services took."""
        self.app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[in_dialect])
        for path in (*PATHS, COUNT_PATH):
            self.app.router.add_post(path, self._answer)
        self.app.router.add_get(f"{MODELS_PATH}{{name:(/.+)?}}", self._answer)
        self.app.router.add_get("/v1/session", self._task)
        self.app.router.add_post("/v1/session/reward", self._reward)
        self.app.router.add_post("/v1/session/end", self._end)
        self.app.router.add_post("/v1/tasks/next", self._next_task)
        self.app.router.add_get("/health", health)
        self._listener = Listener(self.app, options or ListenOptions())
        self.serving = self._listener.serving

    async def start(self) -> None:
        """Serve. Raises ConfigError where the address is taken."""
        place = await self._listener.open()
        self._services[place.tasks_key] = set()
        if not self.is_behind:
            self.set_address(place.base_url)

    async def stop(self) -> None:
        await self._listener.close()

    def answer_eval(
        self, tokenizer: Tokenizer, model: ModelAccess, *, limit: Callable[[], int], is_serving: Callable[[], bool]
    ) -> None:
        """An engine for the eval key. `limit`: requests at a time. `is_serving`: it has weights of the run."""
        self._eval = EvalAccess(tokenizer, model, limit, is_serving)

    async def served(self) -> GatewayPlace:
        """Its own address and keys, once it serves."""
        await self._listener.is_open.wait()
        return self._listener.place

    def set_address(self, address: str) -> None:
        """What agents get from now on."""
        if self._address is None or self._address.done():
            self._address = asyncio.get_running_loop().create_future()
        self._address.set_result(address)

    async def address(self) -> str:
        """What agents get, once it is known."""
        if self._address is None:
            self._address = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._address)

    def open(self, rollout: OpenSession) -> str:
        key = _new_key(self._prefix)
        self._open[key] = rollout
        return key

    async def close(self, key: str) -> None:
        """Its key is refused from now on; its turns under way end."""
        rollout = self._open.pop(key, None)
        self._offered.pop(key, None)
        for sessions in self._services.values():
            sessions.discard(key)
        self._ended[key] = None
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        if rollout is not None:
            for session in (rollout.session, *(model.clients for model in rollout.models.values())):
                await session.close()

    def offer(self, task: dict[str, Any], key: str) -> Offer:
        """Put a task where services that poll get it."""
        offer = self._offered[key] = Offer(task, key)
        self._has_offers.set()
        return offer

    def add_service(self) -> str:
        key = _new_key(f"{self._prefix}tasks-")
        self._services[key] = set()
        return key

    def drop_service(self, key: str, why: str) -> None:
        """It has ended: what it has taken fails."""
        for session in self._services.pop(key):
            if (rollout := self._open.get(session)) is not None and not rollout.ended.is_set():
                rollout.end = SessionEnd(failure=why)
                rollout.ended.set()

    def refuse_offers(self, why: str) -> None:
        """Nothing will ever take the tasks that wait: their rollouts fail."""
        while self._offered:
            key, offer = self._offered.popitem()
            if (rollout := self._open.get(key)) is not None:
                rollout.end = SessionEnd(failure=why, kind="user-code")
                rollout.ended.set()
                offer.taken.set()

    async def _next_task(self, request: web.Request) -> web.StreamResponse:
        key = key_of(request)
        if key not in self._services:
            raise RequestFault("auth", "tasks are given for the key of a service alone")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.0 if "now" in request.query else POLL_S):
                while not self._offered:
                    self._has_offers.clear()
                    await self._has_offers.wait()
        if not self._offered:
            return web.Response(status=204)
        return await self._hand_over(self._offered.pop(next(iter(self._offered))), key, request)

    async def _hand_over(self, offer: Offer, key: str, request: web.Request) -> web.StreamResponse:
        """Hand the task over; to another service where this one has left."""
        try:
            response = await send_whole(request, json_response(offer.task))
        except BaseException:
            if offer.key in self._open:
                self._offered[offer.key] = offer
                self._has_offers.set()
            raise
        offer.taken.set()
        self.num_taken += 1
        self._services.get(key, set()).add(offer.key)
        return response

    @contextlib.asynccontextmanager
    async def _session(self, request: web.Request) -> AsyncGenerator[OpenSession]:
        """Of the request's key. Raises RequestFault."""
        if self._is_eval(request):
            async with self._eval_session() as rollout:
                yield rollout
            return
        rollout = self._find_rollout(request)
        rollout.num_under_way += 1
        try:
            yield rollout
        finally:
            rollout.num_under_way -= 1
            rollout.heard_s = asyncio.get_running_loop().time()

    def _is_eval(self, request: web.Request) -> bool:
        eval_key = self._listener.place.eval_key
        return bool(eval_key) and same(key_of(request), eval_key)

    def _find_rollout(self, request: web.Request) -> OpenSession:
        """Raises RequestFault."""
        key = key_of(request)
        if (rollout := self._open.get(key)) is not None:
            rollout.heard_s = asyncio.get_running_loop().time()
            return rollout
        if self._is_eval(request):
            raise RequestFault("auth", "the eval key belongs to no rollout: it has no task and earns no reward")
        if key in self._ended:
            raise RequestFault("auth", "the session of this key has ended")
        raise RequestFault("auth", "no session has this key: send the one that the task came with")

    @contextlib.asynccontextmanager
    async def _eval_session(self) -> AsyncGenerator[OpenSession]:
        access = self._eval
        if access is None or not access.is_serving():
            raise RequestFault("busy", "this engine has no weights of the run yet: ask again in a moment")
        if self._num_eval >= access.limit():
            reason = f"{self._num_eval} requests with this key are under way, gateway.eval_requests allows no more"
            raise RequestFault("busy", f"{reason}: ask again in a moment")
        number = next(self._numbers)
        model = replace(access.model, request_prefix=f"{access.model.request_prefix}eval{number}.")
        prompt = Prompt(group_id=0, row=0, pass_index=0, messages=())
        no_ids, tokenizer = np.zeros(0, np.int32), access.tokenizer
        root = Episode(prompt=prompt, index=0, tokenizer=tokenizer, model=model, prompt_ids=no_ids)
        rollout = OpenSession(AgentSession(root, tokenizer), prompt)
        self._num_eval += 1
        try:
            yield rollout
        finally:
            self._num_eval -= 1
            await rollout.session.close()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        async with self._session(request) as rollout:
            body = await body_of(request)
            answer = answer_of(request.path, body, request.headers, rollout.session, rollout.models)
            if not isinstance(answer, Answering):
                return json_response(answer)
            with answer.delivering():
                if answer.is_stream:
                    return await _streamed(request, answer)
                return await send_whole(request, json_response(await answer.body()))

    async def _task(self, request: web.Request) -> web.Response:
        rollout = self._find_rollout(request)
        facts = {"is_replay": rollout.is_replay, "reward": rollout.reward, "counts": dict(rollout.session.counts)}
        return json_response({**task_of(rollout.prompt), **facts})

    async def _read_for_rollout(self, request: web.Request) -> tuple[OpenSession, bytes]:
        """The rollout of its key, which may end while the body comes, and the body. Raises RequestFault."""
        self._find_rollout(request)
        body = await body_of(request)
        return self._find_rollout(request), body

    async def _reward(self, request: web.Request) -> web.Response:
        rollout, body = await self._read_for_rollout(request)
        earned = read_body(body, Reward)
        if earned.answer is None:
            rollout.reward = checked_reward(earned.reward)
        else:
            rollout.session.reward_turn(earned.answer, earned.reward)
        return json_response({"ok": True})

    async def _end(self, request: web.Request) -> web.Response:
        rollout, body = await self._read_for_rollout(request)
        end = read_body(body or b"{}", SessionEnd)
        if end.reward is not None:
            rollout.reward = checked_reward(end.reward)
        rollout.end = end
        rollout.ended.set()
        return json_response({"ok": True})


def key_of(request: web.Request) -> str:
    """Of either header: a client may send a key of another service's beside the session's."""
    kind, _, key = request.headers.get("Authorization", "").partition(" ")
    keys = (key.strip() if kind.lower() == "bearer" else "", request.headers.get("x-api-key", ""))
    return next((value for value in keys if value.startswith(KEY_PREFIX)), keys[0] or keys[1])


async def health(request: web.Request) -> web.Response:
    return json_response({"ok": True})


def json_response(data: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(data), status=status, content_type="application/json")


async def body_of(request: web.Request) -> bytes:
    """Raises RequestFault."""
    try:
        if (request.content_length or 0) > MAX_BODY_BYTES:
            raise web.HTTPRequestEntityTooLarge(max_size=MAX_BODY_BYTES, actual_size=request.content_length or 0)
        if request.content.is_eof():  # it is here: no timer is needed
            return await request.read()
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except web.RequestPayloadError as error:
        raise RequestFault("invalid", f"the body cannot be read: {error}") from None
    except web.HTTPRequestEntityTooLarge:
        raise RequestFault("too-large", f"the body is larger than {MAX_BODY_BYTES >> 20} MiB") from None
    except TimeoutError:
        raise RequestFault("invalid", f"the body did not come within {BODY_S:g} s") from None


async def send_whole(request: web.Request, response: web.Response) -> web.Response:
    """All of it has left. Raises ConnectionError or TimeoutError where its client does not take it."""
    await response.prepare(request)
    async with asyncio.timeout(READ_S):
        await response.write_eof()
    return response


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
    return response


@web.middleware
async def in_dialect(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestFault as fault:
        return json_response(fault_body(request.path, fault), STATUS[fault.kind])
    except web.HTTPException as error:
        kind = "not-found" if error.status == 404 else "invalid"
        fault = RequestFault(kind, f"{request.method} {request.path}: {error.reason}; {KNOWN_PATHS}")
        return json_response(fault_body(request.path, fault), error.status)
    except (ConnectionError, TimeoutError) as error:
        _log.info("a client of %s left: %s", request.path, error or type(error).__name__)
        raise
    except Exception as error:  # noqa: BLE001 -- whatever it is, others are served
        _log.exception("%s %s", request.method, request.path)
        fault = RequestFault("engine", f"this is a fault of the gateway, see its log: {type(error).__name__}")
        return json_response(fault_body(request.path, fault), 500)
