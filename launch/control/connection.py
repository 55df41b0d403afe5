"""One connection to a control socket: who is at its other end, which protocol is spoken, idle, read and size limits.

The first byte decides the protocol: "{" is newline JSON, anything else is HTTP. Every callback of the transport passes
through here on its way to the chosen protocol. So the limits are the same for both, and neither can be held open:

    silent    no byte has come: the first one must come in time
    asking    no request is being served; the next one must begin in time, and be whole in time once it has begun
    busy      a verb or a stream is being served; the bytes that may come meanwhile are limited
    slow      the other side does not read what it asked for

The kernel says which process and user opened a connection, whatever the caller claims.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from ...core.knobs import Operator
from .wire import MAX_REQUEST_BYTES

_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Peer:
    """Process and user that opened the connection."""

    pid: int
    uid: int
    gid: int

    @classmethod
    def of(cls, link: Any) -> Peer:
        """By SO_PEERCRED of a connected Unix socket. Raises OSError if the connection is gone already."""
        raw = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return cls(*_CREDENTIALS.unpack(raw))

    @property
    def is_ours(self) -> bool:
        """Whether it is the user of this process, or root."""
        return self.uid in (os.getuid(), 0)

    def operator(self, via: str) -> Operator:
        """For the audit log."""
        return Operator(user=_user(self.uid), uid=self.uid, pid=self.pid, host=socket.gethostname(), via=via)


@cache
def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


LINES = b"{"
BLANKS = b" \t\r\n"


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What a connection may cost. Seconds and bytes."""

    first_s: float = 5.0
    """From the connection to the first byte."""
    idle_s: float = 600.0
    """Between an answer and the next request."""
    request_s: float = 20.0
    """From a request's first byte to its last."""
    read_s: float = 30.0
    """For the other side to take what was written."""
    ahead_bytes: int = 2 * MAX_REQUEST_BYTES
    """That may come while a request is being served."""
    num_connections: int = 64
    """Of one socket. One more takes the place of the one that has been silent longest."""


class ControlConnection(asyncio.Protocol):
    """A connection with its limits. `choose` makes the protocol for the first bytes; `gone` is called at the end."""

    def __init__(
        self,
        limits: ConnectionLimits,
        choose: Callable[[ControlConnection, bytes], asyncio.Protocol],
        gone: Callable[[ControlConnection], None],
    ) -> None:
        self._limits = limits
        self._choose = choose
        self._gone = gone
        self._inner: asyncio.Protocol | None = None
        self._transport: Any = None
        self._loop = asyncio.get_running_loop()
        self._idle_since: float = self._loop.time()
        self._asked_since: float | None = None
        self._slow_since: float | None = None
        self._has_asked = False
        """A request of it was whole."""
        self._num_running = 0
        self._ahead_bytes = 0
        self.peer = Peer(0, -1, -1)
        self.is_stream = False
        """The other side gets items until it leaves; it sends no more requests."""
        self.has_ended = False
        """The other side sends no more."""
        self.closed_for = ""
        """The limit that was passed."""

    # -- for the protocol inside ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """A request is whole and is being carried out."""
        self._num_running += 1
        self._has_asked = True
        self._ahead_bytes = 0

    def end(self) -> None:
        """It was answered."""
        self._num_running -= 1
        self._idle_since = self._loop.time()
        self._asked_since = None

    # -- for the server ------------------------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """Close it if it passed a limit of time."""
        if self._slow_since is not None:
            self._close_for("slow_reader", now - self._slow_since, self._limits.read_s)
        elif self._num_running:
            return
        elif self._asked_since is not None:
            self._close_for("slow_writer", now - self._asked_since, self._limits.request_s)
        elif self._inner is None:
            self._close_for("silent", now - self._idle_since, self._limits.first_s)
        else:
            self._close_for("idle", now - self._idle_since, self._limits.idle_s)

    @property
    def silence(self) -> tuple[bool, float] | None:
        """Sort key by how little is lost by closing it: connections that never asked first, then the longest silence.
        None: it is busy."""
        if self._num_running or self.is_stream:
            return None
        return self._has_asked, self._asked_since if self._asked_since is not None else self._idle_since

    def make_room(self) -> None:
        """Close it for a newer one."""
        self.closed_for = "silent"
        self.abort()

    def _close_for(self, what: str, value: float, limit: float) -> None:
        if value > limit:
            self.closed_for = what
            self.abort()

    def abort(self) -> None:
        """Close at once; what was not sent yet is thrown away."""
        if self._transport is not None:
            self._transport.abort()

    def close(self, last_words: bytes = b"") -> None:
        """Close once what was written is sent."""
        if last_words:
            self._transport.write(last_words)
        self._transport.close()

    # -- of the transport ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._num_running:
            self._ahead_bytes += len(data)
            self._close_for("flood", self._ahead_bytes, self._limits.ahead_bytes)
        elif self._asked_since is None:
            self._asked_since = self._loop.time()
        if self._inner is None:
            data = data.lstrip(BLANKS)
            if not data:
                return
            self._inner = self._choose(self, data)
            self._inner.connection_made(self._transport)
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        """A caller that has sent everything is still answered; a stream ends."""
        self.has_ended = True
        stays = self._inner.eof_received() if self._inner is not None else None
        return stays or (not self.is_stream and bool(self._num_running or self._asked_since))

    def pause_writing(self) -> None:
        self._slow_since = self._loop.time()
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._slow_since = None
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._inner is not None:
            self._inner.connection_lost(exc)
        self._gone(self)
