r"""The sending half: one connection at a time to one peer on one lane, kept up as long as the peer is wanted.

The first envelope of a turn of the loop leaves at once, the rest of the turn leaves together; large ones go in chunks,
a few per turn. libzmq's own reconnecting is off: it would send our next message, not our HELLO, to whoever listens.

    CONNECTING --handshake--> READY --broken--> BACKOFF --timer--> CONNECTING
         \--refused, timer--> BACKOFF           any --close--> CLOSED (may linger in CONNECTING to say what is queued)
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from .frames import LIMITS, batch, chunk_header
from .wire import Parcel
from .zmq_inbox import Pump
from .zmq_sockets import MONITORED, Socket

CONNECT_LIMIT_S = 5.0
BACKOFF_S = (0.05, 2.0)
BATCH_BYTES = 512 * 1024
CHUNKS_PER_TURN = 4
AGAIN_S = 0.005


class OutboxState(Enum):
    """Of the connection."""

    CONNECTING = "connecting"
    READY = "ready"
    BACKOFF = "waiting before the next attempt"
    CLOSED = "closed"


class OutboxEvents(Protocol):
    """What an outbox reports."""

    def greeting(self, sent_units: int) -> bytearray: ...

    def ready(self) -> None: ...

    def broken(self, why: str) -> None:
        """A connection that was ready is gone."""
        ...

    def failing(self, why: str, since_s: float) -> None:
        """An attempt failed; there has been no connection for `since_s`."""
        ...

    def closed(self) -> None: ...


class Outbox:
    """See the module's head."""

    def __init__(self, endpoint: str, make_socket: Callable[[], Socket], events: OutboxEvents) -> None:
        self._endpoint = endpoint
        self._make_socket = make_socket
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._state = OutboxState.CLOSED
        self._queue: deque[Parcel] = deque()
        self._chunked: tuple[Parcel, int] | None = None
        self._sent_units = 0
        self._is_turn_taken = False
        self._is_closing = False
        self._linger_s = 0.0
        self._down_since: float | None = self._loop.time()
        self._backoff_s = BACKOFF_S[0]
        self._timer: asyncio.TimerHandle | None = None
        self._socket: Socket | None = None
        self._monitor: Socket | None = None
        self._pump: Pump | None = None
        self._connect()

    # -- sending

    def send(self, parcel: Parcel) -> None:
        self._queue.append(parcel)
        if self._state is OutboxState.READY and not self._is_turn_taken:
            self._flush()

    def _flush(self) -> None:
        """Send what is queued, then let the turn go by before the next."""
        self._is_turn_taken = False
        if self._state is not OutboxState.READY:
            return
        has_sent = False
        while self._queue or self._chunked is not None:
            if self._chunked is not None or len(self._queue[0].data) > LIMITS.chunk:
                has_sent = True
                if not self._send_chunks():
                    break
            elif not self._send_batch():
                break
            else:
                has_sent = True
        if self._is_closing and not self._queue and self._chunked is None:
            self._finish()
        elif has_sent or self._queue:
            self._take_turn()

    def _take_turn(self) -> None:
        if not self._is_turn_taken:
            self._is_turn_taken = True
            self._loop.call_soon(self._flush)

    def _send_batch(self) -> bool:
        """One ZeroMQ message; False if it has to wait."""
        parcels: list[Parcel] = []
        num_bytes = 0
        for parcel in self._queue:
            size = len(parcel.data)
            if parcels and (num_bytes + size > BATCH_BYTES or len(parcels) >= LIMITS.batch):
                break
            num_bytes += size
            parcels.append(parcel)
        wanted = [p for p in parcels if not p.is_withdrawn]
        if wanted and not self._put(batch([p.data for p in wanted])):
            return False
        for _ in parcels:
            self._queue.popleft()
        for parcel in wanted:
            self._note_sent(parcel)
        return True

    def _send_chunks(self) -> bool:
        """A few pieces of a large envelope; False if the rest has to wait for the next turn."""
        if self._chunked is None:
            parcel, offset = self._queue.popleft(), 0
            if parcel.is_withdrawn:
                return True
        else:
            parcel, offset = self._chunked
        total = len(parcel.data)
        self._chunked = parcel, offset
        for _ in range(CHUNKS_PER_TURN):
            piece = memoryview(parcel.data)[offset : offset + LIMITS.chunk]
            if not self._put(b"".join([chunk_header(offset // LIMITS.chunk, offset, total), piece])):
                return False
            if offset == 0:
                self._note_sent(parcel)
            offset += len(piece)
            self._chunked = parcel, offset
            if offset >= total:
                self._chunked = None
                return True
        return False

    def _note_sent(self, parcel: Parcel) -> None:
        parcel.is_sent = True
        self._sent_units += parcel.cost

    def _put(self, message: bytes) -> bool:
        socket = self._socket
        if socket is None:
            return False
        for _ in range(2):
            try:
                socket.send(message, zmq.DONTWAIT)
            except zmq.Again:
                # The new connection may not have been noticed yet by this side of the socket: looking makes it so.
                socket.getsockopt(zmq.EVENTS)
            else:
                return True
        self._is_turn_taken = True
        self._loop.call_later(AGAIN_S, self._flush)
        return False

    # -- the connection

    def _connect(self) -> None:
        self._state = OutboxState.CONNECTING
        self._socket = self._make_socket()
        self._monitor = self._socket.get_monitor_socket(MONITORED)
        self._pump = Pump(self._monitor, self._watch, 16)
        self._timer = self._loop.call_later(CONNECT_LIMIT_S, self._on_broken, "no answer to the handshake")
        try:
            self._socket.connect(self._endpoint)
        except zmq.ZMQError as error:
            self._on_broken(f"cannot connect: {error}")

    def _watch(self) -> bool:
        monitor = self._monitor
        if monitor is None:
            return False
        try:
            event = recv_monitor_message(monitor, zmq.NOBLOCK)["event"]
        except zmq.Again:
            return False
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._on_ready()
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._on_broken("the other side does not admit our key")
        elif event == zmq.EVENT_CLOSED:
            self._on_broken("nobody listens there")
        elif event == zmq.EVENT_DISCONNECTED and self._state is OutboxState.CONNECTING:
            self._on_broken("the other side ended the handshake; has it another job key?")
        else:
            self._on_broken("the connection broke")
        return self._monitor is monitor

    def _on_ready(self) -> None:
        if self._state is not OutboxState.CONNECTING:
            return
        self._set_timer(None)
        self._state = OutboxState.READY
        self._down_since = None
        self._backoff_s = BACKOFF_S[0]
        self._queue.appendleft(Parcel(self._events.greeting(self._sent_units)))
        self._events.ready()
        self._flush()

    def _on_broken(self, why: str) -> None:
        if self._state not in (OutboxState.CONNECTING, OutboxState.READY):
            return
        was_ready = self._state is OutboxState.READY
        self._release(0)
        self._chunked = None
        if was_ready and self._queue and self._queue[0].data[3] == _HELLO:
            self._queue.popleft()
        self._state = OutboxState.BACKOFF
        now = self._loop.time()
        self._down_since = self._down_since or now
        pause_s = self._backoff_s * random.uniform(0.5, 1.0)
        self._backoff_s = min(2 * self._backoff_s, BACKOFF_S[1])
        self._set_timer(self._loop.call_later(pause_s, self._connect))
        if was_ready:
            self._events.broken(why)
        self._events.failing(why, now - self._down_since)

    # -- the end

    def close(self, linger_s: float) -> None:
        """Send what is queued if that takes no longer than `linger_s`, then end. Not if the last attempt failed."""
        if self._state is OutboxState.CLOSED or self._is_closing:
            return
        self._linger_s = linger_s
        self._is_closing = True
        if linger_s <= 0 or not (self._queue or self._chunked) or self._state is OutboxState.BACKOFF:
            self._finish()
            return
        self._loop.call_later(linger_s, self._finish)
        if self._state is OutboxState.READY:
            self._flush()

    def abort(self) -> None:
        """End at once; what was not sent is lost."""
        self._linger_s = 0.0
        self._finish()

    def _finish(self) -> None:
        if self._state is OutboxState.CLOSED:
            return
        self._state = OutboxState.CLOSED
        self._queue.clear()
        self._release(int(self._linger_s * 1000))
        self._events.closed()

    def _release(self, linger_ms: int) -> None:
        self._set_timer(None)
        if self._pump is not None:
            self._pump.stop()
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close(linger=linger_ms)
        if self._monitor is not None:
            self._monitor.close(linger=0)
        self._pump = self._socket = self._monitor = None

    def _set_timer(self, timer: asyncio.TimerHandle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer


_HELLO = 1
"""`frames.Kind.HELLO` in the fourth byte of an envelope."""
