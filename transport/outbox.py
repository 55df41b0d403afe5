r"""The sending half of every wire: one connection at a time to one peer on one lane, kept up as long as the peer is
wanted. It decides what leaves when, and when to reconnect; `zeromq.py` carries it out.

The first envelope of a burst leaves at once, the rest of the turn of the loop leaves together (if the last turn had
several, all of them together). While messages are taken in, their answers are held and leave together
(`WriteCoalescing`): a message of the network costs as much as several of ours. Large ones go in chunks, a few per turn.

    CONNECTING --ready--> READY --broken--> BACKOFF --timer--> CONNECTING
         \--refused, timer--> BACKOFF           any --close--> CLOSED (may linger in CONNECTING to say what is queued)

`TurnBudget` bounds how much a node takes in before the loop's other work runs. The inboxes of a node share it: a burst
of thousands of messages would otherwise hold the host's loop up for tens of milliseconds.
"""

from __future__ import annotations

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from ..core.errors import ConfigError, LaunchError
from .session.frames import LIMITS, batch, fill_chunk, sole
from .wire import Parcel

BACKOFF_S = (0.05, 2.0)
MAX_BACKDATED_S = 5.0
BATCH_BYTES = 512 * 1024
CHUNKS_PER_TURN = 1
BURST_S = 50e-6
"""What is sent so soon after another one, with nothing taken in between, is of one burst with it; what follows on an
answer is not, however soon that came. To ask for a call in the next turn of the loop, for each that leaves alone, would
cost half as much as sending it."""


class OutboxState(Enum):
    """Of the connection."""

    CONNECTING = "connecting"
    READY = "ready"
    BACKOFF = "waiting before the next attempt"
    CLOSED = "closed"


_MAX_BATCH, _CHUNK = LIMITS.batch, LIMITS.chunk
_READY = OutboxState.READY  # members of an Enum are looked up in Python
_HELLO = 1
"""`frames.Kind.HELLO` in the fourth byte of an envelope."""


