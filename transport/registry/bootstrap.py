"""Finding, founding and joining the registry, and the mirror of its directory in every other process.

`RegistryLocation` says where the registry is, as far as this process has heard. The registry may die and come back as
another incarnation. On its own host it posts a record in the directory of the sockets, at a fixed path; to other hosts
it comes back at its tcp address, and answers requests for the old incarnation with its identity (HELLO). Both are only
accepted if they are newer.

`host_registry` makes this process the registry's host: for the first time, or after a death, from its journal. A
registry that comes back takes the directory of sockets and the tcp port of its last incarnation. Every process that was
alive when it died counts as alive until it had time to come back.

`join` gets an epoch for a process that has none. It speaks under a provisional identity (a random number, epoch 0),
which may only register. While the registry does not answer, the mirror stays as it is and calls continue.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from ...core.actor import PeerEvent
from ...core.clock import Clock
from ...core.errors import CallError, LaunchError, MyxaError, NoSuchActor, NotExecuted, NotSent, PeerDied, StaleEpoch
from ...core.failure_detector import Verdict
from ...core.handlers import HandlerSpec, handlers_of
from ...core.ids import PeerKey
from ...core.refs import RequestSender, make_ref, with_deadline
from ..address import Rendezvous, check_socket_dir
from ..call_client import CallClient
from ..session.calls import TICK_S
from ..session.guard import PROVISIONAL
from ..session.links import Arrival
from ..session.pending import CallOrder, Route
from ..session.session import Session
from ..socket_transport import Opened
from ..wire import ConnectionGuard, Endpoints, Lane, Transport
from .directory import Directory, DirectoryUpdate, HostedActor, Location, NodeRecord
from .journal import NodeEntry, RegistryAddress, RegistryJournal
from .registry import REGISTRY, RegistryActor, RegistryContract

POSTED = "registry.json"


class RegistryLocation:
    """Begins with the record that this process was given."""

    def __init__(self, rdzv: Rendezvous, node_rank: int) -> None:
        self.rdzv = rdzv
        is_near = bool(rdzv.socket_dir) and rdzv.endpoints.node_rank == node_rank
        self._posted = Path(rdzv.socket_dir) / POSTED if is_near else None
        self._seen = (0, 0)
        self.location = registry_location(rdzv)

    @property
    def key(self) -> PeerKey:
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
            return False  # no record there, or the job is over; its address may still answer
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
    return Location(node, HostedActor(name=REGISTRY, index=0, handlers=handlers_of(RegistryContract).schema))


@dataclass(frozen=True, slots=True)
class RegistryLock:
    """What the next incarnation of a registry should open."""

    journal: RegistryJournal | None
    tcp: str
    socket_dir: Path | None = None
    """Of the last incarnation, if it is still there."""

    def release(self) -> None:
        if self.journal is not None:
            self.journal.close()


def claim_registry(name: str, tcp: str, journal_path: Path | str | None) -> RegistryLock:
    """Raises LaunchError if the journal cannot be used, or is that of another name."""
    if journal_path is None:
        return RegistryLock(None, tcp)
    journal = RegistryJournal.open(Path(journal_path))
    last = journal.address
    if last is None:
        return RegistryLock(journal, tcp)
    if last.node != name:
        journal.close()
        raise LaunchError(
            f"registry journal {journal_path} is that of {last.node}, not of {name}", remedy="names stay; take that one"
        )
    host, _, port = tcp.rpartition(":")
    if port == "0" and last.tcp.rpartition(":")[0] == host:
        tcp = last.tcp
    return RegistryLock(journal, tcp, _still_there(last.socket_dir))


def _still_there(socket_dir: str) -> Path | None:
    try:
        return check_socket_dir(Path(socket_dir)) if socket_dir else None
    except LaunchError:
        return None  # the host was restarted, or the folder was cleaned up


async def host_registry(
    name: str, opened: Opened, claim: RegistryLock
) -> tuple[RegistryActor, NodeRecord, RegistryLocation]:
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
        claim.journal.append(RegistryAddress(node=name, epoch=record.epoch, socket_dir=opened.socket_dir, tcp=tcp))
        claim.journal.append(NodeEntry(record=record))
        await claim.journal.settle()
        if opened.socket_dir:
            rdzv.save(Path(opened.socket_dir) / POSTED)
    state.enter(record)
    if opened.guard is not None:
        opened.guard.follow(state.nodes(""))
    return registry, record, RegistryLocation(rdzv, record.endpoints.node_rank)


T = TypeVar("T")

LOOK_TICKS = 10
PATIENCE_S = 2.0
"""With the first attempt to register; doubled with each."""


async def join(
    place: RegistryLocation,
    name: str,
    transport: Transport,
    clock: Clock,
    timeout_s: float,
    door: ConnectionGuard | None = None,
) -> NodeRecord:
    """Register and return our record. Raises LaunchError naming the registry's endpoint if it does not answer. A
    registry that was restarted since its record was written is found on the way; `place` then says where it is."""
    stranger = _Stranger()
    own = PeerKey(PROVISIONAL | secrets.randbits(31), 0)
    session = Session(own=own, name=name, transport=transport, host=stranger, clock=clock, door=door)
    session.on_greeted = place.greeted
    transport.start(session)
    registry = make_ref(CallClient(session.calls, _OnlyRegistry(place), clock), RegistryContract, REGISTRY)
    give_up_at, patience_s = clock.monotonic() + timeout_s, PATIENCE_S
    try:
        while True:
            place.look()
            asked = place.key
            left_s = max(give_up_at - clock.monotonic(), TICK_S)  # this process may have been stopped beyond it
            try:
                # An answer, or the question, may be lost with its connection. To ask again does no harm: it gives a
                # newer epoch, and no process has heard of the one before.
                request = with_deadline(registry, min(left_s, patience_s))
                return await _ticking(session, place, request.register(name, transport.endpoints, os.getpid()))
            except CallError as error:
                patience_s *= 2
                is_final = isinstance(error, NotExecuted) and place.key == asked
                if is_final or clock.monotonic() >= give_up_at:
                    why = stranger.trouble or error
                    raise LaunchError(
                        f"{name}: no answer from the registry at {place.rdzv.endpoints} within {timeout_s:g} s ({why})",
                        remedy="is the launcher of node 0 running and reachable, and is the job key the same?",
                    ) from error
                await asyncio.sleep(TICK_S)
    finally:
        session.close()


async def _ticking(session: Session, place: RegistryLocation, work: Awaitable[T]) -> T:
    """Let the session's time pass while `work` is waited for, and stop waiting where the registry is not any more."""
    loop = asyncio.get_running_loop()
    num_ticks = 0

    def tick() -> None:
        nonlocal timer, num_ticks
        session.tick()
        num_ticks += 1
        asked = place.key
        if num_ticks % LOOK_TICKS == 0 and place.look():
            session.peer_over(asked, f"the registry is back as epoch {place.key.epoch}")
        timer = loop.call_later(TICK_S, tick)

    timer = loop.call_later(TICK_S, tick)
    try:
        return await work
    finally:
        timer.cancel()


