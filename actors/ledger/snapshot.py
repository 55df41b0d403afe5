"""The ledger as of one moment, read by a connection of its own beside the buffer that writes it: groups, or a copy.

The copy is the ledger's part of a run checkpoint. SQLite's own backup reads under one snapshot of the file, so that
writers work meanwhile and the copy holds all of a transaction or nothing of it. The copy is one file, with a digest.
Knows the file's tables. Must not know what payloads hold or the rules of the run.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Collection, Generator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ...core.errors import LedgerError
from ...core.files import FileEntry, describe_file
from .states import Row, State

_COLUMNS = tuple(f.name for f in fields(Row))
_SQL = (
    f"SELECT {', '.join(f'g.{name}' for name in _COLUMNS)}, t.data, p.is_whole, p.data FROM groups g "
    "LEFT JOIN terms t ON t.id = g.terms LEFT JOIN payloads p ON p.group_id = g.group_id"
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A group with all that the ledger has of it."""

    row: Row
    terms: str
    """Empty: from before ledgers kept them."""
    is_whole: bool
    payload: bytes | None


def entries_in(path: Path, states: Collection[State]) -> Generator[Entry]:
    """Groups in these states, oldest first, all as of one moment. Raises LedgerError if the file cannot be read."""
    marks = ", ".join("?" * len(states))
    yield from _read(path, f"{_SQL} WHERE g.state IN ({marks}) ORDER BY g.group_id", tuple(map(str, states)))


def entries_of(path: Path, group_ids: Collection[int]) -> Generator[Entry]:
    """These groups, oldest first. Raises LedgerError if the file cannot be read."""
    marks = ", ".join("?" * len(group_ids))
    yield from _read(path, f"{_SQL} WHERE g.group_id IN ({marks}) ORDER BY g.group_id", tuple(group_ids))


def _read(path: Path, sql: str, args: tuple[Any, ...]) -> Generator[Entry]:
    try:
        with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as db:
            for values in db.execute(sql, args):  # one statement: one moment
                found = dict(zip(_COLUMNS, values[: len(_COLUMNS)], strict=True))
                found["state"] = State(found["state"])
                terms, is_whole, payload = values[len(_COLUMNS) :]
                yield Entry(Row(**found), terms or "", bool(is_whole), payload)
    except sqlite3.Error as error:
        raise LedgerError(f"{path} cannot be read: {error}") from error


_one_at_a_time = threading.Lock()
"""Whoever gave up waiting for a copy asks again while it is still being made: two into one draft would destroy it, and
the first to begin must not be the last to take the target's place."""


def copy_ledger(path: Path, target: Path) -> FileEntry:
    """Copy the ledger, which may be in use, to `target`; any thread, one after another. Returns what is durably there
    then. A target belongs to one process, which finds what a crash left of a draft and replaces it.

    Raises LedgerError naming both files if it cannot be read or written.
    """
    with _one_at_a_time:
        return _copy(path, target)


def _copy(path: Path, target: Path) -> FileEntry:
    draft = target.with_name(f"{target.name}.part")
    try:
        draft.unlink(missing_ok=True)
        with (
            contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as source,
            contextlib.closing(sqlite3.connect(draft, isolation_level=None)) as copy,
        ):
            source.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")  # else the copy would go on as two files
        entry = describe_file(draft)
        draft.replace(target)
    except (sqlite3.Error, OSError) as error:
        draft.unlink(missing_ok=True)
        raise LedgerError(
            f"{path} cannot be copied to {target}: {error}", remedy="is the disk full or the file system read-only?"
        ) from error
    return FileEntry(name=target.name, num_bytes=entry.num_bytes, sha256=entry.sha256)
