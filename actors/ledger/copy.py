"""A copy of the ledger as of one moment, made beside the buffer's work: the ledger's part of a run checkpoint.

SQLite's own backup reads under one snapshot of the file, so that writers go on meanwhile and the copy holds all of a
transaction or nothing of it. The copy is one file, with a digest. Knows files; knows no rules of the run.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from pathlib import Path

from ...core.errors import LedgerError
from ...core.file_entry import FileEntry, describe_file

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
