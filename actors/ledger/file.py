"""The ledger's SQLite file: schema, identity, one writer, invariants. Knows rows; knows no rules of the run.

Crash safety: WAL with synchronous=NORMAL survives the death of the process at any moment; a power cut may lose the
newest transactions, never the order of the older ones. The file must lie on a local disk (WAL needs shared memory).
Hand-written over the standard library's sqlite3: SQLAlchemy was considered and adds a layer to four statements.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from msgspec.structs import replace

from ...core.errors import LedgerError
from ...core.files import is_locked, lock_remedy, take_lock
from .states import AT_REST, PASSED_OVER, REWIND, TRANSITIONS, Row, State

FORMAT = "2"

LIVE = "live/"
"""Prefix of the keys of settings that were changed during the run."""

COLUMNS = Row.__struct_fields__
_KINDS = {"group_id": "INTEGER PRIMARY KEY", "reward": ""}
SCHEMA = f"""
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE groups(
  {", ".join(f"{name} {_KINDS.get(name, 'NOT NULL')}" for name in COLUMNS)});
CREATE INDEX groups_by_state ON groups(state, step);
CREATE TABLE payloads(group_id INTEGER PRIMARY KEY, is_whole INTEGER NOT NULL, data BLOB NOT NULL);
CREATE TABLE transitions(
  seq INTEGER PRIMARY KEY, group_id INTEGER NOT NULL, from_state TEXT NOT NULL, to_state TEXT NOT NULL,
  attempt INTEGER NOT NULL, wall_s REAL NOT NULL, detail TEXT NOT NULL);
