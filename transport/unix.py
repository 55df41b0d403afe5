"""Small messages of one host over Unix sockets: listening and receiving, connecting and sending, all in the loop.

    length (8 bytes, little endian) | message: a batch or a chunk, as over ZeroMQ | zeros up to a multiple of 8

So an envelope that comes alone lies at a multiple of 8 in the read buffer, and its arrays are used where they are.
SOCK_SEQPACKET was considered: it takes no message larger than the socket's buffer (208 KiB by default; a batch has up
to 512), and one system call gives one message, where a stream gives all that came.

Receiving: only processes of our own user may connect, must speak within a few seconds, and are banned after repeated
protocol violations. Data is read in one go and copied once, into memory that is the sink's; the rest of an incomplete
message is read straight to its place. Memory grows with the bytes received, up to one message. asyncio's servers were
considered: they accept as long as any client waits, log and spin without free descriptors, and have no budget of a turn
over all connections.

Sending: `outbox.py` decides when a message leaves. What the kernel does not take waits, and everything behind it stays
in our queue, where it can still be withdrawn; credit bounds that. The other side never writes, so something to read is
the end. asyncio's transports were considered: they add a buffer from which no message can be withdrawn, and cost a
third more time for a message.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import select
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path

from ..core.errors import LaunchError
from .descriptors import check_room
from .outbox import Outbox, OutboxEvents, OutboxState, TurnBudget, WriteCoalescing
from .session.frames import LIMITS, SOLE_BYTES, VERSION, Unwrapping
from .session.session import ProtocolViolations
from .wire import InboundSink, Lane

SCHEME = "unix://"
BACKLOG = 4096
"""Connections that a process may leave waiting while its loop does not turn; the kernel allows no more by default."""

_CREDENTIALS = struct.Struct("=iII")
_WHY = {
    errno.ECONNREFUSED: "no process listens there",
    errno.ENOENT: "no process listens there: its socket file is gone",
}
_STUCK = frozenset((errno.EAGAIN, errno.ECONNABORTED))


def knows_peer_user() -> bool:
    """Whether this system says which user is at the other end; else Unix sockets are not used."""
    return hasattr(socket, "SO_PEERCRED")


def path_of(endpoint: str) -> str:
    return endpoint.removeprefix(SCHEME)


def make_listener(path: Path) -> socket.socket:
    """Bound, listening, never blocking. Raises OSError."""
    made = _new_socket()
    try:
        made.bind(os.fspath(path))
        path.chmod(0o600)  # its folder is closed to others already
        made.listen(BACKLOG)
    except OSError:
        made.close()
        raise
    return made


def connect(path: str) -> socket.socket:
    """A connection: on Unix sockets the kernel makes it at once or not at all. Raises OSError."""
    made = _new_socket()
    try:
        made.connect(path)
    except OSError:
        made.close()
        raise
    return made


def credentials(connection: socket.socket) -> tuple[int, int]:
    """(process, user) of the other end when it connected or began to listen, as the kernel says."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def shut(connection: socket.socket) -> None:
    """End it at once, also where a forked process holds a copy. What the kernel has taken, the other side will find."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def is_stuck(error: OSError) -> bool:
    """It listens and accepts no connection: its backlog is full."""
    return error.errno in _STUCK


def why_not(error: OSError) -> str:
    """In words, why no connection could be made."""
    if is_stuck(error):
        return "it accepts no connection: as many as may wait for that do"
    return _WHY.get(error.errno or 0) or f"cannot connect: {error}"


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)


_LENGTH = struct.Struct("<Q")
LENGTH_BYTES = _LENGTH.size
_PADS = tuple(bytes(-length % 8) for length in range(8))
MAX_MESSAGE = LIMITS.control_message + 64 * 1024
"""As over ZeroMQ. A peer that announces more speaks another protocol."""
SOLE_AT = LENGTH_BYTES + SOLE_BYTES
"""Where the envelope begins in a message of one."""
SOLE_HEAD = int.from_bytes(struct.pack("<cBH", b"B", VERSION, 1), "little")
_SOLE = struct.Struct("<QII")
read_sole = _SOLE.unpack_from
"""Length of the message, its head (`SOLE_HEAD` for a message of one), length of that one: most messages at one look."""


def framed(message: bytes | memoryview) -> bytes:
    length = len(message)
    return b"".join((_LENGTH.pack(length), message, _PADS[length & 7]))


def framed_sole(envelope: bytes | bytearray) -> bytes:
    """The same for a message of one envelope."""
    size = len(envelope)
    return b"".join((_SOLE.pack(size + SOLE_BYTES, SOLE_HEAD, size), envelope, _PADS[size & 7]))


def end_of_sole(data: memoryview, size: int) -> int | None:
    """Where the envelope ends, if the first `size` bytes are a message of one and nothing else."""
    if size < SOLE_AT:
        return None
    length, head, num_bytes = read_sole(data)
    end = SOLE_AT + num_bytes
    return end if head == SOLE_HEAD and length == num_bytes + SOLE_BYTES and size == end + 7 & -8 else None


def padded(length: int) -> int:
    """What a message of that length takes up behind it."""
    return (length + 7) & -8


def length_at(data: memoryview, at: int) -> int:
    """Of the message whose length lies there."""
    return int(_LENGTH.unpack_from(data, at)[0])


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
    """There are no keys here."""

    def __init__(
        self,
        path: Path,
        lane: Lane,
        turn: TurnBudget,
        coalescing: WriteCoalescing,
        counters: Counter[str],
        note: Callable[[str, str, str], None],
    ) -> None:
        """`note`: what was refused, whom, remedy; to be reported once. Raises LaunchError if it cannot listen there."""
        self.sink: InboundSink | None = None
        self.lane = lane
        self.turn = turn
        self.coalescing = coalescing
        self.unwrapping = Unwrapping(lane)
        self.scratch = memoryview(bytearray(READ_BYTES))
        self._counters = counters
        self._note = note
        self._violations = ProtocolViolations()
        self._numbers = itertools.count(1)
        self._connections: dict[bytes, UnixConnection] = {}
        self._waiting: list[UnixConnection] = []
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

    def start(self, sink: InboundSink) -> None:
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
            turn.resume(self._until)
        else:
            turn.begin()
            self._until = turn.until
        return True

    def wait(self, connection: UnixConnection) -> None:
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
                waiting.popleft().next_turn()
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
        elif self._violations.has_bans and self._violations.is_banned(_name(pid), time.monotonic()):
            self._refuse("pid_banned", f"process {pid}")
        else:
            source = b"unix-%d" % next(self._numbers)
            connection = self._connections[source] = UnixConnection(self, made, source, pid)
            connection.patience = asyncio.get_running_loop().call_later(HELLO_LIMIT_S, self._look_at, connection)
            return
        made.close()

    def _look_at(self, connection: UnixConnection) -> None:
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
        """No descriptor is free: clients keep waiting, and the loop does not spin for them."""
        self._refuse("accept_failed", "")
        if self._loop is not None and not self._is_stopped:
            self._loop.remove_reader(self._listener.fileno())
            self._breath = self._loop.call_later(BREATH_S, self._breathe)

    def _breathe(self) -> None:
        if self._loop is not None and not self._is_stopped:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def ended(self, connection: UnixConnection) -> None:
        self._connections.pop(connection.source, None)

    def offended(self, connection: UnixConnection, reason: str) -> None:
        self._refuse("handshake_wrong", f"process {connection.pid}")
        if connection.pid:  # 0: of another namespace; others there would be banned with it
            self._violations.record(_name(connection.pid), time.monotonic())
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


class UnixConnection:
    """One accepted connection: reads messages and hands envelopes to the sink."""

    def __init__(self, inbox: UnixInbox, made: socket.socket, source: bytes, pid: int) -> None:
        self.source = source
        self.pid = pid
        self.has_spoken = False
        """A message of it was taken in."""
        self.patience: asyncio.TimerHandle | None = None
        """When it ends, something should have come."""
        self._inbox = inbox
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
            self._inbox.unwrapping.forget(self.source)
            self._inbox.ended(self)

    def stop(self) -> None:
        """Take nothing in any more; the connection stays."""
        if self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())

    def next_turn(self) -> None:
        """A new turn: with what had to wait."""
        self.is_waiting = False
        if self._socket is None:
            return
        if not self._inbox.may_take():
            self._wait()
        elif self._data or self._envelopes is not None:
            self._hand_over()
        else:
            self.look()

    def _wait(self) -> None:
        if not self.is_waiting and self._socket is not None:
            self.is_waiting = True
            self._inbox.wait(self)

    def _on_readable(self) -> None:
        if self.is_waiting:
            return
        if self._inbox.may_take():
            self.look()
        else:
            self._wait()  # the first connection of each turn would otherwise be the only one that is read

    def look(self) -> None:
        """Take in what is there."""
        inbox = self._inbox
        while (made := self._socket) is not None:
            room = inbox.scratch if self._part is None else self._room
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
        coalescing = self._inbox.coalescing
        coalescing.hold()
        try:
            return self._cut() if sole is None else self._take(sole)
        except Exception as error:  # noqa: BLE001  # a bug in the session must be heard of and cost one message
            _log.error("the session failed on a message", exc_info=error)
            self._wait()
            if (sink := self._inbox.sink) is not None:
                sink.crashed(error)
            return False
        except BaseException:  # an interrupt; the loop may be run again after it
            self._wait()
            raise
        finally:
            coalescing.is_holding = False
            if coalescing.due:
                coalescing.release()

    def _take(self, sole: memoryview) -> bool:
        inbox = self._inbox
        if (sink := inbox.sink) is not None:
            self.has_spoken = True
            sink.received(self.source, inbox.lane, sole)
            if inbox.turn.look():
                self._wait()
        return False

    def _cut(self) -> bool:
        inbox, data, source = self._inbox, self._data, self.source
        sink, lane, look = inbox.sink, inbox.lane, inbox.turn.look
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
                    if look():
                        self._wait()
                        return False
                    if self._socket is None:
                        return False
                    continue
            if (begin := at + LENGTH_BYTES) > end or (next_at := begin + padded(length := length_at(data, at))) > end:
                return self._keep(data[at:])
            self._at = at = next_at
            self.has_spoken = True
            self._envelopes = inbox.unwrapping.envelopes(sink, source, data[begin : begin + length])
            if inbox.turn.look():
                self._wait()
                return False

    def _hand_over_batch(self, sink: InboundSink, envelopes: Iterator[memoryview]) -> bool:
        """Until they or the turn are over."""
        source, lane, turn, received = self.source, self._inbox.lane, self._inbox.turn, sink.received
        for envelope in envelopes:
            received(source, lane, envelope)
            if turn.look():
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
                self._inbox.offended(self, f"a message of {length} bytes")
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


_BROKE = "the connection broke"


class UnixOutbox(Outbox):
    """One connected socket, written by the loop."""

    STEADY_S = 0.02  # the kernel makes a connection before anybody has looked at it: one dropped at once was none

    def __init__(
        self, endpoint: str, cut: Callable[[], str], events: OutboxEvents, coalescing: WriteCoalescing | None = None
    ) -> None:
        """`cut`: why no connection may be made now (a drill); "" if one may."""
        self._path = path_of(endpoint)
        self._cut = cut
        self._socket: socket.socket | None = None
        self._rest: memoryview | None = None
        """Of the last message: what the kernel did not take."""
        self._is_dead = False
        """The socket takes nothing any more; the loop is about to say so."""
        self._is_opening = False
        """It will be reached for in the next turn."""
        super().__init__(events, coalescing)

    # -- the connection

    def _open(self) -> None:
        self._is_opening = False
        if why := self._cut():
            raise LaunchError(why)
        check_room("a connection")  # ZeroMQ's sockets, which abort the process without, live beside ours
        self._is_opening = True
        self._set_timer(self._loop.call_soon(self._reach))

    def _settle(self, until: float) -> None:
        del until  # it is made at once or not at all
        if self._is_opening:  # not in a cut
            self._reach()

    def _reach(self) -> None:
        """Not at once: the caller is not ready for its events yet."""
        if self._state is not OutboxState.CONNECTING:
            return
        self._is_opening = False
        try:
            made = connect(self._path)
        except OSError as error:
            (self._on_stuck if is_stuck(error) else self._on_broken)(why_not(error))
            return
        if credentials(made)[1] != os.geteuid():
            made.close()
            self._on_broken("another user listens there")
            return
        self._socket, self._is_dead = made, False
        self._loop.add_reader(made.fileno(), self._on_readable)
        self._on_ready()

    def _on_readable(self) -> None:
        self._on_broken(_BROKE)

    def _release(self, linger_s: float) -> None:
        del linger_s  # what the kernel has taken, the other side will find
        made, self._socket, self._rest = self._socket, None, None
        if made is not None:
            self._loop.remove_reader(made.fileno())
            self._loop.remove_writer(made.fileno())
            shut(made)

    # -- sending

    @property
    def _is_unfinished(self) -> bool:
        return self._rest is not None or bool(self._queue) or self._chunked is not None

    def _put(self, message: bytes | memoryview) -> bool:
        return self._write(framed(message))

    def _put_sole(self, envelope: bytes | bytearray) -> bool:
        return self._write(framed_sole(envelope))

    def _write(self, data: bytes) -> bool:
        made = self._socket
        if made is None:
            return False
        try:
            size = made.send(data, socket.MSG_NOSIGNAL)  # a host may have SIGPIPE at its default, which ends it
        except BlockingIOError:
            size = 0
        except OSError:
            self._die(made)
            return False
        if size < len(data):
            self._hold()
            self._loop.add_writer(made.fileno(), self._on_writable)
            if not size:
                return False
            self._rest = memoryview(data)[size:]
        return True

    def _on_writable(self) -> None:
        made, rest = self._socket, self._rest
        if made is None:
            return
        if rest is not None:
            try:
                size = made.send(rest, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError:
                self._die(made)
                return
            self._rest = rest = rest[size:] if size < len(rest) else None
        if rest is None:
            self._loop.remove_writer(made.fileno())
            self._on_room()

    def _await_room(self, until: float) -> bool:
        made = self._socket
        if made is None or self._is_dead:
            return False
        poller = select.poll()
        poller.register(made, select.POLLOUT)
        found = poller.poll(max(0.0, until - time.monotonic()) * 1000)
        if not found or found[0][1] != select.POLLOUT:  # it is full, or broken: the loop will say so
            return False
        self._on_writable()
        return True

    def _die(self, made: socket.socket) -> None:
        self._is_dead = True
        self._hold()
        self._loop.remove_writer(made.fileno())
        self._loop.call_soon(self._on_dead, made)

    def _on_dead(self, of: socket.socket) -> None:
        """In a later turn of the loop: the sender is not ready for events of the connection."""
        if self._socket is of:
            self._on_broken(_BROKE)
