"""ZeroMQ sockets, receiving, and who may come in (`outbox.py` sends). All options are here, with `docs/walk-call.md`.

Receiving: one ROUTER that is only read, pumped by the loop's own reader (`zmq.asyncio`: 4 times the latency). Rules of
the pump: the file descriptor is only a hint and edge-like, so look once after registering it; take messages until there
are none, or for `TURN_S`; never send on a socket that is polled; never wait. `HandshakeWatch` counts failed connections
to a bound tcp endpoint.

Admission of tcp keys (ZeroMQ's RFC 27) is answered in the same pump: the guard decides, with the next connection.
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
import time
from collections import Counter
from collections.abc import Callable

import zmq
from zmq.utils import z85

from ..core.actor import MANY_PEERS
from ..core.errors import LaunchError
from ..core.timeouts import TIMEOUTS
from .descriptors import check_room
from .security import KeyPair
from .session.frames import CHUNK_HEADER_BYTES, LIMITS, Assemblies
from .session.guard import PeerGuard
from .wire import InboundSink, Lane

ZAP_DOMAIN = b"myxa"
_SLACK_BYTES = 64 * 1024

Socket = zmq.Socket[bytes]
_MONITOR_EVENT = struct.Struct("=hi")

MONITORED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
)


def make_context() -> zmq.Context[Socket]:
    """A context with one IO thread per lane. Raises LaunchError for a libzmq with known holes."""
    if zmq.zmq_version_info() < (4, 3, 5):
        raise LaunchError(f"libzmq {zmq.zmq_version()} is too old", remedy="install pyzmq >= 26 from a wheel")
    check_room("ZeroMQ")
    context: zmq.Context[Socket] = zmq.Context(io_threads=2)
    context.set(zmq.MAX_SOCKETS, MANY_PEERS)
    return context


def make_inbox(context: zmq.Context[Socket], lane: Lane, key: KeyPair | None) -> Socket:
    """Receive-only ROUTER with routing ids of libzmq's. Raises LaunchError without free descriptors."""
    inbox = _new_socket(context, zmq.ROUTER, "an endpoint")
    _common(inbox, lane, has_network=key is not None)
    inbox.setsockopt(zmq.MAXMSGSIZE, max_message(lane))
    inbox.setsockopt(zmq.BACKLOG, MANY_PEERS)  # with ZeroMQ's 100, peers of a process that is stopped would find none
    if key is None:
        inbox.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
    else:
        inbox.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        inbox.setsockopt(zmq.CURVE_SERVER, 1)
        inbox.setsockopt(zmq.CURVE_SECRETKEY, key.secret.encode())
    return inbox


def make_outbox(context: zmq.Context[Socket], lane: Lane, key: KeyPair | None, server: str = "") -> Socket:
    """Send-only DEALER for one connection: it never reconnects by itself, so each connection begins with our HELLO.
    `key`: our own pair, `server`: the peer's public key, both for tcp. Raises LaunchError without free descriptors."""
    outbox = _new_socket(context, zmq.DEALER, "a connection")
    _common(outbox, lane, has_network=key is not None)
    outbox.setsockopt(zmq.IMMEDIATE, 1)
    outbox.setsockopt(zmq.RECONNECT_IVL, -1)
    outbox.setsockopt(zmq.MAXMSGSIZE, 4096)  # it receives only commands of ZeroMQ itself
    if key is not None:
        try:
            outbox.setsockopt(zmq.CURVE_SERVERKEY, server.encode())
        except zmq.ZMQError as error:
            outbox.close(linger=0)
            raise LaunchError(f"{server!r} is no public key: {error}", remedy="is the peer of this job?") from error
        outbox.setsockopt(zmq.CURVE_PUBLICKEY, key.public.encode())
        outbox.setsockopt(zmq.CURVE_SECRETKEY, key.secret.encode())
    return outbox


def _new_socket(context: zmq.Context[Socket], kind: int, purpose: str) -> Socket:
    check_room(purpose)
    try:
        return context.socket(kind)
    except zmq.ZMQError as error:
        raise LaunchError(
            f"no socket for {purpose}: {error}",
            remedy=f"a process has {MANY_PEERS} at most; does it know so many peers?",
        ) from error


def read_event(monitor: Socket) -> tuple[int, int, str]:
    """(event, value, endpoint) of a monitor's next message. Raises zmq.Again."""
    head, endpoint = monitor.recv_multipart(zmq.NOBLOCK)
    event, value = _MONITOR_EVENT.unpack(head)
    return event, value, endpoint.decode("ascii", "replace")


