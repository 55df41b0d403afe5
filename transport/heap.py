"""How much freed memory the C library keeps for the next time. For processes of our own; a host decides for itself.

ZeroMQ takes memory for each message and gives it back when it has left. A chunk of the bulk lane is large enough for
the C library to return it to the kernel, and pages that are asked for anew cost three times what it takes to copy into
them. Sending through buffers of our own, without ZeroMQ's copy, was considered: pyzmq then needs a thread, and a
message of its own for each buffer, to learn that it is free.
"""

from __future__ import annotations

import ctypes

CHOSEN_BY = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Environment variables by which whoever starts a process decides it."""
KEPT_BYTES = 64 << 20
"""Freed memory at the end of a heap that is not given back to the kernel; there is one heap for some threads each."""
MAPPED_FROM_BYTES = 4 << 20
"""What is asked for in one piece of this size gets pages of its own and gives them back. Chunks of the bulk lane are
smaller."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)


def keep_freed_memory() -> None:
    """Set it for this process; nothing happens with a C library that knows no such thing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, MAPPED_FROM_BYTES)
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
