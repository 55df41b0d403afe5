"""The tenant's side: what it obeys, what it answers again, what it does when its own work fails."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection
from typing import Any

import pytest

from myxa.actors.tenancy.tenant import CountedRoom, Tenant, TenantOptions
from myxa.core.clock import SystemClock
from myxa.core.daemon_thread import in_daemon_thread
from myxa.core.device_memory import CommandKind, MemoryCommand, MemoryReply, Tag, TagReport
from myxa.core.errors import MemoryFault
from myxa.memory.communicators.residency import Absent

pytestmark = [pytest.mark.timeout(30)]


class Turn:
    """A gate whose work may take long."""

    def __init__(self) -> None:
        self.is_open = False
        self.takes_s = 0.0

    async def quiesce(self) -> None:
        self.is_open = False
        await asyncio.sleep(self.takes_s)

    async def resume(self) -> None:
        self.is_open = True


class Store:
    """Memory that only counts."""

    def __init__(self) -> None:
        self.is_mapped = True
        self.num_moves = 0
        self.error: Exception | None = None
        self.log: list[str] = []

    def report(self) -> tuple[TagReport, ...]:
        return (TagReport("optimizer", 100, "backup", "mapped_dirty" if self.is_mapped else "host"),)

    def release(self, tags: Collection[Tag]) -> int:
        return self._move("release", False)

    def restore(self, tags: Collection[Tag]) -> int:
        return self._move("restore", True)

    def _move(self, what: str, is_mapped: bool) -> int:
        self.log.append(what)
        self.num_moves += 1
        if self.error is not None:
            raise self.error
        self.is_mapped = is_mapped
        return 100


class Comms:
    """Communicators with NCCL's manners: releasing fails when somebody does not come."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.error: MemoryFault | None = None

    def release(self, epoch: int, timeout_s: float) -> None:
        self.log.append("comms release")
        if self.error is not None:
            raise self.error

    def restore(self, epoch: int, timeout_s: float) -> None:
        self.log.append(f"comms restore {epoch}")

    def abort(self) -> None:
        self.log.append("comms abort")


class Bench:
    def __init__(self, planned: dict[Tag, Any] | None = None) -> None:
        self.turn, self.store = Turn(), Store()
        self.comms = Comms(self.store.log)
        self.tenant = Tenant(
            options=TenantOptions(name="trainer/0", epoch=3, gang="trainer", devices=("gpu",), planned=planned or {}),
            gate=self.turn,
            in_thread=self._in_thread,
            clock=SystemClock(),
        )
        if planned is None:
            self.tenant.loaded((self.store,), self.comms)
        self.count = 0

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await in_daemon_thread(work, "memory")

    async def tell(self, kind: CommandKind, epoch: int = 1, deadline_s: float = 5.0, **change: Any) -> MemoryReply:
        self.count += 1
        tags: tuple[Tag, ...] = ("optimizer", "nccl", "kv_cache") if kind in ("release", "restore") else ()
        fields = {"command_id": f"c{self.count}", "tags": tags} | change
        return await self.tenant.command(MemoryCommand(epoch=epoch, kind=kind, deadline_s=deadline_s, **fields))


async def test_a_whole_turn_away_and_back() -> None:
    bench = Bench()
    await bench.tell("commit")
    assert bench.turn.is_open
    assert (await bench.tell("drain")).report.state == "quiet"
    gone = await bench.tell("release")
    assert (gone.report.state, gone.copied_bytes) == ("quiet", 100)
    assert not bench.turn.is_open
    back = await bench.tell("restore", epoch=2)
    assert back.report.state == "quiet"
    assert bench.store.log == ["comms release", "release", "restore", "comms restore 2"]
    done = await bench.tell("commit", epoch=2)
    assert (done.report.state, bench.turn.is_open) == ("active", True)
    assert done.report.pids == (os.getpid(),)


async def test_the_same_command_at_the_same_time_is_one_command() -> None:
    bench = Bench()
    await bench.tell("commit")
    await bench.tell("drain")
    first, second = await asyncio.gather(*(bench.tell("release", command_id="once") for _ in range(2)))
    assert first == second == await bench.tell("release", command_id="once")
    assert bench.store.num_moves == 1