def max_message(lane: Lane) -> int:
    """Largest ZeroMQ message of a lane; a larger one would break the connection silently."""
    if lane is Lane.BULK:
        return LIMITS.chunk + CHUNK_HEADER_BYTES + _SLACK_BYTES
    return LIMITS.control_message + _SLACK_BYTES


def _common(socket: Socket, lane: Lane, *, has_network: bool) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.AFFINITY, 2 if lane is Lane.BULK else 1)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(1000 * TIMEOUTS.wire.tcp_handshake_s))
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 60)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    if lane is Lane.CONTROL and has_network:
        # Not on the bulk lane: a large transfer would look like silence. Not on ipc: there the kernel itself says when
        # a process is gone, and one that is only stopped would lose its connection and an answer, for nothing.
        every_s, silence_s = TIMEOUTS.wire.tcp_heartbeat_s, TIMEOUTS.wire.tcp_silence_s
        socket.setsockopt(zmq.HEARTBEAT_IVL, int(1000 * every_s))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1000 * silence_s))
        socket.setsockopt(zmq.HEARTBEAT_TTL, int(1000 * (every_s + silence_s)))


TURN_S = 0.001
"""So long a socket is read before the loop's other work gets its turn: what a host that streams tokens does not notice.
A message under way is taken in whole, so each overruns by `LIMITS.batch` envelopes at most."""

_NOTHING = memoryview(b"")
_ID_BYTES = 5
"""Of the routing ids that libzmq makes."""
_NOBLOCK, _EVENTS, _POLLIN, _RCVMORE = int(zmq.NOBLOCK), int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.RCVMORE)

_log = logging.getLogger("myxa.transport")


class Pump:
    """Calls `take` for a socket until it says that there is nothing more, whenever there may be something."""

    def __init__(self, socket: Socket, take: Callable[[], bool], turn_s: float = TURN_S) -> None:
        """`turn_s`: so long it takes before the loop's other work gets its turn; 0: one message."""
        self._take = take
        self._turn_s = turn_s
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._is_stopped = False
        self._is_due = False
        """The next turn of the loop looks anyway; a second look in it would take twice what fits."""
        self._loop.add_reader(self._fd, self._on_signal)
        self.look_soon()  # arm: without this look the first message may never be signalled

    def look_soon(self) -> None:
        """Something was done on this very socket: a wake-up may have been eaten."""
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._drain)

    def _on_signal(self) -> None:
        if not self._is_due:
            self._drain()

    def stop(self) -> None:
        if not self._is_stopped:
            self._is_stopped = True
            self._loop.remove_reader(self._fd)

    def _drain(self) -> None:
        self._is_due = False
        until = time.monotonic() + self._turn_s
        try:
            while not self._is_stopped and self._take():
                if time.monotonic() >= until:
                    self.look_soon()
                    return
        except BaseException:  # an interrupt; the loop may be run again after it
            self.look_soon()
            raise


class Inbox:
    """One bound endpoint of one lane."""

    def __init__(self, socket: Socket, lane: Lane) -> None:
        self._socket = socket
        self._lane = lane
        self._sink: InboundSink | None = None
        self._assemblies = Assemblies()
        self._pump: Pump | None = None
        self._copies = lane is Lane.CONTROL and not socket.getsockopt(zmq.CURVE_SERVER)
        """A frame of pyzmq costs more than a copy of what is small. Bulk is large, and a frame alone has the proof."""
        self._frame: zmq.Frame | None = None

    @property
    def proof(self) -> str:
        """Public key under which the sender of the message being handled was admitted; "": none is handled, or ipc."""
        if self._frame is None:
            return ""
        try:
            return str(self._frame.get("User-Id"))
        except zmq.ZMQError:
            return ""

    def start(self, sink: InboundSink) -> None:
        self._sink = sink
        if self._pump is None:
            self._pump = Pump(self._socket, self._take, 0.0 if self._lane is Lane.BULK else TURN_S)

    def listen_again(self, endpoint: str) -> None:
        """By a new file and listener: ZeroMQ would remove the new file with the old one. Raises zmq.ZMQError."""
        self._socket.bind(endpoint)
        if self._pump is not None:
            self._pump.look_soon()

    def forget(self, source: bytes) -> None:
        self._assemblies.forget(source)

    def stop(self) -> None:
        """Read no more; what comes waits in the socket."""
        if self._pump is not None:
            self._pump.stop()

    def close(self) -> None:
        self.stop()
        self._socket.close(linger=0)

    def _take(self) -> bool:
        """One message of ZeroMQ. False: there are no more."""
        sink, lane = self._sink, self._lane
        if sink is None:
            return False
        try:
            source, self._frame, data = self._receive()
            for envelope in self._assemblies.envelopes(sink, source, lane, data):
                sink.received(source, lane, envelope)
        except zmq.Again:
            return False
        except Exception as error:  # noqa: BLE001  # a bug in the session must be heard of and not stop the pump
            _log.exception("the session failed on a message")
            sink.crashed(error)
        finally:
            self._frame = None
        # Asking whether there is more costs half of the exception that would say that there is not.
        return not self._socket.closed and bool(int(self._socket.getsockopt(_EVENTS)) & _POLLIN)

    def _receive(self) -> tuple[bytes, zmq.Frame | None, memoryview]:
        """Source and message. Nothing in place of a message whose sender chose its routing id, or of a second frame: no
        process of ours sends such. To ask of each message whether it has more frames costs as much as receiving it."""
        recv = self._socket.recv
        source = recv(_NOBLOCK)
        if len(source) != _ID_BYTES:
            while self._socket.getsockopt(_RCVMORE):
                recv(_NOBLOCK)
            return source, None, _NOTHING
        if self._copies:
            return source, None, memoryview(recv(_NOBLOCK))
        frame = recv(_NOBLOCK, copy=False)
        return source, frame, frame.buffer


