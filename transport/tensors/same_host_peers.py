"""The other processes of this host that can read our memory, or whose memory we read.

    reach   UNKNOWN --ask--> ASKING --found--> OPEN         by which ways that process can read our memory
            ASKING --nothing--> SHUT    OPEN --failed--> SHUT    SHUT --retry--> UNKNOWN

Reachability is found by really reading, once per pair of processes, for the first large array. The reader chooses a
random challenge, the other process writes it into its private memory and into a slab, and the reader looks for it in
both. So no process can have us read the memory of another, be it by a wrong number from another container or by
malice; whether the kernel, Yama or seccomp permit it needs no knowledge of them. At HELLO, for every pair, was
considered: most pairs never exchange a large array.

Each peer has a pidfd from before the first look at its memory: so a number that the kernel gives to another process is
noticed, and its exit is reported at once. Peers talk by ordinary small calls (`TensorMemoryContract`), which every node
answers under a number outside the registry's tables: they belong to a process, not to a name.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import secrets
from collections import deque
from collections.abc import Callable, Coroutine
from enum import Enum
from typing import Any, Protocol

import msgspec

from ...core.actor import Actor
from ...core.clock import Clock
from ...core.errors import CallError, MyxaError, NoSuchActor, SlabError
from ...core.handlers import NO_SCOPE, HandlerSpec, call, fresh_context
from ...core.ids import PeerKey
from ...core.process import boot_id
from ...core.refs import RequestSender, make_ref
from ..session.pending import Route
from ..wire import Endpoints
from .kernel import IS_LINUX, admit_reader, has_exited, read_bytes, watch_process
from .slabs import Slab, SlabMapping

CHALLENGE_BYTES = 32
MAX_CHALLENGES = 64


class Peers(Protocol):
    """What is known of other incarnations: the session."""

    def endpoints_of(self, key: PeerKey) -> Endpoints | None: ...

    def is_over(self, key: PeerKey) -> bool: ...


class Directions:
    """Where the memory parts of other processes are, of which the registry knows nothing. A `call_client.Finder`."""

    def __init__(self, own: PeerKey, endpoints: Endpoints, peers: Peers) -> None:
        self._own = own
        self._endpoints = endpoints
        self._peers = peers
        self.routes: dict[tuple[str, str, str], Route] = {}
        self.met_at: dict[PeerKey, Endpoints] = {}
        """Of processes that there may be no connection to yet."""

    def route(self, target: str, spec: HandlerSpec) -> Route | CallError | None:
        node_id, _, epoch = target.removeprefix("memory/").partition(".")
        key = PeerKey(int(node_id), int(epoch))
        endpoints = self.endpoints_of(key)
        if endpoints is None or self._peers.is_over(key):
            return NoSuchActor(f"{key} is not there (any more)")
        return Route(peer=key, endpoints=endpoints, actor=MEMORY_INDEX, method=spec.index)

    def endpoints_of(self, key: PeerKey) -> Endpoints | None:
        if key == self._own:
            return self._endpoints
        return self._peers.endpoints_of(key) or self.met_at.get(key)

    def is_over(self, key: PeerKey) -> bool:
        return self._peers.is_over(key)

    async def find(self, target: str, spec: HandlerSpec, timeout_s: float | None) -> Route | CallError:
        return NoSuchActor(f"{target} is not there (any more)")

    def has_ended(self, target: str) -> bool:
        return False


class SameHostPeers:
    """All other processes of this host that we have to do with."""

    def __init__(self, endpoints: Endpoints, directions: Directions, caller: RequestSender, clock: Clock) -> None:
        self._endpoints = endpoints
        self._directions = directions
        self._caller = caller
        self._clock = clock
        self._peers_by_key: dict[PeerKey, SameHostPeer] = {}
        self._board: Slab | None = None
        self._private: deque[ctypes.Array[ctypes.c_char]] = deque(maxlen=MAX_CHALLENGES)
        self._num_shown = 0
        self._tasks: dict[asyncio.Task[None], None] = {}
        self.when_gone: Callable[[PeerKey], None] = self.forget
        """Called when a process that we read, or that reads us, has exited."""

    def ref(self, key: PeerKey) -> TensorMemoryContract:
        """The memory part of that process."""
        return make_ref(self._caller, TensorMemoryContract, memory_name(key))

    # -- asking

    def is_near(self, endpoints: Endpoints) -> bool:
        """Whether a process that listens there may share memory with us: it is reached by ipc, not by tcp."""
        has_sockets = bool(self._endpoints.ipc[0] and endpoints.ipc[0])
        return IS_LINUX and has_sockets and endpoints.node_rank == self._endpoints.node_rank

    async def reach(self, key: PeerKey, endpoints: Endpoints | None, wait_s: float) -> PeerReach:
        """How that process can read our memory; asks it if that is not known yet, and waits up to `wait_s`."""
        known = self._peers_by_key.get(key)
        if known is not None and known.reach.state is ReachState.OPEN:
            return known.reach
        endpoints = endpoints or self._directions.endpoints_of(key)
        if endpoints is None or not self.is_near(endpoints):
            return PeerReach()
        host_peer = known or self._add(key)
        self._directions.met_at[key] = endpoints
        if host_peer.reach.is_due(self._clock.monotonic()):
            host_peer.reach.on("ask")
            host_peer.asking = self.spawn(self._ask(host_peer), f"asks {key} to read its memory")
        if host_peer.asking is not None and not host_peer.asking.done():
            await asyncio.wait({host_peer.asking}, timeout=max(0.0, wait_s))
        return host_peer.reach if host_peer.reach.state is ReachState.OPEN else PeerReach()

    async def _ask(self, host_peer: SameHostPeer) -> None:
        findings = Findings()
        try:
            findings = await self.ref(host_peer.key).probe(os.getpid(), boot_id())
            if findings.pid:
                host_peer.meet(findings.pid, self._gone)
        except (MyxaError, OSError, ValueError) as error:
            findings = Findings(why=str(error))
        finally:
            if host_peer.reach.state is ReachState.ASKING:
                now = self._clock.monotonic()
                host_peer.reach.found(can_pull=findings.can_pull, can_map=findings.can_map, now=now)

    # -- being asked

    async def probe(self, caller: PeerKey, pid: int, host: str) -> Findings:
        """See `TensorMemoryContract`."""
        if host != boot_id() or not IS_LINUX:
            return Findings(why="another host")
        host_peer = self._peers_by_key.get(caller) or self._add(caller)
        try:
            host_peer.meet(pid, self._gone)
        except (OSError, ValueError) as error:
            return Findings(why=f"process {pid}: {error}")
        challenge = secrets.token_hex(CHALLENGE_BYTES // 2)
        shown = await self.ref(caller).show(challenge, os.getpid())
        pulled = _failure(lambda: read_bytes(pid, shown.address, CHALLENGE_BYTES), challenge)
        mapped = _failure(lambda: _posted(host_peer, shown), challenge)
        host_peer.is_readable = not pulled and host_peer.is_alive
        why = "; ".join(text for text in (pulled and f"pull: {pulled}", mapped and f"map: {mapped}") if text)
        return Findings(pid=os.getpid(), can_pull=host_peer.is_readable, can_map=not mapped, why=why)

    def show(self, challenge: str, reader: int) -> Shown:
        """See `TensorMemoryContract`."""
        if len(challenge) != CHALLENGE_BYTES or not challenge.isascii():
            raise SlabError(f"a challenge has {CHALLENGE_BYTES} characters")
        admit_reader(reader)
        if self._board is None:
            self._board = Slab(secrets.randbits(62), 4096)
        text = challenge.encode("ascii")
        private = ctypes.create_string_buffer(text, CHALLENGE_BYTES + 8)
        self._private.append(private)
        offset = self._num_shown % MAX_CHALLENGES * CHALLENGE_BYTES
        self._num_shown += 1
        self._board.memory.data[offset : offset + CHALLENGE_BYTES] = text
        return Shown(
            address=ctypes.addressof(private), path=self._board.path, slab_id=self._board.slab_id, offset=offset
        )  # fmt: skip

    # -- who is there

    def get(self, key: PeerKey) -> SameHostPeer | None:
        return self._peers_by_key.get(key)

    def is_over(self, key: PeerKey) -> bool:
        """That incarnation has ended."""
        return self._directions.is_over(key)

    def known(self) -> list[SameHostPeer]:
        return list(self._peers_by_key.values())

    def _add(self, key: PeerKey) -> SameHostPeer:
        made = self._peers_by_key[key] = SameHostPeer(key)
        return made

    def _gone(self, key: PeerKey) -> None:
        self.when_gone(key)

    def forget(self, key: PeerKey) -> None:
        """That incarnation is over."""
        host_peer = self._peers_by_key.pop(key, None)
        self._directions.met_at.pop(key, None)
        if host_peer is not None:
            host_peer.leave()

    # -- tasks

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A separate task, which inherits no deadline."""
        task = asyncio.get_running_loop().create_task(work, name=name, context=fresh_context(NO_SCOPE))
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task

    async def close(self) -> None:
        """End all tasks, forget everybody."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for key in list(self._peers_by_key):
            self.forget(key)
        if self._board is not None:
            self._board.close()
            self._board = None


def _posted(host_peer: SameHostPeer, shown: Shown) -> bytes:
    mapping = SlabMapping.open(host_peer.check_path(shown.path), shown.slab_id)
    return mapping.memory(shown.offset, CHALLENGE_BYTES).tobytes()


def _failure(look: Callable[[], bytes], challenge: str) -> str:
    """Empty if `look` finds the challenge."""
    try:
        return "" if look() == challenge.encode() else "something else lies there"
    except (OSError, SlabError) as error:
        return str(error)


SHUT_S = 30.0
"""How long nothing is tried with a process that could not read our memory."""
MAPPING_IDLE_S = 10.0


class ReachState(Enum):
    """What we know of a process's ability to read our memory."""

    UNKNOWN = "unknown"
    ASKING = "being asked"
    OPEN = "open"
    SHUT = "shut"


