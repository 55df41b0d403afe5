"""One incoming connection: bytes come in, messages are cut out of them and go to the sink.

What has come is read in one go and copied once, into memory that is the sink's from then on; of a message that has not
come whole, the rest is read straight to its place. Memory grows with what has come, up to one message.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from typing import Protocol

from ..sending.departures import Departures
from ..session.frames import SOLE_BYTES
from ..session.unwrapping import Unwrapping
from ..turn_budget import TurnBudget
from ..wire import Lane, Sink
from .stream import LENGTH_BYTES, MAX_MESSAGE, SOLE_AT, SOLE_HEAD, length_at, read_sole

_log = logging.getLogger("myxa.transport")
_NOTHING = memoryview(b"")


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
        """It has more and the turn is over: call its `go_on` in the next one."""
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
        self._is_waiting = False
        """For the next turn, with more of `_data`."""
        self._part: bytearray | None = None
        """A message that has not come whole, with room for the rest of it."""
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
            made.close()
            self._data, self._part, self._room, self._envelopes = _NOTHING, None, _NOTHING, None
            self._porch.unwrapping.forget(self.source)
            self._porch.ended(self)

    def stop(self) -> None:
        """Take nothing in any more; the connection stays."""
        if self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())

    def go_on(self) -> None:
        """A new turn: with what had to wait."""
        self._is_waiting = False
        if self._socket is not None:
            if self._porch.may_take():
                self._hand_over()
            else:
                self._wait()

    def _wait(self) -> None:
        self._is_waiting = self.has_spoken = True
        self._porch.wait(self)

    def _on_readable(self) -> None:
        if not self._is_waiting and self._porch.may_take():
            self.look()  # else the descriptor says so again

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
                self._data = memoryview(bytearray(room[:size]))
            elif size < len(room):
                self._room = room[size:]
                return
            else:
                self._data, self._part = memoryview(self._part), None
            self._at = 0
            if not self._hand_over() or size < len(room):
                return

    def _hand_over(self) -> bool:
        """All messages that have come whole. False: the turn was over before, or the connection."""
        departures = self._porch.departures
        departures.hold()
        try:
            return self._cut()
        except BaseException:  # an interrupt; a host that polls by hand may go on after it
            self._wait()
            raise
        finally:
            departures.is_holding = False
            if departures.due:
                departures.release()

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
                if head == SOLE_HEAD and length == size + SOLE_BYTES and begin + size <= end:  # nearly always
                    self._at = at = begin + size
                    try:
                        received(source, lane, data[begin:at])
                    except Exception as error:  # noqa: BLE001  # a bug in the session must be heard of
                        self._crashed(sink, error)
                    if note_taken():
                        self._wait()
                        return False
                    continue
            if (begin := at + LENGTH_BYTES) > end or begin + (length := length_at(data, at)) > end:
                return self._keep(data[at:])
            self._at = at = begin + length
            self._envelopes = porch.unwrapping.envelopes(sink, source, data[begin:at])
            porch.turn.look()

    def _hand_over_batch(self, sink: Sink, envelopes: Iterator[memoryview]) -> bool:
        """Until they or the turn are over."""
        source, lane, turn = self.source, self._porch.lane, self._porch.turn
        for envelope in envelopes:
            try:
                sink.received(source, lane, envelope)
            except Exception as error:  # noqa: BLE001  # as above
                self._crashed(sink, error)
            if turn.note_taken():
                self._wait()
                return False
        self._envelopes = None
        return True

    def _crashed(self, sink: Sink, error: Exception) -> None:
        _log.error("the session failed on a message", exc_info=error)
        sink.crashed(error)

    def _keep(self, left: memoryview) -> bool:
        """Of a message that has not come whole what there is, for the rest to be put behind it."""
        self._data = _NOTHING
        self.has_spoken = self.has_spoken or self._at > 0
        if self._socket is None:
            return False
        if not left:
            return True
        total = LENGTH_BYTES  # without its length, that first
        if len(left) >= LENGTH_BYTES:
            length = length_at(left, 0)
            if length > MAX_MESSAGE:
                self._porch.offended(self, f"a message of {length} bytes")
                return False
            total += length
        part = self._part = bytearray(total)
        part[: len(left)] = left
        self._room = memoryview(part)[len(left) :]
        return True