class Outbox(ABC):
    """One connection at a time to one peer on one lane."""

    def __init__(self, events: OutboxEvents, coalescing: WriteCoalescing | None = None) -> None:
        """Begins to connect: whatever `_open` needs is there before."""
        self._coalescing = coalescing or WriteCoalescing()
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._state = OutboxState.CLOSED
        self._queue: deque[Parcel] = deque()
        self._chunked: tuple[Parcel, int] | None = None
        self._scratch = bytearray()
        self._sent_units = 0
        self._is_turn_taken = False
        """The next flush is due already."""
        self._is_held = False
        """Nothing can leave before there is room for it; `_on_room` will be called then."""
        self._is_hot = False
        """Several left in the last turn: the first of this one is not alone either."""
        self._left_at = 0.0  # when the last one left alone
        self._left_after = 0  # so many intakes
        self._is_closing = False
        self._linger_s = 0.0
        self._down_since: float | None = self._loop.time()
        self._backoff_s = BACKOFF_S[0]
        self._timer: asyncio.Handle | None = None
        self._connect()

    # -- how it is sent

    @abstractmethod
    def _open(self) -> None:
        """Begin to connect; `_on_ready` or `_on_broken` says what came of it. Raises LaunchError if nothing can."""

    @abstractmethod
    def _put(self, message: bytes | memoryview) -> bool:
        """One message of ours on its way, never called while `_is_held`. False: it has to wait.

        Where it, or a part of it, waits for room: calls `_hold`, and sees to it that `_on_room` is called.
        """

    def _put_sole(self, envelope: bytes | bytearray) -> bool:
        """The same for a message of one envelope."""
        return self._put(sole(envelope))

    @abstractmethod
    def _await_room(self, until: float) -> bool:
        """Wait, blocking, for room, until that moment of `time.monotonic` at most, and put there what waits for it.
        False: there was none."""

    @abstractmethod
    def _settle(self, until: float) -> None:
        """Wait, blocking, for a connection that is just being made, until that moment of `time.monotonic` at most."""

    @abstractmethod
    def _release(self, linger_s: float) -> None:
        """Drop the connection, if there is one. What it has taken already may leave for so long."""

    @property
    def _is_unfinished(self) -> bool:
        return bool(self._queue) or self._chunked is not None

    # -- sending

    def send(self, parcel: Parcel) -> None:
        self._queue.append(parcel)
        if self._is_turn_taken or self._state is not _READY:
            return
        if self._coalescing.is_holding:
            self._is_turn_taken = True
            self._coalescing.add(self._depart)
            return
        now, num_intakes = time.monotonic(), self._coalescing.num_intakes
        if self._is_hot or (num_intakes == self._left_after and now - self._left_at < BURST_S):
            self._take_turn()
        else:
            self._left_at, self._left_after = now, num_intakes
            if self._is_only_one():
                self._send_sole(parcel)
            elif self._flush() and self._is_unfinished:
                self._take_turn()

    def flush(self, until: float) -> None:
        """Send what is queued now, whatever the turn, for the loop may be blocked next. Waits, blocking, for a
        connection that is just being made and for room, until that moment of `time.monotonic` at most."""
        if self._state is OutboxState.CONNECTING:
            self._settle(until)
        while self._state is _READY:
            self._depart()
            if not self._is_unfinished or (self._is_held and not self._await_room(until)) or time.monotonic() >= until:
                return

    def _hold(self) -> None:
        """There is no room for more."""
        self._is_held = self._is_turn_taken = True

    def _on_room(self) -> None:
        """There is room again."""
        self._is_held = False
        self._flush_in_turn()

    def _flush_in_turn(self) -> None:
        """At the beginning of a turn: what the last one left behind."""
        self._is_hot = len(self._queue) > (0 if not self._is_hot else 1)
        self._depart()

    def _depart(self) -> None:
        """Send what is queued now; what remains of large envelopes continues in the next turn."""
        if self._is_held:
            return
        self._is_turn_taken = False
        if self._is_only_one():
            self._send_sole(self._queue[0])
        elif self._flush() and self._is_unfinished:
            self._take_turn()

    def _is_only_one(self) -> bool:
        """One that is not large is all that waits: nearly always, to a loop at leisure."""
        queue = self._queue
        if len(queue) != 1 or self._chunked is not None or self._is_closing or self._state is not _READY:
            return False
        return len(queue[0].data) <= _CHUNK

    def _flush(self) -> bool:
        """Send what is queued, of large envelopes a few pieces; False if it was not the time for it."""
        if self._state is not _READY:
            return False
        while not self._is_held and (self._queue or self._chunked is not None):
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
        if not self._is_turn_taken:  # nor held back: a turn of the loop makes no room
            self._is_turn_taken = True
            self._loop.call_soon(self._flush_in_turn)

    def _send_sole(self, parcel: Parcel) -> bool:
        """One message of the only one that waits; False if it has to wait."""
        if not parcel.is_withdrawn:
            if not self._put_sole(parcel.data):
                return False
            parcel.is_sent = True
            self._sent_units += parcel.cost
        self._queue.clear()
        return True

    def _send_batch(self) -> bool:
        """One message; False if it has to wait."""
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
        """As many of those that wait as fit into one message."""
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
                parcel.is_sent = True
                self._sent_units += parcel.cost
            offset += LIMITS.chunk
            self._chunked = parcel, offset
            if offset >= total:
                self._chunked = None
                return True
        return False

    # -- the connection

    def interrupt(self, why: str) -> None:
        """The network is gone, as far as this connection knows; attempts to make it again continue."""
        self._on_broken(why)

    def _connect(self) -> None:
        self._state = OutboxState.CONNECTING
        try:
            self._open()
        except LaunchError as error:  # no descriptors are left, or a drill
            self._loop.call_soon(self._on_broken, str(error))

    def _on_ready(self) -> None:
        if self._state is not OutboxState.CONNECTING:
            return
        self._set_timer(None)
        self._state = _READY
        self._down_since = None
        self._queue.appendleft(Parcel(self._events.greeting(self._sent_units)))
        self._events.ready()
        self._depart()

    def _on_stuck(self, why: str) -> None:
        """Its kernel takes connections and its process does nothing: stopped or stuck, which is not unreachable.
        Whether it hangs is for the loop's heartbeat to say."""
        self._down_since = self._loop.time()
        self._on_broken(why)

    def _on_broken(self, why: str) -> None:
        if self._state not in (OutboxState.CONNECTING, _READY):
            return
        was_ready = self._state is _READY
        self._set_timer(None)
        self._release(0.0)
        self._chunked, self._is_held = None, False
        if was_ready and self._queue and self._queue[0].data[3] == _HELLO:
            self._queue.popleft()
        self._state = OutboxState.BACKOFF
        now = self._loop.time()
        if self._down_since is None:
            # A connection that broke for want of heartbeats was silent before; one more attempt it has, whatever.
            self._down_since = now - min(self._events.silence_s(), MAX_BACKDATED_S)
        if was_ready:
            self._backoff_s = BACKOFF_S[0]
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
        if linger_s <= 0 or not self._is_unfinished or self._state is OutboxState.BACKOFF:
            self._finish()
            return
        self._loop.call_later(linger_s, self._finish)
        if self._state is _READY:
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
        self._set_timer(None)
        self._release(self._linger_s)
        self._events.closed()

    def _set_timer(self, timer: asyncio.Handle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer


class OutboxEvents(Protocol):
    """What an outbox reports."""

    def greeting(self, sent_units: int) -> bytearray: ...

    def ready(self) -> None: ...

    def turned_away(self, why: str) -> None:
        """The other side holds this incarnation to be over."""
        ...

    def broken(self, why: str) -> None:
        """A connection that was ready is gone."""
        ...

    def failing(self, why: str, since_s: float) -> None:
        """An attempt failed; there has been no connection, and no sign of the other side's host, for `since_s`."""
        ...

    def silence_s(self) -> float:
        """How long ago the peer should have been heard; 0: unknown."""
        ...

    def closed(self) -> None: ...


class WriteCoalescing:
    """Shared by the inboxes and outboxes of a process."""

    __slots__ = ("due", "is_holding", "num_intakes")

    def __init__(self) -> None:
        self.is_holding = False
        """Messages are being taken in now."""
        self.num_intakes = 0
        """How often messages were taken in; counts on while they are."""
        self.due: list[Callable[[], None]] = []
        """To be called when the messages have been taken in."""

    def hold(self) -> None:
        """From now on senders call `add` instead."""
        self.is_holding = True
        self.num_intakes += 1

    def add(self, flush: Callable[[], None]) -> None:
        """Call it when the messages have been taken in."""
        self.due.append(flush)

    def release(self) -> None:
        """They have, or enough of them."""
        self.is_holding = False
        while self.due:
            flush = self.due.pop()
            try:
                flush()
            except BaseException:
                self.release()  # one that fails must not keep the others' answers back
                raise


_monotonic = time.monotonic
TURN_S = 0.001
"""Default: what a host that streams tokens does not notice."""


class TurnBudget:
    """Asked after each message; when it is over, the rest waits for the next turn of the loop."""

    __slots__ = ("_num_inboxes", "is_spent", "turn_s", "until")

    def __init__(self, turn_s: float = TURN_S) -> None:
        """`turn_s`: of one turn of the loop, for all inboxes together. Raises ConfigError if nothing fits into it."""
        if not turn_s > 0:
            raise ConfigError(f"in a turn of {turn_s} s no message is taken in", remedy="turn_budget_s is above 0")
        self.turn_s = turn_s
        self.is_spent = False
        """The current inbox has to stop, as of the last look at the clock."""
        self._num_inboxes = 0
        self.until = 0.0
        """When the part of the inbox whose turn it is ends."""

    def add_inbox(self) -> None:
        """One more shares the time; each overruns its part by one message at most."""
        self._num_inboxes += 1

    def begin(self) -> None:
        """An inbox begins its part of the turn."""
        self.until = time.monotonic() + self.turn_s / max(1, self._num_inboxes)
        self.is_spent = False

    def look(self) -> bool:
        """Something was taken in. True: the turn is over, the current inbox has to stop."""
        self.is_spent = is_spent = _monotonic() >= self.until
        return is_spent
