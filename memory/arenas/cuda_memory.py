"""An arena on a GPU that torch can allocate into: driver, pinned pool, arena, and one torch `MemPool` for each tag.

Code without any notion of arenas (a model's constructor, Megatron's buffers) runs inside `region`: the segments that
torch's caching allocator asked for meanwhile belong to the tag, each as a whole. Tensors never change their addresses,
so captured graphs stay valid. Before a release, torch's caches and cuBLAS workspaces are trimmed.

Used of torch (2.11 to 2.13): `CUDAPluggableAllocator`, `MemPool`, `use_mem_pool`. torch routes by thread: what
backward's threads allocate is in no region. This memory cannot be shared by CUDA IPC, and what network cards or NCCL
have registered must not leave: allocate buffers for either outside of regions.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Collection, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from threading import RLock, local
from typing import Any, cast

import torch

from ...core.device_memory import Tag, TagPolicy, TagReport
from ...core.errors import MemoryFault, OutOfDeviceMemory
from .arena import CHUNK_BYTES, Arena, Restoring
from .cuda_driver import LIBRARY, CudaDriver, Pinning
from .host_pool import HostPool
from .segment_table import MAX_CHUNK_BYTES, SLOTS, SegmentTable, TorchSegment
from .tagged_memory import MAPPED, REMEDIES


def trim_torch_cache(ordinal: int) -> None:
    """Give it back to GPU `ordinal`: memory that other processes released, cuBLAS's scratch memory, and segments
    without a living tensor. Cycles of Python objects are the caller's to collect."""
    torch._C._cuda_clearCublasWorkspaces()  # pyright: ignore[reportPrivateUsage]
    with torch.cuda.device(ordinal):
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def taken_bytes(device: str) -> int:
    """Bytes that torch has outside of pools, its cache included, in a process of one GPU; 0 on a stand-in
    ("host:<n>"). From any thread: it asks no device."""
    if device.startswith("host:"):
        return 0
    segments = cast("list[dict[str, Any]]", torch.cuda.memory_snapshot())  # pyright: ignore[reportUnknownMemberType]
    return sum(segment["total_size"] for segment in segments if segment["segment_pool_id"] == (0, 0))


def vacate(device: str) -> None:
    """What torch caches on the current GPU, tensors in young cycles included; nothing on a stand-in ("host:<n>")."""
    if not device.startswith("host:"):
        gc.collect(1)
        trim_torch_cache(torch.cuda.current_device())


class TorchCachingAllocator:
    """torch's caching allocator, on GPU `ordinal`."""

    no_memory: type[Exception] = torch.OutOfMemoryError
    """What it raises when a pool's allocator gave nothing."""

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal
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

    def pool(self, library: Path, allocate: str, free: str) -> object:
        """A pool whose segments come from these two functions; it ends with its last reference."""
        allocator = torch.cuda.memory.CUDAPluggableAllocator(str(library), allocate, free).allocator()
        # torch's pool points at the allocator and frees through it as late as at the interpreter's end: it never dies.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(allocator))
        with torch.cuda.device(self._ordinal):
            return torch.cuda.MemPool(allocator)

    def using(self, pool: object) -> AbstractContextManager[None]:
        """This thread's allocations go to the pool meanwhile."""
        return torch.cuda.use_mem_pool(cast("torch.cuda.MemPool", pool), self._ordinal)

    def trim(self) -> None:
        trim_torch_cache(self._ordinal)


