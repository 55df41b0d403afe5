"""The receiving half over a Unix socket: who may come in, and how much is taken in at once.

Only processes of our own user (the kernel says whose they are; the folder is closed to others anyway) that say
something within a few seconds, and nobody who announced nonsense again and again. asyncio's servers were considered:
they accept as long as anybody waits, log and spin without free descriptors, and know no budget of a turn over all
connections.
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
from collections.abc import Callable
from pathlib import Path

from ...core.errors import LaunchError
from ..sending.departures import Departures
from ..session.strikes import Strikes
from ..session.unwrapping import Unwrapping
from ..turn_budget import TurnBudget
from ..wire import Lane, Sink
from .connection import Connection
from .sockets import SCHEME, credentials, make_listener

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
        departures: Departures,
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
        self._strikes = Strikes()
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
