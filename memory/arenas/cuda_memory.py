"""An arena on a GPU that torch can allocate into: driver, pinned pool, arena, and one torch `MemPool` for each tag.

Code without any notion of arenas (a model's constructor, Megatron's buffers, an optimizer's first step) runs inside
`region`. The segments that torch's caching allocator asked for meanwhile then belong to the tag, each as a whole.
Tensors never change their addresses, so captured graphs stay valid. Before a release, torch's caches and cuBLAS
workspaces are trimmed; `residue` reports what stays on the device.

Used of torch (2.11 to 2.13): `CUDAPluggableAllocator`, `MemPool`, `use_mem_pool`. torch routes by thread: what
backward's threads allocate is in no region. torch-memory-saver's "torch" mode uses the same three, but ends the process
when a segment is freed by another thread or while it is away.

This memory cannot be shared by CUDA IPC, and memory that network cards or NCCL have registered must not leave: allocate
buffers for either outside of regions.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Collection, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import RLock, local
from typing import Any, Protocol, cast

import torch

from ...core.clock import Clock
from ...core.device_memory import Tag, TagPolicy, TagReport
from ...core.errors import MemoryFault, OutOfDeviceMemory
from .arena import CHUNK_BYTES, Arena
from .cuda_driver import LIBRARY, CudaDriver
from .host_pool import HostPool
from .pinned import Pinning
from .segment_table import MAX_CHUNK_BYTES, REGISTER, SegmentTable, TorchSegment
from .tagged_memory import MAPPED, REMEDIES
from .transfer import OnFreed, TransferStats


def trim_torch_cache(ordinal: int, *, keeps_workspaces: bool = False) -> None:
    """Give it back to GPU `ordinal`: memory that other processes released, cuBLAS's scratch memory unless it is kept,
    and segments without a living tensor. Cycles of Python objects are the caller's to collect."""
    if not keeps_workspaces:
        torch._C._cuda_clearCublasWorkspaces()  # pyright: ignore[reportPrivateUsage]
    with torch.cuda.device(ordinal):
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def vacate(device: str) -> None:
    """What torch caches on the current GPU, tensors in young cycles included; nothing on a stand-in ("host:<n>")."""
    if not device.startswith("host:"):
        gc.collect(1)
        trim_torch_cache(torch.cuda.current_device())


class CachingAllocator(Protocol):
    """The few things wanted of torch's caching allocator on one GPU."""

    @property
    def no_memory(self) -> type[Exception]:
        """What it raises when a pool's allocator gave nothing."""
        ...

    def pool(self, library: Path, allocate: str, free: str) -> object:
        """A pool whose segments come from these two functions; it ends with its last reference."""
        ...

    def pool_id(self, pool: object) -> tuple[int, int]:
        """For `torch.cuda.graph(pool=...)`."""
        ...

    def using(self, pool: object) -> AbstractContextManager[None]:
        """This thread's allocations go to the pool meanwhile."""
        ...

    def trim(self) -> None:
        """Give back unused memory that it caches, outside of living pools."""
        ...


class TorchCachingAllocator:
    """torch's own, on GPU `ordinal`.

    `keeps_workspaces`: leave cuBLAS its scratch memory when trimming. For a process whose CUDA graphs were captured on
    a stream that had run matrix products before: such a graph uses the scratch of that stream, freed or not.
    """

    def __init__(self, ordinal: int, *, keeps_workspaces: bool = False) -> None:
        self._ordinal = ordinal
        self._keeps_workspaces = keeps_workspaces
        if not torch.cuda.is_available():
            raise MemoryFault(
                "torch sees no GPU: its allocations cannot be placed in an arena on one",
                remedy="use a build of torch for CUDA and see nvidia-smi, or use a host arena",
            )
        torch.cuda.init()
        settings = cast("dict[str, Any]", torch.cuda.memory._snapshot()).get("allocator_settings", {})  # pyright: ignore[reportPrivateUsage]
        if settings.get("expandable_segments"):
            raise MemoryFault(
                "torch's expandable segments are on: pools of an arena would not get their own segments",
                remedy="leave expandable_segments out of PYTORCH_CUDA_ALLOC_CONF (and PYTORCH_ALLOC_CONF)",
            )

    @property
    def no_memory(self) -> type[Exception]:
        return torch.OutOfMemoryError

    def pool(self, library: Path, allocate: str, free: str) -> object:
        allocator = torch.cuda.memory.CUDAPluggableAllocator(str(library), allocate, free).allocator()
        # torch's pool points at the allocator and frees through it as late as at the interpreter's end: it never dies.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(allocator))
        with torch.cuda.device(self._ordinal):
            return torch.cuda.MemPool(allocator)

    def pool_id(self, pool: object) -> tuple[int, int]:
        return cast("torch.cuda.MemPool", pool).id

    def using(self, pool: object) -> AbstractContextManager[None]:
        return torch.cuda.use_mem_pool(cast("torch.cuda.MemPool", pool), self._ordinal)

    def trim(self) -> None:
        trim_torch_cache(self._ordinal, keeps_workspaces=self._keeps_workspaces)


