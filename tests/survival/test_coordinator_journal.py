"""The coordinator's journal: what is read is what was written, whole, by this launch; anything else is an error or
named."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
from tests.harness.commands import Command

from myxa.actors.coordinator import run_state as journal_module
from myxa.actors.coordinator.run_state import CoordinatorJournal, RunState
from myxa.core.errors import ConfigError, LedgerError

WRITER = """
import asyncio, sys
from pathlib import Path
from myxa.actors.coordinator.run_state import CoordinatorJournal, RunState

async def main():
    journal, version = CoordinatorJournal(Path(sys.argv[1]), "here"), 0
    while True:
        version += 1
        journal.state = RunState(version=version, reason="x" * (version % 4000))
        await journal.keep()
        print(version, flush=True)

asyncio.run(main())
"""


def _journal(folder: Path, launch: str = "here") -> CoordinatorJournal:
    return CoordinatorJournal(folder / "coordinator.journal", launch)


async def test_what_was_kept_comes_back(tmp_path: Path) -> None:
    journal = _journal(tmp_path)
    assert journal.load() == (False, "")
    journal.state = kept = RunState(phase="draining", version=12, leader_reason="all done", eval_reward=0.5)
    await journal.keep()
    again = _journal(tmp_path)
    assert (again.load(), again.state) == ((True, ""), kept)
    assert (tmp_path / "coordinator.journal").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["coordinator.journal"]


async def test_a_disk_that_refuses_leaves_the_journal_as_it_was(tmp_path: Path) -> None:
    journal = _journal(tmp_path)
    await journal.keep()
    before = journal.path.read_bytes()
    (tmp_path / ".coordinator.journal.part").mkdir()
    journal.state = RunState(version=7)
    with pytest.raises(LedgerError, match="check disk and rights"):
        await journal.keep()
    assert journal.path.read_bytes() == before


async def test_a_journal_of_another_launch_is_named_and_not_used(tmp_path: Path) -> None:
    await _journal(tmp_path).keep()
    is_kept, why = _journal(tmp_path, "elsewhere").load()
    assert not is_kept
    assert "another launcher" in why


@pytest.mark.parametrize(
    "body", [b"", b"null", b"[" * 100_000, b'{"launch": 1}', b'{"launch": "here", "more": 1}', b'{"launch":"\xff"}']
)
def test_a_damaged_record_is_an_error(tmp_path: Path, body: bytes) -> None:
    (tmp_path / "coordinator.journal").write_bytes(body)
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
    lot, program = random.Random(seed), tmp_path / "writer.py"
    program.write_text(WRITER)
    for _ in range(2):
        with Command([str(path)], tmp_path, program=program) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(lot.random() * 0.2)
            writer.send_signal(signal.SIGKILL)
            said = writer.stdout.read().split()
        journal = _journal(tmp_path)
        assert journal.load() == (True, "")
        told = [int(word) for word in said if word.isdecimal()]
        assert journal.state.version >= max(told, default=1), "what was said to be kept is there"


class SlowDisk:
    """Writes of the journal wait, in their threads, until they are let through; notes how many write at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_write = threading.Event()
        self.has_begun = threading.Event()
        self.num_writing = self.most_writing = 0
        self._write = journal_module.write_durably
        monkeypatch.setattr(journal_module, "write_durably", self._slowly)

    def _slowly(self, path: Path, data: bytes, mode: int) -> None:
        self.num_writing += 1
        self.most_writing = max(self.most_writing, self.num_writing)
        self.has_begun.set()
        assert self.may_write.wait(20)
        self._write(path, data, mode)
        self.num_writing -= 1

    async def until_writing(self) -> None:
        while not self.has_begun.is_set():
            await asyncio.sleep(0.001)


async def test_a_keeper_that_goes_leaves_the_write_to_its_end_and_the_next_one_comes_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, disk = _journal(tmp_path), SlowDisk(monkeypatch)
    journal.state = RunState(version=1)
    gone = asyncio.create_task(journal.keep())
    await disk.until_writing()
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    journal.state = RunState(version=2)
    later = [asyncio.create_task(journal.keep()) for _ in range(5)]
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in later)
    disk.may_write.set()
    await asyncio.gather(*later)
    assert journal.load()[0] and journal.state.version == 2, "the older record does not come last"
    assert disk.most_writing == 1
    assert [path.name for path in tmp_path.iterdir()] == ["coordinator.journal"]
