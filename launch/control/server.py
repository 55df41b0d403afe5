"""The control sockets of a run, in the launcher of node 0: they answer even when the coordinator hangs or is dead.

    control.sock   0600, in a folder that only this user enters: every verb
    view.sock      verbs that only show; with `control.view_group` in a folder of its own that the group may enter

The kernel keeps other users out; that the caller is this user (or root, or of the group) is looked at again for each
connection, and who it was goes into the audit log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections import Counter
from pathlib import Path

from ...core.errors import LaunchError, Overloaded
from .connection import LINES, Connection, Limits
from .desk import Desk, Entrance
from .http import HttpServer
from .lines import LineServer
from .peer import Peer
from .wire import encode, told

LOOK_EVERY_S = 0.5
BACKLOG = 64
_log = logging.getLogger("myxa.control")


class Door:
    """One listening socket."""

    def __init__(self, desk: Desk, path: Path, entrance: Entrance, *, gid: int = -1, limits: Limits) -> None:
        """`gid`: a group that may come in too; -1: none."""
        self.path = path
        self._desk = desk
        self._gid = gid
        self._limits = limits
        self._lines = LineServer(desk, entrance)
        self._http = HttpServer(desk, entrance)
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listen. Raises LaunchError."""
        await self._http.start()
        await self._listen()

    async def open_again(self) -> None:
        """Its file is gone: callers come in by a new one; those that are in stay. Raises LaunchError."""
        former, self._server = self._server, None
        if former is not None:
            former.close()
        await self._listen()

    async def _listen(self) -> None:
        try:
            link = self._bound()
        except OSError as error:
            raise LaunchError(
                f"the control socket {self.path} cannot be made: {error.strerror or error}",
                remedy="set control.socket = false to run without it",
            ) from error
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Greeted(self), sock=link, backlog=BACKLOG)

    def _bound(self) -> socket.socket:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        before = os.umask(0o177)  # never open to others, not even for a moment
        try:
            link.bind(str(self.path))
            if self._gid >= 0:
                os.chown(self.path, -1, self._gid)
                self.path.chmod(0o660)
        except OSError:
            link.close()
            raise
        finally:
            os.umask(before)
        return link

    async def close(self) -> None:
        """Nobody is served any more."""
        if self._server is not None:
            self._server.close()
        await self._lines.close()
        await self._http.close()
        for connection in list(self._connections):
            connection.abort()
        self.path.unlink(missing_ok=True)

    def look(self, now: float) -> None:
        """Close connections that passed a limit."""
        for connection in list(self._connections):
            connection.look(now)

    def greet(self, connection: Connection, link: object) -> None:
        """Let it in, or not."""
        try:
            connection.peer = Peer.of(link)
        except OSError:
            connection.abort()
            return
        if not (connection.peer.is_ours or self._gid >= 0):
            self._desk.counters["strangers"] += 1
            _log.warning("uid %d (pid %d) was kept out of %s", connection.peer.uid, connection.peer.pid, self.path)
            connection.abort()
        elif not self._has_room():
            self._desk.counters["too_many"] += 1
            many = Overloaded(f"{len(self._connections)} connections are open", remedy="close some")
            connection.close(encode({"id": None, "ok": False, "error": told(many)}))
        else:
            self._connections.add(connection)

    def _has_room(self) -> bool:
        """There is, or the one that has been silent longest goes: half-open ones must not keep others out."""
        if len(self._connections) < self._limits.num_connections:
            return True
        silent = [(each.silence, each) for each in self._connections if each.silence is not None]
        if not silent:
            return False
        _, oldest = min(silent, key=lambda pair: pair[0] or (True, 0.0))
        self._connections.discard(oldest)
        oldest.make_room()
        return True

    def choose(self, connection: Connection, data: bytes) -> asyncio.Protocol:
        """The protocol that its first byte asks for."""
        return (self._lines if data.startswith(LINES) else self._http).protocol(connection)

    def gone(self, connection: Connection) -> None:
        """It is over."""
        if connection.closed_for:
            self._desk.counters[connection.closed_for] += 1
        self._connections.discard(connection)
        self._http.forget(connection)

    @property
    def limits(self) -> Limits:
        """Of each connection."""
        return self._limits


class _Greeted(Connection):
    """A connection that is looked at before it is served."""

    def __init__(self, door: Door) -> None:
        super().__init__(door.limits, door.choose, door.gone)
        self._door = door

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._door.greet(self, transport.get_extra_info("socket"))


class ControlServer:
    """All doors of one run. `open`, then `close`."""

    def __init__(
        self, desk: Desk, control: Path, view: Path, *, view_gid: int = -1, limits: Limits | None = None
    ) -> None:
        limits = limits or Limits()
        self._desk = desk
        self._doors = (
            Door(desk, control, Entrance("control", may_operate=True), limits=limits),
            Door(desk, view, Entrance("view", may_operate=False), gid=view_gid, limits=limits),
        )
        self._watch: asyncio.Task[None] | None = None

    @property
    def counters(self) -> Counter[str]:
        """What was refused, and what connections were closed for."""
        return self._desk.counters

    async def open(self) -> None:
        """Listen on all doors. Raises LaunchError."""
        for door in self._doors:
            await door.open()
        self._watch = asyncio.get_running_loop().create_task(self._keep_looking())

    async def close(self) -> None:
        """Shut all doors, give up what is in hand."""
        if self._watch is not None:
            self._watch.cancel()
        for door in self._doors:
            await door.close()
        await self._desk.close()
        if self._desk.counters:
            _log.info("control sockets: %s", ", ".join(f"{name} {n}" for name, n in sorted(self.counters.items())))

    async def _keep_looking(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for door in self._doors:
                door.look(loop.time())
                if not door.path.exists() and door.path.parent.is_dir():  # the launcher makes the folder again
                    with contextlib.suppress(LaunchError):  # the next look tries again
                        await door.open_again()
