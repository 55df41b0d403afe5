"""Which machine this is, and what its kernel tells of a process. Linux."""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@functools.lru_cache(maxsize=1)
def boot_id() -> str:
    """The boot id, equal for all processes of one running system; the host name where the kernel does not tell."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def parent_of(pid: int) -> int:
    """Process id of its parent; 0 if it is gone or cannot be seen."""
    return _field(pid, 1)


def parent_mark() -> str:
    """Names the process that started this one, as no other process is or was named: equal for all its children."""
    parent = os.getppid()
    return f"{boot_id()}.{parent}.{start_time(parent)}"


def start_time(pid: int) -> int:
    """Clock ticks since boot at which the process began; 0 if it is gone or cannot be seen."""
    return _field(pid, 19)


def _field(pid: int, number: int) -> int:
    """A number of `/proc/<pid>/stat`, counted from the state, which follows the name (that may hold anything)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[number])
