r"""The sending half of the wire: one connection at a time to one peer on one lane, kept up while the peer is wanted.

A send-only DEALER for each connection. libzmq's own reconnecting is off: it would send our next message, not our HELLO,
to the new listener. The first envelope of a turn of the loop leaves at once, the others together in the next turn;
large ones go in chunks, one per turn.

    CONNECTING --ready--> READY --broken--> BACKOFF --timer--> CONNECTING
         \--refused, timer--> BACKOFF           any --close--> CLOSED (may linger in CONNECTING to say what is queued)
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import zmq
from zmq.backend import Socket as SocketBase

from ..core.errors import LaunchError
from ..core.ids import PeerKey
from ..core.timeouts import TIMEOUTS
from .session.frames import LIMITS, batch, fill_chunk
from .wire import InboundSink, Lane, Parcel
from .zeromq import MONITORED, Pump, Socket, read_event

BATCH_BYTES = {Lane.CONTROL: 512 * 1024, Lane.BULK: LIMITS.chunk}
"""Of several envelopes in one message. The other side drops a connection that sends more than its lane takes."""

_HELLO = 1
"""`frames.Kind.HELLO` in the fourth byte of an envelope."""
_DONTWAIT = int(zmq.DONTWAIT)
_send = SocketBase.send
"""Without pyzmq's own layer, which takes as long again: it serves what else can be sent than bytes."""


_NO_ANSWER = "no answer to the handshake"
OutboxState = Literal["connecting", "ready", "backoff", "closed"]
"""Of the connection; backoff: it waits before the next attempt."""
_CHUNK, _MAX_BATCH = LIMITS.chunk, LIMITS.batch


