"""A node's mirror of the registry, kept up to date by a stream, and the lookups on it.

When the stream breaks, the mirror stays as it is and a new stream is opened from the version it has; calls go on. To a
registry that was restarted the node first reports that it is still there, with the epoch that it has.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ...core.actor import PeerEvent
from ...core.clock import Clock
from ...core.errors import CallError, LaunchError, NotSent, PeerDied, StaleEpoch
from ...core.handlers import HandlerSpec
from ...core.ids import PeerKey
from ...core.refs import RequestSender, make_ref, with_deadline
from ..session.pending import Order, Route
from ..session.session import Session
from .bootstrap import RegistrySeat
from .directory import ActorRecord, Directory, DirectoryUpdate, Location, NodeRecord
from .registry import REGISTRY, RegistryContract

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
        seat: RegistrySeat,
        session: Session,
        clock: Clock,
        tell: Callable[[PeerEvent], None],
        fenced: Callable[[StaleEpoch], None],
        describe: Callable[[], NodeRecord],
    ) -> None:
        self.directory = Directory()
        self.routes = self.directory.routes
        self._seat = seat
        self._member_of = seat.key
        """The incarnation of the registry that knows us."""
        self._describe = describe
        session.on_greeted = seat.greeted
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
        """A reference to the registry."""
        if self._caller is None:
            raise RuntimeError("the mirror has no caller yet")
        return make_ref(self._caller, RegistryContract, REGISTRY)

    # -- the stream

    async def follow(self) -> None:
        """Keep the mirror up to date until cancelled."""
        while True:
            try:
                if self._member_of != self._seat.key and not await self._report():
                    return
                await self._follow_once()
            except CallError as error:
                self._log.warning("the registry's updates stopped: %s", error)
            self.look_for_registry()
            await asyncio.sleep(RETRY_S)

    def look_for_registry(self) -> None:
        """Whether it came back elsewhere on this host; then nothing is waited for at the old place."""
        before = self._seat.key
        if self._seat.look():
            self._session.peer_over(before, f"the registry is back as epoch {self._seat.key.epoch}")

    async def _report(self) -> bool:
        """Tell a registry that was restarted that we are there; False: we are over."""
        seat = self._seat.key
        refusal = await self.registry.rejoin(self._describe())
        if refusal:
            self._fenced(StaleEpoch(refusal))
            return False
        self._log.info("the registry is back as epoch %d", seat.epoch)
        self._member_of = seat
        return True

    async def announce(self, actors: tuple[ActorRecord, ...], reasons: dict[str, str]) -> None:
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
        async for update in self.registry.updates(self.directory.version, self.directory.history):
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

    def reroute(self, order: Order) -> Route | CallError | None:
        """Where a call that waits for its callee's return has to go now."""
        if order.target == REGISTRY:
            return self._seat.location.route(order.method, order.schema)
        return self.directory.route(order.target, order.method, order.schema)

    # -- lookups

    def route(self, target: str, spec: HandlerSpec) -> Route | CallError | None:
        if target != REGISTRY:
            return self.directory.route(target, spec.name, spec.schema)
        return self._seat.location.route(spec.name, spec.schema)  # the directory may still know where it was

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
