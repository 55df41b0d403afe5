"""A ledger is looked at without a trace and without a lock, and copies of it that are made at once do no harm."""

from __future__ import annotations

import shutil
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.survival.checkpoint_maker import RunOnDisk

from myxa.actors.ledger import file as copy_module
from myxa.actors.ledger.file import LEDGER, copy_ledger, is_in_use, lock_ledger, read_facts
from myxa.core.errors import LedgerError
from myxa.core.files import FileEntry, describe_file
from myxa.launch.run_lineage.resume_point import choose_point


@pytest.fixture
def run(tmp_path: Path) -> RunOnDisk:
    return RunOnDisk(tmp_path, steps=4)


def test_a_look_leaves_nothing_behind(run: RunOnDisk, tmp_path: Path):
    place = tmp_path / "other"
    place.mkdir()
    shutil.copy2(run.ledger, place)
    before = describe_file(place / LEDGER)
    facts = read_facts(place / LEDGER)
    assert (facts.run, facts.claimed) == (run.path.name, 4)
    assert [path.name for path in place.iterdir()] == [LEDGER], "no lock, no journal of another kind"
    assert describe_file(place / LEDGER) == before


def test_what_a_killed_buffer_left_beside_it_is_read_too(run: RunOnDisk, tmp_path: Path):
    ledger = run.open()
    ids = [run.draw(ledger) for _ in range(2)]
    for group in ids:
        ledger.finish(group, b"whole", version=4, num_tokens=3)
    ledger.claim(4, ids)
    killed = tmp_path / "killed"
    killed.mkdir()
    for path in run.path.glob(f"{LEDGER}*"):
        shutil.copy2(path, killed)
    ledger.close()
    assert read_facts(killed / LEDGER).claimed == 5


def test_one_of_another_format_is_refused_as_it_is(run: RunOnDisk):
    with sqlite3.connect(run.ledger) as db:
        db.execute("UPDATE meta SET value = '1' WHERE key = 'format'")
    db.close()
    before = describe_file(run.ledger)
    for use in (lambda: read_facts(run.ledger), run.open):
        with pytest.raises(LedgerError, match="format"):
            use()
    assert describe_file(run.ledger).sha256 == before.sha256


@pytest.mark.parametrize("content", [b"", b"no ledger"])
def test_what_is_none_is_told(run: RunOnDisk, content: bytes):
    run.ledger.write_bytes(content)
    with pytest.raises(LedgerError):
        read_facts(run.ledger)
    assert run.ledger.read_bytes() == content


def test_another_node_that_looks_does_not_make_it_seem_damaged(run: RunOnDisk):
    """Its lock was taken for damage: the good ledger was put away, and the older copy taken."""
    assert not is_in_use(run.ledger)
    with lock_ledger(run.ledger):
        assert is_in_use(run.ledger)
        assert choose_point(run.path, None).is_own_ledger
    assert not is_in_use(run.ledger)


def test_two_copies_at_once_come_one_after_another(run: RunOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whoever waited too long for the first asks again: what it is told of is what lies there."""
    target, is_second_in = tmp_path / "copy.sqlite", threading.Event()
    calls: list[Path] = []

    def slow(path: Path) -> FileEntry:
        calls.append(path)
        if len(calls) > 1:
            is_second_in.set()
        else:
            is_second_in.wait(1.0)
        return describe_file(path)

    monkeypatch.setattr(copy_module, "describe_file", slow)
    with ThreadPoolExecutor(2) as pool:
        made: list[Any] = list(pool.map(lambda _: copy_ledger(run.ledger, target), range(2)))
    found = describe_file(target)
    assert all(entry == found for entry in made)
    assert read_facts(target).claimed == 4
    assert not list(tmp_path.glob("*.part"))


def test_what_a_crash_left_of_a_copy_is_replaced(run: RunOnDisk, tmp_path: Path):
    target = tmp_path / "copy.sqlite"
    target.with_name("copy.sqlite.part").write_bytes(b"half of one")
    copy_ledger(run.ledger, target)
    assert read_facts(target).claimed == 4
    assert not list(tmp_path.glob("*.part"))
