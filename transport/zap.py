"""Who may connect over tcp: only holders of the job's key (ZeroMQ's authentication protocol, RFC 27).

pyzmq's `ThreadAuthenticator` was considered: it needs a thread, and its wildcard admits everybody by default.
"""

from __future__ import annotations

import zmq
from zmq.utils import z85

from .security import JobKey
from .zmq_inbox import Pump
from .zmq_sockets import Socket

ENDPOINT = "inproc://zeromq.zap.01"
NUM_REQUEST_FRAMES = 7


class Gatekeeper:
    """Answers libzmq's question for every tcp connection of one context."""

    def __init__(self, context: zmq.Context[Socket], key: JobKey) -> None:
        self._admitted = z85.decode(key.public.encode())
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ENDPOINT)
        self._pump: Pump | None = None
        self.num_refused = 0

    def start(self) -> None:
        if self._pump is None:
            self._pump = Pump(self._socket, self._take, 64)

    def close(self) -> None:
        if self._pump is not None:
            self._pump.stop()
        self._socket.close(linger=0)

    def _take(self) -> bool:
        try:
            request = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        version, request_id = request[0], request[1] if len(request) > 1 else b""
        is_admitted = (
            len(request) == NUM_REQUEST_FRAMES and request[5] == b"CURVE" and request[6] == self._admitted
        )  # fmt: skip
        self.num_refused += not is_admitted
        verdict = (b"200", b"OK", b"myxa") if is_admitted else (b"400", b"not of this job", b"")
        self._socket.send_multipart([version, request_id, *verdict, b""], zmq.DONTWAIT)
        return True
