"""Memory files of other processes: anonymous (`memfd_create`), opened by `/proc/<pid>/fd/<n>`, as the same user may.

Linux. Knows nothing of what is in them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..core.errors import SlabError

F_SEAL_FUTURE_WRITE = 0x0010
"""No new writable mapping; `fcntl` has no name for it."""

_PATH = re.compile(r"/proc/\d+/fd/\d+")


def path_of(descriptor: int) -> str:
    """Opens this process's file in another one while this one holds it."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def open_to_read(path: str, name: str) -> int:
    """A descriptor of the memory file that its owner made under `name`.

    Raises SlabError if it is gone or another one. Whatever else has that number is not opened: a pipe would block us.
    """
    if _PATH.fullmatch(path) is None:
        raise SlabError(f"{path!r} is no slab's path", remedy="take it from the manifest")
    try:
        found = str(Path(path).readlink())
        if not found.startswith(f"/memfd:{name}"):
            raise SlabError(f"{path} is {found!r}, no slab", remedy="its owner has ended; the number is reused")
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        remedy = "the process that published it has ended, or runs as another user or in another container"
        raise SlabError(f"{path} cannot be opened: {error.strerror}", remedy=remedy) from error