@dataclass(eq=False)
class Outbox:
    """One connection at a time to one peer on one lane."""

    endpoint: str
    make_socket: Callable[[], Socket]
    peer: PeerKey
    lane: Lane
    sink_of: Callable[[], InboundSink]
    """Whom to report to now; it changes when this process has joined."""
    on_closed: Callable[[Outbox], None]

    def __post_init__(self) -> None:
        self._peer, self._lane, self._batch_bytes = self.peer, self.lane, BATCH_BYTES[self.lane]
        self._loop = asyncio.get_running_loop()
        self._socket: Socket | None = None
        self._monitor: Socket | None = None
        self._pump: Pump | None = None
        self._state: OutboxState = "closed"
        self._queue: deque[Parcel] = deque()
        self._chunked: tuple[Parcel, int] | None = None
        self._scratch = bytearray()
        self._is_waiting = False
        """For the next turn of the loop, or for room: `_go_on` will be called then."""
        self._is_closing = False
        self._linger_s = 0.0
        self._down_since: float | None = self._loop.time()
        self._backoff_s = TIMEOUTS.wire.backoff_s
        self._timer: asyncio.Handle | None = None
        self._connect()

    @property
    def _is_unfinished(self) -> bool:
        return bool(self._queue) or self._chunked is not None

    def send(self, parcel: Parcel) -> None:
        self._queue.append(parcel)
        if not self._is_waiting and self._state == "ready":
            self.depart()
            self._wait()

    def settle(self, until: float) -> None:
        """Wait, blocking, for a connection that is being made, up to that moment of `time.monotonic`."""
        while self._state == "connecting" and (monitor := self._monitor) is not None:
            left_ms = int((until - time.monotonic()) * 1000)
            if left_ms < 0 or not monitor.poll(left_ms):
                return
            self._watch()

    def depart(self) -> None:
        """Send what is queued now, until it has to wait."""
        if self._state != "ready":
            return
        queue = self._queue
        while queue or self._chunked is not None:
            is_large = self._chunked is not None or len(queue[0].data) > _CHUNK
            if not (self._send_chunk() if is_large else self._send_batch()):
                return
        if self._is_closing:
            self._finish()

    def _send_batch(self) -> bool:
        """As many of those that wait as fit into one message; False if it has to wait."""
        queue = self._queue
        parcels: list[Parcel] = []
        num_bytes = 0
        while queue:
            size = len(queue[0].data)
            if parcels and (num_bytes + size > self._batch_bytes or len(parcels) >= _MAX_BATCH):
                break
            parcel = queue.popleft()
            if not parcel.is_withdrawn:
                num_bytes += size
                parcels.append(parcel)
        if not parcels:
            return True
        if not self._put(batch([parcel.data for parcel in parcels])):
            queue.extendleft(reversed(parcels))
            return False
        for parcel in parcels:
            parcel.is_sent = True
        return True

    def _send_chunk(self) -> bool:
        """A piece of a large envelope; False if the rest has to wait for the next turn."""
        if self._chunked is None:
            parcel, offset = self._queue.popleft(), 0
            if parcel.is_withdrawn:
                return True
            self._chunked = parcel, offset
        parcel, offset = self._chunked
        if not self._put(fill_chunk(self._scratch, parcel.data, offset)):
            return False
        if offset == 0:
            parcel.is_sent = True
        offset += _CHUNK
        self._chunked = (parcel, offset) if offset < len(parcel.data) else None
        if self._chunked is not None:
            self._wait()
        return self._chunked is None

    def _put(self, message: bytes | memoryview) -> bool:
        """One message on its way. False: it has to wait."""
        socket = self._socket
        assert socket is not None  # it is ready
        for _ in range(2):
            try:
                _send(socket, message, _DONTWAIT)
            except zmq.Again:
                # The new connection may not have been noticed yet by this side of the socket: looking makes it so.
                socket.getsockopt(zmq.EVENTS)
            else:
                return True
        self._wait(TIMEOUTS.wire.room_again_s)
        return False

    def _wait(self, pause_s: float = 0.0) -> None:
        if not self._is_waiting and self._socket is not None:
            self._is_waiting = True
            if pause_s:
                self._loop.call_later(pause_s, self._go_on, self._socket)
            else:
                self._loop.call_soon(self._go_on, self._socket)

    def _go_on(self, socket: Socket) -> None:
        if self._socket is socket:
            self._is_waiting = False
            if self._is_unfinished:
                self.depart()

    def _connect(self) -> None:
        self._state = "connecting"
        try:
            self._open()
        except LaunchError as error:  # no descriptors are left, or a drill
            self._loop.call_soon(self._on_broken, str(error))

    def _open(self) -> None:
        self._socket = self.make_socket()
        self._monitor = self._socket.get_monitor_socket(MONITORED)
        self._pump = Pump(self._monitor, self._watch)
        self._set_timer(self._loop.call_later(TIMEOUTS.wire.reach_s, self._on_late, "its host does not answer"))
        try:
            self._socket.setsockopt(zmq.IPV6, "[" in self.endpoint)  # once on, names mean IPv6 addresses
            self._socket.connect(self.endpoint)
        except zmq.ZMQError as error:
            self._on_broken(f"cannot connect: {error}")

    def _watch(self) -> bool:
        monitor = self._monitor
        if monitor is None:
            return False
        try:
            event, _, _ = read_event(monitor)
        except zmq.Again:
            return False
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._on_ready()
        elif event == zmq.EVENT_CONNECTED:
            self._set_timer(self._loop.call_later(TIMEOUTS.wire.handshake_s, self._on_late, _NO_ANSWER))
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._on_broken("the other side does not admit our key")
        elif event == zmq.EVENT_CLOSED:
            self._on_broken("no process listens there")
        elif event == zmq.EVENT_DISCONNECTED and self._state == "connecting":
            self._on_broken("the other side ended the handshake; has it another job key?")
        else:
            self._on_broken("the connection broke")
        return self._monitor is monitor

    def _on_late(self, why: str) -> None:
        """Time is up, but this loop may have been held up longer than the other side: see what has come meanwhile."""
        timer = self._timer
        while self._watch():
            pass
        if self._timer is timer and self._state == "connecting":
            # Its kernel takes connections and its process does nothing: stopped or stuck, which is not unreachable.
            # Whether it hangs is for the loop's heartbeat to say.
            self._down_since = self._loop.time() if why is _NO_ANSWER else self._down_since
            self._on_broken(why)

    def _on_ready(self) -> None:
        if self._state != "connecting":
            return
        self._set_timer(None)
        self._state = "ready"
        self._down_since = None
        self._queue.appendleft(Parcel(self.sink_of().greeting(self._peer, self._lane)))
        self.sink_of().connected(self._peer, self._lane)
        self.depart()

    def _on_broken(self, why: str) -> None:
        if self._state not in ("connecting", "ready"):
            return
        was_ready = self._state == "ready"
        self._set_timer(None)
        self._release(0.0)
        self._chunked, self._is_waiting = None, False
        if was_ready and self._queue and self._queue[0].data[3] == _HELLO:
            self._queue.popleft()
        self._state = "backoff"
        now = self._loop.time()
        if self._down_since is None:
            # A connection that broke for want of heartbeats was silent before; one more attempt it has, whatever.
            self._down_since = now - min(self.sink_of().silence_s(self._peer), TIMEOUTS.wire.backdated_s)
        if was_ready:
            self._backoff_s = TIMEOUTS.wire.backoff_s
        pause_s = self._backoff_s * random.uniform(0.5, 1.0)
        self._backoff_s = min(2 * self._backoff_s, TIMEOUTS.wire.longest_backoff_s)
        self._set_timer(self._loop.call_later(pause_s, self._connect))
        if was_ready:
            self.sink_of().lost(self._peer, self._lane, why)
        if self._lane is Lane.CONTROL and now - self._down_since >= TIMEOUTS.wire.unreachable_s:
            self.sink_of().unreachable(self._peer, why)

    def close(self, linger_s: float) -> None:
        """Send what is queued if that takes no longer than `linger_s`, then end. Not if the last attempt failed."""
        if self._state == "closed" or self._is_closing:
            return
        self._linger_s = linger_s
        self._is_closing = True
        if linger_s <= 0 or not self._is_unfinished or self._state == "backoff":
            self._finish()
            return
        self._loop.call_later(linger_s, self._finish)
        if self._state == "ready":
            self.depart()

    def abort(self) -> None:
        """End at once; what was not sent is lost."""
        self._linger_s = 0.0
        self._finish()

    def _finish(self) -> None:
        if self._state == "closed":
            return
        self._state = "closed"
        self._queue.clear()
        self._set_timer(None)
        self._release(self._linger_s)
        self.on_closed(self)

    def _release(self, linger_s: float) -> None:
        """Drop the connection, if there is one. What it has taken already may leave for so long."""
        if self._pump is not None:
            self._pump.stop()
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close(linger=int(linger_s * 1000))
        if self._monitor is not None:
            self._monitor.close(linger=0)
        self._pump = self._socket = self._monitor = None

    def _set_timer(self, timer: asyncio.Handle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer
