"""Where pulled arrays land: private memory that is kept warm for the next one when its arrays are gone.

A fresh array of 64 MiB costs as much in page faults and zeroing as in copying. So freed memory is kept for a few
seconds, up to a limit, and given to the next array of about the same size.
"""

from __future__ import annotations

import mmap
from collections import deque

import numpy as np

from ..shm import available_bytes
from .kernel import anonymous, prefer_huge_pages
from .region import Bytes, address_of, region

IDLE_S = 3.0
MAX_WASTE = 1.25
"""Spare memory may be so many times larger than what is asked for."""
_SMALL_STEP = 64 << 10
_LARGE_STEP = 2 << 20
_LARGE_FROM = 16 << 20
_ASK_FROM = 64 << 20
"""From this size on, the host is asked whether it has the memory."""


class Landing:
    """Gives out memory. `take` and `trim` belong to the loop's thread; memory may come back in any."""

    def __init__(self, spare_bytes: int) -> None:
        self.spare_bytes = spare_bytes
        """Kept at most."""
        self._spare: list[tuple[float, mmap.mmap]] = []
        self._back: deque[mmap.mmap] = deque()
        self._is_closed = False

    def take(self, num_bytes: int, now: float) -> Bytes:
        """Writable memory of that size, its content undefined. Raises MemoryError."""
        self._collect(now)
        memory = self._warm(num_bytes) or self._fresh(num_bytes)
        whole = np.frombuffer(memory, dtype=np.uint8)
        return region(address_of(whole), num_bytes, lambda: self._give_back(memory))

    def trim(self, now: float) -> None:
        """Free what nobody wanted for a while."""
        self._collect(now)
        self._spare = [(since, memory) for since, memory in self._spare if now - since < IDLE_S]

    def close(self) -> None:
        """Keep nothing; memory in use is freed with its arrays."""
        self._is_closed = True
        self._spare.clear()
        self._back.clear()

    @property
    def num_spare_bytes(self) -> int:
        return sum(len(memory) for _, memory in self._spare)

    def _give_back(self, memory: mmap.mmap) -> None:
        if not self._is_closed:
            self._back.append(memory)

    def _collect(self, now: float) -> None:
        while self._back:
            self._spare.append((now, self._back.popleft()))
        while self.num_spare_bytes > self.spare_bytes:
            del self._spare[0]

    def _warm(self, num_bytes: int) -> mmap.mmap | None:
        fitting = [i for i, (_, m) in enumerate(self._spare) if num_bytes <= len(m) <= MAX_WASTE * num_bytes]
        return self._spare.pop(min(fitting, key=lambda i: len(self._spare[i][1])))[1] if fitting else None

    def _fresh(self, num_bytes: int) -> mmap.mmap:
        step = _SMALL_STEP if num_bytes < _LARGE_FROM else _LARGE_STEP
        size = -(-num_bytes // step) * step
        if size >= _ASK_FROM and size > available_bytes():
            raise MemoryError(f"{size} bytes are more than the host has free")
        try:
            memory = anonymous(size)
        except (OSError, ValueError, OverflowError) as error:
            raise MemoryError(f"{size} bytes: {error}") from error
        prefer_huge_pages(address_of(np.frombuffer(memory, dtype=np.uint8)), size)
        return memory
