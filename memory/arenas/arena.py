"""One device's memory of one process, by tags that leave and come back while every address stays the same.

An arena has a driver (a GPU's, or the host's), a pool of host memory, and a policy for each tag. It has no tensors and
no actors; the memory manager decides what leaves when. All calls block. One worker thread per device makes them, and a
lock keeps torch's allocator, which may call from any thread, out of the middle of a transfer.

`SpreadArenas` joins the arenas of several devices into one store: a tag is on all of them or on none.

torch-memory-saver does the same for one policy (all or nothing, always copied, host memory pinned in every cycle). It
serves engines that are built on it, and it is the baseline of the benchmarks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from threading import RLock
from typing import get_args

from msgspec.structs import replace

from ...core.clock import Clock
from ...core.device_memory import MovedBytes, MovedMemory, Tag, TagPolicy, TagReport
from ...core.errors import MemoryFault
from .driver import VmmDriver
from .host_pool import HostPool
from .tagged_memory import AWAY, LEAVES_BY, MAPPED, REMEDIES, MemoryChunk, Region, TagEvent, TaggedMemory, deal
from .transfer import (
    Offload,
    OnFreed,
    Readback,
    Restoring,
    Saving,
    TransferContext,
    TransferMeter,
    TransferStats,
    at_place,
    begin_copy_out,
    onload,
    reserve_host_copies,
    settle,
)

CHUNK_BYTES = 256 << 20


class Arena:
    """The tags of one device. Driver and pool belong to the arena from here on: `close` closes them too.

    `chunk_bytes`: memory is created, copied and given back in pieces of this size at most (rounded up to the driver's
    granularity). `on_freed(bytes)` is called, in the thread that releases, each time a piece went back to the device;
    what it raises comes out of `release` once everything has left.
    `is_verifying`: every copy is read back and compared before its original is given up, and host copies are checked
    by CRC-32 before they come back; slow, for tests and for machines under suspicion.
    """

    def __init__(
        self,
        driver: VmmDriver,
        pool: HostPool,
        clock: Clock,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        on_freed: OnFreed | None = None,
        is_verifying: bool = False,
    ) -> None:
        if chunk_bytes <= 0:
            raise MemoryFault(f"arena on {driver.device}: chunks of {chunk_bytes} bytes", remedy="use at least 1")
        self._chunk_bytes = _rounded(chunk_bytes, driver.granularity)
        self._context = TransferContext(
            driver=driver,
            pool=pool,
            clock=clock,
            readback=Readback(driver),
            window_bytes=2 * self._chunk_bytes,
            is_verifying=is_verifying,
            on_freed=on_freed,
        )
        self._memories: dict[Tag, TaggedMemory] = {}
        self._lock = RLock()
        self._is_closed = False

    @property
    def device(self) -> str:
        """As the driver names it."""
        return self._context.driver.device

    @property
    def driver(self) -> VmmDriver:
        """For allocators that make memory for `adopt`."""
        return self._context.driver

    # -- tags and their memory -------------------------------------------------------------------------------------

    def tag(self, tag: Tag, policy: TagPolicy, *, priority: int = 0) -> None:
        """Declare a tag. Higher priorities leave last and come back first. The same again does nothing; MemoryFault
        when the policy of a tag that holds memory would change."""
        if tag not in get_args(Tag) or policy not in get_args(TagPolicy):
            raise MemoryFault(
                f"{self._context.place}: tag {tag!r} with policy {policy!r}",
                remedy=f"tags are {', '.join(get_args(Tag))}; policies are {', '.join(get_args(TagPolicy))}",
            )
        with self._lock:
            known = self._memories.get(tag)
            if known is not None and known.policy != policy and known.regions:
                raise MemoryFault(
                    f"{self._context.place}: tag {tag!r} holds {known.num_bytes:,} bytes under policy {known.policy}",
                    remedy=f"free them before the policy becomes {policy}",
                )
            if known is None or known.policy != policy:
                self._memories[tag] = TaggedMemory(self._context.place, tag, policy, priority)
            else:
                known.priority = priority

    def empty(self, tag: Tag, num_bytes: int) -> int:
        """Address of fresh memory of a tag that is on the device; contents undefined, size rounded up to the driver's
        granularity. Raises OutOfDeviceMemory with nothing changed."""
        with self._lock:
            memory = self._growing(tag, num_bytes)
            total = _rounded(num_bytes, self._context.driver.granularity)
            address = self._context.driver.reserve(total)
            sizes = [min(self._chunk_bytes, total - start) for start in range(0, total, self._chunk_bytes)]
            chunks = [MemoryChunk(address + index * self._chunk_bytes, size) for index, size in enumerate(sizes)]
            try:
                self._context.give_all(chunks)
            except MemoryFault as error:
                self._context.driver.free_reservation(address, total)
                raise at_place(f"{self._context.place}: {num_bytes:,} bytes for tag {tag!r}", error) from error
            self._add(memory, Region(address, num_bytes, chunks))
            return address

    def adopt(self, tag: Tag, address: int, num_bytes: int, handles: Sequence[tuple[int, int]]) -> None:
        """Take over memory that another allocator made by calls to the same driver: one reservation at `address`,
        filled from its start with chunks (handle, bytes). The allocator asks `forget` what to free."""
        with self._lock:
            memory = self._growing(tag, num_bytes)
            chunks: list[MemoryChunk] = []
            end = address
            for handle, size in handles:
                chunks.append(MemoryChunk(end, size, handle))
                end += size
            if any(size <= 0 for _, size in handles) or end - address < num_bytes:
                sizes = [size for _, size in handles]
                raise MemoryFault(
                    f"{self._context.place}: {num_bytes:,} bytes at {address:#x} in chunks of {sizes}",
                    remedy="name every chunk of the region, in the order of addresses",
                )
            if any(r.address < end and address < r.address + r.mapped_bytes for r in self._regions()):
                raise MemoryFault(
                    f"{self._context.place}: {num_bytes:,} bytes at {address:#x} overlap a region it has",
                    remedy="adopt a region once, and forget it when it is freed",
                )
            self._add(memory, Region(address, num_bytes, chunks))

    def forget(self, address: int) -> tuple[tuple[int, int], ...]:
        """The caller frees this region itself: returns (handle, bytes) of what is mapped there now, chunk by chunk
        from the start; empty while its tag is away. Its copy on the host is given up."""
        with self._lock:
            memory, region = self._region_at(address)
            self._calm(memory)
            handles = tuple((c.handle, c.num_bytes) for c in region.chunks if c.handle is not None)
            for chunk in region.chunks:
                self._context.give_up_copy(chunk)
            del memory.regions[address]
            return handles

    def free(self, address: int) -> None:
        """A region ends: memory, copy and addresses. It may be away, or poisoned."""
        with self._lock:
            memory, region = self._region_at(address)
            self._calm(memory)
            for chunk in region.chunks:
                self._context.take_memory(chunk)
                self._context.give_up_copy(chunk)
            self._context.driver.free_reservation(address, region.mapped_bytes)
            del memory.regions[address]

    def divide(self, parts: Sequence[Tag]) -> None:
        """Deal what the first tag holds out to all of these, which leave and come back each on its own from now on:
        regions go over whole, so that the parts are as equal as these allow; small ones stay together.

        MemoryFault when a part is not on the device, holds memory already, or has another policy.
        """
        with self._lock:
            whole, *others = memories = [self._memory(tag) for tag in dict.fromkeys(parts)]
            for memory in memories:
                settle(self._context, memory)
                if memory.backing not in MAPPED or memory.policy != whole.policy:
                    raise self._unfit(memory, f"a part of {whole.tag!r} ({whole.policy})")
            if any(memory.regions for memory in others):
                raise MemoryFault(
                    f"{self._context.place}: parts of tag {whole.tag!r} hold their own memory",
                    remedy="divide a tag once, after it was filled",
                )
            deal(whole, memories, self._context.driver.granularity)
            for memory in memories:
                memory.step(TagEvent.WRITTEN)

    def mark_dirty(self, tag: Tag) -> None:
        """Its owner changed the contents, or has filled what came back empty (policy rematerialise)."""
        with self._lock:
            memory = self._memory(tag)
            if memory.backing == "copy_in" and memory.policy != "rematerialise":
                raise MemoryFault(
                    f"{self._context.place}: tag {tag!r} was written to while its contents still come in",
                    remedy="wait for its restore first",
                )
            memory.is_saving = False
            memory.step(TagEvent.WRITTEN)

    def mark_clean(self, tag: Tag) -> None:
        """Its owner knows that the contents are those of the host copy. MemoryFault when there is no whole copy."""
        with self._lock:
            memory = self._memory(tag)
            if memory.backing == "mapped_dirty" and not (memory.policy == "backup" and memory.has_whole_copy):
                raise MemoryFault(
                    f"{self._context.place}: tag {tag!r} has no whole copy on the host that it could be equal to",
                    remedy="back it up first",
                )
            memory.step(TagEvent.EQUAL)

    # -- leaving and coming back -----------------------------------------------------------------------------------

    def release(self, tags: Collection[Tag]) -> TransferStats:
        """Take tags off the device, each by its policy; those that are away already are left alone.

        Waits for all work on the device first. Raises MemoryFault before anything moved when a tag is unknown, kept
        or poisoned, or when the host pool has no room. When a copy fails its tag is poisoned; what had left before
        stays away, what had not begun stays.
        """
        with self._lock:
            meter = TransferMeter(self._context.clock)
            leaving = [m for m in self._chosen(tags) if m.backing not in AWAY]
            for memory in leaving:
                self._check_can_leave(memory)
            for memory in leaving:
                if not memory.is_saving:
                    settle(self._context, memory)
            dirty = [m for m in leaving if LEAVES_BY[m.policy, m.backing] is TagEvent.COPY_BEGUN]
            reserve_host_copies(self._context, dirty, self._all_but(leaving))
            if leaving:
                self._context.driver.synchronise()
            Offload(self._context, meter).run(sorted(leaving, key=lambda memory: memory.priority))
            return meter.total()

    def begin_restore(self, tags: Collection[Tag], *, awaited: Collection[Tag] = ()) -> Restoring:
        """Map tags that are away and let their contents stream in; a tag may be touched after its `wait`. Those
        `awaited` are wanted before anybody computes: they may take the device's processors.

        Raises OutOfDeviceMemory, with everything as it was, when not all of it fits.
        """
        with self._lock:
            meter = TransferMeter(self._context.clock)
            memories = self._chosen(tags)
            for memory in memories:
                if memory.backing == "poisoned":
                    settle(self._context, memory)
            onload(self._context, [m for m in memories if m.backing in AWAY], awaited, meter)
            return Restoring(self._context, self._lock, memories, meter)

    def restore(self, tags: Collection[Tag]) -> TransferStats:
        """Bring tags back and wait for their contents. A tag under policy rematerialise comes back undefined and is
        not released from "copy_in" before its owner, who fills it, calls `mark_dirty`."""
        return self.begin_restore(tags, awaited=tags).wait_all()

    def begin_backup(self, tags: Collection[Tag]) -> Saving:
        """Copy tags of policy backup to the host while they stay. Once waited for, a tag that was not marked dirty
        meanwhile is clean, and its next release copies nothing."""
        with self._lock:
            meter = TransferMeter(self._context.clock)
            memories = self._chosen(tags)
            for memory in memories:
                settle(self._context, memory)
                if memory.policy != "backup" or memory.backing not in MAPPED:
                    raise self._unfit(memory, "copied to the host")
            dirty = [m for m in memories if m.backing == "mapped_dirty"]
            reserve_host_copies(self._context, dirty, self._all_but(memories))
            if dirty:
                self._context.driver.synchronise()
            for memory in dirty:
                self._begin_saving(memory, meter)
            return Saving(self._context, self._lock, memories, meter)

    # -- looking ---------------------------------------------------------------------------------------------------

    def report(self) -> tuple[TagReport, ...]:
        """Every declared tag, in the order of declaration. Does not wait for transfers."""
        return tuple(memory.report() for memory in tuple(self._memories.values()))

    def digest(self, tag: Tag) -> str:
        """Of the bytes that were asked for, on the device or on the host; MemoryFault when there are no contents."""
        with self._lock:
            memory = self._memory(tag)
            settle(self._context, memory)
            if memory.backing not in MAPPED and memory.backing != "host":
                raise self._unfit(memory, "read: it has no contents")
            self._context.driver.synchronise()
            return self._context.readback.digest(memory)

    def close(self) -> None:
        """Give everything back: no mapping, no file, no thread is left, and every tensor on it is dead. A second time
        does nothing. The first error met is raised at the end."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            errors: list[MemoryFault] = []
            ends = [partial(self.free, region.address) for region in self._regions()]
            context = self._context
            for end in (*ends, self._memories.clear, context.driver.close, context.readback.close, context.pool.close):
                try:
                    end()
                except MemoryFault as error:
                    errors.append(error)
            if errors:
                raise errors[0]

    # -- within ----------------------------------------------------------------------------------------------------

    def _memory(self, tag: Tag) -> TaggedMemory:
        memory = self._memories.get(tag)
        if memory is None:
            raise MemoryFault(
                f"{self._context.place}: tag {tag!r} was not declared "
                f"({'the arena is closed' if self._is_closed else ', '.join(self._memories) or 'no tag at all'})",
                remedy="declare it with its policy first",
            )
        return memory

    def _chosen(self, tags: Collection[Tag]) -> list[TaggedMemory]:
        if isinstance(tags, str):
            raise MemoryFault(f"{self._context.place}: tags {tags!r}", remedy="pass a collection of tags")
        return [self._memory(tag) for tag in dict.fromkeys(tags)]

    def _all_but(self, chosen: Collection[TaggedMemory]) -> list[TaggedMemory]:
        return [memory for memory in self._memories.values() if memory not in chosen]

    def _regions(self) -> list[Region]:
        return [region for memory in self._memories.values() for region in memory.regions.values()]

    def _region_at(self, address: int) -> tuple[TaggedMemory, Region]:
        for memory in self._memories.values():
            if address in memory.regions:
                return memory, memory.regions[address]
        raise MemoryFault(f"{self._context.place}: no region begins at {address:#x}", remedy="free each region once")

    def _growing(self, tag: Tag, num_bytes: int) -> TaggedMemory:
        memory = self._memory(tag)
        if num_bytes <= 0:
            raise MemoryFault(
                f"{self._context.place}: {num_bytes} bytes for tag {tag!r}", remedy="ask for at least one"
            )
        settle(self._context, memory)
        if memory.backing not in MAPPED and memory.backing != "copy_in":
            raise self._unfit(memory, "given more memory")
        return memory

    def _add(self, memory: TaggedMemory, region: Region) -> None:
        memory.regions[region.address] = region
        if memory.backing in MAPPED:
            memory.step(TagEvent.WRITTEN)

    def _check_can_leave(self, memory: TaggedMemory) -> None:
        if memory.policy == "keep":
            raise MemoryFault(
                f"{self._context.place}: tag {memory.tag!r} is kept: it never leaves the device",
                remedy="release other tags, or declare it with another policy",
            )
        if memory.backing == "poisoned":
            settle(self._context, memory)

    def _begin_saving(self, memory: TaggedMemory, meter: TransferMeter) -> None:
        try:
            for chunk in memory.chunks():
                memory.pending.append((begin_copy_out(self._context, chunk), chunk))
                meter.copied_bytes += chunk.num_bytes
        except MemoryFault as error:
            raise at_place(f"{self._context.place}: tag {memory.tag!r}, which stays whole", error) from error
        memory.is_saving = True

    def _calm(self, memory: TaggedMemory) -> None:
        """Nothing is under way on it; a copy that fails poisons the tag, whose memory can still be freed."""
        try:
            settle(self._context, memory)
        except MemoryFault:
            if memory.backing != "poisoned":
                raise

    def _unfit(self, memory: TaggedMemory, what: str) -> MemoryFault:
        return MemoryFault(
            f"{self._context.place}: tag {memory.tag!r} ({memory.policy}) is {memory.backing} and cannot be {what}",
            remedy=REMEDIES.get(memory.backing, ""),
        )


