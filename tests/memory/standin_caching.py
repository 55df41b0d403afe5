"""What torch's caching allocator does with a pool's segments, as far as it matters to who hands them out: segments of at
least 2 MiB, blocks used again, a pool's segments freed when the pool has ended and no block of theirs lives."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from myxa.memory.arenas.cuda_memory import TorchCachingAllocator

GRANULE = 2 << 20


class NoMemory(RuntimeError):
    """Its out-of-memory error."""


class Pool:
    def __init__(self, owner: StandinCaching, library: Path, allocate: str, free: str) -> None:
        functions = ctypes.CDLL(str(library))
        self.allocate, self.free = getattr(functions, allocate), getattr(functions, free)
        self.allocate.argtypes = (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        self.allocate.restype = ctypes.c_void_p
        self.free.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        self.segments: dict[int, tuple[int, bool]] = {}
        self.owner = owner


class Handle:
    """What the caller holds; the pool ends with it."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def __del__(self) -> None:
        self.pool.owner.ended.append(self.pool)


class StandinCaching(TorchCachingAllocator):
    no_memory = NoMemory

    def __init__(self, ordinal: int = 0) -> None:
        self.ordinal = ordinal
        self.ended: list[Pool] = []
        self.num_trims = 0
        self._here = threading.local()

    def pool(self, library: Path, allocate: str, free: str) -> object:
        return Handle(Pool(self, library, allocate, free))

    @contextmanager
    def using(self, pool: Any) -> Generator[None]:
        self._here.pool = pool.pool
        try:
            yield
        finally:
            self._here.pool = None

    def trim(self) -> None:
        self.num_trims += 1
        for pool in self.ended:
            for address in [at for at, (_, is_live) in pool.segments.items() if not is_live]:
                pool.free(address, pool.segments.pop(address)[0], self.ordinal, None)
        self.ended = [pool for pool in self.ended if pool.segments]

    def empty(self, num_bytes: int, pool: Any = None) -> int:
        """Address of a new tensor's memory."""
        pool = pool.pool if pool is not None else self._here.pool
        for address, (size, is_live) in pool.segments.items():
            if not is_live and size >= num_bytes:
                pool.segments[address] = (size, True)
                return address
        size = -(-num_bytes // GRANULE) * GRANULE
        address = pool.allocate(size, self.ordinal, None)
        if address is None:
            raise NoMemory(f"tried to allocate {size} bytes")
        pool.segments[address] = (size, True)
        return address

    def end(self, address: int, pool: Any) -> None:
        """The tensor dies; its block stays in the pool."""
        pool = getattr(pool, "pool", pool)
        pool.segments[address] = (pool.segments[address][0], False)
