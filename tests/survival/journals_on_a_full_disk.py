"""Journals of coordinator and registry on a file system that is full and empties again: a program for the tests.

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
from myxa.core.ids import NodeId
from myxa.transport.address import Endpoints
from myxa.transport.registry.directory import NodeRecord
from myxa.transport.registry.journal import NodeEnded, NodeEntry, RegistryJournal

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


def known(epoch: int, name: str) -> NodeEntry:
    return NodeEntry(record=NodeRecord(name=name, node_id=NodeId(7), epoch=epoch, endpoints=Endpoints(), pid=1))


async def of_the_registry(folder: Path) -> None:
    path = folder / "registry"
    journal = RegistryJournal.open(path)
    journal.append(known(1, "first"))
    await journal.settle()
    before = path.read_bytes()
    ballast = Ballast(folder)
    ballast.fill()
    entries = [known(2, LONG), NodeEnded(node="first", epoch=1, reason="gone"), known(3, "third")]
    for entry in entries:
        journal.append(entry)
    waiting = [asyncio.create_task(journal.settle()) for _ in range(2)]
    await asyncio.sleep(0.7)
    assert not any(task.done() for task in waiting)
    ballast.empty()
    await asyncio.wait_for(asyncio.gather(*waiting), 20)
    journal.close()
    assert path.read_bytes().startswith(before)
    again = RegistryJournal.open(path)
    assert list(again.entries) == [known(1, "first"), *entries], "each once, in order"
    again.close()


if __name__ == "__main__":
    runs = Path(sys.argv[1]) / "runs"
    asyncio.run(of_the_coordinator(runs))
    asyncio.run(of_the_registry(runs))
