"""The receiving half over a Unix socket: who may connect, and how much is taken in at once.

Only processes of our own user (the kernel says whose they are; the folder is closed to others anyway) that say
something within a few seconds, and none that announced nonsense again and again. asyncio's servers were considered:
they accept as long as any client waits, log and spin without free descriptors, and know no budget of a turn over all
connections.

What has come on a `Connection` is read in one go and copied once, into memory that is the sink's from then on; of a
message that has not come whole, the rest is read straight to its place. Memory grows with what has come, up to one
message: a peer that only announces a large one costs what it has sent, and a little.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from ...core.errors import LaunchError
from ..outbox import WriteCoalescing
from ..session.frames import SOLE_BYTES
from ..session.inbound_router import ProtocolViolations
from ..session.reassembly import Unwrapping
from ..turn_budget import TurnBudget
from ..wire import Lane, Sink
from .sockets import (
    LENGTH_BYTES,
    MAX_MESSAGE,
    SCHEME,
    SOLE_AT,
    SOLE_HEAD,
    credentials,
    end_of_sole,
    length_at,
    make_listener,
    padded,
    read_sole,
    shut,
)

READ_BYTES = 256 * 1024
"""At once: what the kernel keeps for a connection, and a little more."""
ACCEPTED_PER_TURN = 16
HELLO_LIMIT_S = 5.0
"""For a connection's first message."""
BREATH_S = 0.25
"""Before the next try to accept, when there was no descriptor for it: who waits outside keeps the listener readable."""
_FULL = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_REMEDIES = {
    "uid_foreign": "only processes of the user that this one runs as may speak to it",
    "accept_failed": "are there free file descriptors? raise the limit (ulimit -n)",
    "handshake_unfinished": "something connects to this socket and says nothing",
    "handshake_wrong": "something that does not speak our language; who connects to this socket?",
    "pid_banned": "it sent nonsense again and again; is it of another version?",
}

_log = logging.getLogger("myxa.transport")


