"""The session layer of one process: who the peers are, and where each envelope goes. Sans-IO.

The first envelope of a connection is HELLO; everything before it is dropped. What comes from a known peer for this
incarnation goes to the handler of its kind. All else is counted, and refused or dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec
import orjson

from ... import __version__
from ...core.clock import Clock
from ...core.errors import BadRequest, CallError, LaunchError, MyxaError, Overloaded, ProtocolMismatch, StaleEpoch
from ...core.ids import MAX_NAME_LENGTH, NAME_PATTERN, PeerKey
from ...core.timeouts import TIMEOUTS
from ..codec import Buffer
from ..wire import Endpoints, Lane, Transport, is_public_key
from .calls import Calls
from .faults import decode_fault, encode_fault
from .frames import LIMITS, VERSION, Envelope, Kind, Malformed, decode, encode, peek
from .heartbeat import Heartbeat
from .links import Link, Links, SessionHost
from .serving import Serving

PROTOCOL = f"{VERSION}/{__version__}"
"""Version of wire and package: processes of different ones find out when they meet and not at some later message."""
MAX_HELLO_BYTES = 4096


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a HELLO. That of another version is read too, so that it hears why it is refused."""

    name: str
    protocol: str
    """The speaker's, see `PROTOCOL`."""
    to_node: int
    to_epoch: int
    endpoints: Endpoints
    """Where the sender listens, so that it can be answered without asking the registry."""
    attempt: int = 1
    """Grows with every connection that the sender makes: a HELLO that was recorded and comes again is an old one."""


def write_hello(hello: Hello) -> bytes:
    return orjson.dumps(msgspec.to_builtins(hello))


def read_hello(body: Buffer) -> Hello:
    """Raises ValueError for anything that is no HELLO."""
    if len(body) > MAX_HELLO_BYTES:
        raise ValueError(f"{len(body)} bytes are too many")
    try:
        hello = msgspec.convert(orjson.loads(body), Hello)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if len(hello.name) > MAX_NAME_LENGTH or NAME_PATTERN.fullmatch(hello.name) is None:
        raise ValueError("that is no node's name")
    if not 0 < hello.attempt < 1 << 63:
        raise ValueError("numbers out of range")
    _check_endpoints(hello.endpoints)
    return hello


def _check_endpoints(endpoints: Endpoints) -> None:
    """We will connect there: to what listens as nodes do, and to nothing else."""
    for scheme, pair in (("ipc://", endpoints.ipc), ("tcp://", endpoints.tcp)):
        if any(address and not address.startswith(scheme) for address in pair):
            raise ValueError(f"an address that does not begin with {scheme}")
    if endpoints.curve and not is_public_key(endpoints.curve):
        raise ValueError("that is no public key")
    if any(endpoints.tcp) and not endpoints.curve:
        raise ValueError("tcp without a public key")


LOOPBACK = b"self"
_LIMITS = LIMITS.of_control(), LIMITS

Handler = Callable[[Link, Lane, Envelope, int], None]
"""Of one kind of envelope; the number is its length in bytes."""


