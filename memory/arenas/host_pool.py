"""Host memory for the contents of tags that are away: one range made once, handed out in pieces, with a hard limit.

Never torch's cache of pinned memory: it rounds up to powers of two and gives back late. Pinning is a callable of the
GPU side; without one the range is ordinary private memory whose pages go back to the system with each piece.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left, insort
from collections.abc import Callable

from ...core.errors import MemoryFault
from . import libc

Unpin = Callable[[], None]
Pin = Callable[[int, int], Unpin]
"""(address, bytes) -> how to undo it."""


def rounded(num_bytes: int, granule: int) -> int:
    """Up to whole granules."""
    return -(-num_bytes // granule) * granule


class HostPool:
    """Best fit over one range; neighbours that are free grow together. Not thread-safe: its arena's lock guards it."""

    def __init__(self, limit_bytes: int, pin: Pin | None = None) -> None:
        self.limit_bytes = rounded(limit_bytes, libc.PAGE_BYTES)
        self.used_bytes = 0
        self._base = libc.map_anonymous(self.limit_bytes) if self.limit_bytes else 0
        self._taken: dict[int, int] = {}
        self._free: list[tuple[int, int]] = [(self._base, self.limit_bytes)] if self.limit_bytes else []
        """(address, bytes), by address."""
        self._is_pinned = pin is not None
        self._unpin: Unpin | None = None
        if pin is not None and self.limit_bytes:
            try:
                self._unpin = pin(self._base, self.limit_bytes)
            except BaseException:
                libc.unmap(self._base, self.limit_bytes)
                raise

    def take(self, num_bytes: int) -> int:
        """Address of a new piece. Raises MemoryFault with the numbers when there is no room."""
        needed = rounded(num_bytes, libc.PAGE_BYTES)
        fitting = [(size, address) for address, size in self._free if size >= needed]
        if not fitting:
            largest = max((size for _, size in self._free), default=0)
            raise MemoryFault(
                f"host pool: {needed:,} bytes do not fit: {self.used_bytes:,} of {self.limit_bytes:,} are taken, the "
                f"largest free piece has {largest:,}",
                remedy="raise the limit of the host pool to the sum of all tags with policy backup",
            )
        size, address = min(fitting)
        del self._free[bisect_left(self._free, (address, size))]
        if size > needed:
            insort(self._free, (address + needed, size - needed))
        self._taken[address] = needed
        self.used_bytes += needed
        return address

    def give(self, address: int) -> None:
        """Take a piece back, once."""
        num_bytes = self._taken.pop(address)
        self.used_bytes -= num_bytes
        if not self._is_pinned:
            libc.advise(address, num_bytes, mmap.MADV_DONTNEED)
        index = bisect_left(self._free, (address, num_bytes))
        if index < len(self._free) and self._free[index][0] == address + num_bytes:
            num_bytes += self._free.pop(index)[1]
        if index > 0 and sum(self._free[index - 1]) == address:
            address, before = self._free.pop(index - 1)
            num_bytes += before
        insort(self._free, (address, num_bytes))

    def close(self) -> None:
        """Unpin and unmap; pieces still out are gone. A second time does nothing."""
        unpin, self._unpin = self._unpin, None
        if unpin is not None:
            unpin()
        base, self._base = self._base, 0
        if base:
            libc.unmap(base, self.limit_bytes)
        self._taken.clear()
        self._free.clear()
        self.used_bytes = 0
