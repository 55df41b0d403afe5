"""The session layer of one process: who the peers are, and where each envelope goes. Sans-IO.

Inputs: envelopes, connections that come and go, the clock's ticks, what the registry says of other processes, and the
intents of `Calls` and `Serving`. Outputs: envelopes to a `Transport`, work to a `SessionHost`, ends of calls to their
sinks. Knows no sockets, no loop and no actors; runs unchanged over sockets, over the in-process transport, or in a
test.

The first envelope of a connection is HELLO; until then everything is dropped. An envelope that is not meant for this
incarnation, or comes from one that is over, has no effect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

from ...core.clock import Clock
from ...core.errors import LaunchError, MyxaError, StaleEpoch
from ...core.ids import PeerKey
from ..wire import Door, Endpoints, Lane, Transport
from .calls import Calls
from .faults import decode_fault, encode_fault
from .frames import LIMITS, VERSION, Buffer, Envelope, Kind, Limits, encode
from .handshake import PROTOCOL, Handshake, Hello, read_goodbye, read_hello, write_goodbye, write_hello
from .heartbeat import Heartbeat, HeartbeatHost
from .inbound_router import Handler, InboundRouter
from .links import Link, Links
from .repair import Repair
from .serving import Host, Serving

ANOTHER = "asked for another incarnation than"
REPLACED = "was replaced, or was reported dead"
GOODBYE_LINGER_S = 2.0


class Session:
    """See the module's head. Implements `wire.Sink`."""

    def __init__(
        self,
        *,
        own: PeerKey,
        name: str,
        transport: Transport,
        host: SessionHost,
        clock: Clock,
        limits: Limits = LIMITS,
        door: Door | None = None,
    ) -> None:
        self.own = own
        self._epoch = own.epoch
        self.counters: Counter[str] = Counter()
        self._name = name
        self._transport = transport
        self._host = host
        self._links = Links(own, transport, host.loop_back)
        self.calls = Calls(self._links, clock, limits)
        self.serving = Serving(self._links, host, clock, limits)
        self.repair = Repair(self._links, self.calls, self.serving, clock)
        self.heartbeat = Heartbeat(self._links, host, clock, self.counters)
        self._clock = clock
        self._door = door
        self._dialect = Handshake(self._links, self.calls, self.counters, door, self.peer_over)
        self._num_greetings = 0
        self.on_greeted: Callable[[PeerKey, Endpoints], object] | None = None
        """Called when a process said who it is, before anything else is done with it."""
        handlers: dict[Kind, Handler] = {
            Kind.CALL: self.serving.on_call,
            Kind.CAST: self.serving.on_call,
            Kind.CANCEL: self.serving.on_cancel,
            Kind.CREDIT: self.repair.on_credit,
            Kind.REPLY: self.calls.on_answer,
            Kind.ERROR: self.calls.on_answer,
            Kind.END: self.calls.on_answer,
            Kind.NACK: self._on_nack,
            Kind.ITEM: self.calls.on_item,
            Kind.PING: self.heartbeat.on_ping,
            Kind.PONG: self.heartbeat.on_pong,
            Kind.GOODBYE: self._on_goodbye,
        }
        self._inbound_router = InboundRouter(
            self._links, self.calls, self.serving, clock, limits, door, self.counters, self, handlers
        )
        self.received = self._inbound_router.received
        self.malformed = self._inbound_router.malformed
        self.is_known = self._inbound_router.is_known
        self.overflowed = self._inbound_router.overflowed

    # -- from the transport

    def greeting(self, peer: PeerKey, lane: Lane, sent_units: int) -> bytearray:
        del lane
        self._num_greetings += 1
        hello = Hello(
            name=self._name, protocol=PROTOCOL, wire=VERSION, to_node=peer.node_id, to_epoch=peer.epoch,
            endpoints=self._transport.endpoints, sent_units=sent_units & 0xFFFF,
            attempt=self._num_greetings,
        )  # fmt: skip
        return encode(self._envelope(Kind.HELLO, peer, body=write_hello(hello)))

    def connected(self, peer: PeerKey, lane: Lane) -> None:
        link = self._links.find(peer)
        if link is None:
            return
        if lane is Lane.CONTROL:
            link.on("connected")
            self.heartbeat.reconnected(link)
        if lane in link.broken:
            link.broken.discard(lane)
            self.calls.on_blip(link, lane)

    def lost(self, peer: PeerKey, lane: Lane, why: str) -> None:
        del why
        link = self._links.find(peer)
        if link is None:
            return
        self.counters["lost"] += 1
        link.broken.add(lane)
        if lane is Lane.CONTROL:
            link.on("lost")

    def turned_away(self, peer: PeerKey, why: str) -> None:
        if self._links.find(peer) is not None:
            self._host.fenced(StaleEpoch(f"{peer}: {why}; it {REPLACED}"))

    def silence_s(self, peer: PeerKey) -> float:
        return self.heartbeat.silence_s(peer)

    def unreachable(self, peer: PeerKey, why: str) -> None:
        link = self._links.find(peer)
        if link is not None:
            self._end_business(link, why)
            self._links.give_up(link)
        self._host.unreachable(peer, why)

    def crashed(self, error: BaseException) -> None:
        self._host.crashed(error)

    # -- from the node

    def tick(self) -> None:
        """Time has passed."""
        self.calls.expire()
        self.repair.tick()
        self.heartbeat.tick()

    def peer_over(self, key: PeerKey, why: str) -> None:
        """That incarnation has ended for good."""
        if key.epoch:
            self._links.note_over(key)
        link = self._links.find(key)
        if link is not None and key != self.own:
            self._down(link, why)
        for given_up in self._links.bury(key):
            self._inbound_router.drop(given_up)
            self._links.forget_sources(given_up)

    def endpoints_of(self, key: PeerKey) -> Endpoints | None:
        """Where an incarnation that we have a connection to listens."""
        link = self._links.find(key)
        return link.endpoints if link is not None else None

    def is_over(self, key: PeerKey) -> bool:
        """That incarnation is known to have ended."""
        return self._links.is_over(key)

    def peers(self) -> tuple[PeerKey, ...]:
        """Incarnations we have a connection to, or are making one; without this process."""
        return tuple(link.key for link in self._links.all() if link.key != self.own)

    def drain(self, retry_after_s: float) -> None:
        """Tell everybody that new calls are not taken any more; those under way are finished."""
        for link in self._links.all():
            if link.key != self.own:
                body = write_goodbye(retry_after_s)
                self._links.send(link, Lane.CONTROL, encode(self._envelope(Kind.GOODBYE, link.key, body=body)))

    def close(self) -> None:
        """Say goodbye to everybody; calls that are still pending end now."""
        self.calls.fail_all("this process is closing")
        self._links.is_closed = True
        self._inbound_router.look_closely()
        for link in self._links.all():
            if link.key != self.own:
                self._links.send(link, Lane.CONTROL, encode(self._envelope(Kind.GOODBYE, link.key)))
                self._down(link, "this process is closing", GOODBYE_LINGER_S)

    # -- peers

    def on_hello(self, source: bytes, lane: Lane, envelope: Envelope) -> None:
        key = PeerKey(envelope.src_node, envelope.src_epoch)
        if objection := self._objection(source, lane, key, envelope.body):
            self.malformed(source, lane, f"HELLO: {objection}")
            return
        try:
            hello = read_hello(envelope.body)
        except ValueError as error:
            self.malformed(source, lane, f"HELLO: {error}")
            return
        if self._door is not None and (objection := self._door.objection(source, lane, key, hello.name)):
            self.counters["hello_in_anothers_name"] += 1
            self.malformed(source, lane, objection)
            return
        if key == self.own or (hello.to_node, hello.to_epoch) != (self.own.node_id, self.own.epoch):
            self._refuse(key, hello, StaleEpoch(f"{hello.name} {ANOTHER} {self.own}"))
            return
        if self._links.is_over(key):
            self._refuse(key, hello, StaleEpoch(f"{hello.name} epoch {key.epoch} {REPLACED}"))
            return
        for older in self._links.heard_of(key):
            self.peer_over(older.key, f"{hello.name} restarted as epoch {key.epoch}")
        if self.on_greeted is not None:
            self.on_greeted(key, hello.endpoints)
        try:
            link = self._links.open(key, hello.endpoints)
            if hello.attempt <= link.attempts[lane]:
                self.counters["hello_replayed"] += 1
                self.malformed(source, lane, "HELLO: it came before")
                return
            link.attempts[lane] = hello.attempt
            self._links.learn(link, hello.endpoints)
        except LaunchError:
            self.counters["cannot_answer"] += 1
            return
        self._adopt(link, source, lane, hello.sent_units)

    def _objection(self, source: bytes, lane: Lane, key: PeerKey, body: Buffer) -> str:
        known = self._inbound_router.link_of(source, lane)
        if known is not None and known.key != key:
            return f"this connection is that of {known.key}"
        return self._dialect.objection(source, lane, key, body)

    def _adopt(self, link: Link, source: bytes, lane: Lane, sent_units: int) -> None:
        link.grants[lane].resync(sent_units)
        previous = self._inbound_router.adopt(link, source, lane)
        if previous is not None and previous != source:
            self._transport.forget(previous, lane)
            self.calls.on_blip(link)

    def _refuse(self, key: PeerKey, hello: Hello, error: StaleEpoch) -> None:
        self.counters["hello_stale"] += 1
        if self._links.find(key) is not None:
            return  # it greets a former identity of ours (we have just joined) and knows the present one already
        try:
            refusal = self._envelope(Kind.NACK, key, body=encode_fault(error), actor=hello.to_node)
            self._links.tell_stranger(key, hello.endpoints, encode(refusal))
        except LaunchError:
            self.counters["cannot_answer"] += 1

    def on_stale(self, link: Link, envelope: Envelope) -> None:
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
        elif isinstance(error, StaleEpoch) and ANOTHER in error.message:
            self._on_moved(envelope.actor, link)
        else:
            self.peer_over(link.key, f"it refused us: {error}")

    def _on_moved(self, node_id: int, found: Link) -> None:
        """Somebody else listens where we looked for that node. A newer incarnation of it has said so with its HELLO."""
        for link in self._links.all():
            if link.key.node_id == node_id and node_id != found.key.node_id:
                self._down(link, f"{found.key} is at its address now")

    def _on_goodbye(self, link: Link, _lane: Lane, envelope: Envelope, _num_bytes: int) -> None:
        farewell = read_goodbye(envelope.body)
        if farewell is None:
            self.peer_over(link.key, "it said goodbye")
        else:
            link.drains_until = self._clock.monotonic() + farewell.retry_after_s

    def is_back(self, link: Link, envelope: Envelope) -> bool:
        """A peer that we had given up calls us: only the way to it was broken. It is tried again."""
        if envelope.kind not in (Kind.CALL, Kind.CAST):
            return False
        try:
            self._links.open(link.key, link.endpoints)
        except MyxaError:
            return False
        return True

    def _down(self, link: Link, why: str, linger_s: float = 0.0) -> None:
        if link.is_down:
            return
        self._inbound_router.drop(link)
        self._links.forget(link, linger_s)
        self._end_business(link, why)

    def _end_business(self, link: Link, why: str) -> None:
        self.heartbeat.forget(link.key)
        self.calls.on_gone(link, why)
        self.serving.on_gone(link)

    def _envelope(self, kind: Kind, peer: PeerKey, *, body: bytes = b"", corr: int = 0, actor: int = 0) -> Envelope:
        return Envelope(
            kind=kind, src_node=self.own.node_id, src_epoch=self.own.epoch, dst_epoch=peer.epoch,
            corr=corr, actor=actor, body=body,
        )  # fmt: skip


class SessionHost(Host, HeartbeatHost, Protocol):
    """What the session asks of its surroundings."""

    def unreachable(self, key: PeerKey, why: str) -> None:
        """A peer was given up."""
        ...

    def fenced(self, error: MyxaError) -> None:
        """Another incarnation has taken this process's place."""
        ...

    def loop_back(self, lane: Lane, data: bytes | bytearray) -> None:
        """Give an envelope back to `Session.received` as from LOOPBACK, in a later turn of the loop."""
        ...

    def crashed(self, error: BaseException) -> None:
        """A bug in this layer; the node cannot be trusted any more."""
        ...