class Session:
    """The peers of one process and its envelopes. Implements `wire.InboundSink`."""

    def __init__(self, *, own: PeerKey, name: str, transport: Transport, host: SessionHost, clock: Clock) -> None:
        self.own = own
        self._epoch = own.epoch
        self.counters: Counter[str] = Counter()
        self._name = name
        self._transport = transport
        self._host = host
        self._links = Links(own, transport, host.loop_back)
        self.calls = Calls(self._links, clock, self.counters)
        self.serving = Serving(self._links, host, clock, self.counters)
        self.heartbeat = Heartbeat(self._links, host, clock, self.counters)
        self._num_greetings = 0
        self._handlers: dict[Kind, Handler] = {
            Kind.CALL: self.serving.on_call,
            Kind.CANCEL: self.serving.on_cancel,
            Kind.CREDIT: self.calls.on_credit,
            Kind.REPLY: self.calls.on_answer,
            Kind.ERROR: self.calls.on_answer,
            Kind.NACK: self._on_nack,
            Kind.PING: self.heartbeat.on_ping,
            Kind.PONG: self.heartbeat.on_pong,
            Kind.GOODBYE: self._on_goodbye,
        }
        self._sources: tuple[dict[bytes, Link], dict[bytes, Link]] = ({}, {})
        for sources in self._sources:
            sources[LOOPBACK] = self._links.itself

    # -- from the transport

    def is_known(self, source: bytes, lane: Lane) -> bool:
        return source in self._sources[lane]

    def received(self, source: bytes, lane: Lane, data: memoryview) -> None:
        if self._links.is_closed:
            return
        envelope = decode(data, _LIMITS[lane])
        link = self._sources[lane].get(source)
        if (
            link is None
            or type(envelope) is not Envelope
            or envelope.kind is Kind.HELLO
            or envelope.dst_epoch != self._epoch
            or (envelope.src_node, envelope.src_epoch) != link.key
            or (link.is_down and not self._is_back(link, envelope))
        ):
            self._on_irregular(source, lane, link, envelope)
            return
        self._handlers[envelope.kind](link, lane, envelope, len(data))

    def _on_irregular(self, source: bytes, lane: Lane, link: Link | None, envelope: Envelope | Malformed) -> None:
        if isinstance(envelope, Malformed):
            self.malformed(source, lane, envelope.reason)
            if link is not None and envelope.corr and PeerKey(envelope.src_node, envelope.src_epoch) == link.key:
                self.serving.refuse_unread(link, envelope.corr, BadRequest(f"malformed: {envelope.reason}"))
            return
        if envelope.kind is Kind.HELLO:
            self._on_hello(source, lane, envelope)
        elif link is None or link.is_down:
            self.counters["before_hello"] += 1
        elif (envelope.src_node, envelope.src_epoch) != link.key:
            self.malformed(source, lane, "sender is not who it said it was")
        else:
            self._on_stale(link, envelope)

    def malformed(self, source: bytes, lane: Lane, reason: str) -> None:
        del source, lane, reason
        self.counters["malformed"] += 1

    def overflowed(self, source: bytes, lane: Lane, head: bytes, total: int) -> None:
        del total
        self.counters["overflowed"] += 1
        link, kind_and_corr = self._sources[lane].get(source), peek(head)
        if link is not None and kind_and_corr is not None and kind_and_corr[0] == Kind.CALL:
            error = Overloaded("so much is being received that there is no memory for it")
            self.serving.refuse_unread(link, kind_and_corr[1], error)

    def greeting(self, peer: PeerKey, lane: Lane) -> bytes | bytearray:
        del lane
        self._num_greetings += 1
        hello = Hello(
            name=self._name, protocol=PROTOCOL, to_node=peer.node_id, to_epoch=peer.epoch,
            endpoints=self._transport.endpoints, attempt=self._num_greetings,
        )  # fmt: skip
        return encode(self._envelope(Kind.HELLO, peer, body=write_hello(hello)))

    def connected(self, peer: PeerKey, lane: Lane) -> None:
        link = self._links.find(peer)
        if link is None:
            return
        if lane is Lane.CONTROL:
            link.is_up = True
            self.heartbeat.reconnected(link)
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
            link.is_up = False

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
        self.heartbeat.tick()

    def peer_over(self, key: PeerKey, why: str) -> None:
        if key.epoch:
            self._links.note_over(key)
        link = self._links.find(key)
        if link is not None and key != self.own:
            self._down(link, why)
        for given_up in self._links.take_ended(key):
            self._drop_sources(given_up)
            self._links.forget_sources(given_up)

    def peers(self) -> tuple[PeerKey, ...]:
        """Incarnations we have a connection to, or are making one; without this process."""
        return tuple(link.key for link in self._links.all() if link.key != self.own)

    def close(self) -> None:
        """Say goodbye to everybody; calls that are still pending end now."""
        self.calls.fail_all("this process is closing")
        self._links.is_closed = True
        for link in self._links.all():
            if link.key != self.own:
                self._links.send(link, Kind.GOODBYE)
                self._down(link, "this process is closing", TIMEOUTS.wire.linger_s)

    # -- peers

    def _on_hello(self, source: bytes, lane: Lane, envelope: Envelope) -> None:
        key = PeerKey(envelope.src_node, envelope.src_epoch)
        speaker = self._sources[lane].get(source)
        if speaker is not None and speaker.key != key:
            self.malformed(source, lane, f"HELLO: this connection is that of {speaker.key}")
            return
        try:
            hello = read_hello(envelope.body)
        except ValueError as error:
            self.malformed(source, lane, f"HELLO: {error}")
            return
        if objection := self._transport.objection(lane, key, hello.name):
            self.counters["hello_in_anothers_name"] += 1
            self.malformed(source, lane, objection)
            return
        if hello.protocol != PROTOCOL:
            self._refuse_version(key, hello)
            return
        if key == self.own or (hello.to_node, hello.to_epoch) != (self.own.node_id, self.own.epoch):
            self.counters["hello_stale"] += 1  # the registry tells it who is over
            return
        if self._links.is_over(key):
            self._refuse_ended(key, hello)
            return
        for older in self._links.heard_of(key):
            self.peer_over(older.key, f"{hello.name} restarted as epoch {key.epoch}")
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
        self._adopt(link, source, lane)

    def _refuse_ended(self, key: PeerKey, hello: Hello) -> None:
        self.counters["hello_stale"] += 1
        if self._links.find(key) is None:  # else it greets a former identity of ours, and knows the present one
            error = StaleEpoch(f"{hello.name} epoch {key.epoch} was replaced, or was reported dead")
            self._tell_stranger(key, hello.endpoints, error)

    def _refuse_version(self, key: PeerKey, hello: Hello) -> None:
        """It takes nothing from us either."""
        self.counters["hello_of_another_version"] += 1
        error = ProtocolMismatch(
            f"{hello.name} speaks protocol {hello.protocol[:16]}, this process {PROTOCOL}",
            remedy="run the same version of myxa in all processes of a job",
        )
        if self._links.find(key) is not None:
            self.peer_over(key, str(error))
        else:
            self._tell_stranger(key, hello.endpoints, error)

    def _tell_stranger(self, key: PeerKey, endpoints: Endpoints, error: CallError) -> None:
        """With our own HELLO in front, from which it sees the same."""
        try:
            refusal = self._envelope(Kind.NACK, key, body=encode_fault(error))
            self._links.tell_stranger(key, endpoints, encode(refusal))
        except LaunchError:
            self.counters["cannot_answer"] += 1

    def _adopt(self, link: Link, source: bytes, lane: Lane) -> None:
        """From now on that peer sends on that connection; the one before it is over."""
        previous = link.sources[lane]
        link.sources[lane] = source
        self._sources[lane][source] = link
        if previous is not None and previous != source:
            self._sources[lane].pop(previous, None)
            self._transport.forget(previous, lane)
            self.calls.on_blip(link)

    def _drop_sources(self, link: Link) -> None:
        """Envelopes on that peer's connections have no sender from now on."""
        for lane in Lane:
            if (source := link.sources[lane]) is not None:
                self._sources[lane].pop(source, None)

    def _on_stale(self, link: Link, envelope: Envelope) -> None:
        self.counters["stale"] += 1
        if envelope.kind is Kind.CALL:
            error = StaleEpoch(f"meant for epoch {envelope.dst_epoch}, this is epoch {self.own.epoch}")
            self.serving.refuse_unread(link, envelope.corr, error)

    def _on_nack(self, link: Link, lane: Lane, envelope: Envelope, num_bytes: int) -> None:
        if envelope.corr:
            self.calls.on_answer(link, lane, envelope, num_bytes)
            return
        error = decode_fault(envelope.body, str(link.key), "HELLO", is_refusal=True)
        if isinstance(error, StaleEpoch):
            self._host.fenced(error)
        else:
            self.peer_over(link.key, f"it refused us: {error}")

    def _on_goodbye(self, link: Link, _lane: Lane, _envelope: Envelope, _num_bytes: int) -> None:
        self.peer_over(link.key, "it said goodbye")

    def _is_back(self, link: Link, envelope: Envelope) -> bool:
        """Only the way to a peer that was given up was broken: it is tried again, what it waits for sent again."""
        if envelope.kind not in (Kind.CALL, Kind.PING):
            return False
        try:
            self._links.open(link.key, link.endpoints)
        except MyxaError:
            return False
        return True

    def _down(self, link: Link, why: str, linger_s: float = 0.0) -> None:
        if link.is_down:
            return
        self._drop_sources(link)
        self._links.forget(link, linger_s)
        self._end_business(link, why)

    def _end_business(self, link: Link, why: str) -> None:
        self.heartbeat.forget(link.key)
        self.calls.fail_all(why, link.pending)
        self.serving.on_gone(link)

    def _envelope(self, kind: Kind, peer: PeerKey, *, body: bytes = b"", corr: int = 0) -> Envelope:
        return Envelope(
            kind=kind, src_node=self.own.node_id, src_epoch=self.own.epoch, dst_epoch=peer.epoch,
            corr=corr, body=body,
        )  # fmt: skip