REACH_TABLE: dict[tuple[ReachState, str], ReachState] = {
    (ReachState.UNKNOWN, "ask"): ReachState.ASKING,
    (ReachState.ASKING, "found"): ReachState.OPEN,
    (ReachState.ASKING, "nothing"): ReachState.SHUT,
    (ReachState.OPEN, "found"): ReachState.OPEN,
    (ReachState.OPEN, "failed"): ReachState.SHUT,
    (ReachState.SHUT, "failed"): ReachState.SHUT,
    (ReachState.SHUT, "retry"): ReachState.UNKNOWN,
}


class PeerReach:
    """How one other process can read our memory. Sans-IO."""

    def __init__(self) -> None:
        self.state = ReachState.UNKNOWN
        self.can_pull = False
        self.can_map = False
        self._shut_until = 0.0

    def on(self, event: str) -> None:
        """KeyError for an event that the table does not know in this state: a bug."""
        self.state = REACH_TABLE[self.state, event]

    def found(self, *, can_pull: bool, can_map: bool, now: float) -> None:
        """It was tried."""
        self.can_pull, self.can_map = can_pull, can_map
        self._settle("found" if can_pull or can_map else "nothing", now)

    def lost(self, *, pull: bool, now: float) -> None:
        """It could not read what it was promised, by pulling or else from a slab."""
        if pull:
            self.can_pull = False
        else:
            self.can_map = False
        if not (self.can_pull or self.can_map) and self.state in (ReachState.OPEN, ReachState.SHUT):
            self._settle("failed", now)

    def is_due(self, now: float) -> bool:
        """Whether it should be asked (again)."""
        if self.state is ReachState.SHUT and now >= self._shut_until:
            self.on("retry")
        return self.state is ReachState.UNKNOWN

    def _settle(self, event: str, now: float) -> None:
        self.on(event)
        if self.state is ReachState.SHUT:
            self._shut_until = now + SHUT_S


