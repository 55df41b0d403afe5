"""Several servers behind one rollout actor, as one `Engine`: requests are spread over them, weights go to all of them.

A request goes to the least loaded server, unless the server of its session is nearly as free:

    home(session) stays  while  load(home) <= SPREAD * least load + SLACK

so that a group's samples and a sample's turns find their beginning in the cache, and one popular session does not
overload a server. Consistent hashing was considered: it ignores load, and moves sessions when a server comes or goes.

    JOINING    answers, but has not been given a version since it (re)joined: gets weights, no requests
    SERVING    has the pool's version: gets requests and weights
    FENCED     failed, or lost its weights: gets nothing; the pool probes it until it is well again

A server that fails is fenced by name. Its requests continue on other servers with the tokens they have. It rejoins with
the next weight version. If no server could take a version and all still hold the old one whole, no server is fenced and
all serve the old one. The pool is lost when its last server is. sglang-router was considered: it routes, but does not
know versions and does not fence; it can be put in front for requests (`engine.router`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import msgspec
import numpy as np

from ...core.errors import EngineError, RequestRefused, WeightsRefused
from ...core.messages import EngineUsage, WeightManifest
from ...core.protocols import (
    Delta,
    Engine,
    EngineInfo,
    EngineTrace,
    GenerateRequest,
    PauseMode,
    ProfilesItself,
    ReportsProgress,
)
from ...core.samples import F32, I32
from ...core.weight_channel import WeightProgress

SPREAD = 1.25
SLACK = 8
"""Requests in flight; as many as the samples of one group, so that a group is not torn apart on idle servers."""
MAX_SESSIONS = 65_536
"""Remembered at most; the one not asked for longest is forgotten first."""


class Choice:
    """Remembers where sessions live."""

    def __init__(self, *, spread: float = SPREAD, slack: int = SLACK) -> None:
        self._spread = spread
        self._slack = slack
        self._homes: OrderedDict[str, str] = OrderedDict()

    def pick(self, session: str, loads: Mapping[str, int]) -> str:
        """A server out of `loads` (server -> requests in flight). An empty session belongs to no server.

        Raises ValueError when there is no server.
        """
        if not loads:
            raise ValueError("no server to choose from")
        least = min(loads, key=lambda name: (loads[name], name))
        if not session:
            return least
        home = self._homes.get(session)
        if home is None or home not in loads or loads[home] > self._spread * loads[least] + self._slack:
            home = least
        self._homes[session] = home
        self._homes.move_to_end(session)
        while len(self._homes) > MAX_SESSIONS:
            self._homes.popitem(last=False)
        return home


class PoolMember(Engine, ReportsProgress, ProfilesItself, Protocol):
    """A client of one server."""

    def cut(self) -> None:
        """End all streams at once; their readers get an EngineError."""
        ...


class MemberState(Enum):
    """See the module's head."""

    JOINING = "joining"
    SERVING = "serving"
    FENCED = "fenced"


_ALLOWED: Mapping[MemberState, frozenset[MemberState]] = {
    MemberState.JOINING: frozenset({MemberState.SERVING, MemberState.FENCED}),
    MemberState.SERVING: frozenset({MemberState.SERVING, MemberState.FENCED}),
    MemberState.FENCED: frozenset({MemberState.JOINING}),
}


class PoolServer:
    """See the module's head."""

    def __init__(self, name: str, make: Callable[[], PoolMember]) -> None:
        """`make` builds a client that was not started yet."""
        self.name = name
        self.make = make
        self.client: PoolMember | None = None
        self.state = MemberState.FENCED
        self.reason = "was not started"
        self.info: EngineInfo | None = None
        """What it said when it joined, with the version that it was given last."""
        self.num_running = 0
        self.is_fenced = asyncio.Event()
        self.is_fenced.set()

    def move(self, to: MemberState) -> None:
        """Raises ValueError for a step that does not exist."""
        if to not in _ALLOWED[self.state]:
            raise ValueError(f"{self.name} cannot go from {self.state.value} to {to.value}")
        self.state = to

    def require(self) -> PoolMember:
        """Its client. Raises EngineError while it is fenced."""
        if self.client is None:
            raise EngineError(f"{self.name} is fenced: {self.reason}", remedy="it comes back with the next version")
        return self.client

    def joined(self, client: PoolMember, info: EngineInfo) -> None:
        """It answers, through this client."""
        self.client, self.info = client, info
        self.is_fenced.clear()
        self.move(MemberState.JOINING)

    def adopted(self, version: int) -> None:
        """It serves that version."""
        self.move(MemberState.SERVING)
        if self.info is not None:
            self.info = msgspec.structs.replace(self.info, version=version)

    def fenced(self, why: str) -> None:
        """Nothing more for it."""
        self.move(MemberState.FENCED)
        self.client, self.reason = None, why
        self.is_fenced.set()


