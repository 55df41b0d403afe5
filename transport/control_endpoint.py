"""One tcp port for asking a process from another host: requests and answers of text, encrypted, by admitted keys only.

Apart from the lanes on purpose: a client here is no process of the job, joins nothing and sees no actor. There is
no other mechanism than CURVE, on loopback neither. What is asked means nothing here; who asks is known by key. HTTPS
was considered: it needs certificates and a clock, and a second way of naming people beside the keys.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from ..core.errors import LaunchError
from .security import KeyPair
from .zeromq import HANDSHAKE_MS, ZAP_DOMAIN, KeyAdmission, Pump, Socket, ZapHandler

MAX_MESSAGE_BYTES = 1 << 20
MAX_WAITING = 64
"""Messages of one peer that wait to be taken, in either direction; a peer that does not read gets no more."""
BUDGET = 64
HEARTBEAT_MS = 5000
MAX_DESCRIPTORS = 256

_log = logging.getLogger("myxa.transport")


@dataclass(frozen=True, slots=True)
class ControlRequest:
    """A message and where it came from."""

    peer: bytes
    """Of the connection; answers go there."""
    key: str
    """Public key that the connection has proved."""
    address: str
    body: bytes


class ControlEndpoint:
    """Calls `heard` on the loop for every message of an admitted peer. `open`, then `close`."""

    def __init__(self, key: KeyPair, doorman: KeyAdmission, heard: Callable[[ControlRequest], None]) -> None:
        self._key = key
        self._doorman = doorman
        self._heard = heard
        self.counters: Counter[str] = Counter()
        """What was refused: "key_unknown", "key_malformed", "malformed"."""
        self._context: zmq.Context[Socket] = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, MAX_DESCRIPTORS)
        self._socket: Socket | None = None
        self._zap_handler: ZapHandler | None = None
        self._pump: Pump | None = None

    def open(self, host: str, port: int) -> str:
        """Listen; the "host:port" that it became. Raises LaunchError."""
        self._zap_handler = ZapHandler(self._context, self._doorman, self.counters, _note)
        self._zap_handler.start()
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in _OPTIONS:
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, self._key.secret.encode())
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise LaunchError(
                f"control.tcp: {host}:{port} cannot be listened on: {error}", remedy="name another port, or 0 for any"
            ) from error
        self._pump = Pump(self._socket, self._take, BUDGET)
        endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        return bytes(endpoint).decode().rstrip("\0").removeprefix("tcp://")

    def tell(self, peer: bytes, body: bytes) -> bool:
        """Send to a peer; False: it is gone, or reads too slowly."""
        if self._socket is None:
            return False
        try:
            self._socket.send_multipart([peer, body], zmq.DONTWAIT)
        except zmq.ZMQError:
            return False
        if self._pump is not None:
            self._pump.look()
        return True

    def close(self) -> None:
        """Stop receiving. Harmless to call again."""
        if self._pump is not None:
            self._pump.stop()
        if self._socket is not None:
            self._socket.close(linger=0)
        if self._zap_handler is not None:
            self._zap_handler.close()
        self._pump = self._socket = self._zap_handler = None
        self._context.term()

    def _take(self) -> bool:
        if self._socket is None:
            return False
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        if len(frames) != 2:
            self.counters["malformed"] += 1
            return True
        peer, body = frames
        try:
            key, address = str(body.get("User-Id")), str(body.get("Peer-Address"))
        except zmq.ZMQError:  # no proof came with it: it cannot have passed the zap_handler
            self.counters["key_malformed"] += 1
            return True
        self._heard(ControlRequest(peer.bytes, key, address, body.bytes))
        return True


_OPTIONS: tuple[tuple[int, int], ...] = (
    (zmq.LINGER, 0),
    (zmq.ROUTER_MANDATORY, 1),
    (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
    (zmq.SNDHWM, MAX_WAITING),
    (zmq.RCVHWM, MAX_WAITING),
    (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
    (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
    (zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS),
    (zmq.HEARTBEAT_TTL, 3 * HEARTBEAT_MS),
)


def _note(what: str, address: str, remedy: str) -> None:
    _log.warning("control endpoint: %s from %s -- %s", what, address, remedy)


class ControlCaller:
    """The other side: one connection, synchronous. Use as a context manager."""

    def __init__(self, endpoint: str, server: str, key: KeyPair) -> None:
        """`endpoint`: "host:port"; `server`: its public key; `key`: our own pair. Raises LaunchError."""
        self._endpoint = endpoint
        self._context: zmq.Context[Socket] = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in ((zmq.LINGER, 0), (zmq.HANDSHAKE_IVL, HANDSHAKE_MS), (zmq.HEARTBEAT_IVL, HEARTBEAT_MS)):
            self._socket.setsockopt(option, value)
        try:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, server.encode())
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, key.public.encode())
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret.encode())
            self._socket.connect(f"tcp://{endpoint}")
        except zmq.ZMQError as error:
            self.close()
            raise LaunchError(f"tcp://{endpoint} with that key: {error}", remedy="check address and key") from error

    def __enter__(self) -> ControlCaller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        self._socket.close(linger=0)
        self._context.term()

    def send(self, body: bytes) -> None:
        """Send once there is a connection; queued until then."""
        self._socket.send(body, zmq.DONTWAIT)

    def receive(self, timeout_s: float | None) -> bytes | None:
        """The next message; None: none came in time (None: wait for ever)."""
        if not self._socket.poll(None if timeout_s is None else max(0, int(timeout_s * 1000))):
            return None
        return self._socket.recv()
