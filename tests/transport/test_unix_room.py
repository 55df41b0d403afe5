"""What leaves over a Unix socket that is full, broken, cut off or copied."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.harness.waiting import until
from tests.transport.raw_unix import RawUnix
from tests.transport.unix_parts import (
    GREETING,
    Events,
    Listener,
    Sink,
    envelopes,
    inbox_at,
    number_of,
    outbox_to,
    parcel,
)

from myxa.core.ids import PeerKey
from myxa.transport.session.frames import sole
from myxa.transport.socket_transport import SocketTransport
from myxa.transport.unix import UnixOutbox
from myxa.transport.wire import Endpoints, Lane

pytestmark = [pytest.mark.timeout(60)]

HERE = Path(__file__).parent


@pytest.mark.parametrize("how", ["flush", "close", "held back"])
async def test_a_message_that_is_partly_sent_is_waited_for_and_not_asked_for(tmp_path, how):
    listener = Listener(tmp_path / "s")
    outbox = outbox_to(listener.endpoint, Events())
    far = await listener.accept()
    outbox.send(parcel(1, 900_000))
    await until(lambda: outbox._rest is not None)
    num_flushes, flush = 0, outbox._flush

    def counted() -> bool:
        nonlocal num_flushes
        num_flushes += 1
        return flush()

    outbox._flush = counted
    if how == "flush":
        outbox.flush(time.monotonic())
    elif how == "close":
        outbox.close(20)
    else:
        outbox._coalescing.hold()
        outbox.send(parcel(2))
        outbox._coalescing.release()
    await asyncio.sleep(0.2)
    assert num_flushes <= 2
    numbers = [0, 1, 2] if how == "held back" else [0, 1]
    assert [number_of(data) for data in await envelopes(far, len(numbers))] == numbers
    outbox.abort()
    far.close()
    listener.socket.close()


def read_all(made: socket.socket, found: list[int]) -> None:
    made.setblocking(True)
    while data := made.recv(1 << 16):
        found.append(len(data))


@pytest.mark.parametrize("size", [100_000, 200_000, 3_000_000])
async def test_a_flush_gets_out_what_the_kernel_does_not_keep_if_the_other_side_reads(tmp_path, size):
    listener = Listener(tmp_path / "s")
    outbox = outbox_to(listener.endpoint, Events())
    far = await listener.accept()
    parcels = [*(parcel(number, size) for number in range(6)), parcel(9)]
    for one in parcels:
        outbox.send(one)
    found: list[int] = []
    reader = threading.Thread(target=read_all, args=(far, found), daemon=True)
    reader.start()
    outbox.flush(time.monotonic() + 30)  # no turn of the loop from here on
    assert all(one.is_sent for one in parcels)
    assert not outbox._is_unfinished
    outbox.abort()
    await asyncio.to_thread(reader.join, 20)
    assert sum(found) > 6 * size
    far.close()
    listener.socket.close()


async def test_a_flush_waits_no_longer_than_it_may_and_loses_nothing(tmp_path):
    listener = Listener(tmp_path / "s")
    outbox = outbox_to(listener.endpoint, Events())
    far = await listener.accept()
    for number in range(1, 11):
        outbox.send(parcel(number, 200_000))
    began = time.monotonic()
    outbox.flush(began + 0.3)
    assert 0.25 < time.monotonic() - began < 20
    assert outbox._is_unfinished
    assert [number_of(data) for data in await envelopes(far, 11)] == list(range(11))
    await until(lambda: not outbox._is_unfinished)
    for number in range(11, 16):
        outbox.send(parcel(number, 200_000))
    far.close()
    began = time.monotonic()
    outbox.flush(began + 30)  # broken: the loop will say so
    assert time.monotonic() - began < 10
    outbox.abort()
    listener.socket.close()


SENDS_INTO_THE_VOID = """
import asyncio, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.harness.waiting import until
from tests.transport.unix_parts import Events, Listener, outbox_to, parcel
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
async def main():
    listener, events = Listener(Path(sys.argv[2])), Events()
    outbox = outbox_to(listener.endpoint, events)
    far = await listener.accept()
    await until(lambda: "ready" in events.said)
    if sys.argv[3] == "rest":
        outbox.send(parcel(1, 900_000))
    far.close()
    outbox.send(parcel(2))
    outbox._on_writable()
    await until(lambda: "broken" in events.said)
    outbox.abort()
    print("alive")
