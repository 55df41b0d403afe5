"""Every option of ZeroMQ, in one place. See `docs/walk-call.md` for the measurements and failures behind them."""

from __future__ import annotations

import struct

import zmq

from ...core.errors import LaunchError
from ..descriptors import check_room
from ..security import KeyPair
from ..session.frames import CHUNK_HEADER_BYTES, LIMITS
from ..wire import Lane

ZAP_DOMAIN = b"myxa"
HEARTBEAT_MS = 1500
HEARTBEAT_TIMEOUT_MS = 4500
"""A host that vanished is noticed after 4.5 to 6 s; 2000 and 6000 would leave no time to try again within 8 s."""
HEARTBEAT_TTL_MS = 6000
HANDSHAKE_MS = 5000
MAX_SOCKETS = 16384
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
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


def make_inbox(context: zmq.Context[Socket], lane: Lane, key: KeyPair | None) -> Socket:
    """Receive-only ROUTER. libzmq makes the routing ids: with chosen ones a restarted peer got a dead one's replies.

    Raises LaunchError without free descriptors.
    """
    inbox = _new_socket(context, zmq.ROUTER, "an endpoint")
    _common(inbox, lane, has_network=key is not None)
    inbox.setsockopt(zmq.MAXMSGSIZE, max_message(lane))
    if key is not None:
        inbox.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        inbox.setsockopt(zmq.CURVE_SERVER, 1)
        inbox.setsockopt(zmq.CURVE_SECRETKEY, key.secret.encode())
    return inbox


def make_outbox(context: zmq.Context[Socket], lane: Lane, key: KeyPair | None, server: str = "") -> Socket:
    """Send-only DEALER for one connection: it never reconnects by itself, so each connection begins with our HELLO.

    `key`: our own pair, `server`: the peer's public key, both for tcp. Raises LaunchError without free descriptors.
    """
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


def _new_socket(context: zmq.Context[Socket], kind: int, what: str) -> Socket:
    check_room(what)
    try:
        return context.socket(kind)
    except zmq.ZMQError as error:
        raise LaunchError(
            f"no socket for {what}: {error}", remedy=f"a process has {MAX_SOCKETS} at most; does it know so many peers?"
        ) from error


def read_event(monitor: Socket) -> tuple[int, int, str]:
    """(event, its value, endpoint) of the next message of a monitor; raises zmq.Again.

    pyzmq's own reader makes a member of an enumeration of every value that it meets, and keeps them all.
    """
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
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 60)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    if lane is Lane.CONTROL and has_network:
        # Not on the bulk lane: a large transfer would look like silence. Not on ipc: there the kernel itself says when
        # a process is gone, and one that only stands still would lose its connection and an answer, for nothing.
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TTL_MS)
