"""Everything this process knows of one other incarnation, and the way envelopes leave for it. Sans-IO.

OPENING --connected--> UP --lost--> LOST --connected--> UP
   any --gone--> DOWN          (exit reported, replaced, said goodbye, unreachable, closed)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

from ..core.errors import NotSent, StaleEpoch
from ..core.ids import PeerKey
from .credit import Grant, SendWindow
from .frames import NO_TTL, stamp
from .wire import Endpoints, Lane, Parcel, Transport

if TYPE_CHECKING:
    from .pending import PendingCall
    from .serving import Arrival


STRANGER_LINGER_S = 1.0


class LinkState(Enum):
    """Of the connection on which we send."""

    OPENING = "opening"
    UP = "up"
    LOST = "lost"
    DOWN = "down"


_TRANSITIONS: dict[tuple[LinkState, str], LinkState] = {
    (LinkState.OPENING, "connected"): LinkState.UP,
    (LinkState.UP, "connected"): LinkState.UP,
    (LinkState.LOST, "connected"): LinkState.UP,
    (LinkState.OPENING, "lost"): LinkState.OPENING,
    (LinkState.UP, "lost"): LinkState.LOST,
    (LinkState.LOST, "lost"): LinkState.LOST,
    (LinkState.OPENING, "gone"): LinkState.DOWN,
    (LinkState.UP, "gone"): LinkState.DOWN,
    (LinkState.LOST, "gone"): LinkState.DOWN,
}


class Link:
    """One other incarnation."""

    def __init__(self, key: PeerKey, endpoints: Endpoints) -> None:
        self.key = key
        self.endpoints = endpoints
        self.state = LinkState.OPENING
        self.windows = (SendWindow(), SendWindow())
        self.grants = (Grant(), Grant())
        self.waiting: tuple[deque[PendingCall], deque[PendingCall]] = (deque(), deque())
        """Calls without credit, per lane, oldest first."""
        self.pending: dict[int, PendingCall] = {}
        """Our calls to it, by correlation number."""
        self.served: dict[int, Arrival] = {}
        """Its calls to us."""
        self._last_word = 0
        self.sources: list[bytes | None] = [None, None]
        """The connections on which it sends, per lane."""
        self.broken: set[Lane] = set()
        """Lanes on which we cannot send at the moment."""

    def on(self, event: str) -> None:
        """Move to the next state; an event that the table does not know in this state is a bug."""
        self.state = _TRANSITIONS[self.state, event]

    @property
    def is_down(self) -> bool:
        return self.state is LinkState.DOWN

    def credit_word(self) -> int:
        """Both counters as they travel in a header."""
        control, bulk = self.grants
        return control.announce() | bulk.announce() << 16

    def take_credit(self, word: int) -> tuple[Lane, ...]:
        """Apply the other side's counters; the lanes that gained room."""
        if word == self._last_word:
            return ()
        self._last_word = word
        return tuple(lane for lane in Lane if self.windows[lane].released(word >> 16 * lane & 0xFFFF))


class Links:
    """All incarnations we talk to, and the transport to them."""

    def __init__(self, own: PeerKey, transport: Transport, loop_back: Callable[[Lane, bytearray], None]) -> None:
        self.own = own
        self._transport = transport
        self._loop_back = loop_back
        self._links: dict[PeerKey, Link] = {}
        self._newest: dict[int, int] = {}
        self._over: dict[int, int] = {}
        self.is_closed = False
        """This process is going: no link is opened any more."""
        self.itself = Link(own, transport.endpoints)
        """The way to ourselves: always up, no transport between."""
        self.itself.on("connected")
        self._links[own] = self.itself

    def all(self) -> list[Link]:
        return list(self._links.values())

    def find(self, key: PeerKey) -> Link | None:
        return self._links.get(key)

    def newest(self, node_id: int) -> int:
        """Highest epoch heard of for that node; 0: none."""
        return self._newest.get(node_id, 0)

    def heard_of(self, key: PeerKey) -> list[Link]:
        """Note that an incarnation exists; older ones of the same node, which are thereby over, are returned."""
        if key.epoch <= self.newest(key.node_id):
            return []
        self._newest[key.node_id] = key.epoch
        return [link for link in self._links.values() if link.key.node_id == key.node_id and link.key.epoch < key.epoch]

    def open(self, key: PeerKey, endpoints: Endpoints) -> Link:
        """The link to an incarnation, connecting if there is none.

        Raises LaunchError without a usable endpoint, StaleEpoch for an incarnation that is over, NotSent after the end.
        """
        if self.is_closed:
            raise NotSent("this process is closing")
        link = self._links.get(key)
        if link is None:
            if self.is_over(key):
                raise StaleEpoch(f"{key} has ended", remedy="look its name up again")
            self._transport.connect(key, endpoints)
            link = self._links[key] = Link(key, endpoints)
        return link

    def learn(self, link: Link, endpoints: Endpoints) -> None:
        """The incarnation itself says where it listens; what we were told before may have been less."""
        if endpoints != link.endpoints:
            link.endpoints = endpoints
            self._transport.connect(link.key, endpoints)

    def is_over(self, key: PeerKey) -> bool:
        """That incarnation, or a newer one, is known to have ended."""
        return 0 < key.epoch <= self._over.get(key.node_id, 0) or key.epoch < self.newest(key.node_id)

    def note_over(self, key: PeerKey) -> None:
        """It ended for good: nothing is sent to it or taken from it any more."""
        self._over[key.node_id] = max(key.epoch, self._over.get(key.node_id, 0))

    def forget(self, link: Link, linger_s: float) -> None:
        """Drop the connection; the incarnation may live on."""
        link.on("gone")
        del self._links[link.key]
        self._transport.disconnect(link.key, linger_s)
        self.forget_sources(link)

    def forget_sources(self, link: Link) -> None:
        """Whatever still comes from its connections is of no interest."""
        for lane in Lane:
            if (source := link.sources[lane]) is not None:
                self._transport.forget(source, lane)

    def tell_stranger(self, key: PeerKey, endpoints: Endpoints, data: bytearray) -> None:
        """Send one envelope to an incarnation that we will not link with."""
        self._transport.connect(key, endpoints)
        self._transport.send(key, Lane.CONTROL, Parcel(data))
        self._transport.disconnect(key, STRANGER_LINGER_S)

    def send(self, link: Link, lane: Lane, data: bytearray, cost: int = 0, ttl_ms: int = NO_TTL) -> Parcel:
        """Stamp and hand to the transport."""
        stamp(data, ttl_ms, link.credit_word())
        parcel = Parcel(data, cost)
        if link is self.itself:
            parcel.is_sent = True
            self._loop_back(lane, data)
        else:
            self._transport.send(link.key, lane, parcel)
        return parcel