asyncio.run(main())
"""


@pytest.mark.parametrize("what", ["whole", "rest"])
async def test_who_sends_to_one_that_is_gone_gets_no_signal(tmp_path, what):
    command = [sys.executable, "-c", SENDS_INTO_THE_VOID, str(HERE), str(tmp_path / "s"), what]
    done = await asyncio.to_thread(subprocess.run, command, timeout=40, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


async def test_a_flush_does_not_go_through_a_cut(tmp_path):
    listener = Listener(tmp_path / "s")
    events, why = Events(), ["cut off on purpose"]
    outbox = UnixOutbox(listener.endpoint, lambda: why[0], events)
    outbox.send(parcel(1))
    outbox.flush(time.monotonic() + 0.1)
    await until(lambda: events.why)
    outbox.flush(time.monotonic() + 0.1)
    with pytest.raises(BlockingIOError):
        listener.socket.accept()
    assert events.said == []
    assert set(events.why) == set(why)
    why[0] = ""
    far = await asyncio.wait_for(listener.accept(), 10)
    assert [number_of(data) for data in await envelopes(far, 2)] == [0, 1]
    outbox.abort()
    far.close()
    listener.socket.close()


async def test_a_connection_ends_though_a_forked_process_holds_a_copy_of_it(tmp_path):
    inbox = inbox_at(tmp_path / "s", sink := Sink())
    outbox = outbox_to(inbox.endpoint, Events())
    client = RawUnix(inbox.endpoint)
    client.send(sole(GREETING))
    await until(lambda: len(set(sink.sources)) == 2)
    assert outbox._socket is not None
    # What a child has after a fork, without the child.
    held = [
        os.dup(made.fileno()) for made in (outbox._socket, *(c._socket for c in inbox._connections.values())) if made
    ]
    outbox.abort()
    await until(lambda: len(inbox._connections) == 1)
    (source,) = inbox._connections
    inbox.forget(source)
    assert client.is_ended()
    client.close()
    inbox.close()
    for descriptor in held:
        os.close(descriptor)


class Session(Sink):
    """A sink of a whole transport, which drops whom it has lost."""

    transport: SocketTransport

    def greeting(self, *_: object) -> bytearray:
        return bytearray(GREETING)

    def connected(self, *_: object) -> None: ...

    def unreachable(self, *_: object) -> None: ...

    def silence_s(self, peer: PeerKey) -> float:
        return 0.0

    def lost(self, peer: PeerKey, lane: Lane, why: str) -> None:
        self.transport.disconnect(peer, 0.0)


def transport_at(folder: Path) -> SocketTransport:
    folder.mkdir()
    made = SocketTransport(node_rank=0, folder=folder, listen="", keys=None)
    made.bind()
    session = Session()
    session.transport = made
    made.start(session)  # pyright: ignore[reportArgumentType]
    return made


async def test_one_that_does_not_read_takes_nothing_from_a_flush_to_the_others(tmp_path):
    transport = transport_at(tmp_path / "t")
    listeners = [Listener(tmp_path / str(number)) for number in range(3)]
    peers = [PeerKey(node_id=number + 1, epoch=1) for number in range(3)]
    for peer, listener in zip(peers, listeners, strict=True):
        transport.connect(peer, Endpoints(node_rank=0, ipc=(listener.endpoint, "")))
    fars = [await listener.accept() for listener in listeners]
    parcels = [parcel(number, 200_000) for number in range(8)]
    found: list[int] = []
    reader = threading.Thread(target=read_all, args=(fars[1], found), daemon=True)
    for peer in peers[::2]:  # full, and nobody reads there: the first and the last
        for number in range(8):
            transport.send(peer, Lane.CONTROL, parcel(number, 200_000))
    for one in parcels:
        transport.send(peers[1], Lane.CONTROL, one)
    await asyncio.sleep(0.05)
    assert not parcels[-1].is_sent
    reader.start()
    began = time.monotonic()
    transport.flush()
    assert time.monotonic() - began < 10
    assert parcels[-1].is_sent
    await transport.close(0.0)
    await asyncio.to_thread(reader.join, 20)
    for made in (*fars, *(listener.socket for listener in listeners)):
        made.close()


async def test_who_is_cut_off_may_be_dropped_at_once(tmp_path):
    transport = transport_at(tmp_path / "t")
    listener = Listener(tmp_path / "s")
    peers = [PeerKey(node_id=1, epoch=epoch) for epoch in (1, 2)]
    fars: list[socket.socket] = []
    for peer in peers:
        transport.connect(peer, Endpoints(node_rank=0, ipc=(listener.endpoint, "")))
        fars.append(await listener.accept())
        await envelopes(fars[-1], 1)
    transport.cut_off(1, 5.0)
    assert not transport._peers
    await transport.close(0.0)
    for made in (*fars, listener.socket):
        made.close()
