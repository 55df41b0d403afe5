"""The session layer of one process: who the peers are, and where each envelope goes. Sans-IO.

Inputs: envelopes, connections that come and go, the clock's ticks, what the registry says of other processes, and the
intents of `Calls` and `Serving`. Outputs: envelopes to a `Transport`, work to a `Host`, ends of calls to their sinks.
Knows no sockets, no loop and no actors; runs unchanged over ZeroMQ, over the in-process transport, or in a test.

Who may speak: the first envelope of a connection is HELLO; until then everything is dropped. An envelope that is not
meant for this incarnation, or comes from one that is over, has no effect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

import msgspec
import orjson

from ..core.clock import Clock
from ..core.errors import BadRequest, LaunchError, MyxaError, StaleEpoch
from ..core.ids import PeerKey
from .calls import Calls
from .faults import decode_fault, encode_fault
from .frames import LIMITS, VERSION, Envelope, Kind, Limits, Malformed, decode, encode
from .links import Link, Links
from .serving import Host, Serving
from .wire import Endpoints, Lane, Transport

MAX_MALFORMED = 100
"""So many malformed messages from one connection and it is not listened to any more."""
REPLACED = "was replaced, or was reported dead"
LOOPBACK = b"self"
"""Source of what a process sends to itself."""
GOODBYE_LINGER_S = 2.0


class Hello(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of the first envelope of every connection."""

    name: str
    """Node name."""
    wire: int
    to_node: int
    to_epoch: int
    endpoints: Endpoints
    """Where the sender listens, so that it can be answered without asking the registry."""
    sent_units: int
    """Credit spent on this lane before this connection."""


class SessionHost(Host, Protocol):
    """What the session asks of its surroundings."""

    def unreachable(self, key: PeerKey, why: str) -> None:
        """A peer was given up."""
        ...

    def fenced(self, error: MyxaError) -> None:
        """Another incarnation has taken this process's place."""
        ...

    def loop_back(self, lane: Lane, data: bytearray) -> None:
        """Give an envelope back to `Session.received` as from LOOPBACK, in a later turn of the loop."""
        ...

    def crashed(self, error: BaseException) -> None:
        """A bug in this layer; the node cannot be trusted any more."""
        ...


