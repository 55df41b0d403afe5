"""Seeing processes end, by the kernel's own word (pidfd), not by silence.

A number that is used again is another process: start times tell them apart. psutil was considered: it polls.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from ...core.host import start_time


class ProcessWatch:
    """Calls `on_end(pid, started_at)` on the loop, once for each watched process that ends."""

    def __init__(self, on_end: Callable[[int, int], None]) -> None:
        self._on_end = on_end
        self._fds: dict[tuple[int, int], int] = {}

    def watch(self, pid: int, started_at: int) -> bool:
        """From now on; False if that process is gone already. `started_at` 0: whoever has the number now."""
        if (pid, started_at) in self._fds or pid == os.getpid():
            return True
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        if started_at and start_time(pid) != started_at:
            os.close(fd)
            return False
        self._fds[pid, started_at] = fd
        asyncio.get_running_loop().add_reader(fd, self._ended, pid, started_at)
        return True

    def _ended(self, pid: int, started_at: int) -> None:
        self._drop(pid, started_at)
        self._on_end(pid, started_at)

    def _drop(self, pid: int, started_at: int) -> None:
        fd = self._fds.pop((pid, started_at), None)
        if fd is not None:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)

    def close(self) -> None:
        """No more calls."""
        for pid, started_at in list(self._fds):
            self._drop(pid, started_at)
