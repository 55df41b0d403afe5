r"""The sending half: one connection at a time to one peer on one lane, kept up as long as the peer is wanted.

The first envelope of a burst leaves at once, the rest of the turn of the loop leaves together (if the last turn had
several, all of them together); answers to what is just being taken in wait for its end. Large ones go in chunks, a few
per turn. libzmq's own reconnecting is off: it would send our next message, not our HELLO, to whoever listens.

    CONNECTING --handshake--> READY --broken--> BACKOFF --timer--> CONNECTING
         \--refused, timer--> BACKOFF           any --close--> CLOSED (may linger in CONNECTING to say what is queued)
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable
from enum import Enum

import zmq

from ...core.errors import LaunchError
from ..session.frames import LIMITS, batch, sole
from ..session.lent import fill_chunk, lent_of
from ..wire import Parcel
from .departures import Departures
from .inbox import Pump
from .outbox_events import OutboxEvents
from .sockets import MONITORED, Socket, read_event

REACH_LIMIT_S = 1.5
"""For the other side's kernel to take the connection."""
HANDSHAKE_LIMIT_S = 4.0
"""For the other side's process to answer; below libzmq's own limit, so that it is known who ran out of patience."""
BACKOFF_S = (0.05, 2.0)
MAX_BACKDATED_S = 5.0
BATCH_BYTES = 512 * 1024
CHUNKS_PER_TURN = 1
AGAIN_S = 0.005
BURST_S = 50e-6
"""What is sent so soon after another one is of one burst with it. To ask for a call in the next turn of the loop, for
each that leaves alone, would cost half as much as sending it."""
STATUS_OVER = 500
"""Of ZeroMQ's authentication: the key was good once (see zap.py)."""


class OutboxState(Enum):
    """Of the connection."""

    CONNECTING = "connecting"
    READY = "ready"
    BACKOFF = "waiting before the next attempt"
    CLOSED = "closed"


_MAX_BATCH, _CHUNK, _DONTWAIT = LIMITS.batch, LIMITS.chunk, int(zmq.DONTWAIT)
_READY = OutboxState.READY  # members of an Enum are looked up in Python