class SameHostPeer:
    """One other incarnation on this host."""

    def __init__(self, key: PeerKey) -> None:
        self.key = key
        self.reach = PeerReach()
        self.asking: asyncio.Task[None] | None = None
        self.pid = 0
        """0: not known yet."""
        self.is_readable = False
        """We may pull from its memory: tried."""
        self._watch = -1
        self._mappings: dict[int, tuple[float, SlabMapping]] = {}

    def meet(self, pid: int, when_gone: Callable[[PeerKey], None]) -> None:
        """It says that it is this process. Raises OSError if there is none, ValueError if it said another before."""
        if self.pid:
            if pid != self.pid:
                raise ValueError(f"{self.key} was process {self.pid} and now says {pid}")
            return
        self._watch = watch_process(pid)
        self.pid = pid
        asyncio.get_running_loop().add_reader(self._watch, when_gone, self.key)

    @property
    def is_alive(self) -> bool:
        """What was just read under its number was read from it and no other."""
        return self._watch >= 0 and not has_exited(self._watch)

    def check_path(self, path: str) -> str:
        """A slab's path, if it is one of this process. Raises SlabError."""
        if not self.pid or not path.startswith(f"/proc/{self.pid}/fd/"):
            raise SlabError(f"{self.key} points at {path}, which is not of process {self.pid}")
        return path

    def mapping(self, slab_id: int, now: float) -> SlabMapping | None:
        """A slab that is mapped already."""
        found = self._mappings.get(slab_id)
        if found is not None:
            self._mappings[slab_id] = now, found[1]
        return found[1] if found is not None else None

    def keep(self, slab_id: int, mapping: SlabMapping, now: float) -> None:
        self._mappings[slab_id] = now, mapping

    def trim(self, now: float) -> None:
        """Unmap slabs that were not used for a while; their owner may want the memory back."""
        self._mappings = {n: (t, m) for n, (t, m) in self._mappings.items() if now - t < MAPPING_IDLE_S}

    def leave(self) -> None:
        """Forget all of it. What is in use stays mapped until its last array is gone."""
        self._mappings.clear()
        if self.asking is not None:
            self.asking.cancel()
        if self._watch >= 0:
            asyncio.get_running_loop().remove_reader(self._watch)
            os.close(self._watch)
            self._watch = -1
        self.is_readable = False