class CudaMemory:
    """One process's memory on one GPU. Any thread may allocate; one worker thread moves tags, as with the arena."""

    def __init__(self, arena: Arena, driver: CudaDriver, table: SegmentTable, caching: TorchCachingAllocator) -> None:
        self.arena = arena
        self.driver = driver
        self.table = table
        self._caching = caching
        self._pools: dict[Tag, object] = {}
        self._slots: dict[int, Tag] = {}
        """Of pools that live, and of those that are gone but whose tensors are not."""
        self._lock = RLock()
        self._here = local()
        self._is_closed = False

    # -- torch's allocations

    @contextmanager
    def region(self, tag: Tag, policy: TagPolicy) -> Generator[None]:
        """What this thread allocates by torch on this GPU belongs to `tag`. Raises MemoryFault when the tag is away,
        OutOfDeviceMemory when a segment could not be had."""
        inside = getattr(self._here, "tag", None)
        if inside is not None:
            raise MemoryFault(
                f"region {tag!r} within region {inside!r} of one thread: torch would continue with {inside!r}",
                remedy="leave the outer one first",
            )
        self.arena.tag(tag, policy)
        self._check_is_here(tag)
        pool = self._pool(tag)
        num_failures = self.table.last_failure().num_failures
        self._here.tag = tag
        try:
            with self._caching.using(pool):
                yield
        except self._caching.no_memory as error:
            raise self._explain(tag, num_failures, error) from error
        finally:
            self._here.tag = None
            self.adopt_new()

    def adopt_new(self) -> None:
        """Give the arena the segments that torch has got since the last time, and free those that it gave up."""
        with self._lock:
            self.collect()
            for segment in self.segments():
                if segment.is_taken or segment.is_freed:
                    continue
                handles = self.table.take(segment.address, segment.num_chunks)
                if handles is None:  # torch freed it a moment ago
                    continue
                try:
                    self.arena.adopt(self._slots[segment.slot], segment.address, segment.num_bytes, handles)
                except MemoryFault:
                    self.table.untake(segment.address)
                    raise

    def collect(self) -> None:
        """Free segments that torch freed after the arena had taken them, in whatever state."""
        with self._lock:
            freed = [segment for segment in self.segments() if segment.is_freed]
            for segment in freed:
                if segment.is_taken:
                    self.arena.free(segment.address)
                    self.table.forget(segment.address)
            if any(not segment.is_taken for segment in freed):
                self.table.reap()

    def shrink(self, tags: Collection[Tag]) -> None:
        """End these tags' pools: segments without a living tensor go back to the device. The next region of such a tag
        has a fresh pool; living tensors keep their memory."""
        with self._lock:
            if not [tag for tag in tags if self._pools.pop(tag, None) is not None]:
                return
            gc.collect()  # a pool ends with its last reference, and a cycle may hold one
            self._caching.trim()
            self.collect()
            busy = {segment.slot for segment in self.segments()}
            self._give_slots(slot for slot, tag in self._slots.items() if tag not in self._pools and slot not in busy)

    def segments(self) -> list[TorchSegment]:
        """What torch believes to have in these pools."""
        return [s for s in self.table.segments() if s.slot in self._slots and s.device == self.driver.ordinal]

    def trim(self) -> None:
        """Give back unused memory: cuBLAS workspaces, torch's cache, dead segments. Old reference cycles stay: to
        collect them takes tenths of a second in a large process."""
        gc.collect(1)
        self._caching.trim()
        self.collect()

    # -- tags

    def divide(self, parts: Sequence[Tag]) -> None:
        """`Arena.divide`; the parts are declared like the first."""
        for part in parts[1:]:
            self.arena.tag(part, "backup")
        self.arena.divide(parts)

    def mark_dirty(self, tag: Tag) -> None:
        self.arena.mark_dirty(tag)

    def release(self, tags: Collection[Tag]) -> int:
        """`Arena.release` of these tags with every segment adopted and every cache trimmed before."""
        self.adopt_new()
        self.trim()
        return self.arena.release(tags)

    def begin_restore(self, tags: Collection[Tag], *, awaited: Collection[Tag] = ()) -> Restoring:
        """`Arena.begin_restore`, with every cache trimmed before so that there is room."""
        self.trim()
        return self.arena.begin_restore(tags, awaited=awaited)

    def report(self) -> tuple[TagReport, ...]:
        return self.arena.report()

    def close(self) -> None:
        """Nothing is left on device or host; tensors on it are dead. A second time does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        with self._lock:
            self.shrink(tuple(self._pools))
            segments = self.segments()
            self.arena.close()
            for segment in segments:
                if segment.is_taken:
                    self.table.forget(segment.address)
            # torch may still free through these: no newer segment gets them
            busy = {segment.slot for segment in segments}
            self._give_slots(slot for slot in self._slots if slot not in busy)
            self._slots.clear()

    # -- within

    def _pool(self, tag: Tag) -> object:
        with self._lock:
            pool = self._pools.get(tag)
            if pool is None:
                slot = SLOTS.take(self.table)
                pool = self._caching.pool(self.table.path, *self.table.function_names(slot))
                self._slots[slot] = tag
                self._pools[tag] = pool
            return pool

    def _give_slots(self, slots: Iterable[int]) -> None:
        for slot in list(slots):
            del self._slots[slot]
            SLOTS.give(slot)

    def _check_is_here(self, tag: Tag) -> None:
        report = next(report for report in self.arena.report() if report.tag == tag)
        is_being_rebuilt = report.backing == "copy_in" and report.policy == "rematerialise"
        if report.backing not in MAPPED and not is_being_rebuilt:
            raise MemoryFault(
                f"arena on {self.arena.device}: a region of tag {tag!r}, which is {report.backing}: torch would hand "
                "out addresses that have no memory",
                remedy=REMEDIES.get(report.backing, ""),
            )

    def _explain(self, tag: Tag, num_failures: int, error: Exception) -> Exception:
        failure = self.table.last_failure()
        if failure.num_failures == num_failures:
            return error  # not ours: allocations outside of the pool
        return OutOfDeviceMemory(
            f"arena on {self.arena.device}: tag {tag!r}: {failure.call.decode()} of {failure.num_bytes:,} bytes "
            f"answered {failure.result}",
            remedy="release tags, or have others release theirs, first",
        )


def open_cuda(
    ordinal: int,
    pool_bytes: int,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    num_threads: int = 8,
    library: str = LIBRARY,
    cache_dir: Path | None = None,
    caching: TorchCachingAllocator | None = None,
) -> CudaMemory:
    """Everything for GPU `ordinal` (among those visible, as torch counts them), or nothing and an error. `pool_bytes`
    of the host are made resident and pinned before this returns, by `num_threads` threads: at least the sum of all tags
    with policy backup. The allocator for torch is compiled at the first use on a machine. `caching` None: torch's,
    which makes torch's context of this GPU if there is none yet."""
    with ExitStack() as undo:
        driver = CudaDriver(ordinal, library)
        undo.callback(driver.close)
        table = SegmentTable(library=library, chunk_bytes=min(chunk_bytes, MAX_CHUNK_BYTES), cache_dir=cache_dir)
        allocator = caching or TorchCachingAllocator(ordinal)
        pinning = Pinning(ordinal, library=library, num_threads=num_threads)
        arena = Arena(driver, HostPool(pool_bytes, pinning), chunk_bytes=chunk_bytes)
        undo.pop_all()
    return CudaMemory(arena, driver, table, allocator)