class _OnlyRegistry:
    def __init__(self, place: RegistryLocation) -> None:
        self._place = place
        self.routes: dict[tuple[str, str, str], Route] = {}

    def route(self, target: str, spec: HandlerSpec) -> Route | CallError | None:
        if target != REGISTRY:
            return NoSuchActor(f"{target}: this process has not joined yet")
        return self._place.location.route(spec.name, spec.schema)

    async def find(self, target: str, spec: HandlerSpec, timeout_s: float | None) -> Route | CallError:
        return NoSuchActor(f"{target}: this process has not joined yet")

    def has_ended(self, target: str) -> bool:
        return False


class _Stranger:
    def __init__(self) -> None:
        self.trouble = ""

    def deliver(self, arrival: Arrival) -> None:
        raise NoSuchActor("this process has not joined yet")

    def abandon(self, arrival: Arrival) -> None:
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


LOOKUP_WAIT_S = 2.0
"""How long a call to a name that was never heard of waits for it to come up."""
RETRY_S = 0.5
AWAY_S = 5.0
"""How long news of our own actors wait for a registry that is away."""
SEEN_S = 2.0


class Mirror:
    """Implements `call_client.Finder`."""

    def __init__(
        self,
        place: RegistryLocation,
        session: Session,
        clock: Clock,
        tell: Callable[[PeerEvent], None],
        fenced: Callable[[StaleEpoch], None],
        describe: Callable[[], NodeRecord],
    ) -> None:
        self.directory = Directory()
        self.routes = self.directory.routes
        self._place = place
        self._member_of = place.key
        """The incarnation of the registry that knows us."""
        self._describe = describe
        session.on_greeted = place.greeted
        self._session = session
        self._clock = clock
        self._tell = tell
        self._fenced = fenced
        self._changed: dict[asyncio.Event, None] = {}  # in order: a simulated run repeats itself
        self._log = logging.getLogger("myxa.transport")
        self._caller: RequestSender | None = None
        self.on_update: Callable[[Directory], None] | None = None
        """Called first when something has changed: who may speak is decided by the directory."""

    def call_with(self, caller: RequestSender) -> None:
        self._caller = caller

    @property
    def registry(self) -> RegistryContract:
        if self._caller is None:
            raise RuntimeError("the mirror has no caller yet")
        return make_ref(self._caller, RegistryContract, REGISTRY)

    async def follow(self) -> None:
        while True:
            try:
                if self._member_of != self._place.key and not await self._report():
                    return
                await self._follow_once()
            except CallError as error:
                self._log.warning("the registry's updates stopped: %s", error)
            self.look_for_registry()
            await asyncio.sleep(RETRY_S)

    def look_for_registry(self) -> None:
        """Whether it came back elsewhere on this host; then nothing is waited for at the old place."""
        before = self._place.key
        if self._place.look():
            self._session.peer_over(before, f"the registry is back as epoch {self._place.key.epoch}")

    async def _report(self) -> bool:
        """Tell a registry that was restarted that we are there; False: we are over."""
        key = self._place.key
        refusal = await self.registry.rejoin(self._describe())
        if refusal:
            self._fenced(StaleEpoch(refusal))
            return False
        self._log.info("the registry is back as epoch %d", key.epoch)
        self._member_of = key
        return True

    async def announce(self, actors: tuple[HostedActor, ...], reasons: dict[str, str]) -> None:
        """Publish this node's actors and wait until the mirror has them; repeated while the registry is away."""
        own = self._describe()
        give_up_at = self._clock.monotonic() + AWAY_S
        while True:
            try:
                version = await self.registry.announce(own.name, own.epoch, actors, reasons)
            except (NotSent, PeerDied):
                if self._clock.monotonic() > give_up_at:
                    raise
                await asyncio.sleep(RETRY_S)
            else:
                break
        await self.wait_until(lambda: self.directory.version >= version, SEEN_S)

    async def _follow_once(self) -> None:
        while self._member_of == self._place.key:
            for update in await self.registry.updates(self.directory.version, self.directory.history):
                if not self._take(update):
                    self.directory.version = -1
                    return

    def _take(self, update: DirectoryUpdate) -> bool:
        changes = self.directory.apply(update)
        if changes is None:
            return False
        if self.on_update is not None:
            self.on_update(self.directory)
        events, gone = changes
        for departure in gone:
            key = PeerKey(departure.node_id, departure.epoch)
            if key == self._session.own:
                self._fenced(StaleEpoch(f"{departure.name} epoch {departure.epoch} is over: {departure.reason}"))
            self._session.peer_over(key, departure.reason)
        for event in events:
            self._tell(event)
            if event.kind == "down":
                self._session.calls.on_actor_gone(event.name, event.reason)
            else:
                self._session.calls.on_located(event.name, self.reroute)
        for changed in self._changed:
            changed.set()
        return True

    def reroute(self, order: CallOrder) -> Route | CallError | None:
        """Where a call that waits for its callee's return has to go now."""
        if order.target == REGISTRY:
            return self._place.location.route(order.method, order.schema)
        return self.directory.route(order.target, order.method, order.schema)

    def route(self, target: str, spec: HandlerSpec) -> Route | CallError | None:
        if target != REGISTRY:
            return self.directory.route(target, spec.name, spec.schema)
        return self._place.location.route(spec.name, spec.schema)  # the directory may still know where it was

    async def find(self, target: str, spec: HandlerSpec, timeout_s: float | None) -> Route | CallError:
        if self.directory.has_ended(target):
            return self.directory.missing(target)
        wait_s = LOOKUP_WAIT_S if timeout_s is None else min(LOOKUP_WAIT_S, max(0.0, timeout_s / 2))
        try:
            node = await with_deadline(self.registry, wait_s + 1.0).resolve(target, wait_s)
        except CallError as error:
            missing = self.directory.missing(target)
            missing.add_note(f"and the registry could not be asked: {error}")
            return missing
        actor = next((a for a in node.actors if a.name == target), None) if node is not None else None
        if node is None or actor is None:
            return self.directory.missing(target)
        return Location(node, actor).route(spec.name, spec.schema)

    def has_ended(self, target: str) -> bool:
        return self.directory.has_ended(target)

    async def wait_until(self, is_met: Callable[[], bool], timeout_s: float) -> bool:
        """Until the mirror satisfies `is_met`; False after `timeout_s`."""
        give_up_at = self._clock.monotonic() + timeout_s
        changed = asyncio.Event()
        self._changed[changed] = None
        try:
            while not is_met():
                left_s = give_up_at - self._clock.monotonic()
                if left_s <= 0:
                    return False
                changed.clear()
                try:
                    async with asyncio.timeout(left_s):
                        await changed.wait()
                except TimeoutError:
                    return is_met()
            return True
        finally:
            del self._changed[changed]

    async def wait_for(self, *names: str, timeout_s: float) -> None:
        """Until all these actors are registered; LaunchError naming the missing ones."""
        if not await self.wait_until(lambda: all(self.directory.find(n) for n in names), timeout_s):
            missing = ", ".join(n for n in names if self.directory.find(n) is None)
            raise LaunchError(
                f"waited {timeout_s:g} s for {missing}", remedy="see their logs; were they started, did they fail?"
            )
