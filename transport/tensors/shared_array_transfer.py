"""Takes large arrays out of messages to processes of this host, and fetches them at the other end.

The ways, best first, and what each costs:

    in place   the array lies in a block of ours already: only its handle travels
    pull       the receiver copies out of our private memory: one copy; only while the caller waits, for the array is
               lent until the call ends
    slab       copied into a block here, read in place or copied out there: casts, replies, items, and where pulling is
               not permitted
    wire       everything else: other hosts, no shared memory (in-process transport, simulator), no room in time

A body with handles is a line of JSON that begins with `{`, then the usual body, which begins with `[`. The frame of an
array that lies elsewhere is empty. Headers, credit and the session do not change.

`ReceiveMemory` is where pulled arrays are put: a fresh array of 64 MiB costs as much in page faults and zeroing as in
copying, so freed memory is kept for a few seconds, up to a limit, and given to the next array of about the same size.

`PullGrants` are arrays of callers that others may pull while a call is under way. Each has a generation word that the
reader copies before and after the data. The word is cleared when the grant ends, before the caller gets its array back.
So a reader that is late or in the middle sees that its data may have changed, and discards it.

`Releases` report to the owners of blocks that we keep one, and that we need it no longer. They are gathered per turn of
the loop and repeated until they are answered: a lost release would keep a block for as long as we live.
"""

from __future__ import annotations

import asyncio
import logging
import math
import mmap
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import numpy as np

from ...core.clock import Clock
from ...core.errors import CallError, MyxaError, SlabError, TensorLost
from ...core.ids import PeerKey
from ..codec import Buffer, UndecodableError
from ..shm import available_bytes
from ..wire import Endpoints
from .blocks import BlockTable, SharedBlock
from .kernel import anonymous, prefer_huge_pages, pull
from .same_host_peers import PeerReach, SameHostPeer, SameHostPeers
from .slabs import Bytes, Copier, SlabMapping, SlabPool, address_of, read_only, region

MAX_ARRAY_BYTES = 1 << 40
MAX_HANDLES = 4096
_FIRST = ord("{")

Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Size = Annotated[int, msgspec.Meta(gt=0, le=MAX_ARRAY_BYTES)]


class PullHandle(msgspec.Struct, frozen=True, kw_only=True, tag="pull", forbid_unknown_fields=True):
    """An array in the sender's private memory."""

    frame: Number
    """Index of the empty frame in its place."""
    address: Number
    num_bytes: Size
    word: Number
    """Address of its generation word."""
    generation: Number


class SlabHandle(msgspec.Struct, frozen=True, kw_only=True, tag="slab", forbid_unknown_fields=True):
    """An array in a slab of the sender."""

    frame: Number
    path: str
    slab_id: Number
    offset: Number
    num_bytes: Size
    slot: Number
    generation: Number
    ticket: Number
    """Of the lease."""
    is_awaited: bool = True
    """The sender waits to hear that it was read; else it ends the offer itself, with its call."""


Handle = PullHandle | SlabHandle


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    arrays: Annotated[list[Handle], msgspec.Meta(max_length=MAX_HANDLES)]


_decoder = msgspec.json.Decoder(_Line)


def has_handles(body: Buffer) -> bool:
    """Whether arrays of this message lie elsewhere."""
    return len(body) > 0 and body[0] == _FIRST


def join(handles: Sequence[Handle], body: Buffer) -> bytes:
    """A body with handles."""
    return b"".join([msgspec.json.encode(_Line(list(handles))), b"\n", body])


