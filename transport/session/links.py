"""Everything this process knows of one other incarnation, and the way envelopes leave for it. Sans-IO.

A link is down when its incarnation is gone (exit reported, replaced, said goodbye, unreachable, closed). One that was
only unreachable is opened again when it is wanted or heard of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from ...core.errors import MyxaError, NotSent, StaleEpoch
from ...core.handlers import HandlerSpec
from ...core.ids import PeerKey
from ...core.timeouts import TIMEOUTS
from ..wire import Endpoints, Lane, Parcel, Transport
from .frames import NO_TTL, Buffer, Envelope, Kind, encode
from .pending import CreditWindow, PendingCall

Verdict = Literal["suspect", "hung", "recovered"]
"""What is reported of a peer."""


class Link:
    """One other incarnation."""

    def __init__(self, key: PeerKey, endpoints: Endpoints) -> None:
        self.key = key
        self.endpoints = endpoints
        self.is_up = False
        """The connection on which we send is there."""
        self.is_down = False
        self.windows = (CreditWindow(), CreditWindow())
        self.waiting: tuple[deque[PendingCall], deque[PendingCall]] = (deque(), deque())
        """Calls without credit, per lane, oldest first."""
        self.pending: dict[int, PendingCall] = {}
        self.served: dict[int, Arrival] = {}
        self.sources: list[bytes | None] = [None, None]
        """The connections on which it sends, per lane."""
        self.attempts = [0, 0]
        """Numbers of these connections as its HELLO gave them."""
        self.newest_call = [0, 0]
        """Highest number per lane of its calls that may run only once: the same or a lower one came before."""
        self.broken: set[Lane] = set()
        """Lanes on which we cannot send at the moment."""

    def reopen(self) -> None:
        """It was given up and is tried again: what we send begins again, what it sends continues where it was."""
        self.is_down = False
        self.windows = (CreditWindow(), CreditWindow())
        self.broken.clear()
        for queue in self.waiting:
            queue.clear()

    @property
    def has_business(self) -> bool:
        """A call waits for an answer, here or there: whether the other side is alive is of interest."""
        return bool(self.pending or self.served)


class Links:
    """All incarnations we talk to, and the transport to them."""

    def __init__(
        self, own: PeerKey, transport: Transport, loop_back: Callable[[Lane, bytes | bytearray], None]
    ) -> None:
        self.own = own
        self._transport = transport
        self._loop_back = loop_back
        self._links: dict[PeerKey, Link] = {}
        self.find = self._links.get
        self._over: dict[int, int] = {}
        """Node -> its newest epoch that has ended: that before the one that was heard of, or that itself."""
        self._given_up: dict[PeerKey, Link] = {}
        """Not to be reached when last tried. They may live and still send: what they said of themselves holds."""
        self.is_closed = False
        """This process is going: no link is opened any more."""
        self.itself = Link(own, transport.endpoints)
        """The way to ourselves: always up, no transport between."""
        self.itself.is_up = True
        self._links[own] = self.itself

    def all(self) -> list[Link]:
        return list(self._links.values())

    def heard_of(self, key: PeerKey) -> list[Link]:
        """Note that an incarnation exists; older ones of the same node, which are thereby over, are returned."""
        if key.epoch - 1 <= self._over.get(key.node_id, 0):
            return []
        self._over[key.node_id] = key.epoch - 1
        return [link for link in self._links.values() if link.key.node_id == key.node_id and link.key.epoch < key.epoch]

    def open(self, key: PeerKey, endpoints: Endpoints) -> Link:
        """Connects if there is none. Raises LaunchError without an endpoint, StaleEpoch, NotSent after the end."""
        if self.is_closed:
            raise NotSent("this process is closing")
        link = self._links.get(key)
        if link is None:
            if self.is_over(key):
                raise StaleEpoch(f"{key} has ended", remedy="look its name up again")
            self._transport.connect(key, endpoints)
            given_up = self._given_up.pop(key, None)
            link = self._links[key] = given_up or Link(key, endpoints)
            if given_up is not None:
                link.endpoints = endpoints
                link.reopen()
        return link

    def learn(self, link: Link, endpoints: Endpoints) -> None:
        """The incarnation itself says where it listens; what we knew before may have been less."""
        if endpoints != link.endpoints:
            link.endpoints = endpoints
            self._transport.connect(link.key, endpoints)

    def is_over(self, key: PeerKey) -> bool:
        return 0 < key.epoch <= self._over.get(key.node_id, 0)

    def note_over(self, key: PeerKey) -> None:
        """It ended for good: nothing is sent to it or taken from it any more."""
        self._over[key.node_id] = max(key.epoch, self._over.get(key.node_id, 0))

    def forget(self, link: Link, linger_s: float) -> None:
        link.is_up, link.is_down = False, True
        del self._links[link.key]
        self._transport.disconnect(link.key, linger_s)
        self.forget_sources(link)

    def give_up(self, link: Link) -> None:
        """It cannot be reached. Whether it has ended is for others to say: `take_ended` then."""
        link.is_up, link.is_down = False, True
        self._given_up[link.key] = self._links.pop(link.key)
        self._transport.disconnect(link.key, 0.0)

    def take_ended(self, key: PeerKey) -> list[Link]:
        """That incarnation is over, and every older one of its node: those that had been given up."""
        ended = [k for k in self._given_up if k.node_id == key.node_id and k.epoch <= key.epoch]
        return [self._given_up.pop(k) for k in ended]

    def forget_sources(self, link: Link) -> None:
        """Whatever still comes from its connections is of no interest."""
        for lane in Lane:
            if (source := link.sources[lane]) is not None:
                self._transport.forget(source, lane)

    def flush(self) -> None:
        """What was sent before leaves this process now, not in the next turn of the loop."""
        self._transport.flush()

    def tell_stranger(self, key: PeerKey, endpoints: Endpoints, data: bytes | bytearray) -> None:
        """Send one envelope to an incarnation that we will not link with."""
        self._transport.connect(key, endpoints)
        self._transport.send(key, Lane.CONTROL, Parcel(data))
        self._transport.disconnect(key, TIMEOUTS.wire.linger_s)

    def send(self, link: Link, kind: Kind, corr: int = 0, body: Buffer = b"") -> None:
        """A small envelope with nothing else in it, on the control lane."""
        own = self.own
        self.hand_over(link, Lane.CONTROL, Envelope(kind, own.node_id, own.epoch, link.key.epoch, corr, body=body))

    def hand_over(self, link: Link, lane: Lane, envelope: Envelope, ttl_ms: int = NO_TTL) -> Parcel:
        parcel = Parcel(encode(envelope, ttl_ms))
        if link is self.itself:
            parcel.is_sent = True
            self._loop_back(lane, parcel.data)
        else:
            self._transport.send(link.key, lane, parcel)
        return parcel


class Arrival(msgspec.Struct, eq=False):
    """One call that came in."""

    link: Link
    lane: Lane
    envelope: Envelope
    deadline_at: float | None
    """On this process's monotonic clock."""
    spec: HandlerSpec | None = None
    """Of its handler; set by the host, as the next."""
    callee: str = ""
    """Name of its actor."""
    has_begun: bool = False
    is_answered: bool = False
    """Or its caller waits no more."""

    @property
    def peer(self) -> PeerKey:
        return self.link.key


class SessionHost(Protocol):
    """What the session asks of its surroundings."""

    def deliver(self, arrival: Arrival) -> None:
        """Queue a call for its actor. Raises a CallError to refuse it."""
        ...

    def abandon(self, arrival: Arrival) -> None:
        """The caller does not wait for the answer any more."""

    def num_waiting(self) -> int:
        """Messages waiting or running now."""
        ...

    def judged(self, key: PeerKey, verdict: Verdict, reason: str) -> None:
        """What became of a peer."""

    def unreachable(self, key: PeerKey, why: str) -> None:
        """A peer was given up."""
        ...

    def fenced(self, error: MyxaError) -> None:
        """Another incarnation has taken this process's place."""
        ...

    def loop_back(self, lane: Lane, data: bytes | bytearray) -> None:
        """Give an envelope back to `Session.received` as from LOOPBACK, in a later turn of the loop."""

    def crashed(self, error: BaseException) -> None:
        """A bug in this layer; the node cannot be trusted any more."""
        ...
