"""Both halves of a ZeroMQ lane without a session: a sink and events that remember, and raw sockets beside them."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zmq
from tests.harness.waiting import until

from myxa.core.ids import PeerKey
from myxa.transport.outbox import Outbox
from myxa.transport.session.frames import Envelope, Kind, encode, split
from myxa.transport.wire import Lane, Parcel
from myxa.transport.zeromq import Inbox, Socket, make_inbox, make_outbox

GREETING = encode(Envelope(kind=Kind.HELLO, body=b"{}"))


class Sink:
    """Remembers what came; implements `wire.InboundSink` as far as an inbox asks for it."""

    def __init__(self) -> None:
        self.came: list[bytes] = []
        self.sources: list[bytes] = []
        self.wrong: list[str] = []
        self.on_received: Callable[[], None] = lambda: None

    def received(self, source: bytes, lane: Lane, data: memoryview) -> None:
        del lane
        self.came.append(bytes(data))
        self.sources.append(source)
        self.on_received()

    def malformed(self, source: bytes, lane: Lane, reason: str) -> None:
        del source, lane
        self.wrong.append(reason)

    def is_known(self, source: bytes, lane: Lane) -> bool:
        return True

    def crashed(self, error: BaseException) -> None:
        raise AssertionError from error

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"an inbox has no business with {name}")


class Events:
    """Remembers what an outbox says; implements `wire.InboundSink` as far as an outbox reports to it."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.why: list[str] = []

    def greeting(self, peer: PeerKey, lane: Lane) -> bytearray:
        self.said.append("greeting")
        return bytearray(GREETING)

    def connected(self, peer: PeerKey, lane: Lane) -> None:
        self.said.append("ready")

    def lost(self, peer: PeerKey, lane: Lane, why: str) -> None:
        self.said.append("broken")
        self.why.append(why)

    def unreachable(self, peer: PeerKey, why: str) -> None:
        self.why.append(why)

    def silence_s(self, peer: PeerKey) -> float:
        return 0.0


class Lab:
    """Sockets of one context at one ipc endpoint."""

    def __init__(self, path: Path) -> None:
        self.context: zmq.Context[Socket] = zmq.Context()
        self.endpoint = f"ipc://{path}"
        self._inboxes: list[Inbox] = []
        self._outboxes: list[Outbox] = []
        self._raw: list[Socket] = []

    def inbox(self, sink: Sink, lane: Lane = Lane.CONTROL) -> Inbox:
        socket = make_inbox(self.context, lane, None)
        socket.bind(self.endpoint)
        inbox = Inbox(socket, lane)
        inbox.start(sink)  # pyright: ignore[reportArgumentType]
        self._inboxes.append(inbox)
        return inbox

    def outbox(self, events: Events) -> Outbox:
        sink: Any = events
        outbox = Outbox(
            self.endpoint, lambda: make_outbox(self.context, Lane.CONTROL, None), PeerKey(2, 1), Lane.CONTROL,
            lambda: sink, lambda _: events.said.append("closed"),
        )  # fmt: skip
        self._outboxes.append(outbox)
        return outbox

    def listener(self) -> Socket:
        """A bound socket that does what the test says: nothing by itself."""
        raw = self.context.socket(zmq.ROUTER)
        raw.linger = 0
        raw.bind(self.endpoint)
        self._raw.append(raw)
        return raw

    def client(self) -> Socket:
        raw = self.context.socket(zmq.DEALER)
        raw.linger = 0
        raw.connect(self.endpoint)
        self._raw.append(raw)
        return raw

    def close(self) -> None:
        for outbox in self._outboxes:
            outbox.abort()
        for inbox in self._inboxes:
            inbox.close()
        for socket in self._raw:
            socket.close(linger=0)
        self.context.term()


@contextlib.contextmanager
def lab_at(folder: Path) -> Iterator[Lab]:
    lab = Lab(folder / "s")
    try:
        yield lab
    finally:
        lab.close()


async def envelopes(listener: Socket, number: int) -> list[bytes]:
    """So many that came there, as they came."""
    envelopes: list[bytes] = []
    while len(envelopes) < number:
        await until(lambda: listener.poll(0))
        parts = split(memoryview(listener.recv_multipart()[-1]))
        assert isinstance(parts, list), parts
        envelopes += [bytes(part) for part in parts]
    return envelopes


def parcel(number: int, size: int = 0) -> Parcel:
    """An envelope that can be told apart."""
    return Parcel(encode(Envelope(kind=Kind.CALL, corr=number, body=bytes(size))))


def number_of(envelope: bytes) -> int:
    return int(struct.unpack_from("<Q", envelope, 12)[0])
