"""One device's memory of one process, by tags that leave and come back while every address stays the same.

An arena has a driver (a GPU's, or the host's), a pool of host memory, and a policy for each tag. It has no tensors and
no actors; the memory manager decides what leaves when. All calls block. One worker thread per device makes them, and a
lock keeps torch's allocator, which may call from any thread, out of the middle of a transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from threading import RLock

from ...core.device_memory import Tag, TagPolicy, TagReport
from ...core.errors import MemoryFault
from .driver import VmmDriver
from .host_pool import HostPool, rounded
from .tagged_memory import (
    AWAY,
    LEAST_GRANULES,
    LEAVES_BY,
    MAPPED,
    REMEDIES,
    MemoryChunk,
    Region,
    TagEvent,
    TaggedMemory,
    shares,
)
from .transfer import ChunkMover, Offload, at_place

CHUNK_BYTES = 256 << 20


class Arena:
    """The tags of one device. Driver and pool belong to the arena from here on: `close` closes them too. `chunk_bytes`:
    memory is created, copied and given back in pieces of this size at most (rounded up to the driver's granularity)."""

    def __init__(self, driver: VmmDriver, pool: HostPool, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = rounded(chunk_bytes, driver.granularity)
        self._mover = ChunkMover(driver, pool, window_bytes=2 * self._chunk_bytes)
        self._memories: dict[Tag, TaggedMemory] = {}
        self._lock = RLock()
        self._is_closed = False

    @property
    def device(self) -> str:
        return self._mover.driver.device

    @property
    def driver(self) -> VmmDriver:
        """For allocators that make memory for `adopt`."""
        return self._mover.driver

    # -- tags and their memory -------------------------------------------------------------------------------------

    def tag(self, tag: Tag, policy: TagPolicy) -> None:
        """Declare a tag, also again. Raises MemoryFault where the policy of a tag that holds memory would change."""
        with self._lock:
            memory = self._memories.get(tag)
            if memory is not None and memory.policy != policy and memory.regions:
                raise self._fault(
                    f"tag {tag!r} holds {memory.num_bytes:,} bytes under policy {memory.policy}",
                    f"free them before the policy becomes {policy}",
                )
            if memory is None or memory.policy != policy:
                self._memories[tag] = TaggedMemory(self._mover.place, tag, policy)

    def empty(self, tag: Tag, num_bytes: int) -> int:
        """Address of fresh memory of a tag that is on the device; contents undefined, size rounded up to the driver's
        granularity. Raises OutOfDeviceMemory with nothing changed."""
        with self._lock:
            memory = self._growing(tag)
            total = rounded(num_bytes, self.driver.granularity)
            address = self.driver.reserve(total)
            starts = range(0, total, self._chunk_bytes)
            chunks = [MemoryChunk(address + start, min(self._chunk_bytes, total - start)) for start in starts]
            try:
                self._mover.give_all(chunks)
            except MemoryFault as error:
                self.driver.free_reservation(address, total)
                raise at_place(f"{self._mover.place}: {num_bytes:,} bytes for tag {tag!r}", error) from error
            self._add(memory, Region(address, num_bytes, chunks))
            return address

    def adopt(self, tag: Tag, address: int, num_bytes: int, handles: Sequence[tuple[int, int]]) -> None:
        """Take over another allocator's memory: one reservation filled with chunks (handle, bytes)."""
        with self._lock:
            memory = self._growing(tag)
            chunks: list[MemoryChunk] = []
            end = address
            for handle, size in handles:
                chunks.append(MemoryChunk(end, size, handle))
                end += size
            self._add(memory, Region(address, num_bytes, chunks))

    def free(self, address: int) -> None:
        with self._lock:
            memory = next((m for m in self._memories.values() if address in m.regions), None)
            if memory is None:
                raise self._fault(f"no region begins at {address:#x}", "free each region once")
            region = memory.regions[address]
            try:
                self._mover.settle(memory)
            except MemoryFault:
                if memory.backing != "poisoned":
                    raise
            for chunk in region.chunks:
                self._mover.take_memory(chunk)
                self._mover.give_up_copy(chunk)
            self.driver.free_reservation(address, region.mapped_bytes)
            del memory.regions[address]

    def divide(self, parts: Sequence[Tag]) -> None:
        """Deal what the first tag holds out to all of these, which leave and come back each on its own from now on:
        regions go over whole, so that the parts are as equal as these allow; small ones stay together. MemoryFault when
        a part is not on the device or has another policy; the others must hold nothing."""
        with self._lock:
            first, *rest_memories = memories = self._chosen(parts)
            for memory in memories:
                self._mover.settle(memory)
                if memory.backing not in MAPPED or memory.policy != first.policy:
                    raise self._unfit(memory, f"a part of {first.tag!r} ({first.policy})")
            assert not any(memory.regions for memory in rest_memories), "a tag is divided once"
            regions = list(first.regions.values())
            sizes = [region.mapped_bytes for region in regions]
            for memory, indices in zip(
                memories, shares(sizes, len(memories), LEAST_GRANULES * self.driver.granularity), strict=False
            ):
                memory.regions = {regions[index].address: regions[index] for index in indices}
            for memory in memories:
                memory.step(TagEvent.WRITTEN)

    def mark_dirty(self, tag: Tag) -> None:
        """Its owner changed the contents, or has filled what came back empty (policy rematerialise)."""
        with self._lock:
            memory = self._memory(tag)
            if memory.backing == "copy_in" and memory.policy != "rematerialise":
                raise self._fault(
                    f"tag {tag!r} was written to while its contents still come in", "wait for its restore first"
                )
            memory.step(TagEvent.WRITTEN)

    # -- leaving and coming back -----------------------------------------------------------------------------------

    def release(self, tags: Collection[Tag]) -> int:
        """Take tags off the device, each by its policy, once all work on it is done. Raises MemoryFault before anything
        moved: a tag is unknown, kept or poisoned, the host pool has no room. When a copy fails its tag is poisoned;
        what had left stays away."""
        with self._lock:
            leaving = [m for m in self._chosen(tags) if m.backing not in AWAY]
            for memory in leaving:
                if memory.policy == "keep":
                    raise self._fault(
                        f"tag {memory.tag!r} is kept: it never leaves the device",
                        "release other tags, or declare it with another policy",
                    )
            for memory in leaving:
                self._mover.settle(memory)
            dirty = [m for m in leaving if LEAVES_BY[m.policy, m.backing] is TagEvent.COPY_BEGUN]
            self._mover.reserve_host_copies(dirty)
            if leaving:
                self.driver.synchronise()
            return Offload(self._mover).run(leaving)

    def begin_restore(self, tags: Collection[Tag], *, awaited: Collection[Tag] = ()) -> Restoring:
        """Map tags that are away and let their contents stream in; a tag may be touched after its `wait`. Those
        `awaited` are wanted before anybody computes: they may take the device's processors. Raises OutOfDeviceMemory,
        with everything as it was, when not all of it fits."""
        with self._lock:
            memories = self._chosen(tags)
            for memory in memories:
                if memory.backing == "poisoned":
                    self._mover.settle(memory)
            copied_bytes = self._mover.begin_restore([m for m in memories if m.backing in AWAY], awaited)
            return Restoring(self._mover.settle, self._lock, {m.tag: m for m in memories}, copied_bytes)

    def restore(self, tags: Collection[Tag]) -> int:
        """Bring tags back and wait for their contents. A tag under policy rematerialise comes back undefined and is
        not released from "copy_in" before its owner, who fills it, calls `mark_dirty`."""
        return self.begin_restore(tags, awaited=tags).wait_all()

    def report(self) -> tuple[TagReport, ...]:
        """Every declared tag, in the order of declaration. Does not wait for transfers."""
        return tuple(memory.report() for memory in tuple(self._memories.values()))

    def close(self) -> None:
        """Give everything back: no mapping, no file, no thread is left, and every tensor on it is dead. A second time
        does nothing. An error is raised at the end."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            with ExitStack() as ends:
                for end in (self._mover.pool.close, self.driver.close, self._memories.clear):
                    ends.callback(end)
                for memory in self._memories.values():
                    for region in memory.regions.values():
                        ends.callback(self.free, region.address)

    # -- within ----------------------------------------------------------------------------------------------------

    def _memory(self, tag: Tag) -> TaggedMemory:
        memory = self._memories.get(tag)
        if memory is None:
            tags = "the arena is closed" if self._is_closed else ", ".join(self._memories) or "no tag at all"
            raise self._fault(f"tag {tag!r} was not declared ({tags})", "declare it with its policy first")
        return memory

    def _chosen(self, tags: Collection[Tag]) -> list[TaggedMemory]:
        return [self._memory(tag) for tag in dict.fromkeys(tags)]

    def _growing(self, tag: Tag) -> TaggedMemory:
        memory = self._memory(tag)
        self._mover.settle(memory)
        if memory.backing not in MAPPED and memory.backing != "copy_in":
            raise self._unfit(memory, "given more memory")
        return memory

    def _add(self, memory: TaggedMemory, region: Region) -> None:
        memory.regions[region.address] = region
        if memory.backing in MAPPED:
            memory.step(TagEvent.WRITTEN)

    def _fault(self, fault: str, remedy: str) -> MemoryFault:
        return MemoryFault(f"{self._mover.place}: {fault}", remedy=remedy)

    def _unfit(self, memory: TaggedMemory, use: str) -> MemoryFault:
        return self._fault(
            f"tag {memory.tag!r} ({memory.policy}) is {memory.backing} and cannot be {use}",
            REMEDIES.get(memory.backing, ""),
        )


@dataclass(frozen=True, slots=True)
class Restoring:
    """Tags with copies under way. Not waiting for them leaks nothing: the arena's next call on a tag waits."""

    settle: Callable[[TaggedMemory], None]
    lock: RLock
    memories: dict[Tag, TaggedMemory]
    copied_bytes: int

    def wait(self, tag: Tag) -> None:
        """Until this tag is there. Raises MemoryFault when a copy failed: it is poisoned then."""
        with self.lock:
            self.settle(self.memories[tag])

    def wait_all(self) -> int:
        for tag in self.memories:
            self.wait(tag)
        return self.copied_bytes
