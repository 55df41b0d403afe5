"""What a manager leaves to its successor."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from myxa.core.device_memory import MemoryCommand, TenantReport
from myxa.core.errors import MemoryFault
from myxa.memory.leases import arbiter as journal_module
from myxa.memory.leases.arbiter import EPOCHS_PER_MANAGER, Arbiter, Journal
from myxa.memory.leases.switch import ArbiterOptions, AskReport


def report(name: str, sequence: int = 1) -> TenantReport:
    return TenantReport(name, 7, "trainer", ("host:0",), (1,), (2,), "active", (), sequence=sequence)


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