async def test_what_is_old_or_meant_for_another_has_no_effect() -> None:
    bench = Bench()
    await bench.tell("commit", epoch=5)
    old = await bench.tell("drain", epoch=4)
    assert (old.accepted, old.reason) == (False, "epoch 4 is over; trainer/0 has seen 5")
    other = await bench.tell("drain", epoch=6, tenant_epoch=2)
    assert "meant for epoch 2 of trainer/0, this is 3" in other.reason
    unsafe = await bench.tell("release", epoch=6)
    assert unsafe.reason == "trainer/0 is active: release is not possible"
    assert bench.turn.is_open
    assert bench.store.num_moves == 0


async def test_a_newer_command_that_waits_outdates_those_before_it() -> None:
    bench = Bench()
    await bench.tell("commit")
    bench.turn.takes_s = 0.1
    slow = asyncio.ensure_future(bench.tell("drain"))
    await asyncio.sleep(0)
    late, survey = await asyncio.gather(bench.tell("release"), bench.tell("survey", epoch=2))
    assert (await slow).accepted
    assert survey.accepted and survey.report.state == "quiet", "answered once nothing older is being carried out"
    assert not late.accepted and bench.store.num_moves == 0


async def test_work_that_does_not_end_is_told_and_goes_on() -> None:
    bench = Bench()
    await bench.tell("commit")
    bench.turn.takes_s = 10.0
    reply = await bench.tell("drain", deadline_s=0.05)
    assert (reply.accepted, reply.report.state) == (False, "active")
    assert "what runs did not end within" in reply.reason
    assert bench.turn.is_open


@pytest.mark.parametrize("error", [MemoryFault("the copy failed"), ValueError("a bug")])
async def test_a_store_that_fails_is_an_answer(error: Exception) -> None:
    bench = Bench()
    await bench.tell("commit")
    await bench.tell("drain")
    bench.store.error = error
    reply = await bench.tell("release")
    assert not reply.accepted
    assert str(error) in reply.reason
    assert reply.report.state == "quiet"
    bench.store.error = None
    assert (await bench.tell("release")).report.state == "quiet"


async def test_communicators_that_were_not_let_go_stay_and_others_are_aborted() -> None:
    bench = Bench()
    await bench.tell("commit")
    await bench.tell("drain")
    bench.comms.error = Absent("rank 1 did not come", (1,))
    assert not (await bench.tell("release")).accepted
    assert bench.store.log == ["comms release"]
    bench.comms.error = MemoryFault("the drop hangs")
    assert not (await bench.tell("release", epoch=2)).accepted
    assert bench.store.log[-1] == "comms abort"
    bench.comms.error = None
    assert (await bench.tell("release", epoch=3)).accepted  # they are away already
    assert (await bench.tell("restore", epoch=4)).accepted
    assert bench.store.log[-1] == "comms restore 4"


async def test_what_is_planned_is_leased_before_it_is_there() -> None:
    bench = Bench(planned={"optimizer": (500, "backup"), "grads": (50, "discard")})
    cold = bench.tenant.report()
    assert (cold.state, {t.backing for t in cold.tags}, cold.reserved_bytes) == ("quiet", {"discarded"}, 0)
    granted = await bench.tell("restore", tags=("optimizer", "grads"))
    assert (granted.report.state, granted.report.reserved_bytes) == ("quiet", 550)
    assert {t.backing for t in granted.report.tags} == {"mapped_dirty"}
    assert (await bench.tell("release", tags=("grads",))).report.reserved_bytes == 500
    bench.tenant.loaded((bench.store,), bench.comms)
    loaded = bench.tenant.report()
    assert (loaded.state, loaded.reserved_bytes) == ("quiet", 0)
    assert {t.tag: t.num_bytes for t in loaded.tags} == {"optimizer": 100, "nccl": 0}


async def test_of_room_for_steps_only_what_torch_did_not_take_yet_is_reserved() -> None:
    bench, taken = Bench(), [0]
    room = CountedRoom({"workspace": (100, "discard")}, is_held=True, taken=lambda: taken[0])
    bench.tenant.loaded((room,))
    assert bench.tenant.report().reserved_bytes == 100
    taken[0] = 80
    assert bench.tenant.report().reserved_bytes == 20
    taken[0] = 130
    assert bench.tenant.report().reserved_bytes == 0
    assert (await bench.tell("release", tags=("workspace",))).report.reserved_bytes == 0
