"""Who may read which piece of our shared memory, and until when. Sans-IO; time passed in.

A *block* is a piece of a slab, written by this process. A *lease* lets one other incarnation read a block; leases, not
counters in the memory itself, decide when a block may be written again, because a reader that dies cannot count down.
Every block that is given out has a generation number that no other block of this process ever had.

    block    OWNED --lease--> LENT --settled--> OWNED          its owner holds it
             OWNED --dropped--> FREE     LENT --dropped--> ORPHAN --settled--> FREE
    lease    OFFERED --hold--> HELD     a message that may arrive / a reader that said so
             OFFERED --release | withdraw | expire | over--> ENDED     HELD --release | over--> ENDED

An offer expires, for its message may be lost. A held lease does not: it ends when the holder says so or is over.
`FreeBytes` says which bytes of one slab are free: first fit, neighbours join when they are given back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from ...core.ids import PeerKey

NUM_SLOTS = 504
"""Generation words per slab, hence blocks per slab."""


class BlockState(Enum):
    """Of a piece of our memory."""

    OWNED = "owned"
    LENT = "lent"
    ORPHAN = "lent, and its owner is done with it"
    FREE = "free"


class LeaseState(Enum):
    """Of one reader's right to one block."""

    OFFERED = "offered"
    HELD = "held"
    ENDED = "ended"


BLOCK_TABLE: dict[tuple[BlockState, str], BlockState] = {
    (BlockState.OWNED, "lease"): BlockState.LENT,
    (BlockState.LENT, "lease"): BlockState.LENT,
    (BlockState.LENT, "settled"): BlockState.OWNED,
    (BlockState.ORPHAN, "settled"): BlockState.FREE,
    (BlockState.OWNED, "dropped"): BlockState.FREE,
    (BlockState.LENT, "dropped"): BlockState.ORPHAN,
}
LEASE_TABLE: dict[tuple[LeaseState, str], LeaseState] = {
    (LeaseState.OFFERED, "hold"): LeaseState.HELD,
    (LeaseState.HELD, "hold"): LeaseState.HELD,
    (LeaseState.OFFERED, "release"): LeaseState.ENDED,
    (LeaseState.OFFERED, "withdraw"): LeaseState.ENDED,
    (LeaseState.OFFERED, "expire"): LeaseState.ENDED,
    (LeaseState.OFFERED, "over"): LeaseState.ENDED,
    (LeaseState.HELD, "release"): LeaseState.ENDED,
    (LeaseState.HELD, "over"): LeaseState.ENDED,
    (LeaseState.HELD, "withdraw"): LeaseState.HELD,
    (LeaseState.HELD, "expire"): LeaseState.HELD,
}


@dataclass(slots=True, eq=False)
class SharedBlock:
    """A piece of slab `slab`."""

    slab: int
    offset: int
    num_bytes: int
    slot: int
    """Which of the slab's words holds its generation."""
    generation: int
    state: BlockState = BlockState.OWNED
    leases: set[int] = field(default_factory=set[int])

    def on(self, event: str) -> None:
        """Move to the next state; KeyError for an event that the table does not know in this one: a bug."""
        self.state = BLOCK_TABLE[self.state, event]


@dataclass(slots=True, eq=False)
class Lease:
    """One incarnation's right to read one block."""

    ticket: int
    block: SharedBlock
    holder: PeerKey
    expires_at: float
    state: LeaseState = LeaseState.OFFERED


