"""One SGLang server's control calls: JSON over HTTP, with a key, a deadline and the server's name in every error.

httpx was considered: aiohttp is here already for the embedded server and streams at half the cost per chunk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import aiohttp
import msgspec
import orjson

from ....core.device_memory import Tag, TagReport
from ....core.errors import ConfigError, EngineError, MyxaError, RequestRefused
from ...http_client import client_session
from .server_args import guesses_by
from .wire import FACTS_ROUTE, KEY_REMEDY, MODEL_ROUTE, MOVED, ServerAnswer, attach_fault

LOOK_S = 10.0
"""Longest look."""
LEAST_LOOK_S = 3.0
"""SGLang 0.5.17 takes a second to answer `/health` when it is well."""


CLOSE_S = 2.0
KEEPALIVE_S = 2.0
"""An idle connection is not used again after so long. The server (uvicorn) closes it after 5 s: a request sent in that
moment is lost, and whether a POST arrived is not known."""


class SglangHttp:
    """A connection to one server."""

    def __init__(self, url: str, *, name: str, call_s: float, admin_key: str = "") -> None:
        """`call_s`: deadline of a control call."""
        self._name = name
        self.call_s = call_s
        self._session: aiohttp.ClientSession | None = None
        self.facts: Mapping[str, Any] = {}
        """Of `/server_info`, once they were checked."""
        self.explain: Callable[[EngineError], Awaitable[MyxaError]] | None = None
        """What to raise for a call that got no answer, instead of the error itself."""
        self.aim(url, admin_key)

    def aim(self, url: str, admin_key: str) -> None:
        """`admin_key`: sent as bearer; empty: none."""
        self.url = url.rstrip("/")
        self.place = f"{self._name} at {self.url}" if url else self._name
        """Whom errors name."""
        key = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
        self.headers = {"Content-Type": "application/json"} | key
        """For every request."""

    @property
    def session(self) -> aiohttp.ClientSession:
        """For streams. Raises EngineError before `open` and after `close`."""
        if self._session is None:
            raise EngineError(f"{self.place}: not started, or closed", remedy="await start() first")
        return self._session

    def open(self) -> None:
        """Make the session; needs a running loop."""
        self._session = client_session(keepalive_s=KEEPALIVE_S)

    async def close(self) -> None:
        """End all connections. Never raises, never waits long: a stopped server reads nothing, and unread bytes
        would keep its connections open."""
        session, self._session = self._session, None
        if session is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await session.close()

    async def until_there(self, within_s: float) -> bool:
        """Wait for a server that is loading; False: it is there and paused. Raises EngineError when it is not there in
        time. `/health` is answered by generating a token: a server that loads says no, one that is paused nothing."""
        look_s = min(LOOK_S, within_s / 3)
        last_answer = ServerAnswer(MODEL_ROUTE, error="nothing", is_absent=True)
        try:
            async with asyncio.timeout(within_s):
                while (answer := await self.answer("/health", look_s)).status != 200:
                    last_answer = await self.answer(MODEL_ROUTE, look_s)
                    if answer.is_silent and last_answer.status == 200:
                        return False
                    if not (answer.is_silent or last_answer.may_come or last_answer.status == 200):
                        self._refuse(*attach_fault(last_answer, last_answer))
                    await asyncio.sleep(0.2)
        except TimeoutError as err:
            raise EngineError(
                f"{self.place}: no healthy answer within {within_s:g} s",
                remedy=f"start the server, or mend engine.attach; {last_answer.words()}",
            ) from err
        return True

    async def check(self, model_type: str, *, tells_experts: bool = False) -> Mapping[str, Any]:
        """What `/server_info` says. Raises EngineError for what is no SGLang server, or one of another model."""
        model, facts = await self.answer(MODEL_ROUTE, self.call_s), await self.answer(FACTS_ROUTE, self.call_s)
        self._refuse(*attach_fault(model, facts, model_type, tells_experts=tells_experts))
        self.facts = facts.value
        return self.facts

    def _refuse(self, fault: str, remedy: str) -> None:
        if fault:
            hint = "; leave /v1 out" if self.url.endswith("/v1") else ""
            raise EngineError(f"{self.place}: {fault}", remedy=remedy + hint)

    async def answer(self, route: str, within_s: float) -> ServerAnswer:
        try:
            async with asyncio.timeout(within_s), self.session.get(self.url + route, headers=self.headers) as answer:
                moved = next((step.status for step in answer.history if step.status in MOVED), 0)
                body = f"sends on to {answer.url}".encode() if moved else await answer.read()
                return ServerAnswer(route, moved or answer.status, body)
        except TimeoutError:  # some of aiohttp's are both
            return ServerAnswer(route, error=f"no answer within {within_s:g} s", is_absent=True, is_silent=True)
        except aiohttp.ClientConnectorError as err:
            return ServerAnswer(route, error=str(err), is_absent=not isinstance(err, aiohttp.ClientSSLError))
        except aiohttp.ClientError as err:
            is_cut = isinstance(err, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
            return ServerAnswer(route, error=f"no HTTP ({type(err).__name__}: {str(err)[:80]})", is_absent=is_cut)

    async def get(self, path: str) -> Mapping[str, Any]:
        """The object a GET answers with; {} for plain text. Raises EngineError."""
        return await self._call("GET", path, None, self.call_s)

    async def post(self, path: str, body: Mapping[str, Any], *, within_s: float = 0.0) -> Mapping[str, Any]:
        """The object a POST answers with; {} for plain text. `within_s` 0: `call_s`. Raises EngineError."""
        return await self._call("POST", path, orjson.dumps(body), within_s or self.call_s)

    async def _call(self, method: str, path: str, body: bytes | None, within_s: float) -> Mapping[str, Any]:
        place = f"{self.place}: {method} {path}"
        try:
            async with (
                asyncio.timeout(within_s),
                self.session.request(method, self.url + path, data=body, headers=self.headers) as answer,
            ):
                status, raw = answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError) as err:
            error = EngineError(
                f"{place} failed within {within_s:g} s: {type(err).__name__}: {err}",
                remedy="is the server alive and reachable?",
            )
            raise (await self.explain(error) if self.explain is not None else error) from err
        if status >= 400:
            raise refusal(place, status, raw)
        value: Any = None
        with suppress(msgspec.MsgspecError):
            value = msgspec.json.decode(raw)
        return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def refusal(place: str, status: int, raw: bytes) -> EngineError:
    """What to raise for an answer of that status."""
    text = f"{place} answered {status}: {raw[:500].decode(errors='replace')}"
    if status in (401, 403):
        return EngineError(text, remedy=KEY_REMEDY)
    kind = RequestRefused if status in (400, 413, 422) else EngineError
    return kind(text, remedy="see the server's log")


ENGINE_TAGS: tuple[Tag, ...] = ("kv_cache", "weights", "cuda_graph")
"""In the order in which they are released; they are resumed in the opposite one: SGLang's own inside a call."""
IDLE_EVERY_S = 0.05
GIB = 1 << 30
_USAGE_KEYS: Mapping[Tag, str] = {"weights": "weight", "kv_cache": "kvcache", "cuda_graph": "graph"}
"""Tag -> its name in `memory_usage` of `/server_info` (GiB)."""


