"""What arrives: which of it is an envelope for this incarnation, from a peer that has said HELLO. Sans-IO.

Nearly all of it is small, has neither options nor arrays, and comes from a known peer: the first word of its header,
one comparison of addresses, and lengths that add up tell that. Everything else is examined, counted, and refused or
dropped. `ProtocolViolations` bans a connection with too many of them within a minute, for a while. Its memory is
bounded, because connections are cheap to make: the oldest are forgotten first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Protocol

from ...core.clock import Clock
from ...core.errors import BadRequest, Overloaded
from ...core.ids import PeerKey
from ..wire import Door, Lane
from .calls import Calls
from .credit import cost_of
from .frames import HEADER_BYTES, WORDS, Envelope, Kind, Limits, Malformed, decode, peek, read_head
from .links import Link, Links
from .serving import Serving

LOOPBACK = b"self"
"""Source of what a process sends to itself."""
_HELLO, _LEAST = Kind.HELLO, HEADER_BYTES  # members of an Enum are looked up in Python

Handler = Callable[[Link, Lane, Envelope, int], None]
"""Of one kind of envelope; the number is its length in bytes."""


class Desk(Protocol):
    """Decides on what is not everyday."""

    def on_hello(self, source: bytes, lane: Lane, envelope: Envelope) -> None:
        """Somebody says who it is."""
        ...

    def on_stale(self, link: Link, envelope: Envelope) -> None:
        """Meant for another incarnation than this one."""
        ...

    def is_back(self, link: Link, envelope: Envelope) -> bool:
        """From a peer that is down: whether that changes with it."""
        ...


class InboundRouter:
    """See the module's head. The part of `wire.Sink` that takes bytes."""

    def __init__(
        self,
        links: Links,
        calls: Calls,
        serving: Serving,
        clock: Clock,
        limits: Limits,
        door: Door | None,
        counters: Counter[str],
        desk: Desk,
        handlers: Mapping[Kind, Handler],
    ) -> None:
        self._links = links
        self._calls = calls
        self._serving = serving
        self._clock = clock
        self._limits = (limits.of_control(), limits)
        self._plain_bytes = min(limits.bulk_from, limits.control_body, limits.body, limits.message)
        self._door = door
        self._counters = counters
        self._desk = desk
        self._handlers = handlers
        self._plain = {WORDS[kind]: (kind, handle) for kind, handle in handlers.items()}
        """The same by the first word of an envelope."""
        self._epoch = links.own.epoch
        self._strikes = ProtocolViolations()
        self._is_wary = False
        """Examine everything: somebody is banned, or this process is closing."""
        self._sources: tuple[dict[bytes, Link], dict[bytes, Link]] = ({}, {})
        for sources in self._sources:
            sources[LOOPBACK] = links.itself

    # -- who is who

    def link_of(self, source: bytes, lane: Lane) -> Link | None:
        """Who sends on that connection; None: it has not said so."""
        return self._sources[lane].get(source)

    def is_known(self, source: bytes, lane: Lane) -> bool:
        return source in self._sources[lane]

    def adopt(self, link: Link, source: bytes, lane: Lane) -> bytes | None:
        """From now on that peer sends on that connection; the one before it, which is over, is returned."""
        previous = link.sources[lane]
        link.sources[lane] = source
        self._sources[lane][source] = link
        if previous is not None and previous != source:
            self._sources[lane].pop(previous, None)
            self._strikes.forgive(previous)
        return previous

    def drop(self, link: Link) -> None:
        """What still comes on that peer's connections is from nobody."""
        for lane in Lane:
            source = link.sources[lane]
            if source is not None:
                self._sources[lane].pop(source, None)
                self._strikes.forgive(source)

    def look_closely(self) -> None:
        """At everything, from now on: this process is closing."""
        self._is_wary = True

    # -- what comes

    def received(self, source: bytes, lane: Lane, data: memoryview) -> None:
        link, size = self._sources[lane].get(source), len(data)
        if link is None or not _LEAST <= size <= self._plain_bytes or self._is_wary:
            self._examine(source, lane, data)
            return
        word, flags, method, actor, corr, address, ttl_ms, num_frames, body_len, credit = read_head(data)
        found = self._plain.get(word)
        if found is None or address != link.address_in or body_len != size - _LEAST or num_frames or flags:
            self._examine(source, lane, data)
            return
        if credit != link.last_word and (gained := link.take_credit(credit)):
            self._make_use_of(link, gained)
        kind, handle = found
        node_id, epoch = link.key
        body = data[_LEAST:]
        handle(link, lane, Envelope(kind, node_id, epoch, self._epoch, corr, actor, method, ttl_ms, credit, body), size)

    def _make_use_of(self, link: Link, gained: tuple[Lane, ...]) -> None:
        for room in gained:
            if link.waiting[room]:
                self._calls.on_room(link, room)

    def _examine(self, source: bytes, lane: Lane, data: memoryview) -> None:
        """The same for whatever comes, from whomever."""
        if self._links.is_closed or (self._strikes.has_bans and self._is_banned(source)):
            return
        self._is_wary = self._strikes.has_bans
        envelope = decode(data, self._limits[lane])
        link = self._sources[lane].get(source)
        if (
            link is None
            or type(envelope) is not Envelope
            or envelope.kind is _HELLO
            or envelope.dst_epoch != self._epoch
            or (envelope.src_node, envelope.src_epoch) != link.key
            or (link.is_down and not self._desk.is_back(link, envelope))
        ):
            self._on_irregular(source, lane, link, envelope)
            return
        if envelope.credit != link.last_word:
            self._make_use_of(link, link.take_credit(envelope.credit))
        self._handlers[envelope.kind](link, lane, envelope, len(data))

    def _on_irregular(self, source: bytes, lane: Lane, link: Link | None, envelope: Envelope | Malformed) -> None:
        """Something else than an envelope for this incarnation from one that has said who it is."""
        if isinstance(envelope, Malformed):
            self.malformed(source, lane, envelope.reason)
            if link is not None and envelope.corr and PeerKey(envelope.src_node, envelope.src_epoch) == link.key:
                self._serving.refuse_unread(link, envelope.corr, BadRequest(f"malformed: {envelope.reason}"))
            return
        if envelope.kind is _HELLO:
            self._desk.on_hello(source, lane, envelope)
        elif link is None or link.is_down:
            self._counters["before_hello"] += 1
        elif (envelope.src_node, envelope.src_epoch) != link.key:
            self.malformed(source, lane, "sender is not who it said it was")
        else:
            self._desk.on_stale(link, envelope)

    def malformed(self, source: bytes, lane: Lane, reason: str) -> None:
        if self._strikes.has_bans and self._is_banned(source):
            return
        self._counters["malformed"] += 1
        if source != LOOPBACK and self._strikes.strike(source, self._clock.monotonic()):
            self._counters["banned"] += 1
            self._is_wary = True
            self._sources[lane].pop(source, None)
            if self._door is not None:
                self._door.ban(source, lane)

    def overflowed(self, source: bytes, lane: Lane, head: bytes, total: int) -> None:
        self._counters["overflowed"] += 1
        link, known = self._sources[lane].get(source), peek(head)
        if link is not None and known is not None and known[0] in (Kind.CALL, Kind.CAST):
            link.grants[lane].take(cost := cost_of(total))
            link.grants[lane].give(cost)
            error = Overloaded("so much is being received that there is no memory for it", retry_after_s=1.0)
            self._serving.refuse_unread(link, known[1], error)

    def _is_banned(self, source: bytes) -> bool:
        if not self._strikes.is_banned(source, self._clock.monotonic()):
            return False
        self._counters["from_banned"] += 1
        return True


