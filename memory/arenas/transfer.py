"""Transfers between a device and the host: how tags leave a device and come back.

Offload: tags without a copy are dropped, dirty ones are copied, and a chunk's memory goes back while the next chunk
copies. A chunk loses its memory only after its own copy is done (and verified, if asked for). Copies are strictly in
order, so a failed copy splits at most one tag between device and host. That tag is poisoned: it is neither moved nor
touched again. The tags behind it are still whole on the device.

Onload: all memory is mapped before any content is lost. When a chunk gets no memory, the copies already begun are
waited for and discarded, and the host keeps its copies. What comes back empty (discarded, or rebuilt by its owner)
needs no copy. `Restoring` and `Saving` are the handles on transfers that are still running.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import RLock

from ...core.clock import Clock
from ...core.device_memory import Tag
from ...core.errors import MemoryFault, OutOfDeviceMemory
from . import libc
from .driver import VmmDriver
from .host_pool import HostPool
from .tagged_memory import LEAVES_BY, MAPPED, MemoryChunk, TagEvent, TaggedMemory

PIECE_BYTES = 16 << 20


class Readback:
    """One small buffer beside the pool, made at first use: a full host pool does not stop a digest."""

    def __init__(self, driver: VmmDriver) -> None:
        self._driver = driver
        self._buffer = 0

    def digest(self, memory: TaggedMemory) -> str:
        """BLAKE2b of the bytes that were asked for, in the order of allocation; wherever they are now."""
        state = hashlib.blake2b(digest_size=16)
        for region in memory.regions.values():
            left = region.num_bytes
            for chunk in region.chunks:
                for piece in self._pieces(chunk, min(left, chunk.num_bytes), is_on_host=memory.backing == "host"):
                    state.update(piece)
                left -= min(left, chunk.num_bytes)
        return state.hexdigest()

    def prove(self, chunk: MemoryChunk, slab: int) -> None:
        """MemoryFault unless device and host copy are the same bytes."""
        at = slab
        for piece in self._pieces(chunk, chunk.num_bytes, is_on_host=False):
            if not libc.is_equal(self._buffer, at, len(piece)):
                raise MemoryFault(
                    f"the copy of {chunk.num_bytes:,} bytes at {chunk.address:#x} differs from its original",
                    remedy="do not trust this device or this host memory; see the driver's log",
                )
            at += len(piece)

    def checksum(self, chunk: MemoryChunk, slab: int) -> int:
        """CRC-32 of the host copy."""
        return zlib.crc32(libc.view(slab, chunk.num_bytes))

    def close(self) -> None:
        buffer, self._buffer = self._buffer, 0
        if buffer:
            libc.unmap(buffer, PIECE_BYTES)

    def _pieces(self, chunk: MemoryChunk, num_bytes: int, *, is_on_host: bool) -> Iterator[memoryview]:
        for start in range(0, num_bytes, PIECE_BYTES):
            size = min(PIECE_BYTES, num_bytes - start)
            if is_on_host:
                yield libc.view((chunk.slab or 0) + start, size)
                continue
            self._buffer = self._buffer or libc.map_anonymous(PIECE_BYTES)
            self._driver.wait(self._driver.copy_out(self._buffer, chunk.address + start, size))
            yield libc.view(self._buffer, size)


OnFreed = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class TransferStats:
    """What one release, restore or backup did."""

    copied_bytes: int = 0
    """Between device and host."""
    dropped_bytes: int = 0
    """Left the device without a copy."""
    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict[str, float])
    """Of the seconds: copy (waiting for copies), unmap, map, verify."""


@dataclass(slots=True)
class TransferContext:
    """Where moves happen: one device, one pool."""

    driver: VmmDriver
    pool: HostPool
    clock: Clock
    readback: Readback
    window_bytes: int
    """Copies begun and not waited for."""
    is_verifying: bool
    on_freed: OnFreed | None
    """Called by releases only."""

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
        done: list[MemoryChunk] = []
        try:
            for chunk in chunks:
                self.give_memory(chunk)
                done.append(chunk)
        except MemoryFault:
            for chunk in done:
                self.take_memory(chunk)
            raise

    def give_up_copy(self, chunk: MemoryChunk) -> None:
        """The slab goes back to the pool."""
        slab, chunk.slab = chunk.slab, None
        chunk.is_copied = False
        chunk.checksum = None
        if slab is not None:
            self.pool.give(slab)


class TransferMeter:
    """Adds up what one move does."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started = clock.monotonic()
        self._parts: dict[str, float] = {}
        self.copied_bytes = 0
        self.dropped_bytes = 0

    @contextmanager
    def part(self, name: str) -> Generator[None]:
        """Time spent inside goes to the part."""
        begun = self._clock.monotonic()
        try:
            yield
        finally:
            self._parts[name] = self._parts.get(name, 0.0) + self._clock.monotonic() - begun

    def total(self) -> TransferStats:
        """Up to now."""
        return TransferStats(
            self.copied_bytes, self.dropped_bytes, self._clock.monotonic() - self._started, dict(self._parts)
        )


