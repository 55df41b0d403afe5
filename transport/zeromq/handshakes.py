"""Counts the connections to a bound tcp endpoint that never came to be: no key, no ZeroMQ at all, given up half-way.

Those with a key that is not admitted are the gatekeeper's to count. Knows libzmq's monitor and nothing of peers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import zmq

from .inbox import Pump
from .sockets import Socket, read_event

WATCHED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_ACCEPT_FAILED
_NAMES = {
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "handshake_wrong",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "handshake_unfinished",
    int(zmq.EVENT_ACCEPT_FAILED): "accept_failed",
}
_REMEDIES = {
    "handshake_wrong": "a client without a key, or something that does not speak ZeroMQ; who connects to this port?",
    "handshake_unfinished": "something connects to this port and says nothing or hangs up",
    "accept_failed": "are there free file descriptors? raise the limit (ulimit -n)",
}


class HandshakeWatch:
    """Of one bound socket."""

    def __init__(self, socket: Socket, counters: Counter[str], note: Callable[[str, str, str], None]) -> None:
        self._socket = socket
        self._counters = counters
        self._note = note
        self._monitor: Socket | None = socket.get_monitor_socket(WATCHED)
        self._pump = Pump(self._monitor, self._take, 64)

    def close(self) -> None:
        """Before the socket itself is closed."""
        self._pump.stop()
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._monitor = None

    def _take(self) -> bool:
        if self._monitor is None:
            return False
        try:
            event, _, endpoint = read_event(self._monitor)
        except zmq.Again:
            return False
        name = _NAMES.get(event)
        if name is not None:
            self._counters[name] += 1
            self._note(name, endpoint, _REMEDIES[name])
        return True
