"""One incoming connection: bytes come in, messages are cut out of them and go to the sink.

What has come is read in one go and copied once, into memory that is the sink's from then on; of a message that has not
come whole, the rest is read straight to its place. Memory grows with what has come, up to one message: whoever only
announces a large one costs what it has sent, and a little.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Iterator
from typing import Protocol

from ..sending.departures import Departures
from ..session.frames import SOLE_BYTES
from ..session.unwrapping import Unwrapping
from ..turn_budget import TurnBudget
from ..wire import Lane, Sink
from .sockets import shut
from .stream import LENGTH_BYTES, MAX_MESSAGE, SOLE_AT, SOLE_HEAD, end_of_sole, length_at, padded, read_sole

PART_BYTES = 64 * 1024
"""Room for a message that has not come whole, at first; doubled when it is full."""

_log = logging.getLogger("myxa.transport")
_NOTHING = memoryview(b"")
_monotonic = time.monotonic


class Porch(Protocol):
    """What a connection needs of the inbox that it belongs to."""

    sink: Sink | None
    lane: Lane
    turn: TurnBudget
    departures: Departures
    unwrapping: Unwrapping
    scratch: memoryview
    """For what is read, until it is copied."""

    def may_take(self) -> bool:
        """There is time left in this turn of the loop."""
        ...

    def wait(self, connection: Connection) -> None:
        """It has more and the turn is over: call its `go_on` in the next one, behind those that wait already."""
        ...

    def ended(self, connection: Connection) -> None: ...

    def offended(self, connection: Connection, reason: str) -> None:
        """It says something that nobody who speaks our language would."""
        ...


class Connection:
    """See the module's head."""

    def __init__(self, porch: Porch, made: socket.socket, source: bytes, pid: int) -> None:
        self.source = source
        self.pid = pid
        self.has_spoken = False
        """A message of it was taken in."""
        self.patience: asyncio.TimerHandle | None = None
        """When it ends, something should have come."""
        self._porch = porch
        self._socket: socket.socket | None = made
        self._data = _NOTHING
        self._at = 0
        """Where in `_data` the next message begins."""
        self._envelopes: Iterator[memoryview] | None = None
        """Of the message before it: those that are not handed over yet."""
        self.is_waiting = False
        """For the next turn, with more of `_data` or with what it has not looked at."""
        self._part: bytearray | None = None
        """A message that has not come whole, with room for more of it."""
        self._part_bytes = 0
        """What it will take when it has come whole."""
        self._room = _NOTHING
        """In `_part`, for what is to come."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(made.fileno(), self._on_readable)

    def close(self) -> None:
        made, self._socket = self._socket, None
        if made is not None:
            if self.patience is not None:
                self.patience.cancel()
            self._loop.remove_reader(made.fileno())
            shut(made)
            self._data, self._part, self._room, self._envelopes = _NOTHING, None, _NOTHING, None
            self._porch.unwrapping.forget(self.source)
            self._porch.ended(self)

    def stop(self) -> None:
        """Take nothing in any more; the connection stays."""
        if self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())

    def go_on(self) -> None:
        """A new turn: with what had to wait."""
        self.is_waiting = False
        if self._socket is None:
            return
        if not self._porch.may_take():
            self._wait()
        elif self._data or self._envelopes is not None:
            self._hand_over()
        else:
            self.look()

    def _wait(self) -> None:
        if not self.is_waiting and self._socket is not None:
            self.is_waiting = True
            self._porch.wait(self)

    def _on_readable(self) -> None:
        if self.is_waiting:
            return
        if self._porch.may_take():
            self.look()
        else:
            self._wait()  # whoever comes first in each turn would otherwise be the only one that is heard

    def look(self) -> None:
        """Take in what is there."""
        porch = self._porch
        while (made := self._socket) is not None:
            room = porch.scratch if self._part is None else self._room
            try:
                size = made.recv_into(room)
            except BlockingIOError:
                return
            except OSError:
                size = 0
            if not size:
                self.close()
                return
            if self._part is None:
                if (end := end_of_sole(room, size)) is not None:  # nearly always, when the loop is at leisure
                    self._hand_over(memoryview(bytearray(room[SOLE_AT:end])))
                    return
                self._data = memoryview(bytearray(room[:size]))
            elif size < len(room):
                self._room = room[size:]
                return
            elif len(self._part) < self._part_bytes:
                self._make_part(memoryview(self._part))
                continue
            else:
                self._data, self._part = memoryview(self._part), None
            self._at = 0
            if not self._hand_over() or size < len(room):
                return

    def _hand_over(self, sole: memoryview | None = None) -> bool:
        """All messages that have come whole; `sole`: only that envelope has. False: the turn was over before, or the
        connection."""
        departures = self._porch.departures
        departures.hold()
        try:
            return self._cut() if sole is None else self._take(sole)
        except Exception as error:  # noqa: BLE001  # a bug in the session must be heard of and cost one message
            _log.error("the session failed on a message", exc_info=error)
            self._wait()
            if (sink := self._porch.sink) is not None:
                sink.crashed(error)
            return False
        except BaseException:  # an interrupt; a host that polls by hand may go on after it
            self._wait()
            raise
        finally:
            departures.is_holding = False
            if departures.due:
                departures.release()

    def _take(self, sole: memoryview) -> bool:
        porch = self._porch
        if (sink := porch.sink) is not None:
            self.has_spoken = True
            sink.received(self.source, porch.lane, sole)
            if porch.turn.note_taken():
                self._wait()
        return False

    def _cut(self) -> bool:
        porch, data, source = self._porch, self._data, self.source
        sink, lane, note_taken = porch.sink, porch.lane, porch.turn.note_taken
        if sink is None:
            return False
        received, end, at = sink.received, len(data), self._at
        while True:
            if self._envelopes is not None and not self._hand_over_batch(sink, self._envelopes):
                return False
            begin = at + SOLE_AT
            if begin <= end:
                length, head, size = read_sole(data, at)
                next_at = begin + (size + 7 & -8)  # `padded`, without the call
                if head == SOLE_HEAD and length == size + SOLE_BYTES and next_at <= end:  # nearly always
                    self._at = at = next_at
                    self.has_spoken = True
                    received(source, lane, data[begin : begin + size])
                    if note_taken():
                        self._wait()
                        return False
                    if self._socket is None:
                        return False
                    continue
            if (begin := at + LENGTH_BYTES) > end or (next_at := begin + padded(length := length_at(data, at))) > end:
                return self._keep(data[at:])
            self._at = at = next_at
            self.has_spoken = True
            self._envelopes = porch.unwrapping.envelopes(sink, source, data[begin : begin + length])
            porch.turn.look()
            if porch.turn.is_spent:
                self._wait()
                return False

    def _hand_over_batch(self, sink: Sink, envelopes: Iterator[memoryview]) -> bool:
        """Until they or the turn are over."""
        source, lane, turn, received = self.source, self._porch.lane, self._porch.turn, sink.received
        for envelope in envelopes:
            received(source, lane, envelope)
            turn.num_taken = num_taken = turn.num_taken + 1  # `note_taken`, without the call
            if _monotonic() >= turn.until or num_taken >= turn.max_taken:
                turn.is_spent = True
                self._wait()
                return False
            if self._socket is None:  # that one ended it
                return False
        self._envelopes = None
        return self._socket is not None

    def _keep(self, left: memoryview) -> bool:
        """Of a message that has not come whole what there is, for the rest to be put behind it."""
        self._data = _NOTHING
        if not left:
            return True
        total = LENGTH_BYTES  # without its length, that first
        if len(left) >= LENGTH_BYTES:
            length = length_at(left, 0)
            if length > MAX_MESSAGE:
                self._porch.offended(self, f"a message of {length} bytes")
                return False
            total += padded(length)
        self._part_bytes = total
        self._make_part(left)
        return True

    def _make_part(self, come: memoryview) -> None:
        """Room behind what has come."""
        size = len(come)
        part = self._part = bytearray(min(self._part_bytes, max(PART_BYTES, 2 * size)))
        part[:size] = come
        self._room = memoryview(part)[size:]
