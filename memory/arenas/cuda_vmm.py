"""An arena on a GPU, put together: driver, pinned pool, arena, and the way for torch's allocations into its tags.

Knows the concrete classes of this folder, and what torch keeps beside them: caches, cuBLAS workspaces. Frees those
before a release, since what torch hoards the other tenant of the GPU lacks, and tells what stays all the same.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from ...core.clock import Clock
from ...core.device_memory import Tag, TagPolicy, TagReport
from .arena import CHUNK_BYTES, Arena
from .cuda_allocator import CachingAllocator, TagPools, TorchCachingAllocator
from .cuda_driver import CudaDriver
from .cuda_library import LIBRARY
from .host_pool import HostPool
from .moving import Moved, OnFreed
from .pinned import Pinning
from .segment_table import MAX_CHUNK_BYTES, SegmentTable


@dataclass(frozen=True, slots=True)
class Residue:
    """What is on the device beside the tags; all in bytes."""

    used_bytes: int
    """Of the device, by everybody, measured now."""
    mapped_bytes: int
    """By this arena's tags."""
    torch_bytes: int
    """Reserved by torch's caching allocator outside of the arena's pools."""
    torch_live_bytes: int
    """Of these in living tensors (and graphs): what no trimming gives back."""
    other_bytes: int
    """The rest: contexts, kernels, communicators, and other processes."""


class CachedBytes(Protocol):
    """What torch's allocator says of a device: (reserved, in living tensors), its pools in arenas included."""

    def __call__(self) -> tuple[int, int]: ...


class CudaMemory:
    """One process's memory on one GPU: an `Arena` that torch can allocate into. `close` ends all of it.

    `arena`, `driver` and `pinning` are there for what this class does not wrap (backup, digests, marks, reports).
    """

    def __init__(
        self, arena: Arena, driver: CudaDriver, pinning: Pinning | None, pools: TagPools, trim: Callable[[], None]
    ) -> None:
        self.arena = arena
        self.driver = driver
        self.pinning = pinning
        self.pools = pools
        self._trim = trim
        self._is_closed = False

    def region(self, tag: Tag, policy: TagPolicy, *, priority: int = 0) -> AbstractContextManager[None]:
        """This thread's allocations by torch on this GPU belong to the tag; see `TagPools.region`."""
        return self.pools.region(tag, policy, priority=priority)

    def adopt_new(self) -> int:
        """After something was allocated in a tag's pool outside of a region: a captured graph."""
        return self.pools.adopt_new()

    def trim(self, *, thoroughly: bool = False) -> None:
        """Give back what nobody uses: cuBLAS workspaces, torch's cache, dead segments.

        `thoroughly` collects reference cycles of every age first, which takes tenths of a second in a large process.
        """
        gc.collect(2 if thoroughly else 1)
        self._trim()
        self.pools.collect()

    def release(self, tags: Collection[Tag], *, thoroughly: bool = False) -> Moved:
        """`Arena.release` of these tags with every segment adopted and every cache trimmed before."""
        self.pools.adopt_new()
        self.trim(thoroughly=thoroughly)
        return self.arena.release(tags)

    def restore(self, tags: Collection[Tag]) -> Moved:
        """`Arena.restore`, with torch's cache trimmed before so that there is room."""
        self._trim()
        return self.arena.restore(tags)

    def report(self) -> tuple[TagReport, ...]:
        """Every tag, as told to a manager."""
        return self.arena.report()

    def residue(self, cached: CachedBytes | None = None) -> Residue:
        """How things stand; `cached` is torch's own account unless given."""
        reserved, live = (cached or self._torch_bytes)()
        in_pools = self.pools.live_bytes()
        mapped = sum(r.num_bytes for r in self.arena.report() if r.backing not in ("host", "discarded"))
        used = self.driver.capacity_bytes() - self.driver.free_bytes()
        outside = max(reserved - in_pools, 0)
        return Residue(
            used_bytes=used,
            mapped_bytes=mapped,
            torch_bytes=outside,
            torch_live_bytes=min(live, outside),
            other_bytes=max(used - mapped - outside, 0),
        )

    def close(self) -> int:
        """Nothing is left of it on the device or the host; tensors that still live on it are dead.

        Returns the bytes of pool segments that such tensors held; a second time does nothing.
        """
        if self._is_closed:
            return 0
        self._is_closed = True
        return self.pools.close(self.arena.close)

    def _torch_bytes(self) -> tuple[int, int]:
        ours = {segment.address for segment in self.pools.segments()}
        reserved = int(torch.cuda.memory_reserved(self.driver.ordinal))
        live = sum(
            int(segment["allocated_size"])
            for segment in cast("Any", torch.cuda).memory_snapshot()
            if segment["device"] == self.driver.ordinal and segment["address"] not in ours
        )
        return reserved, live


def open_cuda(
    ordinal: int,
    pool_bytes: int,
    clock: Clock,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    num_threads: int = 8,
    library: str = LIBRARY,
    cache_dir: Path | None = None,
    on_freed: OnFreed | None = None,
    caching: CachingAllocator | None = None,
) -> CudaMemory:
    """Everything for GPU `ordinal` (among those visible, as torch counts them), or nothing and an error.

    `pool_bytes` of the host are made resident and pinned before this returns, by `num_threads` threads: at least the
    sum of all tags with policy backup. The allocator for torch is compiled at the first use on a machine.
    `caching` None: torch's, which makes torch's context of this GPU if there is none yet.
    """
    with ExitStack() as undo:
        driver = CudaDriver(ordinal, library)
        undo.callback(driver.close)
        table = SegmentTable(library=library, chunk_bytes=min(chunk_bytes, MAX_CHUNK_BYTES), cache_dir=cache_dir)
        allocator = caching or TorchCachingAllocator(ordinal)
        pinning = Pinning(ordinal, library=library, num_threads=num_threads, clock=clock)
        pool = HostPool(pool_bytes, pinning)
        undo.callback(pool.close)
        arena = Arena(driver, pool, clock, chunk_bytes=chunk_bytes, on_freed=on_freed)
        pools = TagPools(arena, table, ordinal, allocator)
        undo.pop_all()
    return CudaMemory(arena, driver, pinning, pools, allocator.trim)
