"""The ledger that a run goes on with: its own, that of an earlier run, or the copy in a checkpoint.

Knows files. A copy is made beside its place and renamed, so that a crash leaves either none or a whole one; whatever it
is copied from stays as it is.
"""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import LedgerError
from .file import FORMAT, LIVE, LedgerReader, lock_ledger
from .snapshot import copy_ledger

LEDGER = "ledger.sqlite"
"""Its name, in a run directory and in a checkpoint."""


@dataclass(frozen=True, slots=True)
class LedgerFacts:
    """How far a ledger that nobody uses goes."""

    run: str
    floor: int
    """The oldest version that it can go back to."""
    claimed: int
    """Versions that its claims lead to: a trainer cannot honestly be further."""

    def why_not(self, version: int) -> str:
        """Why training cannot go on from `version` with this ledger; empty if it can."""
        if version < self.floor:
            return f"it can go back to version {self.floor} at most: what was trained before is given away"
        if version > self.claimed:
            return f"it ends at version {self.claimed}: its newest part was lost"
        return ""


def read_facts(path: Path) -> LedgerFacts:
    """Look through the whole ledger, without a change and without its lock; nobody may be writing it.

    Raises LedgerError if it is missing, damaged or no ledger.
    """
    if not path.is_file():
        raise LedgerError(f"there is no ledger at {path}", remedy="without it a resumed run would repeat prompts")
    file = LedgerReader(path)
    try:
        told = file.query("PRAGMA quick_check(1)")
        if told != [("ok",)]:
            raise LedgerError(f"{path} is damaged: {told[0][0] if told else 'nothing can be read'}")
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
    """The oldest version that a ledger which nobody uses can go back to. Raises LedgerError if it cannot be read."""
    return int(_mark(path, "payload_floor"))


def dataset_of(path: Path) -> str:
    """Fingerprint of the prompts that a ledger which nobody uses was written for. Raises LedgerError if it cannot be
    read."""
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

    Raises LedgerError if the earlier ledger is missing, in use or no ledger.
    """
    if path.exists():
        return False
    if not earlier.is_file():
        raise LedgerError(f"there is no ledger at {earlier}", remedy="without it a resumed run would repeat prompts")
    with lock_ledger(earlier):
        adopt_copy(earlier, path, run)
    return True


def adopt_copy(earlier: Path, path: Path, run: str) -> None:
    """Copy a ledger that nobody writes, of a checkpoint for example, to `path`, which is the caller's alone, for `run`.
    An older file there is replaced. Raises LedgerError if one of the two cannot be used."""
    draft = path.with_name(path.name + ".part")
    copy_ledger(earlier, draft)
    begin_life(draft, run)
    for rest in ("-wal", "-shm"):
        path.with_name(path.name + rest).unlink(missing_ok=True)
    draft.rename(path)


def begin_life(path: Path, run: str) -> None:
    """The ledger is `run`'s from now on, and forgets what was set while an earlier life of it went on (that it was
    paused, values of knobs): a checkpoint brings that. Raises LedgerError if it cannot be written."""
    try:
        with contextlib.closing(sqlite3.connect(path)) as db, db:
            db.execute("UPDATE meta SET value = ? WHERE key = 'run'", (run,))
            db.execute("DELETE FROM meta WHERE key LIKE ?", (f"{LIVE}%",))
    except sqlite3.Error as error:
        raise LedgerError(f"{path} cannot be used as a ledger: {error}", remedy="is it another file?") from error