def part(body: Buffer, num_frames: int) -> tuple[list[Handle], memoryview]:
    """Handles and the usual body. Raises UndecodableError; never anything else, whatever the bytes."""
    line, newline, _ = bytes(body).partition(b"\n")
    if not newline:
        raise UndecodableError("a line of handles without an end")
    try:
        handles = _decoder.decode(line).arrays
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UndecodableError(f"handles: {error}") from error
    frames = [handle.frame for handle in handles]
    if len(set(frames)) != len(frames) or any(frame >= num_frames for frame in frames):
        raise UndecodableError(f"handles for frames {frames[:8]} of a message with {num_frames}")
    return handles, memoryview(body)[len(line) + 1 :]


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
    """Hands arrays of messages over to processes of the same host."""

    def __init__(
        self, clock: Clock, copier: Copier, block_table: BlockTable, pool: SlabPool, grants: PullGrants,
        receive_memory: ReceiveMemory, same_host_peers: SameHostPeers, releases: Releases,
    ) -> None:  # fmt: skip
        self.policy = TensorPolicy()
        self.num_by = {"in place": 0, "pull": 0, "slab": 0, "wire": 0, "lost": 0}
        """Large arrays sent, by way; and those that could not be fetched here."""
        self._clock = clock
        self._copier = copier
        self._block_table = block_table
        self._pool = pool
        self._grants = grants
        self._receive_memory = receive_memory
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
        self, packed: Packed, reach: PeerReach, peer: PeerKey, number: int, frame: memoryview, is_lent: bool,
        left_s: float | None,
    ) -> Handle | None:  # fmt: skip
        can_map = reach.can_map and self.policy.may_map
        own = self._pool.find(address_of(np.frombuffer(frame, np.uint8)), frame.nbytes) if can_map else None
        if own is not None:
            self.num_by["in place"] += 1
            return self._offered(packed, *own, frame.nbytes, peer, number, is_lent, left_s)
        if is_lent and reach.can_pull and self.policy.may_pull and (loan := self._grants.lend(frame)) is not None:
            packed.at_end.append(lambda: self._grants.end(loan))
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
            self._pool.freed(self._block_table.drop(block))  # from now on its leases keep it

    async def _copied(self, frame: memoryview, left_s: float | None) -> SharedBlock | None:
        wait_s = self.policy.wait_s if left_s is None else min(self.policy.wait_s, left_s / 4)
        block = await self._pool.allocate(frame.nbytes, wait_s)
        if block is None:
            return None
        source = np.frombuffer(frame, np.uint8)
        target = self._pool.memory(block)
        try:
            await self._copier.copy(lambda at, n: np.copyto(target[at : at + n], source[at : at + n]), frame.nbytes)
        except BaseException as error:
            self._pool.freed(self._block_table.drop(block))
            if isinstance(error, SlabError):
                return None  # this process is closing; the call will say so
            raise
        return block

    def _offered(
        self, packed: Packed, block: SharedBlock, offset: int, num_bytes: int, peer: PeerKey, number: int,
        is_lent: bool, left_s: float | None,
    ) -> SlabHandle:  # fmt: skip
        self._pool.publish(block)
        offer_s = math.inf if is_lent else (DEFAULT_OFFER_S if left_s is None else left_s) + OFFER_GRACE_S
        lease = self._block_table.offer(block, peer, self._clock.monotonic() + offer_s)
        ends = packed.at_end if is_lent else packed.if_unsent
        ends.append(lambda: self._pool.freed(self._block_table.withdraw(lease)))
        packed.has_slabs = True
        slab = self._pool.slab(block)
        return SlabHandle(
            frame=number, path=slab.path, slab_id=slab.slab_id, offset=offset, num_bytes=num_bytes, slot=block.slot,
            generation=block.generation, ticket=lease.ticket, is_awaited=not is_lent,
        )  # fmt: skip

    def note_lost(self, peer: PeerKey, packed: Packed) -> None:
        """The peer could not read what the message pointed at: that way is not tried again for a while."""
        host_peer = self._same_host_peers.get(peer)
        if host_peer is not None:
            host_peer.reach.lost(pull=packed.has_pulls, now=self._clock.monotonic())

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
        host_peer = self._same_host_peers.get(peer)
        if host_peer is None:
            raise SlabError(f"nothing is known of the memory of {peer}")
        if isinstance(handle, PullHandle):
            return await self._pulled(host_peer, handle)
        mapping = await self._mapping(host_peer, handle)
        if may_lease:
            return await self._leased(peer, mapping, handle)
        try:
            return await self._copied_out(mapping, handle)
        finally:
            if handle.is_awaited:
                self._releases.add(peer, handle.ticket)

    async def _pulled(self, host_peer: SameHostPeer, handle: PullHandle) -> Bytes:
        if not host_peer.is_readable:
            raise SlabError(f"{host_peer.key} may not be pulled from")
        pid, wanted = host_peer.pid, (handle.generation, handle.generation)
        target = self._receive_memory.take(handle.num_bytes, self._clock.monotonic())
        base = address_of(target)

        def step(offset: int, count: int) -> None:
            if pull(pid, handle.address + offset, base + offset, count, handle.word) != wanted:
                raise SlabError("it is lent no longer")

        await self._copier.copy(step, handle.num_bytes)
        if not host_peer.is_alive:
            raise SlabError("its process has ended")
        return target

    async def _mapping(self, host_peer: SameHostPeer, handle: SlabHandle) -> SlabMapping:
        now = self._clock.monotonic()
        mapping = host_peer.mapping(handle.slab_id, now)
        if mapping is None:
            path = host_peer.check_path(handle.path)
            mapping = await self._copier.run(lambda: SlabMapping.open(path, handle.slab_id))
            host_peer.keep(handle.slab_id, mapping, now)
        return mapping

    async def _copied_out(self, mapping: SlabMapping, handle: SlabHandle) -> Bytes:
        source = mapping.memory(handle.offset, handle.num_bytes)
        target = self._receive_memory.take(handle.num_bytes, self._clock.monotonic())
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