class SglangMemory:
    """A server's memory by tag, through `/release_memory_occupation` and `/resume_memory_occupation`. Calls must not
    overlap. What SGLang 0.5.17 does with the two routes:

        released while anything runs    an assertion that ends the server: it is asked to flush its cache first, which
                                        it refuses while it is not idle
        a tag that is off released      ends the server (torch-memory-saver exits); so does resuming one that is on
        weights after a resume          whatever the memory held: nothing may be generated before an update

    So the tags that are off are counted here, and only the others are asked for. After an answer that leaves open what
    was done the server counts as lost: no call is repeated in the hope that it did not arrive.
    """

    def __init__(self, http: SglangHttp) -> None:
        self._http = http
        self._off: set[Tag] = set()
        self._bytes: dict[Tag, int] = {}
        self._unknown = ""
        """Why it is not known which tags are off; empty: it is known."""

    def check(self, facts: Mapping[str, Any]) -> None:
        """`facts`: of `/server_info`. Raises ConfigError for a server whose memory cannot be taken back."""
        if facts.get("enable_memory_saver") is not True:
            raise ConfigError(
                f"{self._http.place}: was started without --enable-memory-saver, so its memory cannot be taken back",
                remedy='start it with --enable-memory-saver, or set memory.share = "none"',
            )
        if guesses_by(facts) in ("layers", "model") and facts.get("enable_draft_weights_cpu_backup") is False:
            raise ConfigError(
                f"{self._http.place}: guesses with weights that are lost when its memory is taken back",
                remedy="start it with --enable-draft-weights-cpu-backup",
            )
        usage = _memory_usage(facts)
        self._bytes = {tag: _gib(usage.get(key)) for tag, key in _USAGE_KEYS.items()}

    def reports(self) -> tuple[TagReport, ...]:
        return tuple(
            TagReport(
                tag=tag,
                num_bytes=self._bytes.get(tag, 0),
                policy="discard",
                backing="discarded" if tag in self._off else "mapped_dirty",
            )
            for tag in ENGINE_TAGS
        )

    @property
    def is_whole(self) -> bool:
        return not self._off and not self._unknown

    async def until_idle(self, within_s: float) -> None:
        """Wait until no request is left in the server, health checks included; its cache is flushed then. Raises
        EngineError when it is not idle in time: releasing would end it."""
        try:
            async with asyncio.timeout(within_s):
                while True:
                    with suppress(RequestRefused):  # 400: not idle
                        await self._http.post("/flush_cache", {})
                        return
                    await asyncio.sleep(IDLE_EVERY_S)
        except TimeoutError as err:
            raise EngineError(
                f"{self._http.place}: was not idle within {within_s:g} s after all requests were aborted",
                remedy="another client sends it requests; leave the server to this run",
            ) from err

    async def release(self, tags: Collection[Tag]) -> None:
        """Have the memory of these tags leave. Tags that are off already are not asked for again. The server must be
        idle. Raises EngineError when it failed: the server is lost then."""
        leaving: list[Tag] = [tag for tag in ENGINE_TAGS if tag in tags and tag not in self._off]
        await self._ask("/release_memory_occupation", leaving)

    async def resume(self, tags: Collection[Tag]) -> None:
        """Have it come back, contents undefined; else as `release`."""
        coming: list[Tag] = [tag for tag in reversed(ENGINE_TAGS) if tag in tags and tag in self._off]
        await self._ask("/resume_memory_occupation", coming)

    async def _ask(self, path: str, tags: Sequence[Tag]) -> None:
        if self._unknown:
            raise EngineError(f"{self._http.place}: {self._unknown}", remedy="restart the server")
        if not tags:
            return
        self._unknown = f"{path} of {', '.join(tags)} did not end well"
        await self._http.post(path, {"tags": tags})
        self._unknown = ""
        self._off = self._off | set(tags) if path.startswith("/release") else self._off - set(tags)


def _memory_usage(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of the first scheduler; {} when the server does not report them."""
    states = facts.get("internal_states")
    first: object = cast("list[object]", states)[0] if isinstance(states, list) and states else facts
    usage = cast("Mapping[str, object]", first).get("memory_usage") if isinstance(first, dict) else None
    return cast("Mapping[str, Any]", usage) if isinstance(usage, dict) else {}


def _gib(value: object) -> int:
    """A number of GiB, or a table of such, as bytes."""
    if isinstance(value, dict):
        value = sum(v for v in cast("dict[str, object]", value).values() if isinstance(v, int | float))
    return int(value * GIB) if isinstance(value, int | float) else 0