MEMORY_INDEX = 0xFFFF_FFFF
"""Number of this actor in every process."""


class Findings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the process that was asked can read the memory of the one that asked."""

    pid: int = 0
    """Of the one that was asked; 0: another host."""
    can_pull: bool = False
    can_map: bool = False
    why: str = ""
    """What is not possible, and why not."""


class Shown(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a challenge was written: in private memory and in a slab."""

    address: int
    path: str
    slab_id: int
    offset: int


class TensorMemoryContract(Actor):
    """What peers of the same host ask each other about shared memory."""

    @call(deadline=3, reentrant=True)
    async def probe(self, pid: int, boot_id: str) -> Findings:
        """The caller is process `pid` of host `boot_id`: try to read its memory."""
        raise NotImplementedError

    @call(deadline=2, reentrant=True)
    async def show(self, challenge: str, reader: int) -> Shown:
        """Write the challenge where process `reader` is going to look for it."""
        raise NotImplementedError

    @call(deadline=5, reentrant=True)
    async def hold(self, ticket: int) -> bool:
        """The caller keeps a block until it releases it. False: the offer is over; do not look."""
        raise NotImplementedError

    @call(deadline=10, reentrant=True, idempotent=True)
    async def release(self, tickets: tuple[int, ...]) -> None:
        """The caller has read these blocks, or keeps them no longer."""
        raise NotImplementedError


def memory_name(key: PeerKey) -> str:
    """Under which a reference to that process's memory part goes."""
    return f"memory/{key.node_id}.{key.epoch}"