def _rounded(num_bytes: int, granularity: int) -> int:
    return -(-num_bytes // granularity) * granularity


class SpreadArenas:
    """An `AssetStore` of at least one arena, all of which have the same tags. Methods block; one caller at a time."""

    def __init__(self, arenas: Sequence[Arena]) -> None:
        """Raises MemoryFault without any."""
        if not arenas:
            raise MemoryFault("a store over no device", remedy="name at least one arena")
        self.arenas = tuple(arenas)

    def report(self) -> tuple[TagReport, ...]:
        """Of each tag what the fullest device has of it; it is away only where all have it away."""
        return tuple(_fullest(parts) for parts in zip(*(arena.report() for arena in self.arenas), strict=True))

    def release(self, tags: Collection[Tag]) -> MovedMemory:
        """See the protocol. A tag that fails on one device stays on the others."""
        return _sum([arena.release(tags) for arena in self.arenas])

    def restore(self, tags: Collection[Tag]) -> MovedMemory:
        """See the protocol. With MemoryFault the tags that were away are away again."""
        moved: list[MovedBytes] = []
        away = {report.tag for report in self.report() if report.backing in AWAY}
        for number, arena in enumerate(self.arenas):
            try:
                moved.append(arena.restore(tags))
            except MemoryFault:
                for done in self.arenas[:number]:
                    done.release([tag for tag in tags if tag in away])
                raise
        return _sum(moved)

    def close(self) -> None:
        """Give everything back on all devices; the first error met is raised at the end."""
        errors: list[MemoryFault] = []
        for arena in self.arenas:
            try:
                arena.close()
            except MemoryFault as error:
                errors.append(error)
        if errors:
            raise errors[0]


def _fullest(parts: Sequence[TagReport]) -> TagReport:
    worst = max(parts, key=lambda part: (part.backing == "poisoned", part.backing not in AWAY))
    num_bytes, host_bytes = max(p.num_bytes for p in parts), max(p.host_bytes for p in parts)
    return replace(worst, num_bytes=num_bytes, host_bytes=host_bytes)


def _sum(moved: Sequence[MovedBytes]) -> MovedMemory:
    return MovedMemory(
        copied_bytes=sum(m.copied_bytes for m in moved),
        dropped_bytes=sum(m.dropped_bytes for m in moved),
        seconds=sum(m.seconds for m in moved),
    )
