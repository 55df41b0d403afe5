"""What all moves of an arena share: where they work, what they report, and how chunks get and lose their memory."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from ...core.clock import Clock
from ...core.errors import MemoryFault
from .driver import VmmDriver
from .host_pool import HostPool
from .readback import Readback
from .tagged_memory import Chunk

OnFreed = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Moved:
    """What one release, restore or backup did."""

    copied_bytes: int = 0
    """Between device and host."""
    dropped_bytes: int = 0
    """Left the device without a copy."""
    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict[str, float])
    """Of the seconds: copy (waiting for copies), unmap, map, verify."""


@dataclass(slots=True)
class Floor:
    """Where moves happen: one device, one pool."""

    driver: VmmDriver
    pool: HostPool
    clock: Clock
    readback: Readback
    window_bytes: int
    """Copies begun and not waited for."""
    is_verifying: bool
    on_freed: OnFreed | None
    """Told by releases alone."""

    @property
    def place(self) -> str:
        """For messages."""
        return f"arena on {self.driver.device}"

    def give_memory(self, chunk: Chunk) -> None:
        """Create and map, or neither."""
        handle = self.driver.create(chunk.num_bytes)
        try:
            self.driver.map(chunk.address, chunk.num_bytes, handle)
        except MemoryFault:
            self.driver.release(handle, chunk.num_bytes)
            raise
        chunk.handle = handle

    def take_memory(self, chunk: Chunk) -> None:
        """Unmap and release; nothing to do for a chunk that has none."""
        if chunk.handle is None:
            return
        self.driver.unmap(chunk.address, chunk.num_bytes)
        handle, chunk.handle = chunk.handle, None
        self.driver.release(handle, chunk.num_bytes)

    def give_all(self, chunks: Iterable[Chunk]) -> None:
        """Memory for every chunk, or for none of them."""
        done: list[Chunk] = []
        try:
            for chunk in chunks:
                self.give_memory(chunk)
                done.append(chunk)
        except MemoryFault:
            for chunk in done:
                self.take_memory(chunk)
            raise

    def give_up_copy(self, chunk: Chunk) -> None:
        """The slab goes back to the pool."""
        slab, chunk.slab = chunk.slab, None
        chunk.is_copied = False
        chunk.checksum = None
        if slab is not None:
            self.pool.give(slab)


class Account:
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

    def total(self) -> Moved:
        """Up to now."""
        return Moved(self.copied_bytes, self.dropped_bytes, self._clock.monotonic() - self._started, dict(self._parts))


def at_place(place: str, error: MemoryFault) -> MemoryFault:
    """The same kind of error, told where it happened."""
    return type(error)(f"{place}: {error.message}", remedy=error.remedy)


def begin_copy_out(floor: Floor, chunk: Chunk) -> int:
    """Returns the ticket."""
    if chunk.slab is None:
        raise MemoryFault(f"{chunk.num_bytes:,} bytes at {chunk.address:#x} have no place on the host")
    chunk.is_copied = False
    return floor.driver.copy_out(chunk.slab, chunk.address, chunk.num_bytes)


def finish_copy_out(floor: Floor, chunk: Chunk, ticket: int) -> None:
    """After it the slab holds the contents."""
    floor.driver.wait(ticket)
    if floor.is_verifying and chunk.slab is not None:
        floor.readback.prove(chunk, chunk.slab)
        chunk.checksum = floor.readback.checksum(chunk, chunk.slab)
    chunk.is_copied = True


def wait_out(floor: Floor, tickets: Iterable[int]) -> None:
    """After a failure: nothing that was begun goes on behind anybody's back. What fails too is not told again."""
    for ticket in tickets:
        with suppress(MemoryFault):
            floor.driver.wait(ticket)