class TagPools:
    """The pools of one arena on one GPU. Any thread may allocate; one worker thread moves tags, as with the arena."""

    def __init__(self, arena: Arena, table: SegmentTable, ordinal: int, caching: CachingAllocator) -> None:
        self._arena = arena
        self._table = table
        self._ordinal = ordinal
        self._caching = caching
        self._pools: dict[Tag, object] = {}
        self._slots: dict[int, Tag] = {}
        """Of pools that live, and of those that are gone but whose tensors are not."""
        self._lock = RLock()
        self._here = local()

    @contextmanager
    def region(self, tag: Tag, policy: TagPolicy, *, priority: int = 0) -> Generator[None]:
        """What this thread allocates by torch on this GPU belongs to `tag` (declared so, if it was not).

        Raises MemoryFault when the tag is away: torch would hand out addresses without memory; OutOfDeviceMemory in the
        driver's words instead of torch's error when a segment could not be had.
        """
        inside = getattr(self._here, "tag", None)
        if inside is not None:
            raise MemoryFault(
                f"region {tag!r} within region {inside!r} of one thread: torch would continue with {inside!r}",
                remedy="leave the outer one first",
            )
        self._arena.tag(tag, policy, priority=priority)
        self._check_is_here(tag)
        pool = self._pool(tag)
        num_failures = self._table.last_failure().num_failures
        self._here.tag = tag
        try:
            with self._caching.using(pool):
                yield
        except self._caching.no_memory as error:
            raise self._explained(tag, num_failures, error) from error
        finally:
            self._here.tag = None
            self.adopt_new()

    def pool_id(self, tag: Tag, policy: TagPolicy) -> tuple[int, int]:
        """For `torch.cuda.graph(graph, pool=...)`, outside of any region; call `adopt_new` when it is captured."""
        self._arena.tag(tag, policy)
        self._check_is_here(tag)
        return self._caching.pool_id(self._pool(tag))

    def adopt_new(self) -> int:
        """Give the arena the segments that torch has got since the last time, and free those that it gave up.

        Returns the bytes that are new. Regions do it at their end; do it too after a graph was captured in a pool.
        """
        with self._lock:
            self.collect()
            num_bytes = 0
            for segment in self.segments():
                if segment.is_taken or segment.is_freed:
                    continue
                handles = self._table.take(segment.address, segment.num_chunks)
                if handles is None:  # torch freed it a moment ago
                    continue
                try:
                    self._arena.adopt(self._slots[segment.slot], segment.address, segment.num_bytes, handles)
                except MemoryFault:
                    self._table.untake(segment.address)
                    raise
                num_bytes += segment.num_bytes
            return num_bytes

    def collect(self) -> int:
        """Free segments that torch freed after the arena had taken them, in whatever state; returns their bytes."""
        with self._lock:
            num_bytes = 0
            for segment in self.segments():
                if segment.is_freed and segment.is_taken:
                    self._arena.free(segment.address)
                    self._table.forget(segment.address)
                    num_bytes += segment.num_bytes
            if any(segment.is_freed and not segment.is_taken for segment in self.segments()):
                self._table.reap()
            return num_bytes

    def drop(self, tag: Tag) -> int:
        """End the tag's pool: segments without a living tensor go back to the device; returns their bytes.

        The next region of the tag has a fresh pool; living tensors keep their memory.
        """
        with self._lock:
            if self._pools.pop(tag, None) is None:
                return 0
            gc.collect()  # the pool ends with its last reference, and a cycle may hold one
            self._caching.trim()
            num_bytes = self.collect()
            self._give_slots()
            return num_bytes

    def live_bytes(self) -> int:
        """Of those segments."""
        return sum(segment.num_bytes for segment in self.segments())

    def close(self, end_arena: Callable[[], None]) -> int:
        """End all pools, then the arena by `end_arena`, then what the table still says of it.

        Returns the bytes of segments that living tensors still pointed at: those tensors are dead now.
        """
        with self._lock:
            for tag in list(self._pools):
                self.drop(tag)
            left = self.segments()
            end_arena()
            for segment in left:
                if segment.is_taken:
                    self._table.forget(segment.address)
            busy = {segment.slot for segment in left}
            for slot in self._slots:
                if slot not in busy:  # else torch may still free through it, and must not meet a newer segment
                    REGISTER.give(slot)
            self._slots.clear()
            return sum(segment.num_bytes for segment in left)

    def _pool(self, tag: Tag) -> object:
        with self._lock:
            pool = self._pools.get(tag)
            if pool is None:
                slot = REGISTER.take(self._table)
                pool = self._caching.pool(self._table.path, *self._table.function_names(slot))
                self._slots[slot] = tag
                self._pools[tag] = pool
            return pool

    def _give_slots(self) -> None:
        busy = {segment.slot for segment in self.segments()}
        for slot in [slot for slot, tag in self._slots.items() if tag not in self._pools and slot not in busy]:
            del self._slots[slot]
            REGISTER.give(slot)

    def segments(self) -> list[TorchSegment]:
        """What torch believes to have in these pools."""
        return [s for s in self._table.segments() if s.slot in self._slots and s.device == self._ordinal]

    def _check_is_here(self, tag: Tag) -> None:
        report = next(report for report in self._arena.report() if report.tag == tag)
        is_being_rebuilt = report.backing == "copy_in" and report.policy == "rematerialise"
        if report.backing not in MAPPED and not is_being_rebuilt:
            raise MemoryFault(
                f"arena on {self._arena.device}: a region of tag {tag!r}, which is {report.backing}: torch would hand "
                "out addresses that have no memory",
                remedy=REMEDIES.get(report.backing, ""),
            )

    def _explained(self, tag: Tag, num_failures: int, error: Exception) -> Exception:
        failure = self._table.last_failure()
        if failure.num_failures == num_failures:
            return error  # not ours: allocations outside of the pool
        return OutOfDeviceMemory(
            f"arena on {self._arena.device}: tag {tag!r}: {failure.call} of {failure.num_bytes:,} bytes answered "
            f"{failure.result}",
            remedy="release tags, or have others release theirs, first",
        )


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
        """Give back unused memory: cuBLAS workspaces, torch's cache, dead segments.

        `thoroughly` collects reference cycles of every age first, which takes tenths of a second in a large process.
        """
        gc.collect(2 if thoroughly else 1)
        self._trim()
        self.pools.collect()

    def release(self, tags: Collection[Tag], *, thoroughly: bool = False) -> TransferStats:
        """`Arena.release` of these tags with every segment adopted and every cache trimmed before."""
        self.pools.adopt_new()
        self.trim(thoroughly=thoroughly)
        return self.arena.release(tags)

    def restore(self, tags: Collection[Tag]) -> TransferStats:
        """`Arena.restore`, with torch's cache trimmed before so that there is room."""
        self._trim()
        return self.arena.restore(tags)

    def report(self) -> tuple[TagReport, ...]:
        """Every tag, as reported to a manager."""
        return self.arena.report()

    def residue(self, cached: CachedBytes | None = None) -> Residue:
        """What is on the device now; `cached` is torch's own account unless given."""
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
