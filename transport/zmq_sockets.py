"""Every option of ZeroMQ, in one place. See `docs/runtime.md` for the measurements and failures behind them."""

from __future__ import annotations

import zmq

from ..core.errors import LaunchError
from .frames import CHUNK_HEADER_BYTES, LIMITS
from .security import JobKey
from .wire import Lane

ZAP_DOMAIN = b"myxa"
HEARTBEAT_MS = 2000
HEARTBEAT_TIMEOUT_MS = 6000
HANDSHAKE_MS = 5000
MAX_SOCKETS = 16384
_SLACK_BYTES = 64 * 1024

Socket = zmq.Socket[bytes]

MONITORED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
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
    context: zmq.Context[Socket] = zmq.Context(io_threads=2)
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


def make_inbox(context: zmq.Context[Socket], lane: Lane, key: JobKey | None) -> Socket:
    """Receive-only ROUTER. libzmq makes the routing ids: with chosen ones a restarted peer got a dead one's replies."""
    inbox = context.socket(zmq.ROUTER)
    _common(inbox, lane)
    inbox.setsockopt(zmq.MAXMSGSIZE, max_message(lane))
    if key is not None:
        inbox.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        inbox.setsockopt(zmq.CURVE_SERVER, 1)
        inbox.setsockopt(zmq.CURVE_SECRETKEY, key.secret.encode())
    return inbox


def make_outbox(context: zmq.Context[Socket], lane: Lane, key: JobKey | None) -> Socket:
    """Send-only DEALER for one connection: it never reconnects by itself, so each connection begins with our HELLO."""
    outbox = context.socket(zmq.DEALER)
    _common(outbox, lane)
    outbox.setsockopt(zmq.IMMEDIATE, 1)
    outbox.setsockopt(zmq.RECONNECT_IVL, -1)
    outbox.setsockopt(zmq.MAXMSGSIZE, 4096)  # it receives only commands of ZeroMQ itself
    if key is not None:
        outbox.setsockopt(zmq.CURVE_SERVERKEY, key.public.encode())
        outbox.setsockopt(zmq.CURVE_PUBLICKEY, key.public.encode())
        outbox.setsockopt(zmq.CURVE_SECRETKEY, key.secret.encode())
    return outbox


def max_message(lane: Lane) -> int:
    """Largest ZeroMQ message of a lane; a larger one would break the connection silently."""
    if lane is Lane.BULK:
        return LIMITS.chunk + CHUNK_HEADER_BYTES + _SLACK_BYTES
    return LIMITS.control_message + _SLACK_BYTES


def _common(socket: Socket, lane: Lane) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.AFFINITY, 2 if lane is Lane.BULK else 1)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 60)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    if lane is Lane.CONTROL:
        # Not on the bulk lane: a large transfer would look like silence.
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
