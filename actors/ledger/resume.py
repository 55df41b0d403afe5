"""The ledger that a run resumes with: its own, that of an earlier run, or the copy in a checkpoint.

A copy is written beside its place and renamed: a crash leaves no copy or a whole one. The source stays unchanged.

`copy_ledger` uses SQLite's own backup, which reads as of one moment while the buffer writes.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Collection, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from ...core.errors import LedgerError
from ...core.files import FileEntry, describe_file
from ...core.samples import Group, Sample
from .file import COLUMNS, FORMAT, LIVE, LedgerReader, lock_ledger, row_of
from .states import Row, State, Terms, decode_group, decode_partial

_SQL = (
    f"SELECT t.data, p.is_whole, p.data, {', '.join(f'g.{name}' for name in COLUMNS)} FROM groups g "
    "LEFT JOIN terms t ON t.id = g.terms LEFT JOIN payloads p ON p.group_id = g.group_id"
)
LedgerEntry = tuple[Row, Terms | None, Group | None, tuple[Sample, ...]]
"""All that the ledger has of a group: under which terms it was dispatched first, if it was; itself, if it was finished,
else its unfinished samples."""


def entries(
    path: Path, values: Collection[State] | Collection[int], *, of: Literal["state", "group_id"]
) -> Generator[LedgerEntry]:
    """Groups in these states, or of these ids, oldest first, all as of one moment. Raises LedgerError if the file, or a
    group in it, cannot be read."""
    sql = f"{_SQL} WHERE g.{of} IN ({', '.join('?' * len(values))}) ORDER BY g.group_id"
    try:
        with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as db:
            for terms, is_whole, data, *columns in db.execute(sql, tuple(values)):  # one statement: one moment
                row = row_of(columns)
                group = decode_group(row.group_id, data) if data is not None and is_whole else None
                partial = decode_partial(row.group_id, data) if data is not None and not is_whole else ()
                yield row, msgspec.json.decode(terms, type=Terms) if terms else None, group, partial
    except (sqlite3.Error, msgspec.MsgspecError) as error:
        raise LedgerError(f"{path} cannot be read: {error}") from error


_one_at_a_time = threading.Lock()
"""A caller that timed out asks again while the copy is being made: two copies into one draft would destroy it, and
the first to begin must not be the last to replace the target."""


def copy_ledger(path: Path, target: Path) -> FileEntry:
    """Copy the ledger, which may be in use, to `target`; any thread, one after another. Returns what is durably there
    then. A target belongs to one process, which finds what a crash left of a draft and replaces it. Raises LedgerError
    naming both files if it cannot be read or written."""
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
            copy.execute("PRAGMA journal_mode=DELETE")  # else the copy would be two files when opened
        entry = describe_file(draft)
        draft.replace(target)
    except (sqlite3.Error, OSError) as error:
        draft.unlink(missing_ok=True)
        raise LedgerError(
            f"{path} cannot be copied to {target}: {error}", remedy="is the disk full or the file system read-only?"
        ) from error
    return FileEntry(name=target.name, num_bytes=entry.num_bytes, sha256=entry.sha256)


LEDGER = "ledger.sqlite"
"""Its name, in a run directory and in a checkpoint."""


@dataclass(frozen=True, slots=True)
class LedgerFacts:
    """How far an unused ledger goes."""

    run: str
    floor: int
    """The oldest version that it can go back to."""
    claimed: int
    """Versions that its claims lead to: a trainer cannot honestly be further."""

    def why_not(self, version: int) -> str:
        """Why training cannot continue from `version` with this ledger; empty if it can."""
        if version < self.floor:
            return f"it can go back to version {self.floor} at most: what was trained before is given away"
        if version > self.claimed:
            return f"it ends at version {self.claimed}: its newest part was lost"
        return ""


def read_facts(path: Path) -> LedgerFacts:
    """Read through the whole ledger, without its lock; it has no writer. Raises LedgerError if missing or damaged."""
    if not path.is_file():
        raise LedgerError(f"there is no ledger at {path}", remedy="without it a resumed run would repeat prompts")
    file = LedgerReader(path)
    try:
        found = file.query("PRAGMA quick_check(1)")
        if found != [("ok",)]:
            raise LedgerError(f"{path} is damaged: {found[0][0] if found else 'nothing can be read'}")
        meta = file.meta()
        if meta["format"] != FORMAT:
            raise LedgerError(f"{path} has format {meta['format']}, this program reads {FORMAT}")
        file.check()
        claimed = int(file.query("SELECT COALESCE(MAX(step), -1) + 1 FROM groups WHERE step >= 0")[0][0])
        return LedgerFacts(
            run=meta["run"], floor=int(meta["payload_floor"]), claimed=max(int(meta["base_version"]), claimed)
        )
    except (KeyError, ValueError) as error:
        raise LedgerError(f"{path} is damaged: {error!r}") from error
    finally:
        file.close()


def floor_of(path: Path) -> int:
    """The oldest version that an unused ledger can go back to. Raises LedgerError if it cannot be read."""
    return int(_mark(path, "payload_floor"))


def dataset_of(path: Path) -> str:
    """Fingerprint of the prompts that an unused ledger was written for. Raises LedgerError if it cannot be read."""
    return _mark(path, "dataset")


def _mark(path: Path, name: str) -> str:
    file = LedgerReader(path)
    try:
        return file.meta()[name]
    except (KeyError, ValueError) as error:
        raise LedgerError(f"{path} is damaged: {error!r}") from error
    finally:
        file.close()


def continue_ledger(earlier: Path, path: Path, run: str) -> bool:
    """Copy `earlier` to `path` as the ledger of `run`; False if `path` is there already (the buffer was restarted).
    Raises LedgerError if the earlier ledger is missing, in use or no ledger."""
    if path.exists():
        return False
    if not earlier.is_file():
        raise LedgerError(f"there is no ledger at {earlier}", remedy="without it a resumed run would repeat prompts")
    with lock_ledger(earlier):
        adopt_copy(earlier, path, run)
    return True


def adopt_copy(earlier: Path, path: Path, run: str) -> None:
    """Copy a ledger without a writer, of a checkpoint for example, to `path` for `run`. Only the caller may use `path`;
    an older file there is replaced. Raises LedgerError if one of the two cannot be used."""
    draft = path.with_name(path.name + ".part")
    copy_ledger(earlier, draft)
    begin_life(draft, run)
    for rest in ("-wal", "-shm"):
        path.with_name(path.name + rest).unlink(missing_ok=True)
    draft.rename(path)


def begin_life(path: Path, run: str) -> None:
    """The ledger is `run`'s from now on, and forgets what was set during an earlier life (that it was paused, values of
    knobs), which comes with a checkpoint. Raises LedgerError if it cannot be written."""
    try:
        with contextlib.closing(sqlite3.connect(path)) as db, db:
            db.execute("UPDATE meta SET value = ? WHERE key = 'run'", (run,))
            db.execute("DELETE FROM meta WHERE key LIKE ?", (f"{LIVE}%",))
    except sqlite3.Error as error:
        raise LedgerError(f"{path} cannot be used as a ledger: {error}", remedy="is it another file?") from error
