"""The sending half over ZeroMQ: a send-only DEALER for each connection, watched by its monitor.

libzmq's own reconnecting is off: it would send our next message, not our HELLO, to whoever listens. When what leaves is
for `transport/outbox.py` to say.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq

from ..outbox import Outbox, OutboxEvents, OutboxState, WriteCoalescing
from .inbox import Pump
from .sockets import MONITORED, Socket, read_event

REACH_LIMIT_S = 1.5
"""For the other side's kernel to take the connection."""
HANDSHAKE_LIMIT_S = 4.0
"""For the other side's process to answer; below libzmq's own limit, so that it is known who ran out of patience."""
AGAIN_S = 0.005
STATUS_OVER = 500
"""Of ZeroMQ's authentication: the key was good once (see zap.py)."""

_DONTWAIT = int(zmq.DONTWAIT)


class ZmqOutbox(Outbox):
    """See the module's head."""

    def __init__(
        self,
        endpoint: str,
        make_socket: Callable[[], Socket],
        events: OutboxEvents,
        departures: WriteCoalescing | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._make_socket = make_socket
        self._socket: Socket | None = None
        self._monitor: Socket | None = None
        self._pump: Pump | None = None
        super().__init__(events, departures)

    def _put(self, message: bytes | memoryview) -> bool:
        socket = self._socket
        if socket is None:
            return False
        for _ in range(2):
            try:
                socket.send(message, _DONTWAIT)
            except zmq.Again:
                # The new connection may not have been noticed yet by this side of the socket: looking makes it so.
                socket.getsockopt(zmq.EVENTS)
            else:
                return True
        self._hold()
        self._loop.call_later(AGAIN_S, self._look_again, socket)
        return False

    def _look_again(self, socket: Socket) -> None:
        if self._is_held and self._socket is socket:
            self._go_on()

    def _await_room(self, until: float) -> bool:
        socket = self._socket
        if socket is None or not socket.poll(max(0, int((until - time.monotonic()) * 1000)), zmq.POLLOUT):
            return False
        self._go_on()
        return True

    def _settle(self, until: float) -> None:
        while self._state is OutboxState.CONNECTING and self._monitor is not None:
            left_s = until - time.monotonic()
            if left_s <= 0 or not self._monitor.poll(int(left_s * 1000) + 1):
                return
            while self._watch():
                pass

    def _open(self) -> None:
        self._socket = self._make_socket()
        self._monitor = self._socket.get_monitor_socket(MONITORED)
        self._pump = Pump(self._monitor, self._watch, 16)
        self._set_timer(self._loop.call_later(REACH_LIMIT_S, self._on_unreached))
        try:
            self._socket.connect(self._endpoint)
        except zmq.ZMQError as error:
            self._on_broken(f"cannot connect: {error}")

    def _watch(self) -> bool:
        monitor = self._monitor
        if monitor is None:
            return False
        try:
            event, value, _ = read_event(monitor)
        except zmq.Again:
            return False
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._on_ready()
        elif event == zmq.EVENT_CONNECTED:
            self._set_timer(self._loop.call_later(HANDSHAKE_LIMIT_S, self._on_no_answer))
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and value == STATUS_OVER:
            why = "the other side says that this incarnation is over"
            self._on_broken(why)
            self._events.turned_away(why)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._on_broken("the other side does not admit our key")
        elif event == zmq.EVENT_CLOSED:
            self._on_broken("nobody listens there")
        elif event == zmq.EVENT_DISCONNECTED and self._state is OutboxState.CONNECTING:
            self._on_broken("the other side ended the handshake; has it another job key?")
        else:
            self._on_broken("the connection broke")
        return self._monitor is monitor

    def _on_unreached(self) -> None:
        if not self._has_moved_on():
            self._on_broken("its host does not answer")

    def _on_no_answer(self) -> None:
        if not self._has_moved_on():
            self._on_stuck("no answer to the handshake")

    def _has_moved_on(self) -> bool:
        """Time is up, but this loop may have been held up longer than the other side: see what has come meanwhile."""
        timer = self._timer
        while self._watch():
            pass
        return self._timer is not timer or self._state is not OutboxState.CONNECTING

    def _release(self, linger_s: float) -> None:
        if self._pump is not None:
            self._pump.stop()
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close(linger=int(linger_s * 1000))
        if self._monitor is not None:
            self._monitor.close(linger=0)
        self._pump = self._socket = self._monitor = None
