"""Takes large arrays out of messages to processes of this host, and fetches them at the other end.

Ways, best first, and what each costs:
    in place   the array lies in a block of ours already: only its handle travels
    pull       the receiver copies out of our private memory: one copy; only while the caller waits, for the array is
               lent until the call ends
    slab       copied into a block here, read in place or copied out there: casts, replies, items, and where pulling is
               not permitted
    wire       everything else: other hosts, no shared memory (in-process transport, simulator), no room in time
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...core.clock import Clock
from ...core.errors import SlabError, TensorLost
from ...core.ids import PeerKey
from ..payload import Buffer
from ..wire import Endpoints
from .copier import Copier
from .handles import Handle, PullHandle, SlabHandle, has_handles, join, part
from .kernel import pull
from .landing import Landing
from .ledger import Block, Ledger
from .loans import Loans
from .neighbourhood import Neighbourhood
from .neighbours import Neighbour, Reach
from .policy import TensorPolicy
from .region import Bytes, address_of, read_only, region
from .releases import Releases
from .slab import SlabMapping
from .slab_pool import SlabPool

OFFER_GRACE_S = 5.0
"""An offer outlives the deadline of its message by so much: the receiver's clock began later."""
DEFAULT_OFFER_S = 60.0
PROBE_WAIT_S = 2.0


@dataclass(slots=True)
class Packed:
    """A message as it will travel. `end` when its call has ended, or when it was not sent."""

    body: Buffer
    frames: tuple[Buffer, ...]
    has_pulls: bool = False
    has_slabs: bool = False
    at_end: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    if_unsent: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])

    def end(self) -> None:
        """Take back what was lent, and what was offered in a message that was not sent."""
        for end in (*self.at_end, *self.if_unsent):
            end()
        self.at_end.clear()
        self.if_unsent.clear()

    @property
    def is_by_handles(self) -> bool:
        return self.has_pulls or self.has_slabs

    def sent(self) -> None:
        """It is on its way: what it offers, unless for the time of a call only, stays until it was read."""
        self.if_unsent.clear()


