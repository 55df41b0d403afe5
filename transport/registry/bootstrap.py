"""Finding, founding and joining the registry.

`RegistrySeat` says where the registry is, as far as this process has heard. The registry may die and come back as
another incarnation. On its own host it posts a record in the directory of the sockets, at a path that stays; to other
hosts it comes back at its tcp address, and tells those who ask for the old incarnation who it is now (HELLO). Both are
taken only for something newer.

`found_registry` makes this process the registry's host: for the first time, or after a death, from its journal. A
registry that comes back must be found: it takes the directory of sockets and the tcp port of its last incarnation, and
posts who it is now. Every process that was alive when it died counts as alive until it had time to come back.

`join` gets an epoch for a process that has none. It speaks under a provisional identity (a random number, epoch 0),
which may do nothing but register, and forgets it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from ...core.clock import Clock
from ...core.errors import CallError, LaunchError, MyxaError, NoSuchActor, NotExecuted
from ...core.failure_detector import Verdict
from ...core.handlers import HandlerSpec, handlers_of
from ...core.ids import PeerKey
from ...core.refs import make_ref, with_deadline
from ..address import Rendezvous, check_socket_dir
from ..call_client import CallClient
from ..opening import Opened
from ..session.guard import PROVISIONAL
from ..session.links import Arrival
from ..session.pending import Route
from ..session.session import Session
from ..session.wheel import TICK_S
from ..wire import Door, Endpoints, Lane, Transport
from .directory import ActorRecord, Location, NodeRecord
from .journal import Known, RegistryJournal, Seat
from .registry import REGISTRY, RegistryActor, RegistryContract

POSTED = "registry.json"
"""Name of the record in the directory of the sockets."""


class RegistrySeat:
    """Begins with the record that this process was given."""

    def __init__(self, rdzv: Rendezvous, node_rank: int) -> None:
        self.rdzv = rdzv
        """What others need to join."""
        is_near = bool(rdzv.socket_dir) and rdzv.endpoints.node_rank == node_rank
        self._posted = Path(rdzv.socket_dir) / POSTED if is_near else None
        self._seen = (0, 0)
        self.location = registry_location(rdzv)

    @property
    def key(self) -> PeerKey:
        """The registry's process."""
        return self.location.node.key

    def greeted(self, key: PeerKey, endpoints: Endpoints) -> bool:
        """Some process said HELLO: whether it is a newer incarnation of the registry's."""
        if key.node_id != self.key.node_id or key.epoch <= self.key.epoch:
            return False
        self._move(msgspec.structs.replace(self.rdzv, epoch=key.epoch, endpoints=endpoints))
        return True

    def look(self) -> bool:
        """Whether a newer one has posted itself. Costs a `stat` while nothing has changed."""
        if self._posted is None:
            return False
        try:
            facts = self._posted.stat()
            if (facts.st_mtime_ns, facts.st_ino) == self._seen:
                return False
            self._seen = facts.st_mtime_ns, facts.st_ino
            posted = Rendezvous.load(self._posted)
        except (OSError, LaunchError):
            return False  # nobody posts there, or the job is over; its address may still answer
        if posted.node_id != self.key.node_id or posted.epoch <= self.key.epoch:
            return False
        self._move(posted)
        return True

    def _move(self, rdzv: Rendezvous) -> None:
        self.rdzv = rdzv
        self.location = registry_location(rdzv)


def registry_location(rdzv: Rendezvous) -> Location:
    """The registry as the rendezvous record describes it; its handlers are those of our own code."""
    node = NodeRecord(name=REGISTRY, node_id=rdzv.node_id, epoch=rdzv.epoch, endpoints=rdzv.endpoints)
    return Location(node, ActorRecord(name=REGISTRY, index=0, handlers=handlers_of(RegistryContract).schema))


@dataclass(frozen=True, slots=True)
class RegistryClaim:
    """What the next incarnation of a registry should open."""

    journal: RegistryJournal | None
    tcp: str
    socket_dir: Path | None = None
    """Of the last incarnation, if it is still there."""

    def release(self) -> None:
        """It could not be opened."""
        if self.journal is not None:
            self.journal.close()


def claim_registry(name: str, tcp: str, journal_path: Path | str | None) -> RegistryClaim:
    """Raises LaunchError if the journal cannot be used, or is that of another name."""
    if journal_path is None:
        return RegistryClaim(None, tcp)
    journal = RegistryJournal.open(Path(journal_path))
    seat = journal.seat
    if seat is None:
        return RegistryClaim(journal, tcp)
    if seat.node != name:
        journal.close()
        raise LaunchError(
            f"registry journal {journal_path} is that of {seat.node}, not of {name}", remedy="names stay; take that one"
        )
    host, _, port = tcp.rpartition(":")
    if port == "0" and seat.tcp.rpartition(":")[0] == host:
        tcp = seat.tcp
    return RegistryClaim(journal, tcp, _still_there(seat.socket_dir))


def _still_there(socket_dir: str) -> Path | None:
    try:
        return check_socket_dir(Path(socket_dir)) if socket_dir else None
    except LaunchError:
        return None  # the host was restarted, or somebody tidied up


