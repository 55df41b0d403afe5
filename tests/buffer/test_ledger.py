"""The ledger on real files: verbs, refusals, restarts, rewinds, identity and damage."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.harness.ledger_audit import audit_ledger

from myxa.actors.ledger.file import STALE, Row, read_facts
from myxa.actors.ledger.ledger import Ledger
from myxa.core.errors import LedgerError


def open_ledger(path: Path, run: str = "sort", fingerprint: str = "data-1") -> Ledger:
    return Ledger(path, run=run, fingerprint=fingerprint, wall=lambda: 1.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    opened = open_ledger(path)
    yield opened
    opened.close()


def draw(ledger: Ledger, count: int, version: int = 0, rollout: str = "rollout/0") -> list[int]:
    first = ledger.draws.next_id
    rows = [
        Row(first + i, ledger.draws.next_draw + i, -1, 2, rollout=rollout, epoch=1, version=version)
        for i in range(count)
    ]
    ledger.dispatch(rows)
    return [row.group_id for row in rows]


def train(ledger: Ledger, step: int, ids: list[int]) -> None:
    for group_id in ids:
        ledger.finish(group_id, b"payload %d" % group_id, version=step, num_tokens=10)
    ledger.claim(step, ids)
    assert ledger.trained(step)


def test_lengths_of_groups_are_counted_once_each_and_outlive_the_process(ledger: Ledger, path: Path) -> None:
    ids = draw(ledger, 5)
    train(ledger, 0, ids[:2])
    ledger.refuse(ids[2], "zero-variance", detail="", num_tokens=8)
    ledger.drop([(ids[3], STALE), (ids[4], "engine-error")])
    ledger.note_length(ids[3], 900)
    ledger.note_length(ids[3], 901)
    lengths = {"trained": 10.0, "zero-variance": 8.0, STALE: 900.0}
    assert ledger.tally.mean_tokens == lengths
    ledger.close()
    again = open_ledger(path)
    assert (again.tally.mean_tokens, again.redraw()) == (lengths, (ids[3], ids[3]))
    again.close()


def test_c_a_batch_and_what_is_drawn_again_are_in_the_order_of_draws(ledger: Ledger) -> None:
    """A group that repeats draw 0 is newer than one of draw 1, and is trained before it; and an older draw that is
    dropped later is drawn again first."""
    ids = draw(ledger, 4)
    ledger.drop([(ids[3], STALE)])
    ledger.drop([(ids[0], STALE)])
    assert ledger.redraw() == (0, 0)
    ledger.dispatch([Row(4, 0, 0, 2, rollout="rollout/0", epoch=1, version=0)])
    assert ledger.redraw() == (3, 3)
    for group_id in (1, 4):
        ledger.finish(group_id, b"whole", version=0, num_tokens=3)
    ledger.claim(0, [1, 4])
    assert [(row.group_id, row.draw) for row in ledger.claim_of(0)] == [(4, 0), (1, 1)]


def test_changes_made_together_are_kept_up_to_an_error_that_is_not_the_files(ledger: Ledger, path: Path) -> None:
    ids = draw(ledger, 3)
    with pytest.raises(LedgerError, match="group 0 .* cannot go from READY to FINISHED"), ledger.together():
        for group_id in (ids[0], ids[1], ids[0], ids[2]):
            ledger.finish(group_id, b"whole", version=0, num_tokens=3)
            with sqlite3.connect(path) as other:
                assert other.execute("SELECT COUNT(*) FROM payloads").fetchone() == (0,), "no commit of its own"
            other.close()
    states = {"READY": 2, "DISPATCHED": 1}
    assert (ledger.tally.states, ledger.is_broken) == (states, False)
    ledger.close()
    again = open_ledger(path)
    assert again.tally.states == {"READY": 2, "REQUEUED": 1}
    again.close()


def test_a_ledger_in_use_or_of_another_run_or_dataset_is_refused(ledger: Ledger, path: Path) -> None:
    with pytest.raises(LedgerError, match="in use by another process"):
        open_ledger(path)
    ledger.close()
    with pytest.raises(LedgerError, match="belongs to another run: 'sort', this run has 'chat'"):
        open_ledger(path, run="chat")
    with pytest.raises(LedgerError, match="belongs to another dataset: 'data-1'"):
        open_ledger(path, fingerprint="data-2")
    open_ledger(path).close()


def test_files_that_are_no_ledgers_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("I am a diary of more than sixteen bytes, not a database.\n" * 40)
    with pytest.raises(LedgerError, match="cannot be used as a ledger"):
        open_ledger(text)
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE songs(title)")
    db.close()
    with pytest.raises(LedgerError, match="a database of something else"):
        open_ledger(other)
    with pytest.raises(LedgerError, match="does the run directory exist"):
        open_ledger(tmp_path / "nowhere" / "ledger.sqlite")


def test_a_copy_without_what_was_written_last_is_told_as_that(ledger: Ledger, path: Path, tmp_path: Path) -> None:
    draw(ledger, 2)
    copy = tmp_path / "copy.sqlite"
    copy.write_bytes(path.read_bytes())  # `cp` of the file alone, while its run writes
    with pytest.raises(
        LedgerError, match=r"cannot be read: no such table: meta -- copy .* `myxa dump`, or with .* \(-wal\)"
    ):
        read_facts(copy)
    copy.with_name("copy.sqlite-wal").write_bytes(path.with_name("ledger.sqlite-wal").read_bytes())
    assert read_facts(copy).run == "sort"


def test_a_log_that_grew_under_a_reader_gives_its_room_back(ledger: Ledger, path: Path) -> None:
    log = path.with_name(f"{path.name}-wal")
    ids = draw(ledger, 4)
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT COUNT(*) FROM groups").fetchall()
        for group_id in ids[:2]:
            ledger.finish(group_id, bytes(40 << 20), version=0, num_tokens=3)
        assert log.stat().st_size > 80 << 20
    for group_id in ids[2:]:
        ledger.finish(group_id, b"small", version=0, num_tokens=3)
    assert log.stat().st_size <= 64 << 20


def test_what_a_killed_run_of_another_user_left_is_read(ledger: Ledger, path: Path, monkeypatch) -> None:
    draw(ledger, 2)
    killed = path.parent / "killed"
    killed.mkdir()
    for file in (path, path.with_name(f"{path.name}-wal")):
        (killed / file.name).write_bytes(file.read_bytes())
    killed.chmod(0o555)
    if not os.getuid():  # who may write everywhere

        def refuse(name: str, *_: object) -> None:
            if str(killed) in name:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
            real(name, 0o700)

        real = os.mkdir
        monkeypatch.setattr(os, "mkdir", refuse)
    assert read_facts(killed / path.name).run == "sort"
    assert sorted(file.name for file in killed.iterdir()) == [path.name, f"{path.name}-wal"]


DAMAGE = [
    ("UPDATE groups SET state = 'DISPATCHED' WHERE group_id = 2", "another state than its last transition"),
    ("DELETE FROM payloads WHERE group_id = 0", "has no whole payload"),
    ("DELETE FROM groups WHERE group_id = 1", "draws up to 3, of which 3 are known"),
    ("UPDATE groups SET step = 4 WHERE group_id = 3", "has a step although it was not claimed"),
    ("UPDATE groups SET step = -1 WHERE group_id = 0", "has no step although it was claimed"),
    ("UPDATE groups SET reason = '' WHERE group_id = 1", "dropped without a reason"),
    ("UPDATE groups SET redraw_of = 3 WHERE group_id = 2", "repeats a draw that was not dropped"),
    ("DELETE FROM transitions WHERE group_id = 0 AND to_state = 'FINISHED'", "has a gap in its transitions"),
    ("UPDATE transitions SET from_state = 'DRAWN', to_state = 'CLAIMED' WHERE group_id = 3", "another state"),
]


@pytest.mark.parametrize(("sql", "text"), DAMAGE, ids=[text for _, text in DAMAGE])
def test_damage_is_found_at_load(ledger: Ledger, path: Path, sql: str, text: str) -> None:
    ids = draw(ledger, 4)
    train(ledger, 0, ids[:1])
    ledger.drop([(1, "workflow-error")])
    ledger.requeue([(2, None, -1)], "drained")
    ledger.close()
    with sqlite3.connect(path) as db:
        db.execute(sql)
    db.close()
    with pytest.raises(LedgerError, match=text):
        open_ledger(path)


def test_histories_are_walked_once_and_damage_of_what_is_newer_is_found(ledger: Ledger, path: Path) -> None:
    train(ledger, 0, draw(ledger, 1))
    ledger.durable(1)
    train(ledger, 1, draw(ledger, 1))
    ledger.durable(2)
    train(ledger, 2, draw(ledger, 1))
    ledger.close()
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM transitions WHERE group_id = 0 AND to_state = 'FINISHED'")
    db.close()
    open_ledger(path).close()  # what a checkpoint covers was checked when it was written
    with pytest.raises(LedgerError, match="has a gap"):
        read_facts(path)  # whoever goes on from it looks at all of it
    assert any("while it was in" in problem for problem in audit_ledger(path).problems)
