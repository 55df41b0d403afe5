"""A checkpoint of a run that lives is not deleted under whoever reads it: readers share a lock on its manifest, and
whoever deletes older ones leaves one that is locked, or of which that cannot be told, for the next time.

Knows that one file; must not know its content.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from ...core.errors import TornCheckpoint
from ...core.file_lock import has_no_locks, take_lock
from .folder_swap import take_away

MANIFEST = "manifest.json"


@contextmanager
def being_read(folder: Path) -> Generator[None]:
    """Nobody deletes it inside, where the file system has locks. Raises TornCheckpoint if it is not there any more."""
    path = folder / MANIFEST
    try:
        lock = take_lock(path, "r", is_shared=True)
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise _gone(folder, f"its {MANIFEST} cannot be opened: {error.strerror}") from error
    except OSError:  # it can be read all the same
        yield
        return
    if lock is None:
        raise _gone(folder, "it is being deleted")
    with lock:
        try:
            is_same = os.path.samestat(os.fstat(lock.fileno()), path.stat())
        except OSError as error:
            raise _gone(folder, "it was deleted just now") from error
        if not is_same:
            raise _gone(folder, "another one takes its place just now")
        yield


def take_away_unread(folder: Path) -> bool:
    """Delete it, unless somebody reads it or nobody can tell; returns whether. Where the file system has no locks those
    who read are on their own."""
    try:
        lock = take_lock(folder / MANIFEST, "r+")
    except OSError as error:
        is_torn = isinstance(error, (FileNotFoundError, NotADirectoryError))  # without a manifest nobody can read it
        if not (is_torn or has_no_locks(error)):  # a moment's trouble of the disk is no leave to delete
            return False
        take_away(folder)
        return True
    if lock is None:
        return False
    with lock:
        take_away(folder)
    return True


def _gone(folder: Path, why: str) -> TornCheckpoint:
    return TornCheckpoint(f"checkpoint {folder} cannot be read: {why}", remedy="use another one")