def at_place(place: str, error: MemoryFault) -> MemoryFault:
    """The same kind of error, with the place where it happened."""
    return type(error)(f"{place}: {error.message}", remedy=error.remedy)


def begin_copy_out(context: TransferContext, chunk: MemoryChunk) -> int:
    """Returns the ticket."""
    if chunk.slab is None:
        raise MemoryFault(f"{chunk.num_bytes:,} bytes at {chunk.address:#x} have no place on the host")
    chunk.is_copied = False
    return context.driver.copy_out(chunk.slab, chunk.address, chunk.num_bytes)


def finish_copy_out(context: TransferContext, chunk: MemoryChunk, ticket: int) -> None:
    """After it the slab holds the contents."""
    context.driver.wait(ticket)
    if context.is_verifying and chunk.slab is not None:
        context.readback.prove(chunk, chunk.slab)
        chunk.checksum = context.readback.checksum(chunk, chunk.slab)
    chunk.is_copied = True


def wait_out(context: TransferContext, tickets: Iterable[int]) -> None:
    """After a failure: wait for every copy that was begun. Further failures are not raised."""
    for ticket in tickets:
        with suppress(MemoryFault):
            context.driver.wait(ticket)


def onload(
    context: TransferContext, coming: Sequence[TaggedMemory], awaited: Collection[Tag], meter: TransferMeter
) -> None:
    """Map memories that are away and begin to fill them, highest priority first; `settle` waits for each. `awaited`:
    tags for which it will be called at once.

    Of those awaited, what is copied goes before the others: the link is busy from the first chunk on, and mapping the
    rest (1.5 ms a GiB on an H200) happens beside it. What streams in is begun when everything is mapped: its copies
    take turns with the driver's clearing of freed memory, and mapping may wait for both (0.46 s until an 8B-shaped
    trainer had what it begins with, on two H200s; 0.20 this way).
    """
    ordered = sorted(coming, key=lambda memory: (memory.tag not in awaited, memory.backing != "host", -memory.priority))
    come: list[TaggedMemory] = []
    for memory in ordered:
        try:
            _map(context, memory, meter, is_awaited=memory.tag in awaited)
        except _Unfilled as fault:
            raise _stranded(context, [*come, memory], meter, fault) from fault.error
        except MemoryFault as error:
            for back in (*come, memory):
                _go_back(context, back)
            raise _onload_refusal(context, ordered, error) from error
        come.append(memory)
    for index, memory in enumerate(come):
        if memory.tag in awaited:
            continue
        try:
            for chunk in memory.chunks():
                _fill(context, memory, chunk, is_awaited=False)
        except _Unfilled as fault:
            for back in come[index + 1 :]:  # nothing of them was begun
                _go_back(context, back)
            raise _stranded(context, come[: index + 1], meter, fault) from fault.error
    _step(context, come, meter)


class _Unfilled(Exception):
    """The chunk has memory, but the copy into it failed."""

    def __init__(self, error: MemoryFault) -> None:
        super().__init__(str(error))
        self.error = error


def _map(context: TransferContext, memory: TaggedMemory, meter: TransferMeter, *, is_awaited: bool) -> None:
    """And begin to fill what is awaited. Raises MemoryFault when a chunk gets no memory, _Unfilled."""
    for chunk in memory.chunks():
        with meter.part("map"):
            context.give_memory(chunk)
        if is_awaited:
            _fill(context, memory, chunk, is_awaited=True)


