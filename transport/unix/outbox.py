"""The sending half over a Unix socket: the loop itself writes, and no thread is in between.

When what leaves is for `outbox.py` of the floor to say; here is how: a message behind its length (`sockets.py`). What
the kernel does not take of one waits, and everything behind it stays in our queue, where it can still be withdrawn;
credit bounds that. The other side never writes, so something to read is the end. asyncio's transports were considered:
a buffer of their own behind ours, which nobody could withdraw anything from, and a third more time for a message.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable

from ...core.errors import LaunchError
from ..descriptors import check_room
from ..outbox import Outbox, OutboxEvents, OutboxState, WriteCoalescing
from .sockets import connect, credentials, framed, framed_sole, is_stuck, path_of, shut, why_not

_BROKE = "the connection broke"


class UnixOutbox(Outbox):
    """See the module's head."""

    STEADY_S = 0.02  # the kernel makes a connection before anybody has looked at it: one dropped at once was none

    def __init__(
        self, endpoint: str, cut: Callable[[], str], events: OutboxEvents, departures: WriteCoalescing | None = None
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
        super().__init__(events, departures)

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
        """Not as soon as it is asked for: whoever asked is not ready for news of it yet."""
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
            self._go_on()

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
        """In a turn of its own: whoever sends is not ready for news of the connection."""
        if self._socket is of:
            self._on_broken(_BROKE)