class Session:
    """See the module's head. Implements `wire.Sink`."""

    def __init__(
        self, *, own: PeerKey, name: str, transport: Transport, host: SessionHost, clock: Clock, limits: Limits = LIMITS
    ) -> None:
        self.own = own
        self.counters: Counter[str] = Counter()
        self._name = name
        self._transport = transport
        self._host = host
        self._limits = limits
        self._links = Links(own, transport, host.loop_back)
        self.calls = Calls(self._links, clock, limits)
        self.serving = Serving(self._links, host, clock, limits)
        self._sources: tuple[dict[bytes, Link], dict[bytes, Link]] = ({}, {})
        self._bad: Counter[bytes] = Counter()
        self._banned: set[bytes] = set()
        for sources in self._sources:
            sources[LOOPBACK] = self._links.itself
        self._dispatch: dict[Kind, Callable[[Link, Lane, Envelope, int], None]] = {
            Kind.CALL: self.serving.on_call,
            Kind.CAST: self.serving.on_call,
            Kind.CANCEL: self.serving.on_cancel,
            Kind.CREDIT: self.serving.on_demand,
            Kind.REPLY: self.calls.on_answer,
            Kind.ERROR: self.calls.on_answer,
            Kind.END: self.calls.on_answer,
            Kind.NACK: self._on_nack,
            Kind.ITEM: self.calls.on_item,
            Kind.PING: self._on_ping,
            Kind.PONG: self._on_pong,
            Kind.GOODBYE: self._on_goodbye,
        }

    # -- from the transport

    def greeting(self, peer: PeerKey, lane: Lane, sent_units: int) -> bytearray:
        del lane
        hello = Hello(
            name=self._name, wire=VERSION, to_node=peer.node_id, to_epoch=peer.epoch,
            endpoints=self._transport.endpoints, sent_units=sent_units & 0xFFFF,
        )  # fmt: skip
        return encode(self._envelope(Kind.HELLO, peer, body=orjson.dumps(msgspec.to_builtins(hello))))

    def received(self, source: bytes, lane: Lane, data: memoryview) -> None:
        if source in self._banned or self._links.is_closed:
            return
        envelope = decode(data, self._limits)
        link = self._sources[lane].get(source)
        if isinstance(envelope, Malformed):
            self.malformed(source, lane, envelope.reason)
            if link is not None and envelope.corr and PeerKey(envelope.src_node, envelope.src_epoch) == link.key:
                self.serving.refuse_unread(link, envelope.corr, BadRequest(f"malformed: {envelope.reason}"))
            return
        if envelope.kind is Kind.HELLO:
            self._on_hello(source, lane, envelope)
        elif link is None or link.is_down:
            self.counters["before_hello"] += 1
        elif (envelope.src_node, envelope.src_epoch) != (link.key.node_id, link.key.epoch):
            self.malformed(source, lane, "sender is not who it said it was")
        elif envelope.dst_epoch != self.own.epoch:
            self._on_stale(link, envelope)
        else:
            for room in link.take_credit(envelope.credit):
                self.calls.on_room(link, room)
            self._dispatch[envelope.kind](link, lane, envelope, len(data))

    def malformed(self, source: bytes, lane: Lane, reason: str) -> None:
        self.counters["malformed"] += 1
        self._bad[source] += 1
        if self._bad[source] > MAX_MALFORMED and source != LOOPBACK:
            self._banned.add(source)
            self._sources[lane].pop(source, None)

    def connected(self, peer: PeerKey, lane: Lane) -> None:
        link = self._links.find(peer)
        if link is None:
            return
        if lane is Lane.CONTROL:
            link.on("connected")
        if lane in link.broken:
            link.broken.discard(lane)
            self.calls.on_blip(link)

    def lost(self, peer: PeerKey, lane: Lane, why: str) -> None:
        del why
        link = self._links.find(peer)
        if link is None:
            return
        self.counters["lost"] += 1
        link.broken.add(lane)
        if lane is Lane.CONTROL:
            link.on("lost")

    def unreachable(self, peer: PeerKey, why: str) -> None:
        link = self._links.find(peer)
        if link is not None:
            self._down(link, f"{why}")
        self._host.unreachable(peer, why)

    def crashed(self, error: BaseException) -> None:
        self._host.crashed(error)

    # -- from the node

    def tick(self) -> None:
        """Time has passed."""
        self.calls.expire()

    def peer_over(self, key: PeerKey, why: str) -> None:
        """That incarnation has ended for good."""
        if key.epoch:
            self._links.note_over(key)
        link = self._links.find(key)
        if link is not None and key != self.own:
            self._down(link, why)

    def peers(self) -> tuple[PeerKey, ...]:
        """Incarnations we have a connection to, or are making one; without this process."""
        return tuple(link.key for link in self._links.all() if link.key != self.own)

    def close(self) -> None:
        """Say goodbye to everybody; calls that are still pending end now."""
        self.calls.fail_all("this process is closing")
        self._links.is_closed = True
        for link in self._links.all():
            if link.key != self.own:
                self._links.send(link, Lane.CONTROL, encode(self._envelope(Kind.GOODBYE, link.key)))
                self._down(link, "this process is closing", GOODBYE_LINGER_S)

    # -- peers

    def _on_hello(self, source: bytes, lane: Lane, envelope: Envelope) -> None:
        key = PeerKey(envelope.src_node, envelope.src_epoch)
        try:
            hello = msgspec.convert(orjson.loads(envelope.body), Hello)
        except (msgspec.ValidationError, ValueError) as error:
            self.malformed(source, lane, f"HELLO: {error}")
            return
        if key == self.own or (hello.to_node, hello.to_epoch) != (self.own.node_id, self.own.epoch):
            self._refuse(key, hello, StaleEpoch(f"{hello.name} asked for another incarnation than {self.own}"))
            return
        if self._links.is_over(key):
            self._refuse(key, hello, StaleEpoch(f"{hello.name} epoch {key.epoch} {REPLACED}"))
            return
        for older in self._links.heard_of(key):
            self.peer_over(older.key, f"{hello.name} restarted as epoch {key.epoch}")
        try:
            link = self._links.open(key, hello.endpoints)
            self._links.learn(link, hello.endpoints)
        except LaunchError:
            self.counters["cannot_answer"] += 1
            return
        self._adopt(link, source, lane, hello.sent_units)

    def _adopt(self, link: Link, source: bytes, lane: Lane, sent_units: int) -> None:
        previous = link.sources[lane]
        link.sources[lane] = source
        self._sources[lane][source] = link
        link.grants[lane].resync(sent_units)
        if previous is not None and previous != source:
            self._sources[lane].pop(previous, None)
            self._bad.pop(previous, None)
            self._transport.forget(previous, lane)
            self.calls.on_blip(link)

    def _refuse(self, key: PeerKey, hello: Hello, error: StaleEpoch) -> None:
        self.counters["refused"] += 1
        try:
            self._links.tell_stranger(
                key, hello.endpoints, encode(self._envelope(Kind.NACK, key, body=encode_fault(error)))
            )
        except LaunchError:
            self.counters["cannot_answer"] += 1

    def _on_stale(self, link: Link, envelope: Envelope) -> None:
        self.counters["stale"] += 1
        if envelope.kind in (Kind.CALL, Kind.CAST):
            error = StaleEpoch(f"meant for epoch {envelope.dst_epoch}, this is epoch {self.own.epoch}")
            self.serving.refuse_unread(link, envelope.corr, error)

    def _on_nack(self, link: Link, lane: Lane, envelope: Envelope, num_bytes: int) -> None:
        if envelope.corr:
            self.calls.on_answer(link, lane, envelope, num_bytes)
            return
        error = decode_fault(envelope.body, str(link.key), "HELLO", is_refusal=True)
        if isinstance(error, StaleEpoch) and REPLACED in error.message:
            self._host.fenced(error)
        else:
            self.peer_over(link.key, f"it refused us: {error}")

    def _on_ping(self, link: Link, _lane: Lane, envelope: Envelope, _num_bytes: int) -> None:
        self._links.send(link, Lane.CONTROL, encode(self._envelope(Kind.PONG, link.key, corr=envelope.corr)))

    def _on_pong(self, _link: Link, _lane: Lane, _envelope: Envelope, _num_bytes: int) -> None:
        self.counters["pong"] += 1

    def _on_goodbye(self, link: Link, _lane: Lane, _envelope: Envelope, _num_bytes: int) -> None:
        self.peer_over(link.key, "it said goodbye")

    def _down(self, link: Link, why: str, linger_s: float = 0.0) -> None:
        if link.is_down:
            return
        for lane in Lane:
            source = link.sources[lane]
            if source is not None:
                self._sources[lane].pop(source, None)
                self._bad.pop(source, None)
        self._links.forget(link, linger_s)
        self.calls.on_gone(link, why)
        self.serving.on_gone(link)

    def _envelope(self, kind: Kind, peer: PeerKey, *, body: bytes = b"", corr: int = 0) -> Envelope:
        return Envelope(
            kind=kind, src_node=self.own.node_id, src_epoch=self.own.epoch, dst_epoch=peer.epoch, corr=corr, body=body
        )