def _stranded(
    context: TransferContext, come: Sequence[TaggedMemory], meter: TransferMeter, fault: _Unfilled
) -> MemoryFault:
    """There was memory for all of `come`, and no copy into the last one: that is poisoned. What to raise."""
    _step(context, come, meter)
    memory = come[-1]
    wait_out(context, [ticket for ticket, _ in memory.pending])
    memory.pending.clear()
    memory.step(TagEvent.FAULT)
    return at_place(f"{context.place}: tag {memory.tag!r}", fault.error)


def _step(context: TransferContext, come: Sequence[TaggedMemory], meter: TransferMeter) -> None:
    for memory in come:
        if memory.backing == "host":
            meter.copied_bytes += memory.num_bytes
        memory.step(TagEvent.MAPPED)


def _go_back(context: TransferContext, memory: TaggedMemory) -> None:
    wait_out(context, [ticket for ticket, _ in memory.pending])
    memory.pending.clear()
    for chunk in memory.chunks():
        context.take_memory(chunk)


def _fill(context: TransferContext, memory: TaggedMemory, chunk: MemoryChunk, *, is_awaited: bool) -> None:
    """Raises _Unfilled when nothing can be copied into it."""
    try:
        ticket = _begin_to_fill(context, memory, chunk, is_awaited=is_awaited)
    except MemoryFault as error:
        raise _Unfilled(error) from error
    if ticket is not None:
        memory.pending.append((ticket, chunk))


def _begin_to_fill(
    context: TransferContext, memory: TaggedMemory, chunk: MemoryChunk, *, is_awaited: bool
) -> int | None:
    if memory.policy == "rematerialise":
        return None
    if memory.backing == "discarded":
        return context.driver.zero(chunk.address, chunk.num_bytes)
    if chunk.slab is None or not chunk.is_copied:
        raise MemoryFault(f"{chunk.num_bytes:,} bytes of {chunk.address:#x} have no copy on the host")
    if chunk.checksum is not None and context.readback.checksum(chunk, chunk.slab) != chunk.checksum:
        raise MemoryFault(
            f"the host copy of {chunk.num_bytes:,} bytes of {chunk.address:#x} changed while it was away",
            remedy="do not trust this host's memory; restart from a checkpoint",
        )
    return context.driver.copy_in(chunk.address, chunk.slab, chunk.num_bytes, is_awaited=is_awaited)


def _onload_refusal(context: TransferContext, ordered: Sequence[TaggedMemory], error: MemoryFault) -> MemoryFault:
    names = ", ".join(memory.tag for memory in ordered)
    wanted = sum(memory.num_bytes for memory in ordered)
    kind = OutOfDeviceMemory if isinstance(error, OutOfDeviceMemory) else MemoryFault
    return kind(
        f"{context.place}: {names} cannot come back ({wanted:,} bytes in all), all is as it was: {error.message}",
        remedy=error.remedy,
    )


def settle(context: TransferContext, memory: TaggedMemory, *, until: int | None = None) -> None:
    """Wait for what was begun on a tag; with `until` for the chunk that holds this address only, and those before it.

    Raises MemoryFault when a copy failed or (verifying) is none. The tag is poisoned then, unless the copy was one
    beside the work: it is whole where it is, and dirty.
    """
    if memory.backing == "poisoned":
        raise MemoryFault(
            f"{context.place}: tag {memory.tag!r} is poisoned: a copy of it failed before",
            remedy="restart this process, its state comes back from a checkpoint",
        )
    try:
        while memory.pending:
            ticket, chunk = memory.pending.pop(0)
            _finish(context, memory, chunk, ticket)
            if until is not None and chunk.address <= until < chunk.address + chunk.num_bytes and memory.pending:
                return
    except MemoryFault as error:
        wait_out(context, [ticket for ticket, _ in memory.pending])
        memory.pending.clear()
        memory.is_saving = False
        if memory.backing == "copy_in":
            memory.step(TagEvent.FAULT)
        raise at_place(f"{context.place}: tag {memory.tag!r}", error) from error
    if memory.is_saving:
        memory.is_saving = False
        memory.step(TagEvent.EQUAL)
    elif memory.backing == "copy_in" and not (memory.policy == "rematerialise" and memory.regions):
        has_copy = memory.policy == "backup" and memory.has_whole_copy
        memory.step(TagEvent.ARRIVED if has_copy else TagEvent.WRITTEN)