class BlockTable:
    """All blocks and leases of this process. Methods that may free blocks return those that are free now."""

    def __init__(self, first_number: int) -> None:
        self._next_number = first_number
        """For tickets and generations; random at the start, so that numbers of another incarnation never fit."""
        self._shelves: dict[int, FreeBytes] = {}
        self._slots: dict[int, list[int]] = {}
        self._blocks: dict[int, set[SharedBlock]] = {}
        self._leases: dict[int, Lease] = {}

    # -- slabs

    def add_slab(self, slab: int, num_bytes: int) -> None:
        """There is a new slab to cut blocks from."""
        self._shelves[slab] = FreeBytes(num_bytes)
        self._slots[slab] = list(range(NUM_SLOTS))
        self._blocks[slab] = set()

    def idle_slabs(self) -> tuple[int, ...]:
        """Slabs without a block, largest first."""
        idle = [slab for slab, blocks in self._blocks.items() if not blocks]
        return tuple(sorted(idle, key=lambda slab: -self._shelves[slab].num_bytes))

    def remove_slab(self, slab: int) -> None:
        """Forget an idle slab; ValueError if it is not idle."""
        if self._blocks[slab]:
            raise ValueError(f"slab {slab} has {len(self._blocks[slab])} blocks in use")
        del self._shelves[slab], self._slots[slab], self._blocks[slab]

    # -- blocks

    def allocate(self, num_bytes: int) -> SharedBlock | None:
        """A block with its own generation, OWNED; None: there is no room now."""
        for slab, shelf in self._shelves.items():
            if not self._slots[slab]:
                continue
            offset = shelf.take(num_bytes)
            if offset is not None:
                block = SharedBlock(slab, offset, num_bytes, self._slots[slab].pop(), self._number())
                self._blocks[slab].add(block)
                return block
        return None

    def find(self, slab: int, offset: int, num_bytes: int) -> SharedBlock | None:
        """The block that its owner still holds and that contains these bytes."""
        for block in self._blocks.get(slab, ()):
            is_inside = block.offset <= offset and offset + num_bytes <= block.offset + block.num_bytes
            if is_inside and block.state in (BlockState.OWNED, BlockState.LENT):
                return block
        return None

    def renew(self, block: SharedBlock) -> None:
        """It is about to be written again: what was said of it before is void. ValueError while it is lent."""
        if block.state is not BlockState.OWNED:
            raise ValueError(f"a block that is {block.state.value} cannot be written")
        block.generation = self._number()

    def drop(self, block: SharedBlock) -> list[SharedBlock]:
        """Its owner is done with it."""
        block.on("dropped")
        return self._freed([block])

    # -- leases

    def offer(self, block: SharedBlock, holder: PeerKey, expires_at: float) -> Lease:
        """A message with the block's place goes to `holder`."""
        lease = Lease(self._number(), block, holder, expires_at)
        block.on("lease")
        block.leases.add(lease.ticket)
        self._leases[lease.ticket] = lease
        return lease

    def hold(self, ticket: int, holder: PeerKey) -> bool:
        """The reader will keep it until it releases it; False: too late, or not the reader's."""
        lease = self._leases.get(ticket)
        if lease is None or lease.holder != holder:
            return False
        lease.state = LEASE_TABLE[lease.state, "hold"]
        return True

    def release(self, tickets: Iterable[int], holder: PeerKey) -> list[SharedBlock]:
        """The reader is done. Tickets that are unknown (any more), or another's, have no effect."""
        leases = (self._leases.get(ticket) for ticket in tickets)
        return self._end([lease for lease in leases if lease is not None and lease.holder == holder], "release")

    def withdraw(self, lease: Lease) -> list[SharedBlock]:
        """The message was not sent, or the call that it made has ended. What is held stays held."""
        return self._end([lease] if lease.ticket in self._leases else [], "withdraw")

    def over(self, holder: PeerKey) -> list[SharedBlock]:
        """That incarnation has ended."""
        return self._end([lease for lease in self._leases.values() if lease.holder == holder], "over")

    def expire(self, now: float) -> list[SharedBlock]:
        """End the offers whose time has passed."""
        due = [x for x in self._leases.values() if x.state is LeaseState.OFFERED and x.expires_at <= now]
        return self._end(due, "expire")

    def holders(self) -> set[PeerKey]:
        """Incarnations that have a lease."""
        return {lease.holder for lease in self._leases.values()}

    def holders_of(self, block: SharedBlock) -> list[PeerKey]:
        """Incarnations that have a lease of this block."""
        return sorted({self._leases[ticket].holder for ticket in block.leases})

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self._blocks.values()))

    # -- inside

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number

    def _end(self, leases: list[Lease], event: str) -> list[SharedBlock]:
        settled: list[SharedBlock] = []
        for lease in leases:
            lease.state = LEASE_TABLE[lease.state, event]
            if lease.state is not LeaseState.ENDED:
                continue
            del self._leases[lease.ticket]
            lease.block.leases.discard(lease.ticket)
            if not lease.block.leases:
                lease.block.on("settled")
                settled.append(lease.block)
        return self._freed(settled)

    def _freed(self, blocks: list[SharedBlock]) -> list[SharedBlock]:
        freed = [block for block in blocks if block.state is BlockState.FREE]
        for block in freed:
            self._blocks[block.slab].remove(block)
            self._slots[block.slab].append(block.slot)
            self._shelves[block.slab].give(block.offset, block.num_bytes)
        return freed


PAGE = 4096


def whole_pages(num_bytes: int) -> int:
    """Rounded up; never nothing."""
    return max(PAGE, -(-num_bytes // PAGE) * PAGE)


class FreeBytes:
    """Free ranges of a slab, by offset; none touches the next."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._free: list[tuple[int, int]] = [(0, num_bytes)]

    @property
    def free_bytes(self) -> int:
        return sum(size for _, size in self._free)

    def take(self, num_bytes: int) -> int | None:
        """Offset of a range of so many bytes (rounded up to pages), or None: none is long enough."""
        wanted = whole_pages(num_bytes)
        for i, (offset, size) in enumerate(self._free):
            if size >= wanted:
                rest = [(offset + wanted, size - wanted)] if size > wanted else []
                self._free[i : i + 1] = rest
                return offset
        return None

    def give(self, offset: int, num_bytes: int) -> None:
        """A range that was taken is free again. ValueError if part of it is free already."""
        size = whole_pages(num_bytes)
        place = sum(1 for start, _ in self._free if start < offset)
        before = self._free[place - 1] if place else None
        after = self._free[place] if place < len(self._free) else None
        if (before and before[0] + before[1] > offset) or (after and offset + size > after[0]):
            raise ValueError(f"bytes {offset}..{offset + size} are free already")
        joined = (offset, size)
        first, last = place, place
        if before and before[0] + before[1] == offset:
            joined, first = (before[0], before[1] + size), place - 1
        if after and offset + size == after[0]:
            joined, last = (joined[0], joined[1] + after[1]), place + 1
        self._free[first:last] = [joined]
