"""Published versions that may go: every rank that staged a part hears it in the end, a new coordinator takes over what
the one before was to release, and nothing goes that it is about to hand out."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from myxa.actors.telemetry import Reporter
from myxa.actors.weights.publish import Publisher
from myxa.core.activity import ActivityMeter
from myxa.core.clock import SystemClock
from myxa.core.errors import DeadlineExceeded
from myxa.core.messages import WeightManifest

RANKS = ("trainer/0", "trainer/1")


class Gang:
    """Two ranks that publish a part each; a context by which their leader calls them."""

    name, epoch = "trainer/0", 1
    log = logging.getLogger("gang")

    def __init__(self) -> None:
        self.may_publish = asyncio.Event()
        self.may_publish.set()
        self.staged: dict[str, set[int]] = {name: set() for name in RANKS}
        self.deaf = 0
        """So many calls to rank 1 miss their deadline."""
        self.may_hear = asyncio.Event()
        self.may_hear.set()
        self.coordinator: Any = None
        self.tasks: list[asyncio.Task[Any]] = []
        ctx: Any = self
        ranks: Any = {name: SimpleNamespace(publish=partial(self._publish, name)) for name in RANKS}
        meter = ActivityMeter(self.name, SystemClock())
        self.publisher = Publisher(Reporter(ctx, meter, ctx), ranks, 9, Path())

    def spawn(self, work: Any, *, name: str) -> None:
        self.tasks.append(asyncio.create_task(work, name=name))

    def ref(self, contract: type, name: str) -> Any:
        released = {RANKS[0]: self.release, RANKS[1]: self._tell_other}
        return SimpleNamespace(release_weights=released[name]) if name in released else self.coordinator

    async def _publish(self, name: str, version: int, unreleased: tuple[int, ...]) -> WeightManifest:
        await self.may_publish.wait()
        self.staged[name].intersection_update(unreleased)
        self.staged[name].add(version)
        return WeightManifest(version, "nccl", name, 0, (), "aa", "", 1)

    async def _tell_other(self, version: int) -> None:
        await self.may_hear.wait()
        if self.deaf:
            self.deaf -= 1
            raise DeadlineExceeded("no answer")
        self.staged["trainer/1"].discard(version)

    async def release(self, version: int) -> None:
        """What the actor of rank 0 does when it is told."""
        self.staged["trainer/0"].discard(version)
        await self.publisher.released(version)


async def test_a_rank_that_did_not_hear_it_is_told_again_with_the_next_one():
    gang = Gang()
    for version in (1, 2, 3):
        await gang.publisher.publish(version)
    gang.deaf = 1
    await gang.release(1)
    assert gang.staged == {"trainer/0": {2, 3}, "trainer/1": {1, 2, 3}}
    await asyncio.wait_for(gang.publisher.await_release(4, at_most=2), 5)
    await gang.publisher.publish(4)
    assert gang.staged == {"trainer/0": {2, 3, 4}, "trainer/1": {2, 3, 4}}


@pytest.mark.parametrize("deaf", [0, 1])
async def test_nobody_is_said_to_have_let_go_before_the_other_ranks_gave_their_memory_back(deaf: int):
    """Where devices are shared in turns engines are given them next. A rank that cannot be told is not waited for."""
    gang = Gang()
    await gang.publisher.publish(1)
    gang.may_hear.clear()
    gang.deaf = deaf
    waiting = asyncio.create_task(gang.publisher.await_release(1))
    releasing = asyncio.create_task(gang.release(1))
    for _ in range(10):
        await asyncio.sleep(0)
    assert gang.staged["trainer/0"] == set() and not waiting.done(), "trainer/1 still has it on its device"
    gang.may_hear.set()
    await asyncio.wait_for(asyncio.gather(waiting, releasing), 5)
    assert gang.staged["trainer/1"] == ({1} if deaf else set())
