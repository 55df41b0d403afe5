"""The ledger as it stands at one moment, read by a connection of its own, for threads beside the one that writes it.

Knows the file's tables. Must not know what payloads hold.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Collection, Generator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ...core.errors import LedgerError
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
