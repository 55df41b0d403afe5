"""How tags leave a device: cheap ones dropped, dirty ones copied, each chunk's memory given back while the next copies.

A chunk loses its memory only after its own copy is done (and, when asked for, proven). Copies go strictly in order, so
when one fails at most one tag is split between device and host: that one is poisoned, and nothing of it is touched
again; the tags behind it are still whole where they were.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from ...core.errors import MemoryFault
from .moving import Account, Floor, at_place, begin_copy_out, finish_copy_out, wait_out
from .tag_states import LEAVES_BY, MAPPED, Event
from .tagged_memory import Chunk, TaggedMemory


def admit(floor: Floor, leaving: Sequence[TaggedMemory], staying: Collection[TaggedMemory]) -> None:
    """Room on the host for all that will be copied, or MemoryFault with nothing changed.

    Copies kept of `staying` tags that are on the device are given up for it, out-of-date ones first: those tags lose
    no byte, they will have to be copied again when they leave.
    """
    chunks = [chunk for memory in leaving for chunk in memory.chunks() if chunk.slab is None]
    wanted = sum(chunk.num_bytes for chunk in chunks)
    spare = [m for m in staying if m.backing in MAPPED and not m.pending and m.host_bytes]
    spare.sort(key=lambda memory: (memory.backing == "mapped_clean", memory.priority))
    room = floor.pool.limit_bytes - floor.pool.used_bytes
    if wanted > room + sum(memory.host_bytes for memory in spare):
        raise _refusal(floor, leaving, f"{wanted:,} bytes are wanted, {room:,} of {floor.pool.limit_bytes:,} are free")
    taken: list[Chunk] = []
    try:
        for chunk in chunks:
            chunk.slab = _take(floor, chunk.num_bytes, spare)
            taken.append(chunk)
    except MemoryFault as error:
        for chunk in taken:
            floor.give_up_copy(chunk)
        raise _refusal(floor, leaving, error.message) from error


def _take(floor: Floor, num_bytes: int, spare: list[TaggedMemory]) -> int:
    while True:
        try:
            return floor.pool.take(num_bytes)
        except MemoryFault:
            if not spare:
                raise
        memory = spare.pop(0)
        for chunk in memory.chunks():
            floor.give_up_copy(chunk)
        memory.step(Event.COPY_LOST)


def _refusal(floor: Floor, leaving: Sequence[TaggedMemory], why: str) -> MemoryFault:
    names = ", ".join(memory.tag for memory in leaving)
    return MemoryFault(
        f"{floor.place}: no room on the host for the contents of {names}; nothing was moved: {why}",
        remedy="raise the limit of the host pool to the sum of all tags with policy backup",
    )


class Departure:
    """One release."""

    def __init__(self, floor: Floor, account: Account) -> None:
        self._floor = floor
        self._account = account
        self._flying: deque[tuple[TaggedMemory, Chunk, int]] = deque()
        self._flying_bytes = 0
        self._copying: list[TaggedMemory] = []
        self._begun: dict[Chunk, int] = {}
        """Tickets of copies that were under way before."""
        self._listener_error: Exception | None = None

    def run(self, leaving: Sequence[TaggedMemory]) -> None:
        """Memories that are mapped, their slabs admitted."""
        dirty = [m for m in leaving if LEAVES_BY[m.policy, m.backing] is Event.COPY_BEGUN]
        jobs = deque((memory, chunk) for memory in dirty for chunk in memory.chunks())
        self._begun = {chunk: ticket for memory in dirty for ticket, chunk in memory.pending}
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
            self._abandon()
            raise
        if self._listener_error is not None:
            raise self._listener_error

    def _begin(self, jobs: deque[tuple[TaggedMemory, Chunk]]) -> None:
        while jobs and (len(self._flying) < 2 or self._flying_bytes + jobs[0][1].num_bytes <= self._floor.window_bytes):
            memory, chunk = jobs.popleft()
            if memory not in self._copying:
                self._start(memory)
            ticket = self._begun.get(chunk)
            try:
                if ticket is None:
                    ticket = begin_copy_out(self._floor, chunk)
                    self._account.copied_bytes += chunk.num_bytes
            except MemoryFault as error:
                memory.step(Event.FAULT)
                raise at_place(f"{self._floor.place}: tag {memory.tag!r}", error) from error
            self._flying.append((memory, chunk, ticket))
            self._flying_bytes += chunk.num_bytes

    def _start(self, memory: TaggedMemory) -> None:
        for behind in self._copying:
            self._complete(behind)
        memory.step(Event.COPY_BEGUN)
        self._copying.append(memory)

    def _complete(self, memory: TaggedMemory) -> None:
        if memory.backing == "mapped_dirty":  # has no chunks, or was never begun
            memory.step(Event.COPY_BEGUN)
        if memory.backing == "copy_out" and all(chunk.handle is None for chunk in memory.chunks()):
            memory.pending.clear()
            memory.is_saving = False
            memory.step(Event.LEFT)

    def _finish(self, memory: TaggedMemory, chunk: Chunk, ticket: int) -> None:
        self._flying_bytes -= chunk.num_bytes
        try:
            with self._account.part("copy"):
                finish_copy_out(self._floor, chunk, ticket)
            self._take(chunk)
        except MemoryFault as error:
            memory.step(Event.FAULT)
            raise at_place(f"{self._floor.place}: tag {memory.tag!r}", error) from error

    def _drop(self, memory: TaggedMemory) -> None:
        event = LEAVES_BY[memory.policy, memory.backing]
        try:
            for chunk in memory.chunks():
                self._take(chunk)
                self._account.dropped_bytes += chunk.num_bytes
        except MemoryFault as error:
            memory.step(Event.FAULT)
            raise at_place(f"{self._floor.place}: tag {memory.tag!r}", error) from error
        memory.step(event)

    def _take(self, chunk: Chunk) -> None:
        with self._account.part("unmap"):
            self._floor.take_memory(chunk)
        if self._floor.on_freed is not None and self._listener_error is None:
            try:
                self._floor.on_freed(chunk.num_bytes)
            except Exception as error:  # noqa: BLE001 - raised when all has left: a tag torn in two would be worse
                self._listener_error = error

    def _abandon(self) -> None:
        begun = [ticket for _, _, ticket in self._flying]
        begun += [ticket for memory in self._copying for ticket, _ in memory.pending]
        try:
            wait_out(self._floor, begun)
        finally:
            for memory in self._copying:
                memory.pending.clear()
                memory.is_saving = False
                self._complete(memory)
                if memory.backing == "copy_out":
                    is_whole = all(chunk.handle is not None for chunk in memory.chunks())
                    memory.step(Event.COPY_STOPPED if is_whole else Event.FAULT)