RETRY_S = 5.0
"""Between two attempts to reach a fenced server."""
_log = logging.getLogger("myxa.pool")


@dataclass(frozen=True, slots=True)
class _Try:
    """How a call to one server went."""

    server: PoolServer
    client: PoolMember
    """It may be the server's no more, if that was fenced meanwhile."""
    error: EngineError | None

    @property
    def is_done(self) -> bool:
        return self.error is None and self.server.client is self.client


class EnginePool:
    """See the module's head."""

    def __init__(self, makers: Mapping[str, Callable[[], PoolMember]], *, name: str, retry_s: float = RETRY_S) -> None:
        """`makers`: address -> builds a client that was not started yet."""
        if not makers:
            raise ValueError("a pool needs at least one server")
        self._name = name
        self._retry_s = retry_s
        self._servers = [PoolServer(address, make) for address, make in makers.items()]
        self._choice = Choice()
        self._prepared: tuple[int, tuple[_Try, ...]] = (-1, ())
        self._coming = 0
        """Version that was committed last, or is being: it may be older than the one before."""
        self._all_lost = asyncio.Event()
        self._closings: set[asyncio.Future[None]] = set()
        """Clients of fenced servers, on their way out."""

    # -- start and end

    async def start(self) -> EngineInfo:
        """Reach all servers. Those that do not answer are fenced; raises EngineError when none does."""
        await asyncio.gather(*(self._join(server) for server in self._servers))
        for server in self._servers:
            if server.state is MemberState.JOINING:
                server.move(MemberState.SERVING)
        self._require_some()
        return await self.info()

    async def _join(self, server: PoolServer) -> None:
        client = server.make()
        try:
            info = await client.start()
        except BaseException as err:
            await client.close()
            if not isinstance(err, EngineError):
                raise
            server.reason = err.message
            _log.warning("%s: %s cannot be reached: %s", self._name, server.name, err)
            return
        server.joined(client, info)

    def _fence(self, server: PoolServer, client: PoolMember, why: EngineError) -> None:
        """Nothing more for that client of the server; its requests go elsewhere."""
        if server.client is not client:
            return  # it was fenced before
        server.fenced(why.message)
        _log.error("%s: %s is fenced: %s", self._name, server.name, why)
        if not self._serving():
            self._all_lost.set()
        client.cut()
        # The pool closes it: the task that noticed the failure may be cancelled first.
        closing = asyncio.ensure_future(client.close())  # noqa: TID251 -- awaited in `close`
        self._closings.add(closing)
        closing.add_done_callback(self._closings.discard)

    def _serving(self) -> list[PoolServer]:
        return [server for server in self._servers if server.state is MemberState.SERVING]

    def _require_some(self) -> list[PoolServer]:
        serving = self._serving()
        if not serving:
            reasons = "; ".join(f"{server.name}: {server.reason}" for server in self._servers)
            raise EngineError(f"{self._name}: no server of the pool serves: {reasons}", remedy="see the servers' logs")
        return serving

    async def until_lost(self) -> None:
        """Watches all servers, fences and takes back; raises EngineError once none serves."""
        try:
            async with asyncio.TaskGroup() as group:
                for server in self._servers:
                    group.create_task(self._watch(server))
                await self._all_lost.wait()
                self._require_some()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _watch(self, server: PoolServer) -> None:
        while True:
            client = server.client
            if client is None:
                await asyncio.sleep(self._retry_s)
                await self._join(server)
                continue
            try:
                async with asyncio.TaskGroup() as group:
                    fenced = group.create_task(server.is_fenced.wait())
                    lost = group.create_task(self._fence_when_lost(server, client))
                    await asyncio.wait({fenced, lost}, return_when=asyncio.FIRST_COMPLETED)
                    fenced.cancel()
                    lost.cancel()
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None

    async def _fence_when_lost(self, server: PoolServer, client: PoolMember) -> None:
        try:
            await client.until_lost()
        except EngineError as err:
            self._fence(server, client, err)

    async def close(self) -> None:
        """Close all clients. Never raises."""
        clients = [server.client for server in self._servers if server.client is not None]
        await asyncio.gather(*(client.close() for client in clients), *self._closings)

    # -- requests

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """Stream from the server that suits best; continue on another one when that fails.

        Raises RequestRefused as servers do, EngineError when no server is left or each one failed.
        """
        made = _Made(request)
        failures: list[EngineError] = []
        while len(failures) <= len(self._servers):
            server, client = self._choose(request)
            server.num_running += 1
            try:
                async with aclosing(_as_generator(client, made.rest())) as deltas:
                    async for delta in deltas:
                        made.add(delta)
                        yield delta
                    return
            except RequestRefused:
                raise
            except EngineError as err:
                failures.append(err)
            finally:
                server.num_running -= 1
            _log.warning("%s: %s goes elsewhere: %s", self._name, request.request_id, failures[-1])
            await self._doubt(server, client, failures[-1])
            if made.num_left < 1:
                yield Delta(output_ids=made.none, logprobs=F32_NONE, versions=made.none, finish="length")
                return
        raise failures[-1]

    def _choose(self, request: GenerateRequest) -> tuple[PoolServer, PoolMember]:
        serving = {server.name: server for server in self._require_some()}
        name = self._choice.pick(request.session, {name: server.num_running for name, server in serving.items()})
        return serving[name], serving[name].require()

    async def _doubt(self, server: PoolServer, client: PoolMember, why: EngineError) -> None:
        """A stream broke: the request's fault, or the server's? A server that is well answers with its version."""
        try:
            info = await client.info()
        except EngineError:
            self._fence(server, client, why)
            return
        if server.info is not None and info.version < min(server.info.version, self._coming):
            self._fence(server, client, why)

    async def abort(self, request_id: str | None = None) -> None:
        """Abort one request, or all, wherever they run."""
        await self._on_all(lambda client: client.abort(request_id))

    async def pause(self, mode: PauseMode) -> None:
        """No server generates until `resume`."""
        await self._on_all(lambda client: client.pause(mode))

    async def resume(self) -> None:
        """Continue on all servers after a pause."""
        await self._on_all(lambda client: client.resume())

    async def _on_all(self, act: Callable[[PoolMember], Awaitable[object]]) -> None:
        """On every serving server; those that fail are fenced."""
        await self._each(self._require_some(), act)
        self._require_some()

    async def _each(self, servers: list[PoolServer], act: Callable[[PoolMember], Awaitable[object]]) -> None:
        """On all of them; those on which it failed are fenced."""
        for one in await self._tried(servers, act):
            if one.error is not None:
                self._fence(one.server, one.client, one.error)

    async def _tried(self, servers: list[PoolServer], act: Callable[[PoolMember], Awaitable[object]]) -> list[_Try]:
        """Result of `act` for each of them that is not fenced."""

        async def one(server: PoolServer, client: PoolMember) -> _Try:
            try:
                await act(client)
            except EngineError as err:
                return _Try(server, client, err)
            return _Try(server, client, None)

        asked = [(server, server.client) for server in servers]
        return await asyncio.gather(*(one(server, client) for server, client in asked if client is not None))

    # -- weights

    async def prepare_weights(self, manifest: WeightManifest) -> None:
        """On all servers that answer. Raises EngineError when it succeeds on none.

        A server that could not is fenced only if it does not answer either: what it serves is whole, and the fault may
        be the trainer's, or the bytes'.
        """
        self._prepared = (-1, ())
        tried = await self._tried(self._servers, lambda client: client.prepare_weights(manifest))
        failed = [(one, one.error) for one in tried if one.error is not None]
        await asyncio.gather(*(self._doubt(one.server, one.client, why) for one, why in failed))
        ready = tuple(one for one in tried if one.is_done)
        if not ready:
            self._require_some()
            raise EngineError(
                f"{self._name}: no server of the pool could prepare version {manifest.version}: "
                + "; ".join(f"{one.server.name}: {why.message}" for one, why in failed),
                remedy=failed[0][1].remedy if failed else "see the servers' logs",
            )
        self._prepared = (manifest.version, ready)

    async def commit_weights(self, version: int) -> None:
        """On all servers that prepared it. Once some took it, those that serve another one are fenced.

        Raises WeightsRefused when none took it and some still serve the old one, whole; EngineError when none does.
        """
        prepared, ready = self._prepared
        if prepared != version:
            raise EngineError(
                f"{self._name}: version {version} cannot be committed, the pool prepared {prepared}",
                remedy="call prepare_weights with its manifest first",
            )
        self._prepared, self._coming = (-1, ()), version
        servers = [one.server for one in ready if one.is_done]  # not those that were fenced and are back
        tried = await self._tried(servers, lambda client: client.commit_weights(version))
        taken = [one.server for one in tried if one.is_done]
        for server in taken:
            server.adopted(version)
        for one in tried:
            if one.error is not None and not isinstance(one.error, WeightsRefused):
                self._fence(one.server, one.client, one.error)
        refusals = {one.server.name: one.error for one in tried if isinstance(one.error, WeightsRefused)}
        if taken:
            for server in self._serving():
                if server not in taken and server.client is not None:
                    why = EngineError(f"{server.name} has not prepared version {version}", remedy="it comes back later")
                    self._fence(server, server.client, refusals.get(server.name, why))
        self._require_some()
        if not taken:
            raise WeightsRefused(
                f"{self._name}: no server of the pool took version {version}, those left serve what they had: "
                + ("; ".join(why.message for why in refusals.values()) or "those that prepared it are fenced"),
                remedy="see the servers' logs",
            )

    def weight_progress(self) -> WeightProgress:
        """Of all servers together; named is the one that has come least far."""
        answers = {s.name: s.client.weight_progress() for s in self._servers if s.client is not None}
        if not answers:
            return WeightProgress(at="no server is left")
        last = min(answers, key=lambda name: answers[name].num_done)
        num_done = sum(progress.num_done for progress in answers.values())
        return WeightProgress(
            at=f"{last}: {answers[last].at}", num_done=num_done, is_counted=all(p.is_counted for p in answers.values())
        )

    # -- questions

    async def info(self) -> EngineInfo:
        """All serving servers as one engine; `version` is the oldest that one of them serves."""
        found: list[EngineInfo] = []

        async def ask(client: PoolMember) -> None:
            found.append(await client.info())

        await self._each(self._require_some(), ask)
        self._require_some()
        return EngineInfo(
            kind=found[0].kind,
            vocab_size=found[0].vocab_size,
            context_length=min(info.context_length for info in found),
            max_running=sum(info.max_running for info in found),
            version=min(info.version for info in found),
            running=sum(info.running for info in found),
            waiting=sum(info.waiting for info in found),
            usage=sum((info.usage for info in found), EngineUsage()),
        )

    async def profile(self, duration_s: float) -> tuple[EngineTrace, ...]:
        """Of every server that serves. One that refuses is none the worse for it, and is not fenced."""

        async def one(server: PoolServer, client: PoolMember) -> tuple[EngineTrace, ...]:
            try:
                return await client.profile(duration_s)
            except EngineError as err:
                return (EngineTrace(engine=server.name, refused=str(err)),)

        asked = [(server, server.client) for server in self._require_some()]
        answers = await asyncio.gather(*(one(server, client) for server, client in asked if client is not None))
        return tuple(trace for traces in answers for trace in traces)

    def states(self) -> dict[str, MemberState]:
        """Address -> state."""
        return {server.name: server.state for server in self._servers}


F32_NONE: F32 = np.zeros(0, dtype=np.float32)


class _Made:
    """What a request has got so far, from whichever server."""

    none: I32 = np.zeros(0, dtype=np.int32)

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self._ids: list[I32] = []

    @property
    def num_left(self) -> int:
        """Tokens that may still be generated."""
        return self._request.sampling.max_new_tokens - sum(len(ids) for ids in self._ids)

    def add(self, delta: Delta) -> None:
        """Tokens were handed on."""
        self._ids.append(delta.output_ids)

    def rest(self) -> GenerateRequest:
        """The request for what is missing."""
        if not self._ids:
            return self._request
        ids = np.concatenate([self._request.input_ids, *self._ids]).astype(np.int32, copy=False)
        num_done = self._request.sampling.max_new_tokens - self.num_left
        sampling = self._request.sampling.for_rest(num_done=num_done, limit=self.num_left)
        return msgspec.structs.replace(self._request, input_ids=ids, sampling=sampling)


async def _as_generator(client: PoolMember, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
    """Something that can be closed, whichever iterator the client returns."""
    async for delta in client.generate(request):
        yield delta