_TROUBLE = {
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): (
        "handshake_wrong", "a client without a key, or one that does not speak ZeroMQ; who connects to this port?",
    ),
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): (
        "handshake_unfinished", "something connects to this port and says nothing or hangs up",
    ),
    int(zmq.EVENT_ACCEPT_FAILED): (
        "accept_failed", "are there free file descriptors? raise the limit (ulimit -n)",
    ),
}  # fmt: skip
"""Event -> what it is counted as, and the remedy."""


class HandshakeWatch:
    """Of one bound socket."""

    def __init__(self, socket: Socket, counters: Counter[str], note: Callable[[str, str, str], None]) -> None:
        self._socket = socket
        self._counters = counters
        self._note = note
        self._monitor = socket.get_monitor_socket(sum(_TROUBLE))
        self._pump = Pump(self._monitor, self._take)

    def close(self) -> None:
        self._pump.stop()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)

    def _take(self) -> bool:
        try:
            event, _, endpoint = read_event(self._monitor)
        except zmq.Again:
            return False
        if event in _TROUBLE:
            name, remedy = _TROUBLE[event]
            self._counters[name] += 1
            self._note(name, endpoint, remedy)
        return True


ENDPOINT = "inproc://zeromq.zap.01"
NUM_REQUEST_FRAMES = 9
"""Routing id, delimiter, version, request id, domain, address, identity, mechanism, credentials."""
NOTE_ADDRESS_CHARS = 64

_ZAP_REMEDIES: dict[str, str] = {
    "key_unknown": "has it the job's key of this run, or one that was announced? or has it ended?",
    "key_malformed": "only CURVE is spoken here",
}

Note = Callable[[str, str, str], None]
"""What was refused, whom, remedy: to be reported once."""


class ZapHandler:
    """Of one context."""

    def __init__(self, context: zmq.Context[Socket], guard: PeerGuard, counters: Counter[str], note: Note) -> None:
        self._guard = guard
        self._note = note
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ENDPOINT)
        self._pump: Pump | None = None
        self._counters = counters

    def start(self) -> None:
        if self._pump is None:
            self._pump = Pump(self._socket, self._take)

    def close(self) -> None:
        if self._pump is not None:
            self._pump.stop()
        self._socket.close(linger=0)

    def _take(self) -> bool:
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        address = frames[5].decode("ascii", "replace")[:NOTE_ADDRESS_CHARS] if len(frames) > 5 else ""
        is_curve = len(frames) == NUM_REQUEST_FRAMES and frames[4] == ZAP_DOMAIN and frames[7] == b"CURVE"
        if not is_curve or len(frames[8]) != 32:
            self._refuse("key_malformed", address)
            self._answer(frames, b"400", b"CURVE is needed", "")
            return True
        key = z85.encode(frames[8]).decode("ascii")
        if self._guard.admits(key):
            self._answer(frames, b"200", b"OK", key)
        else:
            self._refuse("key_unknown", address)
            self._answer(frames, b"400", b"not of this job", key)
        return True

    def _refuse(self, counter: str, address: str) -> None:
        self._counters[counter] += 1
        self._note(counter, address, _ZAP_REMEDIES[counter])

    def _answer(self, frames: list[bytes], status: bytes, text: bytes, key: str) -> None:
        user = key.encode() if status == b"200" else b""
        self._socket.send_multipart([*frames[:4], status, text, user, b""], zmq.DONTWAIT)
