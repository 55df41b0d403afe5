"""The coordinator's journal: what is read is what was written, whole, by this launch; anything else is an error or named.

Proved: a decision comes back as it was (to be undone, to go back by itself, for owners that join); torn, changed, foreign
and hostile files; a writer that is killed at any moment; a disk, or an audit log, that refuses.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from myxa.actors.coordinator import journal as journal_module
from myxa.actors.coordinator.audit import AuditWriter, read_audit
from myxa.actors.coordinator.journal import CoordinatorJournal, Kept, KnobsKept, PauseKept
from myxa.actors.coordinator.knob_change import AUTO, KnobOrder
from myxa.actors.coordinator.knob_conductor import DecisionLog
from myxa.actors.coordinator.knob_plan import ChangePlan
from myxa.actors.coordinator.run_state import RunState
from myxa.core.clock import ManualClock
from myxa.core.errors import ConfigError, LedgerError
from myxa.core.knobs import KnobCommit

WRITER = """
import asyncio, sys
from pathlib import Path
from myxa.actors.coordinator.journal import CoordinatorJournal, Kept
from myxa.actors.coordinator.run_state import RunState

async def main():
    journal, version = CoordinatorJournal(Path(sys.argv[1]), "here"), 0
    journal.make = lambda: Kept(launch="here", run=RunState(version=version, reason="x" * (version % 4000)))
    while True:
        version += 1
        await journal.keep()
        print(version, flush=True)

asyncio.run(main())
"""


def _journal(folder: Path, launch: str = "here") -> CoordinatorJournal:
    return CoordinatorJournal(folder / "coordinator.journal", launch)


def _plan(value: float) -> ChangePlan:
    return ChangePlan(
        target="", common={"lr": value}, values={"trainer/0": {"lr": value}}, moves=(), first={"lr": 1e-3},
        numbered=frozenset({"lr"}), own={"trainer/0": {"lr": value}},
    )  # fmt: skip


class Desk:
    """A book, its journal, its audit log, and whether it gave up."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock(start_s=100.0)
        self.journal = _journal(folder)
        self.audit = folder / "audit.jsonl"
        self.errors: list[BaseException] = []
        desk = AuditWriter(self.audit, lambda: 7, self.clock)
        self.book = DecisionLog(desk, self.journal, self.clock, self.errors.append)
        self.journal.make = lambda: Kept(launch="here", knobs=self.book.kept())

    async def decide(self, value: float, *, for_s: float = 0.0) -> int:
        epoch = await self.book.ask(f"set lr = {value}")
        order = KnobOrder("set", AUTO, for_s=for_s)
        await self.book.decide(order, _plan(value), epoch, at=epoch + 10, version=7)
        return epoch


async def test_what_was_kept_comes_back(tmp_path: Path) -> None:
    journal = _journal(tmp_path)
    kept = Kept(
        launch="here",
        run=RunState(phase="draining", version=12, leader_reason="all done", eval_reward=0.5, engines={"rollout/0"}),
        pause=PauseKept(is_paused=True, until_step=14, reason="look"),
        knobs=KnobsKept(asked=3, undecided="set lr = 1.0"),
    )
    journal.make = lambda: kept
    assert journal.load() == (None, "")
    await journal.keep()
    assert journal.load() == (kept, "")
    assert (tmp_path / "coordinator.journal").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["coordinator.journal"]


async def test_the_next_book_goes_on_where_the_first_one_ended(tmp_path: Path) -> None:
    first = Desk(tmp_path)
    await first.decide(2e-3)
    await first.decide(4e-3, for_s=60.0)
    await first.book.ask("set lr = 8e-3")  # never decided
    kept, _ = first.journal.load()
    assert kept is not None
    second = Desk(tmp_path)
    second.clock.advance(25.0)  # the wall went on meanwhile; its monotonic clock has another beginning
    assert second.book.take_up(kept.knobs) == "change 3 (set lr = 8e-3)"
    assert second.book.void == 3
    assert second.book.decisions.newest("lr", 0.0) == 4e-3
    assert second.book.decisions.commits_for("trainer/0")[-1] == KnobCommit(epoch=2, at=12, values={"lr": 4e-3})
    assert second.book.expiries.words(second.clock.monotonic()) == {"lr": "in 35 s"}
    assert await second.decide(1e-2) == 4, "a number that owners may have heard is not used again"
    assert [record.epoch for record in read_audit(second.audit)] == [1, 2, 4]


async def test_a_decision_that_did_not_come_into_the_audit_log_is_written_once(tmp_path: Path) -> None:
    first = Desk(tmp_path)
    await first.decide(2e-3)
    whole = first.audit.read_bytes()
    first.audit.write_bytes(b"")  # as if it had died between journal and audit log
    for is_missing in (True, False):
        second = Desk(tmp_path)
        kept, _ = second.journal.load()
        assert kept is not None
        second.clock.advance(5.0)
        second.book.take_up(kept.knobs)
        assert await second.book.complete_audit() is is_missing
    assert first.audit.read_bytes() == whole


