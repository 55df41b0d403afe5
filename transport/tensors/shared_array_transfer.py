"""Takes large arrays out of messages to processes of this host, and fetches them at the other end.

Ways, best first, and what each costs:
    in place   the array lies in a block of ours already: only its handle travels
    pull       the receiver copies out of our private memory: one copy; only while the caller waits, for the array is
               lent until the call ends
    slab       copied into a block here, read in place or copied out there: casts, replies, items, and where pulling is
               not permitted
    wire       everything else: other hosts, no shared memory (in-process transport, simulator), no room in time

`Landing` is where pulled arrays are put: a fresh array of 64 MiB costs as much in page faults and zeroing as in
copying, so freed memory is kept for a few seconds, up to a limit, and given to the next array of about the same size.

`Loans` are arrays of callers that others may pull while a call is under way. Each loan has a generation word that the
reader copies before and after the data. The word is cleared when the loan ends, before the caller gets its array back;
a reader that is late or in the middle therefore knows that what it read may have changed, and throws it away.

`Releases` tell the owners of blocks that we keep one, and that we need it no longer. They are gathered per turn of the
loop and repeated until they are answered: a lost release would keep a block for as long as we live.
"""

from __future__ import annotations

import asyncio
import logging
import math
import mmap
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from ...core.clock import Clock
from ...core.errors import CallError, MyxaError, SlabError, TensorLost
from ...core.ids import PeerKey
from ..payload import Buffer
from ..shm import available_bytes
from ..wire import Endpoints
from .copier import Copier
from .handles import Handle, PullHandle, SlabHandle, has_handles, join, part
from .kernel import anonymous, prefer_huge_pages, pull
from .ledger import Block, BlockLedger
from .same_host_peers import Neighbour, Reach, SameHostPeers
from .slab import Bytes, SlabMapping, address_of, read_only, region
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