CREATE INDEX transitions_by_group ON transitions(group_id, seq);
CREATE TABLE terms(id INTEGER PRIMARY KEY, data TEXT NOT NULL UNIQUE);
"""
_INVARIANTS: tuple[tuple[str, str], ...] = (
    ("is at rest in a passing state", f"state NOT IN ({', '.join(repr(str(s)) for s in sorted(AT_REST))})"),
    (
        "has no whole payload",
        "state IN ('READY', 'CLAIMED', 'TRAINED') AND group_id NOT IN (SELECT group_id FROM payloads WHERE is_whole)",
    ),
    ("has a step although it was not claimed", "step >= 0 AND state NOT IN ('CLAIMED', 'TRAINED', 'DURABLE')"),
    ("has no step although it was claimed", "step < 0 AND state IN ('CLAIMED', 'TRAINED', 'DURABLE')"),
    ("is dropped without a reason, or has one and is not dropped", "(state = 'DROPPED') != (reason != '')"),
    ("was never dispatched", f"attempt < 1 AND reason NOT IN ({', '.join(repr(r) for r in PASSED_OVER)})"),
    (
        "is durable without a checkpoint that covers it",
        "state = 'DURABLE' AND step >= (SELECT CAST(value AS INTEGER) FROM meta WHERE key = 'durable_version')",
    ),
    (
        "repeats a draw that was not dropped",
        (
            "redraw_of >= 0 AND (redraw_of, draw, source, source_draw) NOT IN "
            "(SELECT group_id, draw, source, source_draw FROM groups WHERE state = 'DROPPED')"
        ),
    ),
    ("was dispatched under unknown terms", "terms != 0 AND terms NOT IN (SELECT id FROM terms)"),
)
_MOVED = "group_id IN (SELECT group_id FROM transitions WHERE seq > ?)"


class LedgerReader:
    """A ledger without a writer, read without a lock. All failures of SQLite become LedgerError with the path."""

    def __init__(self, path: Path) -> None:
        """Raises LedgerError if it cannot be opened, or is no ledger."""
        self.path = path
        self._traces = ExitStack()
        try:
            self._db = sqlite3.connect(_reading(path, self._traces), uri=True)
            self._db.execute("PRAGMA busy_timeout=10000")
        except (sqlite3.Error, OSError) as error:
            self._traces.close()
            raise LedgerError(f"{path} cannot be used as a ledger: {error}", remedy="is it another file?") from error

    def close(self) -> None:
        self._db.close()
        self._traces.close()

    def query(self, sql: str, *args: Any) -> list[tuple[Any, ...]]:
        try:
            return self._db.execute(sql, args).fetchall()
        except sqlite3.Error as error:
            raise LedgerError(f"{self.path} cannot be read: {error}") from error

    def meta(self) -> dict[str, str]:
        return dict(self.query("SELECT key, value FROM meta"))

    def select(self, where: str, *args: Any) -> list[Row]:
        """Rows of groups, oldest first."""
        found = self.query(f"SELECT {', '.join(COLUMNS)} FROM groups WHERE {where} ORDER BY group_id", *args)
        return [row_of(values) for values in found]

    def newest_transition(self) -> int:
        """Number of the newest transition; 0: there is none."""
        return int(self.query("SELECT COALESCE(MAX(seq), 0) FROM transitions")[0][0])

    def stored(self, group_id: int) -> tuple[bool, bytes] | None:
        """(is it a whole group, bytes), or None."""
        found = self.query("SELECT is_whole, data FROM payloads WHERE group_id = ?", group_id)
        return (bool(found[0][0]), found[0][1]) if found else None

    def check(self, since: int = 0) -> None:
        """Raise LedgerError naming the first broken invariant and a group that breaks it. `since`: the histories of
        groups that have not moved after that transition were checked before. All rows are looked at in any case."""
        for text, where in _INVARIANTS:
            self._forbid(text, f"SELECT group_id, state FROM groups WHERE {where} LIMIT 1")
        moved, args = (_MOVED, (since,)) if since else ("TRUE", ())
        self._forbid(
            "is in another state than its last transition says",
            "SELECT group_id, state FROM groups WHERE state IS NOT (SELECT to_state FROM transitions "
            f"WHERE group_id = groups.group_id ORDER BY seq DESC LIMIT 1) AND {moved} LIMIT 1",
            *args,
        )
        self._forbid(
            "has a gap in its transitions",
            "SELECT group_id, from_state FROM (SELECT group_id, from_state, LAG(to_state, 1, 'DRAWN') OVER "
            f"(PARTITION BY group_id ORDER BY seq) AS before FROM transitions WHERE {moved}) "
            "WHERE from_state != before LIMIT 1",
            *args,
        )
        for source, target in self.query("SELECT DISTINCT from_state, to_state FROM transitions WHERE seq > ?", since):
            if not any(target in table.get(State(source), ()) for table in (TRANSITIONS, REWIND)):
                raise LedgerError(f"{self.path} is damaged: it records a transition from {source} to {target}")
        self._forbid(
            "repeats the same dropped group as another",
            "SELECT redraw_of, 'redrawn' FROM groups WHERE redraw_of >= 0 GROUP BY redraw_of HAVING COUNT(*) > 1",
        )
        first, distinct, highest = self.query(
            "SELECT SUM(redraw_of < 0), COUNT(DISTINCT draw), COALESCE(MAX(draw), -1) FROM groups"
        )[0]
        if not (first or 0) == distinct == highest + 1:
            raise LedgerError(
                f"{self.path} is damaged: draws up to {highest}, of which {distinct} are known and {first} drawn once"
            )

        self._forbid(
            "is not numbered among its source's draws without a gap",
            "SELECT MAX(group_id), source FROM groups WHERE source != '' GROUP BY source "
            "HAVING SUM(redraw_of < 0) != MAX(source_draw) + 1 OR COUNT(DISTINCT source_draw) != MAX(source_draw) + 1",
        )

    def _forbid(self, text: str, sql: str, *args: Any) -> None:
        broken = self.query(sql, *args)
        if broken:
            group_id, state = broken[0]
            raise LedgerError(f"{self.path} is damaged: group {group_id} ({state}) {text}")


def _reading(path: Path, traces: ExitStack) -> str:
    """How SQLite opens the file to read. One that was closed well has nothing beside it and gets nothing. What a killed
    writer left beside it is read too, under another name of the same files: SQLite would write an index of it."""
    beside = path.with_name(path.name + "-wal")
    if not beside.exists() or not beside.stat().st_size:
        return f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    folder = Path(traces.enter_context(TemporaryDirectory(prefix=".looked-at-", dir=path.parent)))
    for file in (path, beside):
        try:
            (folder / file.name).hardlink_to(file.resolve())
        except OSError:  # a file system without links
            shutil.copyfile(file, folder / file.name)
    return f"{(folder / path.name).as_uri()}?mode=ro"


def lock_ledger(path: Path) -> IO[str]:
    """Hold `<path>.lock` until this process ends: there is one writer, and a killed one leaves no lock behind."""
    try:
        handle = take_lock(_lock_of(path))
    except OSError as error:
        remedy = lock_remedy(error, "does the run directory exist?")
        raise LedgerError(f"{path} cannot be opened: {error}", remedy=remedy) from error
    if handle is None:
        raise LedgerError(f"{path} is in use by another process", remedy="end the other buffer first")
    return handle


def is_in_use(path: Path) -> bool:
    """Whether the ledger is locked now; leaves nothing behind."""
    return is_locked(_lock_of(path))


def _lock_of(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def row_of(values: Sequence[Any]) -> Row:
    """From its `COLUMNS`."""
    row = Row(*values)
    return replace(row, state=State(row.state))
