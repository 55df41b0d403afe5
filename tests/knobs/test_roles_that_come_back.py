"""The buffer and the monitor of a run that goes on, started anew: the values in force from their first work on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.buffer.conftest import NumberedRows
from tests.harness.waiting import until
from tests.knobs.coordinator_room import Room, open_room
from tests.knobs.knob_maker import Desk, make_desk

from myxa.actors.buffer.buffer import Buffer
from myxa.actors.buffer.filters import GroupFilters
from myxa.actors.knobs.owner import OwnsKnobs
from myxa.actors.monitor.monitor import Monitor
from myxa.algos.filters import GROUP_FILTERS
from myxa.algos.staleness import Admission
from myxa.core.messages import SamplingParams
from myxa.transport.node import Node

pytestmark = [pytest.mark.timeout(120)]


def options(folder: Path) -> dict[str, Any]:
    return {
        "source": NumberedRows(), "ledger_path": folder / "ledger.sqlite", "run": "room", "num_samples": 2,
        "admission": Admission("pace", max_staleness=1, batch_size=2), "sampling": SamplingParams(max_new_tokens=4),
        "group_filter": GroupFilters("none", GROUP_FILTERS),
    }  # fmt: skip


@asynccontextmanager
async def beside(room: Room, name: str, grace_s: float = 0.3) -> AsyncIterator[Node]:
    """Another node of the run, inside the block."""
    node = await Node.attach(name=name, rdzv=room.node.rendezvous)
    try:
        yield node
    finally:
        await node.close(grace_s=grace_s)


async def registered(room: Room, *, is_there: bool = True) -> None:
    await until(lambda: ("buffer" in room.node.peers("buffer")) is is_there, f"the buffer: {is_there}")


class BufferThatDies(Buffer):
    """Agrees to a change, and never asks what was decided."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.was_told = asyncio.Event()

    async def knobs_decided(self, epoch: int) -> None:
        if epoch:
            self.was_told.set()
            await asyncio.Event().wait()


class BufferThatComesBack(Buffer):
    """Notes what it would hand out before anybody can have spoken to it."""

    at_first: dict[str, Any]

    async def on_start(self) -> None:
        await super().on_start()
        sheet = self.knob_owner.sheet()
        self.at_first = {"epoch": sheet.epoch, **{state.tunable.name: state.value for state in sheet.knobs}}


async def test_a_buffer_that_died_before_it_heard_of_a_change(tmp_path: Path) -> None:
    async with open_room(tmp_path) as room:
        async with beside(room, "buffer-1", 0) as first_node:
            first = BufferThatDies(**options(tmp_path))
            await first_node.start(first, "buffer")
            await registered(room)
            change = asyncio.create_task(room.change(temperature=0.5, max_staleness=3))
            async with asyncio.timeout(30):
                await first.was_told.wait()
        reply = await change
        assert reply.epoch, reply.refused
        await registered(room, is_there=False)

        async with beside(room, "buffer-2") as second_node:
            second = BufferThatComesBack(**options(tmp_path))
            await second_node.start(second, "buffer")
            assert second.at_first.items() >= {"temperature": 0.5, "max_staleness": 3, "epoch": reply.epoch}.items()
            assert (await room.change(temperature=0.75)).epoch > reply.epoch
            assert (await second.knobs()).epoch > reply.epoch


async def test_a_buffer_whose_newer_value_contradicts_an_older_change(tmp_path: Path) -> None:
    """A window that only a higher bound allows, and an older change with a lower bound, for all buffers there are."""
    async with open_room(tmp_path) as room:
        for life in ("buffer-1", "buffer-2"):
            async with beside(room, life) as node:
                buffer = BufferThatComesBack(**options(tmp_path))
                await node.start(buffer, "buffer")
                await registered(room)
                if life == "buffer-1":
                    assert (await room.change(max_staleness=2)).epoch
                    assert (await room.change(max_staleness=8, top_p=0.5)).epoch
                else:
                    assert buffer.at_first.items() >= {"max_staleness": 8, "top_p": 0.5}.items()
            await registered(room, is_there=False)
        assert (await room.ref.status()).phase == "running"


async def test_at_the_start_of_a_run_nobody_waits_for_a_coordinator(tmp_path: Path) -> None:
    node = await Node.attach(name="launcher/0")
    try:
        async with asyncio.timeout(4.0):  # less than the monitor's patience; there is nobody to have any with
            await node.start(Monitor(tmp_path, ()), "monitor")
            await node.start(Buffer(**options(tmp_path)), "buffer")
    finally:
        await node.close(grace_s=0.3)


class Stubborn(OwnsKnobs):
    """Has a knob, and cannot use what was decided: the first so many times."""

    def __init__(self, num_failures: int) -> None:
        self.left = num_failures

    async def on_start(self) -> None:
        self.desk: Desk = make_desk(self.ctx.name, "level")
        self.knob_owner = self.desk.owner

    async def knobs_decided(self, epoch: int) -> None:
        if self.left:
            self.left -= 1
            raise RuntimeError("not today")
        await super().knobs_decided(epoch)


@pytest.mark.parametrize(("num_failures", "phase"), [(2, "running"), (1000, "failed")])
async def test_an_owner_is_told_again_and_one_that_never_uses_it_ends_the_run(
    tmp_path: Path, num_failures: int, phase: str
) -> None:
    async with open_room(tmp_path) as room:
        await room.node.stop("monitor")
        async with beside(room, "others") as node:
            await node.start(good := Stubborn(0), "buffer")
            await registered(room)
            assert (await room.change(level="DEBUG")).epoch
            assert good.desk.values["level"] == "DEBUG"
            await node.stop("buffer")
            await registered(room, is_there=False)
            await node.start(bad := Stubborn(num_failures), "buffer")
            async with asyncio.timeout(40):
                while bad.desk.values["level"] != "DEBUG" and (await room.ref.status()).phase == "running":
                    await asyncio.sleep(0.05)
            status = await room.ref.status()
            assert status.phase == phase
            assert ("buffer: " in status.error and "not today" in status.error) is (phase == "failed")