def _finish(context: TransferContext, memory: TaggedMemory, chunk: MemoryChunk, ticket: int) -> None:
    if memory.is_saving:
        finish_copy_out(context, chunk, ticket)
        return
    context.driver.wait(ticket)
    if context.is_verifying and memory.backing == "copy_in" and chunk.slab is not None:
        context.readback.prove(chunk, chunk.slab)


def reserve_host_copies(
    context: TransferContext, leaving: Sequence[TaggedMemory], staying: Collection[TaggedMemory]
) -> None:
    """Room on the host for all that will be copied, or MemoryFault with nothing changed.

    Copies kept of `staying` tags that are on the device are given up for it, out-of-date ones first: those tags lose
    no byte, they will have to be copied again when they leave.
    """
    chunks = [chunk for memory in leaving for chunk in memory.chunks() if chunk.slab is None]
    wanted = sum(chunk.num_bytes for chunk in chunks)
    spare = [m for m in staying if m.backing in MAPPED and not m.pending and m.host_bytes]
    spare.sort(key=lambda memory: (memory.backing == "mapped_clean", memory.priority))
    room = context.pool.limit_bytes - context.pool.used_bytes
    if wanted > room + sum(memory.host_bytes for memory in spare):
        raise _offload_refusal(
            context, leaving, f"{wanted:,} bytes are wanted, {room:,} of {context.pool.limit_bytes:,} are free"
        )
    taken: list[MemoryChunk] = []
    try:
        for chunk in chunks:
            chunk.slab = _take(context, chunk.num_bytes, spare)
            taken.append(chunk)
    except MemoryFault as error:
        for chunk in taken:
            context.give_up_copy(chunk)
        raise _offload_refusal(context, leaving, error.message) from error


def _take(context: TransferContext, num_bytes: int, spare: list[TaggedMemory]) -> int:
    while True:
        try:
            return context.pool.take(num_bytes)
        except MemoryFault:
            if not spare:
                raise
        memory = spare.pop(0)
        for chunk in memory.chunks():
            context.give_up_copy(chunk)
        memory.step(TagEvent.COPY_LOST)


def _offload_refusal(context: TransferContext, leaving: Sequence[TaggedMemory], why: str) -> MemoryFault:
    names = ", ".join(memory.tag for memory in leaving)
    return MemoryFault(
        f"{context.place}: no room on the host for the contents of {names}; nothing was moved: {why}",
        remedy="raise the limit of the host pool to the sum of all tags with policy backup",
    )