class Outbox:
    """See the module's head."""

    def __init__(
        self,
        endpoint: str,
        make_socket: Callable[[], Socket],
        events: OutboxEvents,
        departures: Departures | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._departures = departures or Departures()
        self._make_socket = make_socket
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._state = OutboxState.CLOSED
        self._queue: deque[Parcel] = deque()
        self._chunked: tuple[Parcel, int] | None = None
        self._scratch = bytearray()
        self._sent_units = 0
        self._is_turn_taken = False
        """The next flush is due already."""
        self._is_hot = False
        """Several left in the last turn: the first of this one is not alone either."""
        self._left_at = 0.0  # when the last one left alone
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
        if self._is_turn_taken or self._state is not _READY:
            return
        if self._departures.is_holding:
            self._is_turn_taken = True
            self._departures.add(self._depart)
        elif self._is_hot or (now := time.monotonic()) - self._left_at < BURST_S:
            self._take_turn()
        else:
            self._left_at = now
            if len(self._queue) == 1 and self._chunked is None and not self._is_closing and len(parcel.data) <= _CHUNK:
                self._send_sole(parcel)  # nearly always
            elif self._flush() and self._is_unfinished:
                self._take_turn()

    def flush(self, until: float) -> None:
        """Send what is queued now, whatever the turn, for the loop may be blocked next. A connection that is just being
        made is waited for, blocking, until that moment of `time.monotonic` at most."""
        while self._state is OutboxState.CONNECTING and self._monitor is not None:
            left_s = until - time.monotonic()
            if left_s <= 0 or not self._monitor.poll(int(left_s * 1000) + 1):
                return
            while self._watch():
                pass
        self._depart()

    def _flush_in_turn(self) -> None:
        """At the beginning of a turn: what the last one left behind."""
        self._is_hot = len(self._queue) > (0 if not self._is_hot else 1)
        self._depart()

    def _depart(self) -> None:
        """Send what is queued now; what remains of large envelopes goes on in the next turn."""
        self._is_turn_taken = False
        if self._flush() and self._is_unfinished:
            self._take_turn()

    @property
    def _is_unfinished(self) -> bool:
        return bool(self._queue) or self._chunked is not None

    def _flush(self) -> bool:
        """Send what is queued, of large envelopes a few pieces; False if it was not the time for it."""
        if self._state is not _READY:
            return False
        while self._queue or self._chunked is not None:
            if self._chunked is not None or len(self._queue[0].data) > LIMITS.chunk:
                if not self._send_chunks():
                    break
            elif not self._send_batch():
                break
        if self._is_closing and not self._is_unfinished:
            self._finish()
            return False
        return True

    def _take_turn(self) -> None:
        if not self._is_turn_taken:
            self._is_turn_taken = True
            self._loop.call_soon(self._flush_in_turn)

    def _send_sole(self, parcel: Parcel) -> bool:
        """One ZeroMQ message of the only one that waits; False if it has to wait."""
        if not parcel.is_withdrawn:
            if not self._put(sole(parcel.data)):
                return False
            parcel.is_sent = True
            self._sent_units += parcel.cost
        self._queue.clear()
        return True

    def _send_batch(self) -> bool:
        """One ZeroMQ message; False if it has to wait."""
        queue = self._queue
        if len(queue) == 1:
            return self._send_sole(queue[0])
        datas = [parcel.data for parcel in queue if not parcel.is_withdrawn]
        if 0 < len(datas) <= _MAX_BATCH and sum(map(len, datas)) <= BATCH_BYTES:  # nearly always
            if not self._put(batch(datas)):
                return False
            num_units = 0
            for parcel in queue:
                if not parcel.is_withdrawn:
                    parcel.is_sent = True
                    num_units += parcel.cost
            self._sent_units += num_units
            queue.clear()
            return True
        return self._send_part()

    def _send_part(self) -> bool:
        """As many of those that wait as fit into one message of ZeroMQ."""
        queue = self._queue
        parcels: list[Parcel] = []
        num_bytes = num_taken = 0
        for parcel in queue:
            size = len(parcel.data)
            if num_taken and (num_bytes + size > BATCH_BYTES or num_taken >= _MAX_BATCH):
                break
            num_taken += 1
            if not parcel.is_withdrawn:
                num_bytes += size
                parcels.append(parcel)
        if parcels and not self._put(batch([p.data for p in parcels])):
            return False
        for _ in range(num_taken):
            queue.popleft()
        for parcel in parcels:
            parcel.is_sent = True
            self._sent_units += parcel.cost
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
            if not self._put(fill_chunk(self._scratch, parcel.data, offset)):
                return False
            if offset == 0:
                self._note_sent(parcel)
            offset += LIMITS.chunk
            self._chunked = parcel, offset
            if offset >= total:
                self._chunked = None
                if (lent := lent_of(parcel.data)) is not None:
                    lent.release()
                return True
        return False

    def _note_sent(self, parcel: Parcel) -> None:
        parcel.is_sent = True
        self._sent_units += parcel.cost

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
        self._is_turn_taken = True
        self._loop.call_later(AGAIN_S, self._flush_in_turn)
        return False

    # -- the connection

    def interrupt(self, why: str) -> None:
        """The network is gone, as far as this connection knows; attempts to make it again go on."""
        self._on_broken(why)

    def _connect(self) -> None:
        self._state = OutboxState.CONNECTING
        try:
            self._socket = self._make_socket()
        except LaunchError as error:  # no descriptors are left, or a drill
            self._loop.call_soon(self._on_broken, str(error))
            return
        self._monitor = self._socket.get_monitor_socket(MONITORED)
        self._pump = Pump(self._monitor, self._watch, 16)
        self._timer = self._loop.call_later(REACH_LIMIT_S, self._on_unreached)
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

    def _on_ready(self) -> None:
        if self._state is not OutboxState.CONNECTING:
            return
        self._set_timer(None)
        self._state = OutboxState.READY
        self._down_since = None
        self._backoff_s = BACKOFF_S[0]
        self._queue.appendleft(Parcel(self._events.greeting(self._sent_units)))
        self._events.ready()
        self._depart()

    def _on_unreached(self) -> None:
        if not self._has_moved_on():
            self._on_broken("its host does not answer")

    def _on_no_answer(self) -> None:
        """Its kernel took the connection and its process says nothing: stopped or stuck, which is not unreachable.
        Whether it hangs is for the loop's heartbeat to say."""
        if not self._has_moved_on():
            self._down_since = self._loop.time()
            self._on_broken("no answer to the handshake")

    def _has_moved_on(self) -> bool:
        """Time is up, but this loop may have been held up longer than the other side: see what has come meanwhile."""
        timer = self._timer
        while self._watch():
            pass
        return self._timer is not timer or self._state is not OutboxState.CONNECTING

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
        if self._down_since is None:
            # A connection that broke for want of heartbeats was silent before; one more attempt it has, whatever.
            self._down_since = now - min(self._events.silence_s(), MAX_BACKDATED_S)
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
            self._depart()

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