class UnixInbox:
    """One bound socket of one lane. Implements `connection.Porch`."""

    proof = ""
    """Nobody shows a key here."""

    def __init__(
        self,
        path: Path,
        lane: Lane,
        turn: TurnBudget,
        departures: WriteCoalescing,
        counters: Counter[str],
        note: Callable[[str, str, str], None],
    ) -> None:
        """`note`: what was refused, whom, remedy; to be told once. Raises LaunchError if it cannot listen there."""
        self.sink: Sink | None = None
        self.lane = lane
        self.turn = turn
        self.departures = departures
        self.unwrapping = Unwrapping(lane)
        self.scratch = memoryview(bytearray(READ_BYTES))
        self._counters = counters
        self._note = note
        self._strikes = ProtocolViolations()
        self._numbers = itertools.count(1)
        self._connections: dict[bytes, Connection] = {}
        self._waiting: list[Connection] = []
        self._is_over = False
        """This turn's time is spent."""
        self._until = 0.0
        self._is_stopped = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._breath: asyncio.TimerHandle | None = None
        self._path = path
        try:
            self._listener = make_listener(path)
        except OSError as error:
            raise LaunchError(
                f"cannot listen at {path}: {error}", remedy="is its folder ours, are there free file descriptors?"
            ) from error
        turn.add_inbox()

    @property
    def endpoint(self) -> str:
        return f"{SCHEME}{self._path}"

    def start(self, sink: Sink) -> None:
        """Report to `sink` from now on."""
        self.sink = sink
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def listen_again(self) -> None:
        """Its file is gone: newcomers come in by a new one. Raises OSError."""
        if self._is_stopped or self._loop is None:
            return
        fresh = make_listener(self._path)
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        self._listener = fresh
        self._loop.add_reader(fresh.fileno(), self._accept)

    def forget(self, source: bytes) -> None:
        connection = self._connections.get(source)
        if connection is not None:
            connection.close()

    def stop(self) -> None:
        """Take nothing in any more; connections stay."""
        if self._is_stopped:
            return
        self._is_stopped = True
        if self._breath is not None:
            self._breath.cancel()
        if self._loop is not None:
            self._loop.remove_reader(self._listener.fileno())
            for connection in self._connections.values():
                connection.stop()

    def close(self) -> None:
        self.stop()
        for connection in list(self._connections.values()):
            connection.close()
        self._listener.close()

    # -- a turn of the loop, for its connections

    def may_take(self) -> bool:
        if self._is_over:
            return False
        turn = self.turn
        if time.monotonic() < self._until:
            return turn.resume(self._until)
        is_open = turn.begin()
        self._until = turn.until
        return is_open

    def wait(self, connection: Connection) -> None:
        self._waiting.append(connection)
        self._end_turn()

    def _end_turn(self) -> None:
        if not self._is_over and self._loop is not None:
            self._is_over = True
            self._loop.call_soon(self._turn_over)

    def _turn_over(self) -> None:
        if self._is_stopped:
            return
        self._is_over, self._until = False, 0.0
        waiting, self._waiting = deque(self._waiting), []
        try:
            while waiting and not self._is_over:
                waiting.popleft().go_on()
        finally:  # also after an interrupt: who was not served is the first of the next turn
            self._waiting[:0] = waiting
            if self._waiting:
                self._end_turn()

    # -- who may come in

    def _accept(self) -> None:
        for _ in range(ACCEPTED_PER_TURN):
            try:
                made, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _FULL:
                    self._take_breath()
                return
            made.setblocking(False)
            self._admit(made)

    def _admit(self, made: socket.socket) -> None:
        pid, uid = credentials(made)
        if uid != os.geteuid():
            self._refuse("uid_foreign", f"user {uid}")
        elif self._strikes.has_bans and self._strikes.is_banned(_name(pid), time.monotonic()):
            self._refuse("pid_banned", f"process {pid}")
        else:
            source = b"unix-%d" % next(self._numbers)
            connection = self._connections[source] = Connection(self, made, source, pid)
            connection.patience = asyncio.get_running_loop().call_later(HELLO_LIMIT_S, self._look_at, connection)
            return
        made.close()

    def _look_at(self, connection: Connection) -> None:
        if self._is_stopped or connection.has_spoken:
            return
        if connection.is_waiting:  # there is something, and others are before it
            connection.patience = asyncio.get_running_loop().call_later(BREATH_S, self._look_at, connection)
            return
        connection.look()  # this loop may have been held up longer than the other side
        if not connection.has_spoken:
            self._refuse("handshake_unfinished", f"process {connection.pid}")
            connection.close()

    def _take_breath(self) -> None:
        """No descriptor is free: who waits goes on waiting, and this loop does not turn for it."""
        self._refuse("accept_failed", "")
        if self._loop is not None and not self._is_stopped:
            self._loop.remove_reader(self._listener.fileno())
            self._breath = self._loop.call_later(BREATH_S, self._breathe)

    def _breathe(self) -> None:
        if self._loop is not None and not self._is_stopped:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def ended(self, connection: Connection) -> None:
        self._connections.pop(connection.source, None)

    def offended(self, connection: Connection, reason: str) -> None:
        self._refuse("handshake_wrong", f"process {connection.pid}")
        if connection.pid:  # 0: of another namespace; others there would be banned with it
            self._strikes.strike(_name(connection.pid), time.monotonic())
        connection.close()
        if self.sink is not None:
            self.sink.malformed(connection.source, self.lane, reason)

    def _refuse(self, what: str, whom: str) -> None:
        self._counters[what] += 1
        self._note(what, whom, _REMEDIES[what])


def _name(pid: int) -> bytes:
    return b"%d" % pid


PART_BYTES = 64 * 1024
"""Room for a message that has not come whole, at first; doubled when it is full."""
_NOTHING = memoryview(b"")
_monotonic = time.monotonic


class Porch(Protocol):
    """What a connection needs of the inbox that it belongs to."""

    sink: Sink | None
    lane: Lane
    turn: TurnBudget
    departures: WriteCoalescing
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