class Porter:
    """See the module's head."""

    def __init__(
        self, clock: Clock, copier: Copier, ledger: Ledger, pool: SlabPool, loans: Loans, landing: Landing,
        neighbourhood: Neighbourhood, releases: Releases,
    ) -> None:  # fmt: skip
        self.policy = TensorPolicy()
        self.num_by = {"in place": 0, "pull": 0, "slab": 0, "wire": 0, "lost": 0}
        """Large arrays sent, by way; and those that could not be fetched here."""
        self._clock = clock
        self._copier = copier
        self._ledger = ledger
        self._pool = pool
        self._loans = loans
        self._landing = landing
        self._neighbourhood = neighbourhood
        self._releases = releases

    # -- sending

    def is_wanted(self, frames: Sequence[Buffer]) -> bool:
        """Whether a message has arrays that are worth the trouble."""
        threshold = self.policy.threshold_bytes
        return threshold > 0 and any(len(frame) >= threshold for frame in frames)

    async def pack(
        self,
        peer: PeerKey,
        endpoints: Endpoints | None,
        body: Buffer,
        frames: Sequence[Buffer],
        *,
        is_lent: bool,
        left_s: float | None,
    ) -> Packed:
        """The message with handles for what the peer can fetch. `is_lent`: the sender leaves the arrays alone until
        `Packed.end`; else they are copied before this returns. `left_s`: of its deadline."""
        wait_s = PROBE_WAIT_S if left_s is None else min(PROBE_WAIT_S, left_s / 2)
        reach = await self._neighbourhood.reach(peer, endpoints, wait_s)
        packed = Packed(body, tuple(frames))
        if not (reach.can_pull or reach.can_map):
            self.num_by["wire"] += sum(len(frame) >= self.policy.threshold_bytes for frame in frames)
            return packed
        handles: list[Handle] = []
        rest = list(frames)
        try:
            for number, frame in enumerate(frames):
                if len(frame) < max(1, self.policy.threshold_bytes):
                    continue
                handle = await self._handle(packed, reach, peer, number, memoryview(frame), is_lent, left_s)
                if handle is not None:
                    handles.append(handle)
                    rest[number] = b""
        except BaseException:
            packed.end()
            raise
        if handles:
            packed.body, packed.frames = join(handles, body), tuple(rest)
        return packed

    async def _handle(
        self, packed: Packed, reach: Reach, peer: PeerKey, number: int, frame: memoryview, is_lent: bool,
        left_s: float | None,
    ) -> Handle | None:  # fmt: skip
        can_map = reach.can_map and self.policy.may_map
        own = self._pool.find(address_of(np.frombuffer(frame, np.uint8)), frame.nbytes) if can_map else None
        if own is not None:
            self.num_by["in place"] += 1
            return self._offered(packed, *own, frame.nbytes, peer, number, is_lent, left_s)
        if is_lent and reach.can_pull and self.policy.may_pull and (loan := self._loans.lend(frame)) is not None:
            packed.at_end.append(lambda: self._loans.end(loan))
            packed.has_pulls = True
            self.num_by["pull"] += 1
            return PullHandle(
                frame=number, address=loan.address, num_bytes=loan.num_bytes, word=loan.word,
                generation=loan.generation,
            )  # fmt: skip
        block = await self._copied(frame, left_s) if can_map else None
        if block is None:
            self.num_by["wire"] += 1
            return None
        self.num_by["slab"] += 1
        try:
            return self._offered(packed, block, block.offset, frame.nbytes, peer, number, is_lent, left_s)
        finally:
            self._pool.freed(self._ledger.let_go(block))  # from now on its leases keep it

    async def _copied(self, frame: memoryview, left_s: float | None) -> Block | None:
        wait_s = self.policy.wait_s if left_s is None else min(self.policy.wait_s, left_s / 4)
        block = await self._pool.allocate(frame.nbytes, wait_s)
        if block is None:
            return None
        source = np.frombuffer(frame, np.uint8)
        target = self._pool.memory(block)
        try:
            await self._copier.copy(lambda at, n: np.copyto(target[at : at + n], source[at : at + n]), frame.nbytes)
        except BaseException as error:
            self._pool.freed(self._ledger.let_go(block))
            if isinstance(error, SlabError):
                return None  # this process is closing; the call will say so
            raise
        return block

    def _offered(
        self, packed: Packed, block: Block, offset: int, num_bytes: int, peer: PeerKey, number: int, is_lent: bool,
        left_s: float | None,
    ) -> SlabHandle:  # fmt: skip
        self._pool.publish(block)
        offer_s = math.inf if is_lent else (DEFAULT_OFFER_S if left_s is None else left_s) + OFFER_GRACE_S
        lease = self._ledger.offer(block, peer, self._clock.monotonic() + offer_s)
        ends = packed.at_end if is_lent else packed.if_unsent
        ends.append(lambda: self._pool.freed(self._ledger.withdraw(lease)))
        packed.has_slabs = True
        slab = self._pool.slab(block)
        return SlabHandle(
            frame=number, path=slab.path, slab_id=slab.slab_id, offset=offset, num_bytes=num_bytes, slot=block.slot,
            generation=block.generation, ticket=lease.ticket, is_awaited=not is_lent,
        )  # fmt: skip

    def note_lost(self, peer: PeerKey, packed: Packed) -> None:
        """The peer could not read what the message pointed at: that way is not tried again for a while."""
        neighbour = self._neighbourhood.get(peer)
        if neighbour is not None:
            neighbour.reach.lost(pull=packed.has_pulls, now=self._clock.monotonic())

    # -- receiving

    @staticmethod
    def has_handles(body: Buffer) -> bool:
        return has_handles(body)

    async def unpack(
        self, peer: PeerKey, body: Buffer, frames: Sequence[Buffer], *, may_lease: bool
    ) -> tuple[memoryview, list[memoryview]]:
        """The usual body and all frames. With `may_lease`, blocks of slabs are not copied but read in place, read-only,
        until the last array over them is gone.

        Raises UndecodableError for handles that make no sense, TensorLost for what cannot be read (any more).
        """
        handles, rest = part(body, len(frames))
        found = [memoryview(frame) for frame in frames]
        try:
            for handle in handles:
                found[handle.frame] = (await self._fetched(peer, handle, may_lease)).data
        except (OSError, SlabError, MemoryError) as error:
            self.num_by["lost"] += 1
            raise TensorLost(
                f"an array of {peer} could not be read where it said: {error}", remedy="it may be sent again"
            ) from error
        return rest, found

    async def _fetched(self, peer: PeerKey, handle: Handle, may_lease: bool) -> Bytes:
        neighbour = self._neighbourhood.get(peer)
        if neighbour is None:
            raise SlabError(f"nothing is known of the memory of {peer}")
        if isinstance(handle, PullHandle):
            return await self._pulled(neighbour, handle)
        mapping = await self._mapping(neighbour, handle)
        if may_lease:
            return await self._leased(peer, mapping, handle)
        try:
            return await self._copied_out(mapping, handle)
        finally:
            if handle.is_awaited:
                self._releases.add(peer, handle.ticket)

    async def _pulled(self, neighbour: Neighbour, handle: PullHandle) -> Bytes:
        if not neighbour.is_readable:
            raise SlabError(f"{neighbour.key} may not be pulled from")
        pid, wanted = neighbour.pid, (handle.generation, handle.generation)
        target = self._landing.take(handle.num_bytes, self._clock.monotonic())
        base = address_of(target)

        def step(offset: int, count: int) -> None:
            if pull(pid, handle.address + offset, base + offset, count, handle.word) != wanted:
                raise SlabError("it is lent no longer")

        await self._copier.copy(step, handle.num_bytes)
        if not neighbour.is_alive:
            raise SlabError("its process has ended")
        return target

    async def _mapping(self, neighbour: Neighbour, handle: SlabHandle) -> SlabMapping:
        now = self._clock.monotonic()
        mapping = neighbour.mapping(handle.slab_id, now)
        if mapping is None:
            path = neighbour.check_path(handle.path)
            mapping = await self._copier.run(lambda: SlabMapping.open(path, handle.slab_id))
            neighbour.keep(handle.slab_id, mapping, now)
        return mapping

    async def _copied_out(self, mapping: SlabMapping, handle: SlabHandle) -> Bytes:
        source = mapping.memory(handle.offset, handle.num_bytes)
        target = self._landing.take(handle.num_bytes, self._clock.monotonic())
        _check(mapping, handle)
        await self._copier.copy(lambda at, n: np.copyto(target[at : at + n], source[at : at + n]), handle.num_bytes)
        _check(mapping, handle)
        return target

    async def _leased(self, peer: PeerKey, mapping: SlabMapping, handle: SlabHandle) -> Bytes:
        source = mapping.memory(handle.offset, handle.num_bytes)
        if not await self._releases.hold(peer, handle.ticket):
            raise SlabError("its lease is over")

        def release() -> None:
            self._releases.add_from_anywhere(peer, handle.ticket, mapping)

        view = region(address_of(source), handle.num_bytes, release)
        _check(mapping, handle)
        return read_only(view)


def _check(mapping: SlabMapping, handle: SlabHandle) -> None:
    now = mapping.generation(handle.slot)
    if now != handle.generation:
        raise SlabError(f"its block was written again (generation {now}, wanted {handle.generation})")
