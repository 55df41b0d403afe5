"""What a pool makes of servers that fail, refuse or are lost: no sockets, servers that do as they are told."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from myxa.actors.engines.engine_pool import EnginePool, MemberState
from myxa.core.errors import EngineError, WeightsRefused
from myxa.core.messages import WeightManifest
from myxa.core.protocols import EngineInfo
from myxa.core.weight_channel import WeightProgress

JOINING, SERVING, FENCED = MemberState.JOINING, MemberState.SERVING, MemberState.FENCED
DEAD_TRAINER = EngineError("weights from trainer/0: plan: trainer/0 died")


class Sham:
    """A client of a server; the test says what goes wrong, by the method's name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.fails: dict[str, EngineError] = {}
        self.version = 3
        self.lost = asyncio.Event()
        self.closed = "no"
        self.is_cut = False

    def _meet(self, what: str) -> None:
        if what in self.fails:
            raise self.fails[what]

    async def start(self) -> EngineInfo:
        self._meet("start")
        return await self.info()

    async def info(self) -> EngineInfo:
        self._meet("info")
        return EngineInfo(
            kind="sham", vocab_size=9, context_length=9, max_running=1, version=self.version, running=0, waiting=0
        )

    async def until_lost(self) -> None:
        await self.lost.wait()
        raise EngineError(f"{self.name} ended")

    def cut(self) -> None:
        self.is_cut = True

    async def close(self) -> None:
        self.closed = "begun"
        await asyncio.sleep(0.02)  # its groups are left at the sender, its connections closed
        self.closed = "done"

    async def prepare_weights(self, manifest: WeightManifest) -> None:
        self._meet("prepare")

    async def commit_weights(self, version: int) -> None:
        self._meet("commit")
        self.version = version

    def weight_progress(self) -> WeightProgress:
        return WeightProgress(at="here")


def manifest(version: int) -> WeightManifest:
    return WeightManifest(
        version=version, channel="nccl", location="trainer/0", generation=0, num_bytes=0, tensors=(), digest="", host=""
    )


@asynccontextmanager
async def pool_of(names: str = "ab"):
    """A watched pool that serves version 3, its servers' clients, and the watch."""
    shams = {name: Sham(name) for name in names}
    makers: Any = {name: partial(shams.__getitem__, name) for name in names}
    pool = EnginePool(makers, name="rollout/0", retry_s=99)
    async with asyncio.timeout(20):
        await pool.start()
        watch = asyncio.ensure_future(pool.until_lost())
        await asyncio.sleep(0)
        try:
            yield pool, shams, watch
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            await pool.close()


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_a_version_that_nobody_could_prepare_costs_no_server():
    """The trainer died, or the bytes are bad: what the servers serve is whole, and they go on with it."""
    async with pool_of() as (pool, shams, watch):
        for sham in shams.values():
            sham.fails["prepare"] = DEAD_TRAINER
        with pytest.raises(EngineError, match=r"no server of the pool could prepare version 4: a: .*died; b: .*died"):
            await pool.prepare_weights(manifest(4))
        await settled()
        assert pool.states() == {"a": SERVING, "b": SERVING}
        assert not watch.done()
        with pytest.raises(EngineError, match="the pool prepared -1"):
            await pool.commit_weights(4)
        for sham in shams.values():
            sham.fails.clear()
        await pool.prepare_weights(manifest(4))
        await pool.commit_weights(4)
        assert (await pool.info()).version == 4


@pytest.mark.asyncio
async def test_of_those_that_could_not_prepare_the_ones_that_do_not_answer_are_fenced():
    async with pool_of("abc") as (pool, shams, watch):
        for name in "bc":
            shams[name].fails["prepare"] = DEAD_TRAINER
        shams["c"].fails["info"] = EngineError("nobody there")
        await pool.prepare_weights(manifest(4))
        assert pool.states() == {"a": SERVING, "b": SERVING, "c": FENCED}
        await pool.commit_weights(4)
        assert pool.states() == {"a": SERVING, "b": FENCED, "c": FENCED}, "no two versions are served side by side"
        assert (await pool.info()).version == 4
        assert not watch.done()


@pytest.mark.asyncio
async def test_a_version_that_all_refuse_is_refused_and_all_go_on_with_the_old_one():
    async with pool_of() as (pool, shams, watch):
        await pool.prepare_weights(manifest(4))
        for sham in shams.values():
            sham.fails["commit"] = WeightsRefused(f"{sham.name}: the old weights are back")
        with pytest.raises(WeightsRefused, match=r"took version 4, .*a: the old weights are back; b: the old"):
            await pool.commit_weights(4)
        await settled()
        assert pool.states() == {"a": SERVING, "b": SERVING}
        assert not watch.done()
        assert (await pool.info()).version == 3


@pytest.mark.asyncio
async def test_one_that_refuses_what_another_took_is_fenced():
    async with pool_of() as (pool, shams, _):
        await pool.prepare_weights(manifest(4))
        shams["b"].fails["commit"] = WeightsRefused("no room")
        await pool.commit_weights(4)
        assert pool.states() == {"a": SERVING, "b": FENCED}


@pytest.mark.asyncio
@pytest.mark.parametrize("other", ["refuses", "did not prepare"])
async def test_one_that_is_torn_is_fenced_and_the_whole_ones_go_on_when_nobody_took_the_version(other: str):
    async with pool_of() as (pool, shams, watch):
        shams["a"].fails["commit"] = EngineError("loading broke half-way")
        if other == "refuses":
            shams["b"].fails["commit"] = WeightsRefused("no room")
        else:
            shams["b"].fails["prepare"] = DEAD_TRAINER
        await pool.prepare_weights(manifest(4))
        with pytest.raises(WeightsRefused, match="those left serve what they had"):
            await pool.commit_weights(4)
        assert pool.states() == {"a": FENCED, "b": SERVING}
        assert not watch.done()
        shams["b"].fails["commit"] = EngineError("loading broke half-way")
        shams["b"].fails.pop("prepare", None)
        await pool.prepare_weights(manifest(5))
        with pytest.raises(EngineError, match="no server of the pool serves: .*half-way") as caught:
            await pool.commit_weights(5)
        assert not isinstance(caught.value, WeightsRefused), "nothing whole is left"


@pytest.mark.asyncio
async def test_a_server_that_was_lost_between_prepare_and_commit_is_not_told():
    async with pool_of() as (pool, shams, _):
        await pool.prepare_weights(manifest(4))
        shams["b"].lost.set()
        await settled()
        await pool.commit_weights(4)
        assert pool.states() == {"a": SERVING, "b": FENCED}
        assert shams["b"].version == 3


@pytest.mark.asyncio
async def test_the_client_of_a_lost_server_is_closed_to_the_end():
    """Its watch ends with the loss; its closing (groups to leave, connections) must not end with the watch."""
    async with pool_of() as (pool, shams, _):
        shams["a"].lost.set()
        while shams["a"].closed != "done":
            await asyncio.sleep(0.005)
        assert shams["a"].is_cut
        shams["b"].lost.set()
        while shams["b"].closed == "no":
            await asyncio.sleep(0)
        await pool.close()
        assert shams["b"].closed == "done", "the pool waits for closings under way"
