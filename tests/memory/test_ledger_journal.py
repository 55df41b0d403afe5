"""What a manager leaves to its successor."""

from __future__ import annotations

import asyncio
import os
from contextlib import closing
from pathlib import Path

import pytest

from myxa.actors.tenancy.memory_manager import ManagerOptions, MemoryManager
from myxa.core.clock import SystemClock
from myxa.core.device_memory import MemoryCommand, TenantReport
from myxa.core.errors import MemoryFault
from myxa.core.process import start_time
from myxa.memory.leases import arbiter as journal_module
from myxa.memory.leases.arbiter import EPOCHS_PER_MANAGER, Arbiter, Journal
from myxa.memory.leases.switch import ArbiterOptions, AskReport
from myxa.memory.meters import DeviceMeters
from myxa.transport.node import Node


def report(name: str, sequence: int = 1, *, pid: int = 4_000_001, started_at: int = 2) -> TenantReport:
    return TenantReport(name, 7, "trainer", ("host:0",), (pid,), (started_at,), "active", (), sequence=sequence)


def order(epoch: int) -> MemoryCommand:
    return MemoryCommand(command_id=f"c{epoch}", epoch=epoch, kind="drain")


def test_a_successor_knows_whom_to_ask_and_where_to_begin(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "memory.jsonl"
    with closing(Journal(path)) as first:
        first.report(report("trainer/0"))
        first.report(report("trainer/1"))
        first.report(report("trainer/0", 2))
        first.command("trainer/0", order(41))
        first.gone("trainer/1")
    with path.open("ab") as file:
        file.write(b'{"epoch": 99')  # the writer died in the middle of a line
    with closing(Journal(path)) as second:
        assert second.known == (report("trainer/0", 2),)
        assert second.last_epoch == 41
        assert second.commands == {"trainer/0": order(41)}
        arbiter = Arbiter(ArbiterOptions(), last_epoch=second.last_epoch, known=second.known)
    assert arbiter.epoch == 41 + EPOCHS_PER_MANAGER
    assert arbiter.tick(0.0)[0] == AskReport("trainer/0")  # trusted in nothing before it has answered
    assert not arbiter.ledger.tenants["trainer/0"].is_usable
    with closing(Journal(path)) as third:
        assert third.last_epoch == 41


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_tenant_of_the_life_before_is_not_the_one_of_its_name(tmp_path: Path, *, is_dead: bool) -> None:
    """Epochs begin again in each life: the new process registers whether or not the end of the old one was seen."""
    path, old, new = tmp_path / "memory.jsonl", report("trainer/0", 83), report("trainer/0", pid=3)
    with closing(Journal(path)) as first:
        first.report(old)
    with closing(Journal(path, life=2)) as second:
        (known,) = second.known
        arbiter = Arbiter(ArbiterOptions(), last_epoch=second.last_epoch, known=second.known)
        if is_dead:
            arbiter.died("trainer/0", known.epoch, "its processes ended", 0.0)
        arbiter.registered(new, 0.0)
        second.report(new)
    living = arbiter.ledger.tenants["trainer/0"]
    assert (living.report, living.is_usable) == (new, True)
    assert [gone.report.pids for gone in arbiter.ledger.unproven] == [old.pids], "its memory counts until it is free"
    with closing(Journal(path, life=2)) as third:
        assert third.known == (new,)


@pytest.mark.timeout(20)
async def test_a_proof_for_the_dead_does_not_forget_the_living_of_the_same_name(tmp_path: Path) -> None:
    path, new = tmp_path / "memory.jsonl", report("trainer/0", pid=os.getpid(), started_at=start_time(os.getpid()))
    with closing(Journal(path)) as first:
        first.report(report("trainer/0", 83))
    manager = MemoryManager(
        meter=DeviceMeters({"host:0": 1 << 20}),
        journal=Journal(path, life=2),
        options=ManagerOptions(arbiter=ArbiterOptions(reserve_bytes=0, margin_bytes=0)),
        clock=SystemClock(),
    )
    node = await Node.attach(name="launcher/0")
    try:
        await node.start(manager, "memory/0")
        await manager.register(new)
        while "proven free: 0 bytes" not in [text for *_, text in (await manager.view()).timeline]:
            await asyncio.sleep(0.02)
        (device,) = (await manager.view()).devices
        assert device.tenants == (new,)
    finally:
        await node.close()
    with closing(Journal(path, life=2)) as successor:
        assert successor.known == (new,)


def test_it_does_not_grow_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "REWRITE_BYTES", 4096)
    with closing(Journal(tmp_path / "memory.jsonl")) as journal:
        for number in range(500):
            journal.report(report("trainer/0", number))
            journal.command("trainer/0", order(number))
        assert journal.path.stat().st_size < 8192
        assert journal.last_epoch == 499
    with closing(Journal(tmp_path / "memory.jsonl")) as again:
        assert (again.last_epoch, again.known) == (499, (report("trainer/0", 499),))


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MemoryFault, match="run directory that can be written"):
        Journal(tmp_path / "file" / "memory.jsonl")
