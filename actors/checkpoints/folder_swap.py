"""Put a new folder into the place of an older one so that at every instant a whole one is found there.

Linux exchanges two names in one step (renameat2). A file system that cannot (NFS) leaves an instant between two
renames: the older folder then has the name `old_of(place)`, by which readers find it. Knows folders, not their content.

Library considered: `renameat2` on PyPI, a binding for this one call; ctypes does it in five lines.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from functools import cache
from pathlib import Path

from ...core.file_entry import sync_folder

_AT_FDCWD = -100
_EXCHANGE = 2
_CANNOT = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EXDEV})
OLD = ".old-"
GONE = ".gone-"


def old_of(place: Path) -> Path:
    """Where the older folder is while `place` is empty."""
    return place.with_name(OLD + place.name)


def is_meant(path: Path) -> bool:
    """Whether a folder is to be looked at. A crash while one took another's place may have left the older one only."""
    if path.name.startswith(OLD):
        return not path.with_name(path.name.removeprefix(OLD)).exists()
    return not path.name.startswith(".")


def put_in_place(fresh: Path, place: Path) -> None:
    """`fresh` becomes `place`; what was there is deleted afterwards. Raises OSError; then one of the two is there."""
    old = old_of(place)
    if place.exists():
        shutil.rmtree(old, ignore_errors=True)
        if exchange(fresh, place):
            fresh.replace(old)
        else:
            place.replace(old)
            fresh.replace(place)
    else:
        fresh.replace(place)
    sync_folder(place.parent)
    shutil.rmtree(old, ignore_errors=True)


def take_away(place: Path) -> None:
    """Delete a folder so that nobody finds half of it; what cannot be deleted stays under a hidden name."""
    gone = place.with_name(GONE + place.name)
    shutil.rmtree(gone, ignore_errors=True)
    try:
        place.replace(gone)
    except OSError:
        return
    shutil.rmtree(gone, ignore_errors=True)


def exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step. False if system or file system cannot; raises OSError for other failures."""
    call = _renameat2()
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number), str(other))


@cache
def _renameat2() -> ctypes._NamedFuncPointer | None:  # pyright: ignore[reportPrivateUsage] - ctypes has no public name
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    call.restype = ctypes.c_int
    return call
