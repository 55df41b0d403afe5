"""Which machine this is: the kernel's boot id, equal for all processes of one running system. Linux."""

from __future__ import annotations

import functools
import socket
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@functools.lru_cache(maxsize=1)
def boot_id() -> str:
    """The boot id; the host name where the kernel does not tell."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