MAX_STRIKES = 100
WINDOW_S = 60.0
BAN_S = 60.0
MAX_SOURCES = 4096


class ProtocolViolations:
    """Of all connections of one process."""

    def __init__(self) -> None:
        self._strikes: OrderedDict[bytes, deque[float]] = OrderedDict()
        self._banned: OrderedDict[bytes, float] = OrderedDict()
        self.has_bans = False
        """Whether asking for a ban is worth it."""
        self.num_bans = 0

    def __len__(self) -> int:
        return len(self._strikes) + len(self._banned)

    def strike(self, source: bytes, now: float) -> bool:
        """One more; True if this one was too many: the source is banned from now on."""
        times = self._strikes.get(source)
        if times is None:
            times = self._strikes[source] = deque(maxlen=MAX_STRIKES + 1)
            if len(self._strikes) > MAX_SOURCES:
                self._strikes.popitem(last=False)
        times.append(now)
        if len(times) <= MAX_STRIKES or now - times[0] > WINDOW_S:
            return False
        del self._strikes[source]
        self._banned[source] = now + BAN_S
        self._banned.move_to_end(source)
        if len(self._banned) > MAX_SOURCES:
            self._banned.popitem(last=False)
        self.num_bans += 1
        self.has_bans = True
        return True

    def is_banned(self, source: bytes, now: float) -> bool:
        """Whether it is not listened to."""
        while self._banned and next(iter(self._banned.values())) <= now:  # the oldest ban ends first
            self._banned.popitem(last=False)
        self.has_bans = bool(self._banned)
        return source in self._banned

    def forgive(self, source: bytes) -> None:
        """That connection is over."""
        self._strikes.pop(source, None)
