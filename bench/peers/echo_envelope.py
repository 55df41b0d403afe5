"""Our transport alone (inbox, outbox, pump; no session, no actor): an envelope of 64 bytes there and back.

python echo_envelope.py server SOCKET_DIR ENDPOINTS_FILE | python echo_envelope.py client ... SERVER_PID
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from pathlib import Path

import msgspec
import uvloop
from meter import as_our_workers, async_client, say

from myxa.core.ids import PeerKey
from myxa.transport.session.frames import Envelope, Kind, encode
from myxa.transport.socket_transport import SocketTransport
from myxa.transport.wire import Endpoints, Lane, Parcel

CLIENT, SERVER = PeerKey(1, 1), PeerKey(2, 1)


class Echo:
    """Sink of the server: sends back what comes, to the endpoints that the greeting names."""

    def __init__(self, transport: SocketTransport) -> None:
        self._transport = transport

    def greeting(self, peer: PeerKey, lane: Lane) -> bytes | bytearray:
        del peer, lane
        return encode(Envelope(kind=Kind.HELLO, body=msgspec.json.encode(self._transport.endpoints)))

    def received(self, source: bytes, lane: Lane, data: memoryview) -> None:
        del source
        if data[3] == Kind.HELLO:
            self._transport.connect(CLIENT, msgspec.json.decode(data[48:], type=Endpoints))
        else:
            self._transport.send(CLIENT, lane, Parcel(bytearray(data)))

    def malformed(self, source: bytes, lane: Lane, reason: str) -> None:
        raise SystemExit(f"{source!r} {lane} {reason}")

    def is_known(self, source: bytes, lane: Lane) -> bool:
        return True

    def overflowed(self, source: bytes, lane: Lane, head: bytes, total: int) -> None: ...

    def connected(self, peer: PeerKey, lane: Lane) -> None: ...

    def silence_s(self, peer: PeerKey) -> float:
        return 0.0

    def lost(self, peer: PeerKey, lane: Lane, why: str) -> None: ...

    def unreachable(self, peer: PeerKey, why: str) -> None: ...

    def crashed(self, error: BaseException) -> None:
        raise SystemExit(str(error))


class Asker(Echo):
    """Sink of the client: whatever comes answers the oldest question."""

    def __init__(self, transport: SocketTransport) -> None:
        super().__init__(transport)
        self.waiting: deque[asyncio.Future[None]] = deque()

    def received(self, source: bytes, lane: Lane, data: memoryview) -> None:
        if data[3] != Kind.HELLO:
            self.waiting.popleft().set_result(None)


def opened(folder: str) -> SocketTransport:
    transport = SocketTransport(keys=None, node_rank=0, folder=Path(folder), listen="")
    transport.bind()
    return transport


async def server(folder: str, endpoints_file: str) -> None:
    transport = opened(folder)
    transport.start(Echo(transport))
    Path(endpoints_file).write_bytes(msgspec.json.encode(transport.endpoints))
    say("ready")
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await transport.close(0.1)


async def client(folder: str, endpoints_file: str, server_pid: int) -> None:
    transport = opened(folder)
    sink = Asker(transport)
    transport.start(sink)
    transport.connect(SERVER, msgspec.json.decode(Path(endpoints_file).read_bytes(), type=Endpoints))
    envelope = encode(Envelope(kind=Kind.CALL, body=bytes(16)))
    make_future = asyncio.get_running_loop().create_future

    async def once() -> None:
        answered = make_future()
        sink.waiting.append(answered)
        transport.send(SERVER, Lane.CONTROL, Parcel(envelope))
        await answered

    await once()
    await async_client(once, lambda: [os.getpid(), server_pid])
    await transport.close(0.1)


if __name__ == "__main__":
    as_our_workers()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if sys.argv[1] == "server":
            runner.run(server(sys.argv[2], sys.argv[3]))
        else:
            runner.run(client(sys.argv[2], sys.argv[3], int(sys.argv[4])))
