"""The coordinator's journal, and a run, on a file system of its own that is filled up and emptied: a program for the tests.

    python full_disk.py FOLDER

FOLDER/runs is the mount point of a small tmpfs, in the caller's mount namespace. Ends with 0 if all went as it is to go;
else what was wrong is on its standard error.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import pytest
from tests.harness.commands import run as run_command
from tests.harness.ledger_audit import audit_ledger
from tests.harness.run_job import events
from tests.harness.waiting import until, wait_until
from tests.survival.lives import BATCH, Lives, check_each_once, make_lives

from myxa.actors.coordinator.run_state import CoordinatorJournal, RunState
from myxa.actors.ledger.file import STALE
from myxa.core.errors import LedgerError
from myxa.core.files import refusal, until_written

MIB = 1 << 20
NUM_PROMPTS = 40

FULL_S = 8.0
"""More than the restarts of any actor would take, if there were any."""
QUIET_S = 3.0
MAX_LAG = 2
"""Of the run: its finished groups are enough for so many steps."""


class Ballast:
    def __init__(self, folder: Path) -> None:
        self._path = folder / "ballast"

    def fill(self, leave: int = 0) -> None:
        """Take what is free; again, what has become free since: a run deletes what it could not write whole."""
        self._path.parent.mkdir(exist_ok=True)
        with self._path.open("ab") as file:
            for piece in (MIB, 4096):
                self._pour(file.fileno(), piece, leave)
        print(f"{self._path.stat().st_size} bytes of ballast, {free_bytes(self._path.parent)} are left")

    def _pour(self, descriptor: int, piece: int, leave: int) -> None:
        while free_bytes(self._path.parent) >= piece + leave:
            try:
                os.posix_fallocate(descriptor, os.fstat(descriptor).st_size, piece)
            except OSError:  # the run was faster
                return

    def empty(self) -> None:
        self._path.unlink()


def free_bytes(folder: Path) -> int:
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize


def is_full_for_a_while(lives: Lives, ballast: Ballast) -> None:
    """E8: the run pauses and says what it waits for, to whoever asks; once there is room it goes on and ends."""
    run_dir = lives.run_dir
    since = time.monotonic()

    def is_paused() -> bool:
        ballast.fill()
        return "cannot be written" in asked("ps", run_dir)

    wait_until(is_paused, "a pause that `ps` tells of")
    for verb in ("ps", "why"):
        said = " ".join(asked(verb, run_dir).split())
        for words in (
            f"{run_dir}/ledger.sqlite cannot be written",
            f"file system at {run_dir.parent}",
            "make room there",
        ):
            assert words in said, said
    version = settled_version(lives)
    assert lives.after(max(QUIET_S, FULL_S - (time.monotonic() - since))), "it ended"
    assert lives.version() == version, "a pause"
    ballast.empty()
    assert lives.wait() == 0
    restarted = [path.name for path in (run_dir / "logs").glob("*.log") if path.name.split(".")[-2] != "0"]
    assert not restarted, "no process was started again"
    assert audit_ledger(run_dir / "ledger.sqlite").num_rewound == 0
    steps = [point["step"] for point in lives.steps()]
    assert steps == list(range(1, NUM_PROMPTS // BATCH + 1)), "measurements waited for room"
    told = [event["text"] for event in events(run_dir, "disk-full") if event["source"] == "buffer"]
    assert told
    assert f"{run_dir}/ledger.sqlite cannot be written" in told[0]
    assert any(event["source"] == "buffer" for event in events(run_dir, "disk-has-room"))


def settled_version(lives: Lives) -> int:
    """Steps that were under way are told of later, however slow the machine is: at most as many as may be under way."""
    first = newest = lives.version()
    quiet_since = time.monotonic()
    while time.monotonic() - quiet_since < QUIET_S:
        assert lives.after(0.1), "it ended"
        if (version := lives.version()) != newest:
            newest, quiet_since = version, time.monotonic()
        assert newest <= first + MAX_LAG, "a pause"
    return newest


def asked(verb: str, run_dir: Path) -> str:
    return run_command(verb, "--run", str(run_dir), folder=run_dir.parent).stdout


def play(folder: Path) -> None:
    lives = make_lives(folder, f"rollout.max_groups={BATCH}", patience_s=0.4, num_prompts=NUM_PROMPTS)
    ballast = Ballast(folder / "runs")
    ballast.fill(leave=64 * MIB)  # of what is left then the run is not faster
    try:
        lives.begin()
        lives.until_version(1)
        with contextlib.closing(sqlite3.connect(lives.run_dir / "ledger.sqlite")) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM sqlite_master").fetchone()  # the log keeps its pages and has to grow
            lives.until_version(3)  # there is a checkpoint to go on from
            is_full_for_a_while(lives, ballast)
        check_each_once(lives.run_dir, NUM_PROMPTS)
        audit = audit_ledger(lives.run_dir / "ledger.sqlite")
        lost = set(audit.dropped) - {STALE}  # going back, some may be too old: drawn again
        assert not lost, f"{audit.dropped}"
    finally:
        lives.end()
        with contextlib.suppress(OSError):
            print((folder / "runs" / "latest" / "logs" / "launcher.0.log").read_text()[-3000:])


LONG = "x" * 8192
"""More than a full file system takes into the last page of a file."""


async def journal_waits(folder: Path) -> None:
    path, told = folder / "coordinator.journal", list[tuple[str, str]]()
    journal, other = CoordinatorJournal(path, "here"), CoordinatorJournal(path, "here")
    journal.state = RunState(version=1, reason=LONG)
    await journal.keep()
    journal.state = RunState(version=2, reason=2 * LONG)
    ballast = Ballast(folder)
    ballast.fill()
    assert free_bytes(folder) == 0
    with pytest.raises(LedgerError) as caught:  # what can be refused is
        await journal.keep()
    assert refusal(caught.value) is not None, caught.value
    told_to = lambda kind, text: told.append((kind, text))  # noqa: E731
    waiting = [asyncio.create_task(until_written(journal.keep, path=path, tell=told_to)) for _ in range(2)]
    await until(lambda: len(told) == 2, "both are told")
    await asyncio.sleep(0.7)
    assert not any(task.done() for task in waiting)
    assert [kind for kind, _ in told] == ["disk-full"] * 2
    assert "make room there" in told[0][1]
    assert other.load()[0] and other.state.version == 1, "as it was"
    ballast.empty()
    journal.state = RunState(version=3, reason=3 * LONG)
    await asyncio.wait_for(asyncio.gather(*waiting), 20)
    assert other.load()[0] and other.state.version == 3, "what is so now, not what was so then"
    assert told[-1][0] == "disk-has-room"


if __name__ == "__main__":
    asyncio.run(journal_waits(Path(sys.argv[1]) / "runs"))
    play(Path(sys.argv[1]))