async def found_registry(
    name: str, opened: Opened, claim: RegistryClaim
) -> tuple[RegistryActor, NodeRecord, RegistrySeat]:
    """The registry with this process as its first member (again), and how to find it."""
    registry = RegistryActor(opened.guard, claim.journal)
    state = registry.state
    record = state.grant(name, opened.transport.endpoints, os.getpid())
    state.history = record.epoch
    rdzv = Rendezvous(
        endpoints=record.endpoints,
        node_id=record.node_id,
        epoch=record.epoch,
        socket_dir=opened.socket_dir,
        key_file=opened.key_file,
    )
    if claim.journal is not None:
        tcp = record.endpoints.tcp[0].removeprefix("tcp://")
        claim.journal.append(Seat(node=name, epoch=record.epoch, socket_dir=opened.socket_dir, tcp=tcp))
        claim.journal.append(Known(record=record))
        await claim.journal.settle()
        if opened.socket_dir:
            rdzv.save(Path(opened.socket_dir) / POSTED)
    state.enter(record)
    if opened.guard is not None:
        opened.guard.follow(state.nodes(""))
    return registry, record, RegistrySeat(rdzv, record.endpoints.node_rank)


T = TypeVar("T")

LOOK_TICKS = 10
PATIENCE_S = 2.0
"""With the first attempt to register; doubled with each."""


async def join(
    seat: RegistrySeat, name: str, transport: Transport, clock: Clock, timeout_s: float, door: Door | None = None
) -> NodeRecord:
    """Register and return our record. Raises LaunchError naming the registry's endpoint if it does not answer.

    A registry that was restarted since its record was written is found on the way; `seat` then says where it is.
    """
    stranger = _Stranger()
    own = PeerKey(PROVISIONAL | secrets.randbits(31), 0)
    session = Session(own=own, name=name, transport=transport, host=stranger, clock=clock, door=door)
    session.on_greeted = seat.greeted
    transport.start(session)
    registry = make_ref(CallClient(session.calls, _OnlyRegistry(seat), clock), RegistryContract, REGISTRY)
    give_up_at, patience_s = clock.monotonic() + timeout_s, PATIENCE_S
    try:
        while True:
            seat.look()
            asked = seat.key
            left_s = max(give_up_at - clock.monotonic(), TICK_S)  # this process may have stood still beyond it
            try:
                # An answer, or the question, may be lost with its connection. To ask again does no harm: it gives a
                # newer epoch, and nobody has heard of the one before.
                request = with_deadline(registry, min(left_s, patience_s))
                return await _ticking(session, seat, request.register(name, transport.endpoints, os.getpid()))
            except CallError as error:
                patience_s *= 2
                is_final = isinstance(error, NotExecuted) and seat.key == asked
                if is_final or clock.monotonic() >= give_up_at:
                    why = stranger.trouble or error
                    raise LaunchError(
                        f"{name}: no answer from the registry at {seat.rdzv.endpoints} within {timeout_s:g} s ({why})",
                        remedy="is the launcher of node 0 running and reachable, and is the job key the same?",
                    ) from error
                await asyncio.sleep(TICK_S)
    finally:
        session.close()


async def _ticking(session: Session, seat: RegistrySeat, work: Awaitable[T]) -> T:
    """Let the session's time pass while `work` is waited for, and stop waiting where the registry is not any more."""
    loop = asyncio.get_running_loop()
    num_ticks = 0

    def tick() -> None:
        nonlocal timer, num_ticks
        session.tick()
        num_ticks += 1
        asked = seat.key
        if num_ticks % LOOK_TICKS == 0 and seat.look():
            session.peer_over(asked, f"the registry is back as epoch {seat.key.epoch}")
        timer = loop.call_later(TICK_S, tick)

    timer = loop.call_later(TICK_S, tick)
    try:
        return await work
    finally:
        timer.cancel()


class _OnlyRegistry:
    """Finder of a process that knows nobody else."""

    def __init__(self, seat: RegistrySeat) -> None:
        self._seat = seat
        self.routes: dict[tuple[str, str, str], Route] = {}

    def route(self, target: str, spec: HandlerSpec) -> Route | CallError | None:
        if target != REGISTRY:
            return NoSuchActor(f"{target}: this process has not joined yet")
        return self._seat.location.route(spec.name, spec.schema)

    async def find(self, target: str, spec: HandlerSpec, timeout_s: float | None) -> Route | CallError:
        return NoSuchActor(f"{target}: this process has not joined yet")

    def has_ended(self, target: str) -> bool:
        return False


class _Stranger:
    """Session host of a process that serves nobody yet."""

    def __init__(self) -> None:
        self.trouble = ""

    def deliver(self, arrival: Arrival) -> None:
        raise NoSuchActor("this process has not joined yet")

    def abandon(self, arrival: Arrival) -> None:
        pass

    def demanded(self, arrival: Arrival) -> None:
        pass

    def unreachable(self, key: PeerKey, why: str) -> None:
        self.trouble = why

    def fenced(self, error: MyxaError) -> None:
        self.trouble = str(error)

    def loop_back(self, lane: Lane, data: bytes | bytearray) -> None:
        pass

    def load(self) -> tuple[int, int]:
        return 0, 0

    def judged(self, key: PeerKey, verdict: Verdict, reason: str) -> None:
        pass

    def crashed(self, error: BaseException) -> None:
        self.trouble = f"{type(error).__name__}: {error}"
