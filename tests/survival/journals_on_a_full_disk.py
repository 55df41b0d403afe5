"""The coordinator's journal on a file system that is full and empties again: a program for the tests.

    python journals_on_a_full_disk.py FOLDER

FOLDER/runs is the mount point of a small tmpfs. Ends with 0 if all went as it is to go.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from tests.survival.full_disk import Ballast

from myxa.actors.coordinator.journal import CoordinatorJournal, Kept
from myxa.actors.coordinator.run_state import RunState
from myxa.core.errors import LedgerError
from myxa.core.files import refusal

LONG = "x" * 8192
"""More than a full file system takes into the last page of a file."""


async def of_the_coordinator(folder: Path) -> None:
    journal, version, told = CoordinatorJournal(folder / "coordinator.journal", "here"), 1, list[tuple[str, str]]()
    journal.make = lambda: Kept(launch="here", run=RunState(version=version, reason=LONG * version))
    journal.tell = lambda kind, text: told.append((kind, text))
    await journal.keep()
    ballast, version = Ballast(folder), 2
    ballast.fill()
    with pytest.raises(LedgerError) as caught:  # what can be refused is
        await journal.keep()
    assert refusal(caught.value) is not None, caught.value
    waiting = [asyncio.create_task(journal.until_kept()) for _ in range(2)]
    await asyncio.sleep(0.7)
    assert not any(task.done() for task in waiting)
    assert [kind for kind, _ in told] == ["disk-full"] * 2
    assert "make room there" in told[0][1]
    kept, _ = journal.load()
    assert kept is not None and kept.run.version == 1, "as it was"
    ballast.empty()
    version = 3
    await asyncio.wait_for(asyncio.gather(*waiting), 20)
    kept, _ = journal.load()
    assert kept is not None and kept.run.version == 3, "what is so now, not what was so then"
    assert told[-1][0] == "disk-has-room"


if __name__ == "__main__":
    asyncio.run(of_the_coordinator(Path(sys.argv[1]) / "runs"))
