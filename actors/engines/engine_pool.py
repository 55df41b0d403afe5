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

    def joined(self, client: PoolMember, info: EngineInfo) -> None:
        self.client, self.info = client, info
        self.is_fenced.clear()
        self.move(MemberState.JOINING)

    def adopted(self, version: int) -> None:
        self.move(MemberState.SERVING)
        if self.info is not None:
            self.info = msgspec.structs.replace(self.info, version=version)

    def fenced(self, why: str) -> None:
        self.move(MemberState.FENCED)
        self.client, self.reason = None, why
        self.is_fenced.set()


NO_TOKENS = Delta(
    output_ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32), versions=np.zeros(0, np.int32), finish="length"
)
RETRY_S = 5.0
"""Between two attempts to reach a fenced server."""
_log = logging.getLogger("myxa.pool")


@dataclass(frozen=True, slots=True)
class _Try:
    """How a call to one server went."""

    server: PoolServer
    client: PoolMember
    """It may be the server's no more, if that was fenced meanwhile."""
    error: EngineError | None = None

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
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._fence_when_lost(server, client))
                await server.is_fenced.wait()
                watch.cancel()

    async def _fence_when_lost(self, server: PoolServer, client: PoolMember) -> None:
        try:
            await client.until_lost()
        except EngineError as err:
            self._fence(server, client, err)

    async def close(self) -> None:
        clients = [server.client for server in self._servers if server.client is not None]
        await asyncio.gather(*(client.close() for client in clients), *self._closings)

    # -- requests

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """Stream from the server that suits best; continue on another one when that fails.

        Raises RequestRefused as servers do, EngineError when no server is left or each one failed.
        """
        made, rest = NO_TOKENS.output_ids, request
        failures: list[EngineError] = []
        while len(failures) <= len(self._servers):
            server, client = self._choose(request)
            server.num_running += 1
            try:
                async with aclosing(_as_generator(client, rest)) as deltas:
                    async for delta in deltas:
                        made = np.concatenate([made, delta.output_ids])
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
            num_left = request.sampling.max_new_tokens - len(made)
            if num_left < 1:
                yield NO_TOKENS
                return
            ids = np.concatenate([request.input_ids, made]).astype(np.int32, copy=False)
            sampling = request.sampling.for_rest(num_done=len(made), limit=num_left)
            rest = msgspec.structs.replace(request, input_ids=ids, sampling=sampling)
        raise failures[-1]

    def _choose(self, request: GenerateRequest) -> tuple[PoolServer, PoolMember]:
        serving = {server.name: server for server in self._require_some()}
        name = self._choice.pick(request.session, {name: server.num_running for name, server in serving.items()})
        client = serving[name].client
        assert client is not None
        return serving[name], client

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
        await self._on_all(lambda client: client.pause(mode))

    async def resume(self) -> None:
        await self._on_all(lambda client: client.resume())

    async def _on_all(self, act: Callable[[PoolMember], Awaitable[object]]) -> None:
        """On every serving server; those that fail are fenced."""
        for one in await self._tried(self._require_some(), act):
            if one.error is not None:
                self._fence(one.server, one.client, one.error)
        self._require_some()

    async def _tried(self, servers: list[PoolServer], act: Callable[[PoolMember], Awaitable[object]]) -> list[_Try]:
        """The outcome of `act` for each of them that is not fenced."""

        async def one(server: PoolServer, client: PoolMember) -> _Try:
            try:
                await act(client)
            except EngineError as err:
                return _Try(server, client, err)
            return _Try(server, client)

        return await asyncio.gather(*(one(server, server.client) for server in servers if server.client is not None))

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

        await self._on_all(ask)
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
        traces: list[EngineTrace] = []

        async def one(client: PoolMember) -> None:
            traces.extend(await client.profile(duration_s))

        tried = await self._tried(self._require_some(), one)
        refused = [EngineTrace(engine=t.server.name, refused=str(t.error)) for t in tried if t.error is not None]
        return (*traces, *refused)

    def states(self) -> dict[str, MemberState]:
        """Address -> state."""
        return {server.name: server.state for server in self._servers}


async def _as_generator(client: PoolMember, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
    """Something that can be closed, whichever iterator the client returns."""
    async for delta in client.generate(request):
        yield delta
