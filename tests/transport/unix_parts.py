"""What the tests of the Unix socket share: a sink and events that remember, and both halves without a session."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from myxa.transport.outbox import TurnBudget, WriteCoalescing
from myxa.transport.session.frames import Envelope, Kind, encode, split
from myxa.transport.unix import UnixInbox, UnixOutbox, padded
from myxa.transport.wire import Lane, Parcel

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
        assert not data.readonly  # arrays of a message are its receiver's, to be written too
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
    """Remembers what an outbox says; implements `OutboxEvents`."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.why: list[str] = []
        self.since: list[float] = []

    def greeting(self, sent_units: int) -> bytearray:
        self.said.append(f"greeting {sent_units}")
        return bytearray(GREETING)

    def ready(self) -> None:
        self.said.append("ready")

    def turned_away(self, why: str) -> None:
        raise AssertionError(why)

    def broken(self, why: str) -> None:
        self.said.append("broken")
        self.why.append(why)

    def failing(self, why: str, since_s: float) -> None:
        self.why.append(why)
        self.since.append(since_s)

    def silence_s(self) -> float:
        return 0.0

    def closed(self) -> None:
        self.said.append("closed")


class Listener:
    """A bound socket that does what the test says: nothing by itself."""

    def __init__(self, path: Path, backlog: int = 8) -> None:
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(str(path))
        self.socket.listen(backlog)
        self.socket.setblocking(False)
        self.endpoint = f"unix://{path}"

    async def accept(self) -> socket.socket:
        made, _ = await asyncio.get_running_loop().sock_accept(self.socket)
        made.setblocking(False)
        return made


async def envelopes(made: socket.socket, number: int) -> list[bytes]:
    """So many from that connection, as they came."""
    loop, data, found = asyncio.get_running_loop(), b"", []
    while len(found) < number:
        while len(data) >= 8 and len(data) >= 8 + padded(length := struct.unpack_from("<Q", data)[0]):
            parts = split(memoryview(data[8 : 8 + length]))
            assert isinstance(parts, list), parts
            found += [bytes(part) for part in parts]
            data = data[8 + padded(length) :]
        if len(found) < number:
            more = await loop.sock_recv(made, 1 << 16)
            assert more, "the connection ended before all had come"
            data += more
    assert data == b""
    return found


def inbox_at(path: Path, sink: Sink, counters: Counter[str] | None = None, turn: TurnBudget | None = None) -> UnixInbox:
    inbox = UnixInbox(
        path, Lane.CONTROL, turn or TurnBudget(), WriteCoalescing(), Counter() if counters is None else counters,
        lambda *_: None,
    )  # fmt: skip
    inbox.start(sink)  # pyright: ignore[reportArgumentType]
    return inbox


def outbox_to(endpoint: str, events: Events) -> UnixOutbox:
    return UnixOutbox(endpoint, lambda: "", events)


def parcel(number: int, size: int = 0) -> Parcel:
    """An envelope that can be told apart."""
    return Parcel(encode(Envelope(kind=Kind.CALL, corr=number, body=bytes(size))), cost=1)


def number_of(envelope: bytes) -> int:
    return int(struct.unpack_from("<Q", envelope, 12)[0])
