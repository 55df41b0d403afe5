"""Faults that are undone later are undone whatever becomes of whoever asked for them."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from tests.harness.waiting import until

from myxa.core.clock import SystemClock
from myxa.core.errors import LaunchError, NotSent
from myxa.launch import chaos as desk_module
from myxa.launch.chaos import FaultContext, FaultInjector
from myxa.launch.run_dir import RunDir
from myxa.launch.supervisor.run_actors import ActorStatus
from myxa.launch.supervisor.run_supervisor import SIGNALS

FOR_EVER_S = 3600.0
MEANT = [ActorStatus(name="rollout/0", role="rollout", node=0, host="h", state="up", attempt=0, pid=7)]


class Room:
    """As much of a run as the desk needs: a node 0 without a monitor, one agent."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = RunDir(folder)
        self.node = self.supervisor = self
        self.clock = SystemClock()
        self.sent: list[int] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.fails = False

    def ref(self, contract: type, name: str) -> Any:
        raise NotSent(f"there is no {name}")

    async def send_signal(self, meant: list[ActorStatus], name: str, who: str) -> list[str]:
        self.sent.append(int(SIGNALS[name]))
        if self.fails:
            raise LaunchError("node 0 was not asked: the node is away")
        await self.may_answer.wait()
        return [record.name for record in meant]


class Bulk:
    """A ballast whose thread takes until it may go on."""

    def __init__(self) -> None:
        self.may_fill = threading.Event()
        self.is_filling = threading.Event()
        self.is_full = threading.Event()
        self.taken = 0
        self.fails = False

    def __call__(self, folder: Path) -> Bulk:
        return self

    def fill(self, size_bytes: int) -> int:
        self.is_filling.set()
        assert self.may_fill.wait(20)
        if self.fails:
            raise LaunchError("the disk refuses")
        self.taken = size_bytes
        self.is_full.set()
        return size_bytes

    def empty(self) -> None:
        self.taken = 0


@asynccontextmanager
async def desk_in(folder: Path) -> AsyncIterator[tuple[FaultInjector, Room]]:
    desk, room = FaultInjector(), Room(folder)
    try:
        yield desk, room
    finally:
        await desk.close(cast(FaultContext, room))


@pytest.fixture
def bulk(monkeypatch: pytest.MonkeyPatch) -> Bulk:
    made = Bulk()
    monkeypatch.setattr(desk_module, "DiskFill", made)
    return made


def begin(work: Any) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(work)


@pytest.mark.asyncio
async def test_a_disk_is_emptied_though_whoever_asked_went_while_it_was_filled(tmp_path: Path, bulk: Bulk):
    async with desk_in(tmp_path) as (desk, room):
        asking = begin(desk.fill_disk(cast(FaultContext, room), 1000, 0.05))
        await until(bulk.is_filling.is_set)
        asking.cancel()
        await asyncio.wait({asking})
        bulk.may_fill.set()
        await until(lambda: bulk.is_full.is_set() and bulk.taken == 0)


@pytest.mark.asyncio
async def test_a_disk_that_is_being_filled_when_the_run_ends_is_emptied_when_it_is_full(tmp_path: Path, bulk: Bulk):
    async with desk_in(tmp_path) as (desk, room):
        asking = begin(desk.fill_disk(cast(FaultContext, room), 1000, FOR_EVER_S))
        await until(bulk.is_filling.is_set)
        closing = begin(desk.close(cast(FaultContext, room)))
        await asyncio.sleep(0.05)
        bulk.may_fill.set()
        await closing
        assert await asking == 1000
        assert bulk.is_full.is_set()
        assert bulk.taken == 0, "not before the last byte was taken"


@pytest.mark.asyncio
async def test_a_disk_that_refuses_is_told_and_one_that_is_full_is_held(tmp_path: Path, bulk: Bulk):
    bulk.may_fill.set()
    async with desk_in(tmp_path) as (desk, room):
        assert await desk.fill_disk(cast(FaultContext, room), 1000, FOR_EVER_S) == 1000
        await asyncio.sleep(0.05)
        assert bulk.taken == 1000
        bulk.fails = True
        with pytest.raises(LaunchError, match="the disk refuses"):
            await desk.fill_disk(cast(FaultContext, room), 1000, FOR_EVER_S)
        assert [act.fault for act in desk.acts] == ["fill-disk"]


@pytest.mark.asyncio
async def test_what_was_stopped_for_a_while_goes_on_though_whoever_asked_went(tmp_path: Path):
    async with desk_in(tmp_path) as (desk, room):
        room.may_answer.clear()
        asking = begin(desk.strike(cast(FaultContext, room), "delay", MEANT, 0.05))
        await until(lambda: room.sent == [signal.SIGSTOP])
        asking.cancel()
        await asyncio.wait({asking})
        await asyncio.sleep(0.1)
        assert room.sent == [signal.SIGSTOP], "it lasts as long as it was to"
        room.may_answer.set()
        await until(lambda: room.sent == [signal.SIGSTOP, signal.SIGCONT])


@pytest.mark.asyncio
async def test_what_is_stopped_when_the_run_ends_goes_on(tmp_path: Path):
    async with desk_in(tmp_path) as (desk, room):
        assert await desk.strike(cast(FaultContext, room), "delay", MEANT, FOR_EVER_S) == ("rollout/0",)
        assert room.sent == [signal.SIGSTOP]
    assert room.sent == [signal.SIGSTOP, signal.SIGCONT]


@pytest.mark.asyncio
async def test_what_could_not_be_stopped_is_told_and_goes_on_all_the_same(tmp_path: Path):
    async with desk_in(tmp_path) as (desk, room):
        room.fails = True
        with pytest.raises(LaunchError, match="node 0 was not asked"):
            await desk.strike(cast(FaultContext, room), "delay", MEANT, FOR_EVER_S)
        await until(lambda: room.sent == [signal.SIGSTOP, signal.SIGCONT])
        assert not desk.acts
