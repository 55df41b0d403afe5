"""Carry the ledger of an earlier run into the directory of the run that goes on from its checkpoint.

Knows two files. The copy is made beside its place and renamed, so that a crash leaves either none or a whole one; the
earlier run keeps its own.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from ..core.errors import LedgerError
from .ledger_file import LIVE, lock_ledger


def continue_ledger(earlier: Path, path: Path, run: str) -> bool:
    """Copy `earlier` to `path` as the ledger of `run`; False if `path` is there already (the buffer was restarted).

    Raises LedgerError if the earlier ledger is missing, in use or no ledger.
    """
    if path.exists():
        return False
    if not earlier.is_file():
        raise LedgerError(f"there is no ledger at {earlier}", remedy="without it a resumed run would repeat prompts")
    copy = path.with_name(path.name + ".part")
    with lock_ledger(earlier):
        try:
            copy.unlink(missing_ok=True)
            _copy(earlier, copy, run)
        except (sqlite3.Error, OSError) as error:
            raise LedgerError(f"{earlier} cannot be copied to {path}: {error}") from error
    copy.rename(path)
    return True


def _copy(earlier: Path, copy: Path, run: str) -> None:
    source, target = sqlite3.connect(earlier), sqlite3.connect(copy)
    try:
        source.backup(target)
        target.execute("UPDATE meta SET value = ? WHERE key = 'run'", (run,))
        target.execute("DELETE FROM meta WHERE key LIKE ?", (f"{LIVE}%",))
        target.commit()
    finally:
        source.close()
        target.close()
