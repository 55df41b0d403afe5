"""Prefill and decode servers of one rollout actor, as one `Engine`.

    generate   one prefill server reads the prompt and draws the first token, one decode server is sent cache and token
               and writes the rest. Both get the same request at the same time, with the address of the first and a
               number that both know it by (SGLang's bootstrap room). Tokens and log-probs are the decode server's.
    weights    every server prepares by itself; all are paused before any loads, and none continues before all have
               loaded. So both halves of a request are of one version, or it was under way at a commit, in place: then
               its first token has the version known when it was sent, and is never of an older one.
    failure    a half that fails ends the other one, and the request with an EngineError. A server that ends makes the
               actor fail, as a single one does: groups continue elsewhere with their tokens.

No router is between: it would have to know which two servers have the same version, and an abort that comes before a
request was sent on.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from contextlib import aclosing, contextmanager, suppress
from typing import Any, TypeVar

from ....core.errors import EngineError
from ....core.messages import EngineUsage, WeightManifest
from ....core.protocols import Delta, EngineInfo, GenerateRequest, PauseMode, TellsLoading
from ....core.refs import all_or_first_error
from ....core.weight_channel import WeightProgress
from ....transport.address import LOOPBACK
from .engine import SglangEngine, commit_together

ROOM_BITS = 62
"""Of the number of a request; servers keep it as a signed one of 64 bits."""
SENT_S = 5.0
"""For a prefill server to see that its cache has arrived, after the decode server has it."""

T = TypeVar("T")


class PairedSglang:
    """Prefill servers, decode servers, and their clients."""

    def __init__(self, prefills: Sequence[SglangEngine], decodes: Sequence[SglangEngine]) -> None:
        self._prefills, self._decodes = tuple(prefills), tuple(decodes)
        self._all = (*self._prefills, *self._decodes)
        self._num_open = Counter[str]()
        """Requests by the name of the server; those of a prefill server count until their last token."""
        self.pause_mode: PauseMode = "in_place"
        self.on_loading: Callable[[str], None] = lambda doing: None
        """Told what the servers do while they load."""

    async def _each(self, work: Callable[[SglangEngine], Coroutine[Any, Any, T]]) -> list[T]:
        """Of all servers at once; the first error ends the others, and is raised as it is."""
        return await all_or_first_error(work(engine) for engine in self._all)

    async def start(self) -> EngineInfo:
        """Start all servers; raises as one of them does, and then none is left."""
        for engine in self._all:
            if isinstance(engine, TellsLoading):
                engine.on_loading = lambda doing, name=engine.name: self.on_loading(f"{name}: {doing}")
        try:
            await self._each(lambda engine: engine.start())
            return await self.info()
        except BaseException:
            await self.close()
            raise

    async def until_lost(self) -> None:
        await self._each(lambda engine: engine.until_lost())

    async def close(self) -> None:
        """End all servers. Never raises."""
        await asyncio.gather(*(engine.close() for engine in self._all))

    # -- requests

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """By the prefill and the decode server that have fewest requests. Raises as they do."""
        with self._least(self._prefills) as prefill, self._least(self._decodes) as decode:
            for engine in (prefill, decode):
                await engine.until_whole(request)
            version = min(prefill.version, decode.version)
            pair = {
                "bootstrap_host": LOOPBACK,
                "bootstrap_port": prefill.bootstrap_port,
                "bootstrap_room": secrets.randbits(ROOM_BITS),
            }
            reading = asyncio.ensure_future(  # noqa: TID251 -- awaited below
                _read(prefill.read_prompt(request, version, pair), decode, request.request_id)
            )
            left_s = 0.0
            try:
                async with aclosing(decode.answer(request, version, pair)) as stream:
                    async for delta in stream:
                        if delta.finish == "abort":  # asked for, or because the prompt could not be read
                            await asyncio.wait({reading}, timeout=SENT_S)
                            if reading.done():
                                reading.result()
                        left_s = SENT_S if delta.finish is not None else 0.0
                        yield delta
            finally:
                await asyncio.wait({reading}, timeout=left_s)
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    @contextmanager
    def _least(self, servers: Sequence[SglangEngine]) -> Generator[SglangEngine]:
        """The one with fewest requests, and one more."""
        engine = min(servers, key=lambda engine: self._num_open[engine.name])
        self._num_open[engine.name] += 1
        try:
            yield engine
        finally:
            self._num_open[engine.name] -= 1

    async def abort(self, request_id: str | None = None) -> None:
        """Abort both halves of one request, or of all."""
        await self._each(lambda engine: engine.abort(request_id))

    # -- weights

    async def prepare_weights(self, manifest: WeightManifest) -> None:
        await self._each(lambda engine: engine.prepare_weights(manifest))

    async def commit_weights(self, version: int) -> None:
        """Raises EngineError if any server does not serve the version then; all stay paused."""
        await commit_together(self._all, version)

    def weight_progress(self) -> WeightProgress:
        by_name = {engine.name: engine.weight_progress() for engine in self._all}
        return WeightProgress(
            at="; ".join(f"{name}: {progress.at}" for name, progress in by_name.items()),
            num_done=sum(progress.num_done for progress in by_name.values()),
            is_counted=all(progress.is_counted for progress in by_name.values()),
        )

    # -- questions

    async def info(self) -> EngineInfo:
        """Requests and usage are those of the decode servers. `version` is -1 while the servers have several."""
        infos = await self._each(lambda engine: engine.info())
        writing, versions = infos[len(self._prefills) :], {info.version for info in infos}
        return EngineInfo(
            kind="sglang",
            vocab_size=infos[0].vocab_size,
            context_length=min(info.context_length for info in infos),
            max_running=sum(info.max_running for info in writing),
            version=versions.pop() if len(versions) == 1 else -1,
            running=sum(info.running for info in writing),
            waiting=sum(info.waiting for info in writing),
            usage=sum((info.usage for info in writing), EngineUsage()),
        )


async def _read(read: Coroutine[Any, Any, None], decode: SglangEngine, request_id: str) -> None:
    """The prefill server's half; one that fails ends the decode server's, which would wait for a cache until its own
    deadline of minutes."""
    try:
        await read
    except EngineError as err:
        with suppress(EngineError):
            await decode.abort(request_id)
        raise type(err)(f"{err.message} (it reads prompts for {decode.name})", remedy=err.remedy) from err