class SharedArrayTransfer:
    """See the module's head."""

    def __init__(
        self, clock: Clock, copier: Copier, ledger: BlockLedger, pool: SlabPool, loans: Loans, landing: Landing,
        same_host_peers: SameHostPeers, releases: Releases,
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
        self._same_host_peers = same_host_peers
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
        reach = await self._same_host_peers.reach(peer, endpoints, wait_s)
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
        neighbour = self._same_host_peers.get(peer)
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
        neighbour = self._same_host_peers.get(peer)
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


IDLE_S = 3.0
MAX_WASTE = 1.25
"""Spare memory may be so many times larger than what is asked for."""
_SMALL_STEP = 64 << 10
_LARGE_STEP = 2 << 20
_LARGE_FROM = 16 << 20
_ASK_FROM = 64 << 20
"""From this size on, the host is asked whether it has the memory."""


class Landing:
    """Gives out memory. `take` and `trim` belong to the loop's thread; memory may come back in any."""

    def __init__(self, spare_bytes: int) -> None:
        self.spare_bytes = spare_bytes
        """Kept at most."""
        self._spare: list[tuple[float, mmap.mmap]] = []
        self._back: deque[mmap.mmap] = deque()
        self._is_closed = False

    def take(self, num_bytes: int, now: float) -> Bytes:
        """Writable memory of that size, its content undefined. Raises MemoryError."""
        self._collect(now)
        memory = self._warm(num_bytes) or self._fresh(num_bytes)
        whole = np.frombuffer(memory, dtype=np.uint8)
        return region(address_of(whole), num_bytes, lambda: self._give_back(memory))

    def trim(self, now: float) -> None:
        """Free what nobody wanted for a while."""
        self._collect(now)
        self._spare = [(since, memory) for since, memory in self._spare if now - since < IDLE_S]

    def close(self) -> None:
        """Keep nothing; memory in use is freed with its arrays."""
        self._is_closed = True
        self._spare.clear()
        self._back.clear()

    @property
    def num_spare_bytes(self) -> int:
        return sum(len(memory) for _, memory in self._spare)

    def _give_back(self, memory: mmap.mmap) -> None:
        if not self._is_closed:
            self._back.append(memory)

    def _collect(self, now: float) -> None:
        while self._back:
            self._spare.append((now, self._back.popleft()))
        while self.num_spare_bytes > self.spare_bytes:
            del self._spare[0]

    def _warm(self, num_bytes: int) -> mmap.mmap | None:
        fitting = [i for i, (_, m) in enumerate(self._spare) if num_bytes <= len(m) <= MAX_WASTE * num_bytes]
        return self._spare.pop(min(fitting, key=lambda i: len(self._spare[i][1])))[1] if fitting else None

    def _fresh(self, num_bytes: int) -> mmap.mmap:
        step = _SMALL_STEP if num_bytes < _LARGE_FROM else _LARGE_STEP
        size = -(-num_bytes // step) * step
        if size >= _ASK_FROM and size > available_bytes():
            raise MemoryError(f"{size} bytes are more than the host has free")
        try:
            memory = anonymous(size)
        except (OSError, ValueError, OverflowError) as error:
            raise MemoryError(f"{size} bytes: {error}") from error
        prefer_huge_pages(address_of(np.frombuffer(memory, dtype=np.uint8)), size)
        return memory


MAX_LOANS = 1024


@dataclass(frozen=True, slots=True)
class Loan:
    """One array on loan."""

    slot: int
    address: int
    num_bytes: int
    word: int
    """Address of the generation word."""
    generation: int


class Loans:
    """All loans of this process."""

    def __init__(self, first_generation: int) -> None:
        self._next_generation = first_generation
        self._words = np.zeros(MAX_LOANS, dtype=np.uint64)
        self._base = int(self._words.__array_interface__["data"][0])
        self._free = list(range(MAX_LOANS))
        self._lent: dict[int, memoryview] = {}

    def __len__(self) -> int:
        return len(self._lent)

    def lend(self, memory: memoryview) -> Loan | None:
        """From now until `end` these bytes may be read by others; they stay in memory. None: too many loans."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._next_generation += 1
        self._lent[slot] = memory
        self._words[slot] = self._next_generation
        address = address_of(np.frombuffer(memory, dtype=np.uint8))
        return Loan(slot, address, memory.nbytes, self._base + 8 * slot, self._next_generation)

    def end(self, loan: Loan) -> None:
        """What is read from now on is void."""
        self._words[loan.slot] = 0
        del self._lent[loan.slot]
        self._free.append(loan.slot)


RETRY_S = 1.0
MAX_ATTEMPTS = 60

_log = logging.getLogger("myxa.transport")


class Releases:
    """Tells. `add_from_anywhere` may be called in any thread, all else on the loop."""

    def __init__(self, same_host_peers: SameHostPeers) -> None:
        self._same_host_peers = same_host_peers
        self._loop = asyncio.get_running_loop()
        self._due: dict[PeerKey, list[int]] = {}
        self._is_closed = False

    async def hold(self, owner: PeerKey, ticket: int) -> bool:
        """Keep a block; False: its offer is over, or its owner cannot be asked."""
        try:
            return await self._same_host_peers.ref(owner).hold(ticket)
        except CallError:
            return False

    def add_from_anywhere(self, owner: PeerKey, ticket: int, _mapping: SlabMapping) -> None:
        """The last array over a block is gone (the mapping was kept until now)."""
        if self._is_closed or self._loop.is_closed():
            return
        try:
            self._loop.call_soon_threadsafe(self.add, owner, ticket)
        except RuntimeError:
            return  # the loop was closed meanwhile; the owner hears of our end

    def add(self, owner: PeerKey, ticket: int) -> None:
        """We have read that block."""
        if self._is_closed:
            return
        waiting = self._due.get(owner)
        if waiting is not None:
            waiting.append(ticket)
            return
        self._due[owner] = [ticket]
        self._same_host_peers.spawn(self._tell(owner), f"releases blocks of {owner}")

    async def _tell(self, owner: PeerKey) -> None:
        try:
            for _ in range(MAX_ATTEMPTS):
                while due := self._due[owner]:
                    self._due[owner] = []
                    if not await self._told(owner, tuple(due)):
                        self._due[owner] += due
                        break
                else:
                    return
                if self._same_host_peers.is_over(owner):
                    return
                await asyncio.sleep(RETRY_S)
            _log.warning("%s was not told that %d of its blocks are not needed", owner, len(self._due[owner]))
        finally:
            del self._due[owner]

    async def _told(self, owner: PeerKey, tickets: tuple[int, ...]) -> bool:
        try:
            await self._same_host_peers.ref(owner).release(tickets)
        except MyxaError:
            return False
        return True

    def close(self) -> None:
        """Tell nobody any more: our end says it all."""
        self._is_closed = True


class TensorPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one process; sizes in bytes."""

    threshold_bytes: int = 256 << 10
    """Arrays from this size on travel as a handle; 0: none does."""
    pool_bytes: int = 512 << 20
    """Shared memory for blocks, at most."""
    spare_bytes: int = 1 << 30
    """Memory of received arrays that is kept warm for the next ones for a few seconds, at most."""
    wait_s: float = 0.2
    """How long a message waits for room in the pool before its array goes over the wire."""
    may_pull: bool = True
    """Let others read arrays of ours that are lent, where the kernel permits it."""
    may_map: bool = True
    """Let others read our slabs."""
