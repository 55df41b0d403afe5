"""A lock on a file (flock): it goes with the process that holds it, however that ends, so nothing has to be cleaned up.

Only whoever asks is kept out; files can be read and written as before. Knows files; must not know what they hold.

Over NFS, Linux makes a lock on the file's bytes at the server out of it: processes of other machines see it, unless the
mount says `local_lock`, and one for its holder alone needs the file open for writing. A server that cannot reach a
machine any more gives that machine's locks to others while the process there may still go on.

Library considered: filelock on PyPI. It cannot tell whether a lock is held without taking it, and has none that several
hold at once; `fcntl` does both in one call.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

_RETRY_S = 0.005
_HAS_NONE = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})


def take_lock(path: Path, mode: Literal["r", "r+", "w"] = "w", *, is_shared: bool = False) -> IO[str] | None:
    """Hold the file's lock until what is returned is closed; None: somebody else has it. `is_shared`: together with
    others who share it. `mode`: how the file is opened ("w": made if it is missing). Raises OSError if it cannot be
    opened, or the file system has no locks."""
    handle = path.open(mode)
    try:
        if lock_now(handle.fileno(), is_shared=is_shared):
            return handle
    except OSError:
        handle.close()
        raise
    handle.close()
    return None


def lock_now(descriptor: int, *, is_shared: bool = False) -> bool:
    """Take the lock of an open file, which goes when that is closed; False: somebody else has it. Raises OSError if
    the file system has no locks."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_within(descriptor: int, timeout_s: float) -> bool:
    """The same, waiting for others. Blocks, so a loop calls it in a thread."""
    deadline_s = time.monotonic() + timeout_s
    pause = threading.Event()
    while not lock_now(descriptor):
        if time.monotonic() >= deadline_s:
            return False
        pause.wait(_RETRY_S)
    return True


@contextmanager
def locked_folder(folder: Path, timeout_s: float) -> Generator[bool]:
    """Alone among those who ask for this folder, which gets no file for it; False: somebody else has kept it for so
    long. Where the file system cannot lock folders (NFS) nobody is kept out. Raises OSError if it cannot be opened."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            is_mine = lock_within(descriptor, timeout_s)
        except OSError as error:
            if not (has_no_locks(error) or error.errno in (errno.EBADF, errno.EINVAL)):
                raise
            is_mine = True
        yield is_mine
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Whether somebody has the file's lock for itself now, or it cannot be told; leaves nothing behind."""
    try:
        handle = take_lock(path, "r", is_shared=True)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    if handle is None:
        return True
    handle.close()
    return False


def has_no_locks(error: OSError) -> bool:
    """Whether a lock was refused because the file system has none."""
    return error.errno in _HAS_NONE


def lock_remedy(error: OSError, otherwise: str) -> str:
    """What to do about a lock that could not be taken."""
    if has_no_locks(error):
        return "its file system has no locks: mount it with them (flock), or use a place on another one"
    return otherwise
