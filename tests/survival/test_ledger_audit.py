"""The audit of a ledger finds what it is there to find: a ledger that is right has no problems, a damaged one does."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from tests.harness.ledger_audit import audit_ledger

from myxa.actors.ledger.file import Row
from myxa.actors.ledger.ledger import Ledger


def made_ledger(path: Path) -> Ledger:
    """Two steps of two groups; the first of them was undone and trained again; group 4 grew old and was drawn again."""
    ledger = Ledger(path, run="r", fingerprint="d", wall=lambda: 1.0)
    ledger.dispatch([row(n) for n in range(5)])
    for group_id in range(4):
        ledger.finish(group_id, b"payload", version=0, num_tokens=3)
    ledger.drop([(4, "stale")])
    ledger.dispatch([row(5, draw=4, redraw_of=4)])
    for step, groups in enumerate(((0, 1), (2, 3))):
        ledger.claim(step, groups)
        ledger.trained(step)
    ledger.rewind(1)
    ledger.claim(1, (2, 3))
    ledger.trained(1)
    ledger.durable(2)
    return ledger


def row(group_id: int, draw: int = -1, redraw_of: int = -1) -> Row:
    draw = group_id if draw < 0 else draw
    return Row(group_id, draw, redraw_of, 4, rollout="rollout/0", epoch=1, version=0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made_ledger(tmp_path / "ledger.sqlite").close()
    return tmp_path / "ledger.sqlite"


DAMAGE: dict[str, tuple[str, str]] = {
    "trained twice": ("UPDATE groups SET draw = 0 WHERE group_id = 1", "was trained 2 times"),
    "lost": ("DELETE FROM groups WHERE group_id = 3", "group ids are not counted"),
    "lost and forgotten": ("DELETE FROM groups WHERE group_id = 3", "has transitions and no row"),
    "in two states": ("UPDATE groups SET state = 'TRAINED' WHERE group_id = 3", "not where its transitions end"),
    "skipped": ("DELETE FROM transitions WHERE group_id = 2 AND to_state = 'CLAIMED'", "while it was in"),
    "at rest nowhere": ("UPDATE groups SET state = 'FINISHED' WHERE group_id = 5", "where none can rest"),
    "redrawn without need": ("UPDATE groups SET reason = 'reward-error' WHERE group_id = 4", "was not given up"),
    "a step too few": ("UPDATE groups SET step = 5 WHERE step = 1", "there is a gap"),
    "a draw too few": ("UPDATE groups SET draw = 9 WHERE group_id = 3", "are known"),
    "taken twice": ("UPDATE groups SET redraw_of = -1 WHERE group_id = 5", "taken from the source 2 times"),
    "trained, and its samples gone": ("DELETE FROM payloads WHERE group_id = 2", "and its samples are gone"),
    "durable without a checkpoint": ("UPDATE meta SET value = 1 WHERE key = 'durable_version'", "reach 1 only"),
    "a hop that cannot be": ("UPDATE transitions SET to_state = 'REQUEUED' WHERE to_state = 'TRAINED'", "cannot be"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found(path: Path, name: str):
    sql, words = DAMAGE[name]
    assert audit_ledger(path).problems == ()
    with closing(sqlite3.connect(path)) as db, db:
        assert db.execute(sql).rowcount
    problems = audit_ledger(path).problems
    assert any(words in problem for problem in problems), problems
