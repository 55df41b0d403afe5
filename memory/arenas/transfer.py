"""Transfers between a device and the host: how tags leave a device and come back.

Release: tags without a copy are dropped, dirty ones are copied, and a chunk's memory goes back after its own copy,
while the next one copies. Copies are strictly in order, so a failed copy splits at most one tag between device and
host: it is poisoned, neither moved nor touched again.

Restore: all or nothing is mapped. When a chunk gets no memory, or no copy into it can begin, the copies already begun
are discarded, and the host keeps its copies. A copy that was begun and fails poisons its tag.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from ...core.device_memory import Tag
from ...core.errors import MemoryFault
from .driver import VmmDriver
from .host_pool import HostPool
from .tagged_memory import LEAVES_BY, MemoryChunk, TagEvent, TaggedMemory


def at_place(place: str, error: MemoryFault) -> MemoryFault:
    """The same kind of error, with the place where it happened."""
    return type(error)(f"{place}: {error.message}", remedy=error.remedy)


@dataclass(slots=True)
class ChunkMover:
    """One device and its host pool: memory of chunks, and copies of them."""

    driver: VmmDriver
    pool: HostPool
    window_bytes: int
    """Copies out that were begun and not waited for."""

    @property
    def place(self) -> str:
        """For messages."""
        return f"arena on {self.driver.device}"

    def give_memory(self, chunk: MemoryChunk) -> None:
        """Create and map, or neither."""
        handle = self.driver.create(chunk.num_bytes)
        try:
            self.driver.map(chunk.address, chunk.num_bytes, handle)
        except MemoryFault:
            self.driver.release(handle, chunk.num_bytes)
            raise
        chunk.handle = handle

    def take_memory(self, chunk: MemoryChunk) -> None:
        """Unmap and release; nothing to do for a chunk that has none."""
        if chunk.handle is None:
            return
        self.driver.unmap(chunk.address, chunk.num_bytes)
        handle, chunk.handle = chunk.handle, None
        self.driver.release(handle, chunk.num_bytes)

    def give_all(self, chunks: Iterable[MemoryChunk]) -> None:
        """Memory for every chunk, or for none of them."""
        given_back: list[MemoryChunk] = []
        try:
            for chunk in chunks:
                self.give_memory(chunk)
                given_back.append(chunk)
        except MemoryFault:
            for chunk in given_back:
                self.take_memory(chunk)
            raise

    def give_up_copy(self, chunk: MemoryChunk) -> None:
        """The slab goes back to the pool."""
        slab, chunk.slab = chunk.slab, None
        if slab is not None:
            self.pool.give(slab)

    def wait_out(self, tickets: Iterable[int]) -> None:
        """After a failure: wait for every copy that was begun. Further failures are not raised."""
        for ticket in tickets:
            with suppress(MemoryFault):
                self.driver.wait(ticket)

    def settle(self, memory: TaggedMemory) -> None:
        """Wait for what was begun on a tag. Raises MemoryFault when a copy failed: the tag is poisoned."""
        if memory.backing == "poisoned":
            raise MemoryFault(
                f"{self.place}: tag {memory.tag!r} is poisoned: a copy of it failed before",
                remedy="restart this process, its state comes back from a checkpoint",
            )
        try:
            while memory.pending:
                self.driver.wait(memory.pending.pop(0))
        except MemoryFault as error:
            self.wait_out(memory.pending)
            memory.pending.clear()
            memory.step(TagEvent.FAULT)
            raise at_place(f"{self.place}: tag {memory.tag!r}", error) from error
        if memory.backing == "copy_in" and not (memory.policy == "rematerialise" and memory.regions):
            memory.step(TagEvent.ARRIVED if memory.policy == "backup" else TagEvent.WRITTEN)

    # -- coming

    def begin_restore(self, coming: Sequence[TaggedMemory], awaited: Collection[Tag]) -> int:
        """Map memories that are away and begin to fill them; the bytes that are copied. `settle` waits for each.
        `awaited`: tags for which it will be called at once. Of those awaited, what is copied goes before the others:
        the link is busy from the first chunk on, and mapping the rest (1.5 ms a GiB on an H200) happens beside it.
        What streams in is begun when everything is mapped: its copies take turns with the driver's clearing of freed
        memory, and mapping may wait for both (0.46 s until an 8B-shaped trainer had what it begins with, on two H200s;
        0.20 this way)."""
        ordered = sorted(coming, key=lambda memory: (memory.tag not in awaited, memory.backing != "host"))
        try:
            for memory in ordered:
                for chunk in memory.chunks():
                    self.give_memory(chunk)
                    if memory.tag in awaited:
                        self._begin_to_fill(memory, chunk, is_awaited=True)
            for memory in ordered:
                for chunk in memory.chunks() if memory.tag not in awaited else ():
                    self._begin_to_fill(memory, chunk, is_awaited=False)
        except MemoryFault as error:
            for memory in ordered:
                self._go_back(memory)
            names = ", ".join(memory.tag for memory in ordered)
            num_bytes = sum(memory.num_bytes for memory in ordered)
            fault = f"{self.place}: {names} cannot come back ({num_bytes:,} bytes in all), all is as it was"
            raise at_place(fault, error) from error
        copied_bytes = sum(memory.num_bytes for memory in ordered if memory.backing == "host")
        for memory in ordered:
            memory.step(TagEvent.MAPPED)
        return copied_bytes

    def _begin_to_fill(self, memory: TaggedMemory, chunk: MemoryChunk, *, is_awaited: bool) -> None:
        if memory.policy == "rematerialise":
            return
        if memory.backing == "discarded":
            ticket = self.driver.zero(chunk.address, chunk.num_bytes)
        else:
            assert chunk.slab is not None, "it left with a copy"
            ticket = self.driver.copy_in(chunk.address, chunk.slab, chunk.num_bytes, is_awaited=is_awaited)
        memory.pending.append(ticket)

    def _go_back(self, memory: TaggedMemory) -> None:
        self.wait_out(memory.pending)
        memory.pending.clear()
        for chunk in memory.chunks():
            self.take_memory(chunk)

    # -- leaving

    def reserve_host_copies(self, leaving: Sequence[TaggedMemory]) -> None:
        """Room on the host for all that will be copied, or MemoryFault. A copy keeps it while its region lives."""
        reserved: list[MemoryChunk] = []
        try:
            for chunk in (chunk for memory in leaving for chunk in memory.chunks() if chunk.slab is None):
                chunk.slab = self.pool.take(chunk.num_bytes)
                reserved.append(chunk)
        except MemoryFault as error:
            for chunk in reserved:
                self.give_up_copy(chunk)
            names = ", ".join(memory.tag for memory in leaving)
            fault = f"{self.place}: no room on the host for the contents of {names}; nothing was moved"
            raise at_place(fault, error) from error


class Offload:
    """One release."""

    def __init__(self, mover: ChunkMover) -> None:
        self._mover = mover
        self._flying: deque[tuple[TaggedMemory, MemoryChunk, int]] = deque()
        self._flying_bytes = 0
        self._copying: list[TaggedMemory] = []

    def run(self, leaving: Sequence[TaggedMemory]) -> int:
        """Memories that are mapped, their slabs reserved."""
        dirty = [m for m in leaving if LEAVES_BY[m.policy, m.backing] is TagEvent.COPY_BEGUN]
        jobs = deque((memory, chunk) for memory in dirty for chunk in memory.chunks())
        try:
            self._begin(jobs)  # first, so that the device copies while the cheap ones are unmapped
            for memory in leaving:
                if memory not in dirty:
                    self._drop(memory)
            while jobs or self._flying:
                if self._flying:
                    self._finish(*self._flying.popleft())
                self._begin(jobs)
            for memory in dirty:
                self._complete(memory)
        except BaseException:
            self._mover.wait_out([ticket for _, _, ticket in self._flying])
            for memory in self._copying:
                self._complete(memory)
                if memory.backing == "copy_out":
                    is_whole = all(chunk.handle is not None for chunk in memory.chunks())
                    memory.step(TagEvent.COPY_STOPPED if is_whole else TagEvent.FAULT)
            raise
        return sum(memory.num_bytes for memory in dirty)

    @contextmanager
    def _poisoning(self, memory: TaggedMemory) -> Generator[None]:
        try:
            yield
        except MemoryFault as error:
            memory.step(TagEvent.FAULT)
            raise at_place(f"{self._mover.place}: tag {memory.tag!r}", error) from error

    def _begin(self, jobs: deque[tuple[TaggedMemory, MemoryChunk]]) -> None:
        window_bytes, driver = self._mover.window_bytes, self._mover.driver
        while jobs and (len(self._flying) < 2 or self._flying_bytes + jobs[0][1].num_bytes <= window_bytes):
            memory, chunk = jobs.popleft()
            if memory not in self._copying:
                for behind in self._copying:
                    self._complete(behind)
                memory.step(TagEvent.COPY_BEGUN)
                self._copying.append(memory)
            assert chunk.slab is not None, "reserved before"
            with self._poisoning(memory):
                ticket = driver.copy_out(chunk.slab, chunk.address, chunk.num_bytes)
            self._flying.append((memory, chunk, ticket))
            self._flying_bytes += chunk.num_bytes

    def _complete(self, memory: TaggedMemory) -> None:
        if memory.backing == "mapped_dirty":  # has no chunks
            memory.step(TagEvent.COPY_BEGUN)
        if memory.backing == "copy_out" and all(chunk.handle is None for chunk in memory.chunks()):
            memory.step(TagEvent.LEFT)

    def _finish(self, memory: TaggedMemory, chunk: MemoryChunk, ticket: int) -> None:
        self._flying_bytes -= chunk.num_bytes
        with self._poisoning(memory):
            self._mover.driver.wait(ticket)
            self._mover.take_memory(chunk)

    def _drop(self, memory: TaggedMemory) -> None:
        event = LEAVES_BY[memory.policy, memory.backing]
        with self._poisoning(memory):
            for chunk in memory.chunks():
                self._mover.take_memory(chunk)
        memory.step(event)