class Offload:
    """One release."""

    def __init__(self, context: TransferContext, meter: TransferMeter) -> None:
        self._context = context
        self._meter = meter
        self._flying: deque[tuple[TaggedMemory, MemoryChunk, int]] = deque()
        self._flying_bytes = 0
        self._copying: list[TaggedMemory] = []
        self._begun: dict[MemoryChunk, int] = {}
        """Tickets of copies that were under way before."""
        self._listener_error: Exception | None = None

    def run(self, leaving: Sequence[TaggedMemory]) -> None:
        """Memories that are mapped, their slabs admitted."""
        dirty = [m for m in leaving if LEAVES_BY[m.policy, m.backing] is TagEvent.COPY_BEGUN]
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

    def _begin(self, jobs: deque[tuple[TaggedMemory, MemoryChunk]]) -> None:
        while jobs and (
            len(self._flying) < 2 or self._flying_bytes + jobs[0][1].num_bytes <= self._context.window_bytes
        ):
            memory, chunk = jobs.popleft()
            if memory not in self._copying:
                self._start(memory)
            ticket = self._begun.get(chunk)
            try:
                if ticket is None:
                    ticket = begin_copy_out(self._context, chunk)
                    self._meter.copied_bytes += chunk.num_bytes
            except MemoryFault as error:
                memory.step(TagEvent.FAULT)
                raise at_place(f"{self._context.place}: tag {memory.tag!r}", error) from error
            self._flying.append((memory, chunk, ticket))
            self._flying_bytes += chunk.num_bytes

    def _start(self, memory: TaggedMemory) -> None:
        for behind in self._copying:
            self._complete(behind)
        memory.step(TagEvent.COPY_BEGUN)
        self._copying.append(memory)

    def _complete(self, memory: TaggedMemory) -> None:
        if memory.backing == "mapped_dirty":  # has no chunks, or was never begun
            memory.step(TagEvent.COPY_BEGUN)
        if memory.backing == "copy_out" and all(chunk.handle is None for chunk in memory.chunks()):
            memory.pending.clear()
            memory.is_saving = False
            memory.step(TagEvent.LEFT)

    def _finish(self, memory: TaggedMemory, chunk: MemoryChunk, ticket: int) -> None:
        self._flying_bytes -= chunk.num_bytes
        try:
            with self._meter.part("copy"):
                finish_copy_out(self._context, chunk, ticket)
            self._take(chunk)
        except MemoryFault as error:
            memory.step(TagEvent.FAULT)
            raise at_place(f"{self._context.place}: tag {memory.tag!r}", error) from error

    def _drop(self, memory: TaggedMemory) -> None:
        event = LEAVES_BY[memory.policy, memory.backing]
        try:
            for chunk in memory.chunks():
                self._take(chunk)
                self._meter.dropped_bytes += chunk.num_bytes
        except MemoryFault as error:
            memory.step(TagEvent.FAULT)
            raise at_place(f"{self._context.place}: tag {memory.tag!r}", error) from error
        memory.step(event)

    def _take(self, chunk: MemoryChunk) -> None:
        with self._meter.part("unmap"):
            self._context.take_memory(chunk)
        if self._context.on_freed is not None and self._listener_error is None:
            try:
                self._context.on_freed(chunk.num_bytes)
            except Exception as error:  # noqa: BLE001 - raised when all has left: a tag torn in two would be worse
                self._listener_error = error

    def _abandon(self) -> None:
        begun = [ticket for _, _, ticket in self._flying]
        begun += [ticket for memory in self._copying for ticket, _ in memory.pending]
        try:
            wait_out(self._context, begun)
        finally:
            for memory in self._copying:
                memory.pending.clear()
                memory.is_saving = False
                self._complete(memory)
                if memory.backing == "copy_out":
                    is_whole = all(chunk.handle is not None for chunk in memory.chunks())
                    memory.step(TagEvent.COPY_STOPPED if is_whole else TagEvent.FAULT)


class Transfer:
    """Tags with copies under way. Not waiting for them leaks nothing: the arena's next call on a tag waits."""

    def __init__(
        self, context: TransferContext, lock: RLock, memories: Sequence[TaggedMemory], meter: TransferMeter
    ) -> None:
        self._context = context
        self._lock = lock
        self._memories: dict[Tag, TaggedMemory] = {memory.tag: memory for memory in memories}
        self._meter = meter

    def wait(self, tag: Tag) -> None:
        """Until this tag is done. Raises MemoryFault when a copy failed; the tag is poisoned then."""
        memory = self._memories.get(tag)
        if memory is None:
            others = ", ".join(self._memories) or "nothing is"
            raise MemoryFault(
                f"{self._context.place}: tag {tag!r} is not on its way here ({others})",
                remedy="wait for a tag that was asked for",
            )
        self._settle(memory)

    def wait_all(self) -> TransferStats:
        """Until everything is done."""
        for memory in self._memories.values():
            self._settle(memory)
        return self._meter.total()

    def _settle(self, memory: TaggedMemory, until: int | None = None) -> None:
        with self._lock, self._meter.part("copy"):
            settle(self._context, memory, until=until)


class Saving(Transfer):
    """From `Arena.begin_backup`."""


class Restoring(Transfer):
    """From `Arena.begin_restore`."""

    def wait_address(self, address: int) -> None:
        """Until the chunk that holds this address has arrived (and those of its tag that were begun before it)."""
        for memory in self._memories.values():
            if any(r.address <= address < r.address + r.mapped_bytes for r in memory.regions.values()):
                self._settle(memory, until=address)
                return
        raise MemoryFault(
            f"{self._context.place}: {address:#x} is in none of {', '.join(self._memories)}",
            remedy="wait for an address of a region of these tags",
        )