class ReceiveMemory:
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
        """Free what was not used for a while."""
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
class PullGrant:
    """One array on loan."""

    slot: int
    address: int
    num_bytes: int
    word: int
    """Address of the generation word."""
    generation: int


class PullGrants:
    """All grants of this process."""

    def __init__(self, first_generation: int) -> None:
        self._next_generation = first_generation
        self._words = np.zeros(MAX_LOANS, dtype=np.uint64)
        self._base = int(self._words.__array_interface__["data"][0])
        self._free = list(range(MAX_LOANS))
        self._lent: dict[int, memoryview] = {}

    def __len__(self) -> int:
        return len(self._lent)

    def lend(self, memory: memoryview) -> PullGrant | None:
        """From now until `end` these bytes may be read by others; they stay in memory. None: too many grants."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._next_generation += 1
        self._lent[slot] = memory
        self._words[slot] = self._next_generation
        address = address_of(np.frombuffer(memory, dtype=np.uint8))
        return PullGrant(slot, address, memory.nbytes, self._base + 8 * slot, self._next_generation)

    def end(self, loan: PullGrant) -> None:
        """What is read from now on is void."""
        self._words[loan.slot] = 0
        del self._lent[loan.slot]
        self._free.append(loan.slot)


RETRY_S = 1.0
MAX_ATTEMPTS = 60

_log = logging.getLogger("myxa.transport")


class Releases:
    """Reports read blocks to their owners. `add_from_anywhere` may be called in any thread, all else on the loop."""

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
                    if not await self._sent(owner, tuple(due)):
                        self._due[owner] += due
                        break
                else:
                    return
                if self._same_host_peers.is_over(owner):
                    return
                await asyncio.sleep(RETRY_S)
            _log.warning("%s did not hear that %d of its blocks are not needed", owner, len(self._due[owner]))
        finally:
            del self._due[owner]

    async def _sent(self, owner: PeerKey, tickets: tuple[int, ...]) -> bool:
        try:
            await self._same_host_peers.ref(owner).release(tickets)
        except MyxaError:
            return False
        return True

    def close(self) -> None:
        """Notify no peer any more: our end says it all."""
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
