"""Who can read whose memory: found out by really reading, once per pair of processes, when a large array first asks.

The reader chooses a random challenge, the other process writes it into its private memory and into a slab, and the
reader looks for it in both. So nobody can have us read the memory of a process that is not its own, be it by a wrong
number from another container or by malice; whether the kernel, Yama or seccomp permit it needs no knowledge of them.
At HELLO, for every pair, was considered: most pairs never exchange a large array.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import secrets
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from ...core.actor import Caller, make_ref
from ...core.clock import Clock
from ...core.errors import CallError, MyxaError, NoSuchActor, SlabError
from ...core.handlers import HandlerSpec
from ...core.host import boot_id
from ...core.ids import PeerKey
from ...core.scope import NO_SCOPE, fresh_context
from ..session.pending import Route
from ..wire import Endpoints
from .contract import MEMORY_INDEX, Findings, MemoryContract, Shown, memory_name
from .kernel import IS_LINUX, admit_reader, read_bytes
from .neighbours import Neighbour, Reach, ReachState
from .slab import Slab, SlabMapping

CHALLENGE_BYTES = 32
MAX_CHALLENGES = 64


class Peers(Protocol):
    """What is known of other incarnations: the session."""

    def endpoints_of(self, key: PeerKey) -> Endpoints | None: ...

    def is_over(self, key: PeerKey) -> bool: ...


class Directions:
    """Where the memory parts of other processes are, of which the registry knows nothing. A `courier.Finder`."""

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


class Neighbourhood:
    """All other processes of this host that we have to do with."""

    def __init__(self, endpoints: Endpoints, directions: Directions, caller: Caller, clock: Clock) -> None:
        self._endpoints = endpoints
        self._directions = directions
        self._caller = caller
        self._clock = clock
        self._neighbours: dict[PeerKey, Neighbour] = {}
        self._board: Slab | None = None
        self._private: deque[ctypes.Array[ctypes.c_char]] = deque(maxlen=MAX_CHALLENGES)
        self._num_shown = 0
        self._tasks: dict[asyncio.Task[None], None] = {}
        self.when_gone: Callable[[PeerKey], None] = self.forget
        """Called when a process that we read, or that reads us, has exited."""

    def ref(self, key: PeerKey) -> MemoryContract:
        """The memory part of that process."""
        return make_ref(self._caller, MemoryContract, memory_name(key))

    # -- asking

    def is_near(self, endpoints: Endpoints) -> bool:
        """Whether a process that listens there may share memory with us: it is reached by ipc, not by tcp."""
        has_sockets = bool(self._endpoints.ipc[0] and endpoints.ipc[0])
        return IS_LINUX and has_sockets and endpoints.node_rank == self._endpoints.node_rank

    async def reach(self, key: PeerKey, endpoints: Endpoints | None, wait_s: float) -> Reach:
        """How that process can read our memory; asks it if that is not known yet, and waits up to `wait_s`."""
        known = self._neighbours.get(key)
        if known is not None and known.reach.state is ReachState.OPEN:
            return known.reach
        endpoints = endpoints or self._directions.endpoints_of(key)
        if endpoints is None or not self.is_near(endpoints):
            return Reach()
        neighbour = known or self._add(key)
        self._directions.met_at[key] = endpoints
        if neighbour.reach.is_due(self._clock.monotonic()):
            neighbour.reach.on("ask")
            neighbour.asking = self.spawn(self._ask(neighbour), f"asks {key} to read its memory")
        if neighbour.asking is not None and not neighbour.asking.done():
            await asyncio.wait({neighbour.asking}, timeout=max(0.0, wait_s))
        return neighbour.reach if neighbour.reach.state is ReachState.OPEN else Reach()

    async def _ask(self, neighbour: Neighbour) -> None:
        findings = Findings()
        try:
            findings = await self.ref(neighbour.key).probe(os.getpid(), boot_id())
            if findings.pid:
                neighbour.meet(findings.pid, self._gone)
        except (MyxaError, OSError, ValueError) as error:
            findings = Findings(why=str(error))
        finally:
            if neighbour.reach.state is ReachState.ASKING:
                now = self._clock.monotonic()
                neighbour.reach.found(can_pull=findings.can_pull, can_map=findings.can_map, now=now)

    # -- being asked

    async def probe(self, caller: PeerKey, pid: int, host: str) -> Findings:
        """See `MemoryContract`."""
        if host != boot_id() or not IS_LINUX:
            return Findings(why="another host")
        neighbour = self._neighbours.get(caller) or self._add(caller)
        try:
            neighbour.meet(pid, self._gone)
        except (OSError, ValueError) as error:
            return Findings(why=f"process {pid}: {error}")
        challenge = secrets.token_hex(CHALLENGE_BYTES // 2)
        shown = await self.ref(caller).show(challenge, os.getpid())
        pulled = _failure(lambda: read_bytes(pid, shown.address, CHALLENGE_BYTES), challenge)
        mapped = _failure(lambda: _posted(neighbour, shown), challenge)
        neighbour.is_readable = not pulled and neighbour.is_alive
        why = "; ".join(text for text in (pulled and f"pull: {pulled}", mapped and f"map: {mapped}") if text)
        return Findings(pid=os.getpid(), can_pull=neighbour.is_readable, can_map=not mapped, why=why)

    def show(self, challenge: str, reader: int) -> Shown:
        """See `MemoryContract`."""
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

    def get(self, key: PeerKey) -> Neighbour | None:
        return self._neighbours.get(key)

    def is_over(self, key: PeerKey) -> bool:
        """That incarnation has ended."""
        return self._directions.is_over(key)

    def known(self) -> list[Neighbour]:
        return list(self._neighbours.values())

    def _add(self, key: PeerKey) -> Neighbour:
        made = self._neighbours[key] = Neighbour(key)
        return made

    def _gone(self, key: PeerKey) -> None:
        self.when_gone(key)

    def forget(self, key: PeerKey) -> None:
        """That incarnation is over."""
        neighbour = self._neighbours.pop(key, None)
        self._directions.met_at.pop(key, None)
        if neighbour is not None:
            neighbour.leave()

    # -- tasks

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A task of its own, that inherits no deadline."""
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
        for key in list(self._neighbours):
            self.forget(key)
        if self._board is not None:
            self._board.close()
            self._board = None


def _posted(neighbour: Neighbour, shown: Shown) -> bytes:
    mapping = SlabMapping.open(neighbour.check_path(shown.path), shown.slab_id)
    return mapping.memory(shown.offset, CHALLENGE_BYTES).tobytes()


def _failure(look: Callable[[], bytes], challenge: str) -> str:
    """Empty if `look` finds the challenge."""
    try:
        return "" if look() == challenge.encode() else "something else lies there"
    except (OSError, SlabError) as error:
        return str(error)
