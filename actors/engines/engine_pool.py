"""Several servers behind one rollout actor, as one `Engine`: requests are shared out, weights go to all of them.

    JOINING    answers, but has not been given a version since it (re)joined: gets weights, no requests
    SERVING    has the pool's version: gets requests and weights
    FENCED     failed, or lost its weights: gets nothing; it is asked from time to time whether it is well again

A server that fails is fenced by name and the others go on; requests that it had go on elsewhere with the tokens they
have. It comes back with the next weight version, never with the weights it happens to have. The pool is lost when its
last server is. sglang-router was considered: it routes, but does not know of versions and fences nobody for them; it
can be put in front for requests (`engine.router`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from enum import Enum
from typing import Protocol

import msgspec
import numpy as np

from ...core.errors import EngineError, RequestRefused
from ...core.messages import WeightManifest
from ...core.protocols import Delta, Engine, EngineInfo, GenerateRequest, PauseMode, TellsProgress
from ...core.samples import F32, I32
from ...core.weight_channel import WeightProgress
from .engine_choice import Choice

RETRY_S = 5.0
"""Between two attempts to reach a fenced server."""
_log = logging.getLogger("myxa.pool")


class Member(Engine, TellsProgress, Protocol):
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


class _Server:
    """One place in the pool; its client is built anew each time it comes back."""

    def __init__(self, name: str, make: Callable[[], Member]) -> None:
        self.name = name
        self.make = make
        self.client: Member | None = None
        self.state = MemberState.FENCED
        self.reason = "was not started"
        self.info: EngineInfo | None = None
        self.num_running = 0
        self.is_fenced = asyncio.Event()
        self.is_fenced.set()

    def move(self, to: MemberState) -> None:
        if to not in _ALLOWED[self.state]:
            raise ValueError(f"{self.name} cannot go from {self.state.value} to {to.value}")
        self.state = to

    def require(self) -> Member:
        if self.client is None:
            raise EngineError(f"{self.name} is fenced: {self.reason}", remedy="it comes back with the next version")
        return self.client


class EnginePool:
    """See the module's head."""

    def __init__(self, makers: Mapping[str, Callable[[], Member]], *, name: str, retry_s: float = RETRY_S) -> None:
        """`makers`: address -> builds a client that was not started yet."""
        if not makers:
            raise ValueError("a pool needs at least one server")
        self._name = name
        self._retry_s = retry_s
        self._servers = [_Server(address, make) for address, make in makers.items()]
        self._choice = Choice()
        self._prepared: tuple[int, tuple[_Server, ...]] = (-1, ())
        self._coming = 0
        """Version that was committed last, or is being: it may be older than the one before."""
        self._all_lost = asyncio.Event()

    # -- life

    async def start(self) -> EngineInfo:
        """Reach all servers. Those that do not answer are fenced; raises EngineError when none does."""
        await asyncio.gather(*(self._join(server) for server in self._servers))
        for server in self._servers:
            if server.state is MemberState.JOINING:
                server.move(MemberState.SERVING)
        self._require_some()
        return await self.info()

    async def _join(self, server: _Server) -> None:
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
        server.client, server.info = client, info
        server.is_fenced.clear()
        server.move(MemberState.JOINING)

    async def _fence(self, server: _Server, client: Member, why: EngineError) -> None:
        """Nothing more for that client of the server; its requests go elsewhere."""
        if server.client is not client:
            return  # it was fenced before
        server.move(MemberState.FENCED)
        server.client, server.reason = None, why.message
        server.is_fenced.set()
        _log.error("%s: %s is fenced: %s", self._name, server.name, why)
        if not self._serving():
            self._all_lost.set()
        client.cut()
        await client.close()

    def _serving(self) -> list[_Server]:
        return [server for server in self._servers if server.state is MemberState.SERVING]

    def _require_some(self) -> list[_Server]:
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

    async def _watch(self, server: _Server) -> None:
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

    async def _fence_when_lost(self, server: _Server, client: Member) -> None:
        try:
            await client.until_lost()
        except EngineError as err:
            await self._fence(server, client, err)

    async def close(self) -> None:
        """Close all clients. Never raises."""
        await asyncio.gather(*(server.client.close() for server in self._servers if server.client is not None))

    # -- requests

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """Stream from the server that suits best; goes on with another one when that fails.

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

    def _choose(self, request: GenerateRequest) -> tuple[_Server, Member]:
        serving = {server.name: server for server in self._require_some()}
        name = self._choice.pick(request.session, {name: server.num_running for name, server in serving.items()})
        return serving[name], serving[name].require()

    async def _doubt(self, server: _Server, client: Member, why: EngineError) -> None:
        """A stream broke: the request's fault, or the server's? A server that is well can tell its version."""
        try:
            info = await client.info()
        except EngineError:
            await self._fence(server, client, why)
            return
        if server.info is not None and info.version < min(server.info.version, self._coming):
            await self._fence(server, client, why)

    async def abort(self, request_id: str | None = None) -> None:
        """Abort one request, or all, wherever they run."""
        await self._on_all(lambda client: client.abort(request_id))

    async def pause(self, mode: PauseMode) -> None:
        """All servers stand still."""
        await self._on_all(lambda client: client.pause(mode))

    async def resume(self) -> None:
        """All servers go on."""
        await self._on_all(lambda client: client.resume())

    async def _on_all(self, act: Callable[[Member], Awaitable[object]]) -> None:
        """On every serving server; those that fail are fenced."""
        await self._each(self._require_some(), act)
        self._require_some()

    async def _each(self, servers: list[_Server], act: Callable[[Member], Awaitable[object]]) -> tuple[_Server, ...]:
        """Those on which it succeeded; the others are fenced."""

        async def one(server: _Server) -> bool:
            client = server.client
            if client is None:
                return False
            try:
                await act(client)
            except EngineError as err:
                await self._fence(server, client, err)
                return False
            return server.client is client

        done = await asyncio.gather(*(one(server) for server in servers))
        return tuple(server for server, is_done in zip(servers, done, strict=True) if is_done)

    # -- weights

    async def prepare_weights(self, manifest: WeightManifest) -> None:
        """On all servers that answer. Raises EngineError when it succeeds on none."""
        answering = [server for server in self._servers if server.client is not None]
        ready = await self._each(answering, lambda client: client.prepare_weights(manifest))
        self._prepared = (manifest.version, ready)
        if not ready:
            self._require_some()

    async def commit_weights(self, version: int) -> None:
        """On all servers that prepared it; those that fail are fenced. Raises EngineError when it succeeds on none."""
        prepared, servers = self._prepared
        if prepared != version:
            raise EngineError(
                f"{self._name}: version {version} cannot be committed, the pool prepared {prepared}",
                remedy="call prepare_weights with its manifest first",
            )
        self._prepared, self._coming = (-1, ()), version
        done = await self._each(list(servers), lambda client: client.commit_weights(version))
        for server in done:
            server.move(MemberState.SERVING)
            server.info = None if server.info is None else msgspec.structs.replace(server.info, version=version)
        for server in self._serving():
            if server not in done and server.client is not None:
                why = EngineError(f"{server.name} has not prepared version {version}", remedy="it comes back later")
                await self._fence(server, server.client, why)
        self._require_some()

    def weight_progress(self) -> WeightProgress:
        """Of all servers together; named is the one that has come least far."""
        told = {s.name: s.client.weight_progress() for s in self._servers if s.client is not None}
        if not told:
            return WeightProgress(at="no server is left")
        last = min(told, key=lambda name: told[name].num_done)
        num_done = sum(progress.num_done for progress in told.values())
        return WeightProgress(
            at=f"{last}: {told[last].at}", num_done=num_done, is_counted=all(p.is_counted for p in told.values())
        )

    # -- questions

    async def info(self) -> EngineInfo:
        """All serving servers as one engine; `version` is the oldest that one of them serves."""
        found: list[EngineInfo] = []

        async def ask(client: Member) -> None:
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
        )

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
        sampling = msgspec.structs.replace(self._request.sampling, max_new_tokens=self.num_left)
        return msgspec.structs.replace(self._request, input_ids=ids, sampling=sampling)


async def _as_generator(client: Member, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
    """Something that can be closed, whichever iterator the client returns."""
    async for delta in client.generate(request):
        yield delta