async def test_what_the_audit_log_refuses_is_not_decided_for_the_next_incarnation_either(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    await desk.decide(2e-3)
    desk.audit.write_text("no record\n")
    with pytest.raises(LedgerError, match="no audit record"):
        await desk.decide(4e-3)
    kept, _ = desk.journal.load()
    assert kept is not None
    assert desk.book.decisions.newest("lr", 0.0) == 2e-3
    assert {knob.value for knob in kept.knobs.live} == {2e-3}
    assert not desk.errors


async def test_a_journal_that_cannot_take_a_decision_back_ends_its_owner(tmp_path: Path) -> None:
    """Else it would say no, and the next incarnation yes."""
    desk = Desk(tmp_path)
    epoch = await desk.book.ask("set lr = 4e-3")
    desk.audit.write_text("no record\n")
    keep, calls = desk.journal.keep, 0

    async def keep_once() -> None:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise LedgerError("the disk is full")
        await keep()

    desk.journal.keep = keep_once
    with pytest.raises(LedgerError, match="the disk is full"):
        await desk.book.decide(KnobOrder("set", AUTO), _plan(4e-3), epoch, at=11, version=7)
    assert [str(error) for error in desk.errors] == ["the disk is full"]


async def test_a_disk_that_refuses_leaves_the_journal_as_it_was(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    await desk.decide(2e-3)
    before = desk.journal.path.read_bytes()
    (tmp_path / ".coordinator.journal.new").mkdir()
    with pytest.raises(LedgerError, match="check disk and rights"):
        await desk.decide(4e-3)
    assert desk.journal.path.read_bytes() == before
    assert desk.book.decisions.newest("lr", 0.0) == 2e-3


async def test_a_journal_of_another_launch_is_named_and_not_used(tmp_path: Path) -> None:
    await _journal(tmp_path).keep()
    kept, why = _journal(tmp_path, "elsewhere").load()
    assert kept is None
    assert "another launcher" in why


async def test_every_byte_counts(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    await desk.decide(2e-3)
    data, seed = desk.journal.path.read_bytes(), random.randrange(1 << 32)
    print("seed", seed)
    lot = random.Random(seed)
    for _ in range(20):
        at = lot.randrange(len(data))
        torn, changed = data[:at], data[:at] + bytes([data[at] ^ (1 << lot.randrange(8))]) + data[at + 1 :]
        for bad in (torn, changed):
            desk.journal.path.write_bytes(bad)
            with pytest.raises(ConfigError, match="cannot be used"):
                desk.journal.load()


@pytest.mark.parametrize("body", [b"", b"null", b"[" * 100_000, b'{"launch": 1}', b'{"launch": "here", "more": 1}'])
def test_a_hostile_record_with_a_good_digest_is_an_error(tmp_path: Path, body: bytes) -> None:
    from hashlib import blake2b

    digest = blake2b(body, digest_size=32).hexdigest().encode()
    (tmp_path / "coordinator.journal").write_bytes(digest + b"\n" + body)
    with pytest.raises(ConfigError, match=r"cannot be used.*myxa resume"):
        _journal(tmp_path).load()


@pytest.mark.parametrize("kind", ["fifo", "link", "folder", "huge"])
def test_what_is_no_such_file_is_an_error_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "coordinator.journal"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)
    with pytest.raises(ConfigError, match="cannot be used"):
        _journal(tmp_path).load()


def test_a_writer_that_is_killed_at_any_moment_leaves_a_whole_journal(tmp_path: Path) -> None:
    path, seed = tmp_path / "coordinator.journal", random.randrange(1 << 32)
    print("seed", seed)
    lot = random.Random(seed)
    for _ in range(2):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(lot.random() * 0.2)
            writer.send_signal(signal.SIGKILL)
            said = writer.stdout.read().split()
        kept, why = _journal(tmp_path).load()
        assert kept is not None and not why
        told = [int(word) for word in said if word.isdecimal()]
        assert kept.run.version >= max(told, default=1), "what was said to be kept is there"


class SlowDisk:
    """Writes of the journal wait, in their threads, until they are let through; notes how many write at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_write = threading.Event()
        self.has_begun = threading.Event()
        self.num_writing = self.most_writing = 0
        self._replace = journal_module._replace
        monkeypatch.setattr(journal_module, "_replace", self._slowly)

    def _slowly(self, path: Path, data: bytes) -> None:
        self.num_writing += 1
        self.most_writing = max(self.most_writing, self.num_writing)
        self.has_begun.set()
        assert self.may_write.wait(20)
        self._replace(path, data)
        self.num_writing -= 1

    async def until_writing(self) -> None:
        while not self.has_begun.is_set():
            await asyncio.sleep(0.001)


async def test_a_keeper_that_goes_leaves_the_write_to_its_end_and_the_next_one_comes_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, disk, version = _journal(tmp_path), SlowDisk(monkeypatch), 1
    journal.make = lambda: Kept(launch="here", run=RunState(version=version))
    gone = asyncio.create_task(journal.keep())
    await disk.until_writing()
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    version = 2
    later = [asyncio.create_task(journal.keep()) for _ in range(5)]
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in later)
    disk.may_write.set()
    await asyncio.gather(*later)
    kept, _ = journal.load()
    assert kept is not None and kept.run.version == 2, "the older record does not come last"
    assert disk.most_writing == 1
    assert [path.name for path in tmp_path.iterdir()] == ["coordinator.journal"]
