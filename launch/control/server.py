"""The control sockets of a run, in the launcher of node 0: they answer even when the coordinator hangs or is dead.

    control.sock   0600, in a folder that only this user enters: every verb
    view.sock      verbs that only show; with `control.view_group` in its own folder, which the group may enter

The kernel keeps other users out. The user of each connection is checked again (this user, root, or of the group), and
its name goes into the audit log.

A request is a line of JSON and gets a line of JSON, in order; a stream has its connection for itself. asyncio's
stream reader does the buffering and stops reading at its limit. aiohttp has no such framing, and gRPC or JSON-RPC
libraries would keep `nc -U` from being a client. `http.py` serves the same requests as HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError, LaunchError, MyxaError, Overloaded
from ...core.knobs import Operator
from .connection import LINES, ConnectionLimits, ControlConnection, Peer
from .dispatcher import Dispatcher, VerbCall, VerbCaller
from .http import HttpServer
from .wire import MAX_REQUEST_BYTES, Request, decode_request, encode, error_answer

_log = logging.getLogger("myxa.control")


class LineServer:
    """Serves one connection at a time per call of `protocol`; keeps the tasks."""

    def __init__(self, dispatcher: Dispatcher, caller: VerbCaller) -> None:
        self._dispatcher = dispatcher
        self._caller = caller
        self._tasks: set[asyncio.Task[None]] = set()

    def protocol(self, connection: ControlConnection) -> asyncio.Protocol:
        """A protocol for that connection."""
        reader = asyncio.StreamReader(limit=MAX_REQUEST_BYTES)

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.get_running_loop().create_task(self._serve(connection, reader, writer))
            self._tasks.add(task)  # the loop alone would not keep it
            task.add_done_callback(self._tasks.discard)

        return asyncio.StreamReaderProtocol(reader, connected)

    async def close(self) -> None:
        """End all connections' tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(
        self, connection: ControlConnection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            while line := await self._line(reader, writer):
                if line.isspace():
                    continue
                connection.begin()
                try:
                    if not await self._serve_line(line, connection.peer.operator("socket"), reader, writer):
                        return
                finally:
                    connection.end()
        except OSError as error:
            _log.info("a caller went away: %s", error)
        finally:
            writer.close()

    async def _line(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """The next line, or the rest of one at the end; empty at the end."""
        try:
            return await reader.readuntil(b"\n")
        except asyncio.IncompleteReadError as error:
            return error.partial
        except asyncio.LimitOverrunError:
            self._dispatcher.counters["malformed"] += 1
            error = ConfigError(f"the request is longer than {MAX_REQUEST_BYTES} bytes", remedy="say it in several")
            writer.write(_refusal(None, error))
            return b""

    async def _serve_line(
        self, line: bytes, who: Operator, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Whether the connection stays open."""
        try:
            request = decode_request(line)
        except ConfigError as error:
            self._dispatcher.counters["malformed"] += 1
            return await _send(writer, _refusal(None, error))
        order = await self._order(request, who, writer)
        if order is None:
            return True
        if order.verb.stream is not None:
            await self._stream(order, request, reader, writer)
            return False
        return await _send(writer, await self._answer(order, request))

    async def _order(self, request: Request, who: Operator, writer: asyncio.StreamWriter) -> VerbCall | None:
        try:
            return self._dispatcher.understand(request.verb, request.args, who, self._caller)
        except MyxaError as error:
            await self._dispatcher.refuse(request.verb, who, self._caller, error)
            await _send(writer, _refusal(request.id, error))
            return None

    async def _answer(self, order: VerbCall, request: Request) -> bytes:
        try:
            result = await self._dispatcher.answer(order)
            return encode({"id": request.id, "ok": True, "result": result})
        except Exception as error:  # noqa: BLE001 - the dispatcher logged it; the caller must hear of it, whatever it is
            return _refusal(request.id, error)

    async def _stream(
        self, order: VerbCall, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Streams until the verb ends, the caller leaves, or the caller sends anything."""
        try:
            async with (
                self._dispatcher.items(order) as items,
                contextlib.aclosing(until_heard(items, reader)) as until_left,
            ):
                async for item in until_left:
                    await _send(writer, encode({"id": request.id, "ok": True, "item": item}))
            await _send(writer, encode({"id": request.id, "ok": True, "end": True}))
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            if not isinstance(error, MyxaError):
                _log.exception("%s failed", order.verb.name)
            await _send(writer, _refusal(request.id, error))


async def until_heard(items: AsyncGenerator[Any], reader: asyncio.StreamReader) -> AsyncGenerator[Any]:
    """The items, until there is something to read, or the end of it."""
    loop = asyncio.get_running_loop()
    heard = loop.create_task(reader.read(1))
    pending: asyncio.Task[Any] | None = None
    try:
        while True:
            pending = loop.create_task(_next(items))
            await asyncio.wait({pending, heard}, return_when=asyncio.FIRST_COMPLETED)
            if heard.done():
                return
            item = pending.result()
            if item is _NO_MORE:
                return
            yield item
    finally:
        ended = [task for task in (heard, pending) if task is not None]
        for task in ended:
            task.cancel()
        await asyncio.gather(*ended, return_exceptions=True)


_NO_MORE = object()


async def _next(items: AsyncGenerator[Any]) -> Any:
    return await anext(items, _NO_MORE)


def _refusal(number: int | str | None, error: BaseException) -> bytes:
    return encode({"id": number, "ok": False, "error": error_answer(error)})


async def _send(writer: asyncio.StreamWriter, line: bytes) -> bool:
    writer.write(line)
    await writer.drain()  # its connection's limits cut off a caller that does not read
    return True


LOOK_EVERY_S = 0.5
BACKLOG = 64


class Listener:
    """One listening socket."""

    def __init__(
        self, dispatcher: Dispatcher, path: Path, caller: VerbCaller, *, gid: int = -1, limits: ConnectionLimits
    ) -> None:
        """`gid`: a group that may come in too; -1: none."""
        self.path = path
        self._dispatcher = dispatcher
        self._gid = gid
        self._limits = limits
        self._lines = LineServer(dispatcher, caller)
        self._http = HttpServer(dispatcher, caller)
        self._connections: set[ControlConnection] = set()
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
        """Stops serving."""
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

    def greet(self, connection: ControlConnection, link: object) -> None:
        """Serve the connection, or close it."""
        try:
            connection.peer = Peer.of(link)
        except OSError:
            connection.abort()
            return
        if not (connection.peer.is_ours or self._gid >= 0):
            self._dispatcher.counters["strangers"] += 1
            _log.warning("uid %d (pid %d) was kept out of %s", connection.peer.uid, connection.peer.pid, self.path)
            connection.abort()
        elif not self._has_room():
            self._dispatcher.counters["too_many"] += 1
            many = Overloaded(f"{len(self._connections)} connections are open", remedy="close some")
            connection.close(encode({"id": None, "ok": False, "error": error_answer(many)}))
        else:
            self._connections.add(connection)

    def _has_room(self) -> bool:
        """Whether there is room; if not, closes the longest silent connection: half-open ones must block no others."""
        if len(self._connections) < self._limits.num_connections:
            return True
        silent = [(each.silence, each) for each in self._connections if each.silence is not None]
        if not silent:
            return False
        _, oldest = min(silent, key=lambda pair: pair[0] or (True, 0.0))
        self._connections.discard(oldest)
        oldest.make_room()
        return True

    def choose(self, connection: ControlConnection, data: bytes) -> asyncio.Protocol:
        """The protocol that its first byte asks for."""
        return (self._lines if data.startswith(LINES) else self._http).protocol(connection)

    def gone(self, connection: ControlConnection) -> None:
        """It is over."""
        if connection.closed_for:
            self._dispatcher.counters[connection.closed_for] += 1
        self._connections.discard(connection)
        self._http.forget(connection)

    @property
    def limits(self) -> ConnectionLimits:
        """Of each connection."""
        return self._limits


class _Greeted(ControlConnection):
    """A connection that is looked at before it is served."""

    def __init__(self, listener: Listener) -> None:
        super().__init__(listener.limits, listener.choose, listener.gone)
        self._listener = listener

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._listener.greet(self, transport.get_extra_info("socket"))


class ControlServer:
    """Both sockets of one run. `open`, then `close`."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        control: Path,
        view: Path,
        *,
        view_gid: int = -1,
        limits: ConnectionLimits | None = None,
    ) -> None:
        limits = limits or ConnectionLimits()
        self._dispatcher = dispatcher
        self._listeners = (
            Listener(dispatcher, control, VerbCaller("control", may_operate=True), limits=limits),
            Listener(dispatcher, view, VerbCaller("view", may_operate=False), gid=view_gid, limits=limits),
        )
        self._watch: asyncio.Task[None] | None = None

    @property
    def counters(self) -> Counter[str]:
        """What was refused, and what connections were closed for."""
        return self._dispatcher.counters

    async def open(self) -> None:
        """Listen on both sockets. Raises LaunchError."""
        for listener in self._listeners:
            await listener.open()
        self._watch = asyncio.get_running_loop().create_task(self._keep_looking())

    async def close(self) -> None:
        """Close both sockets, cancel what is still being served."""
        if self._watch is not None:
            self._watch.cancel()
        for listener in self._listeners:
            await listener.close()
        await self._dispatcher.close()
        if self._dispatcher.counters:
            _log.info("control sockets: %s", ", ".join(f"{name} {n}" for name, n in sorted(self.counters.items())))

    async def _keep_looking(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for listener in self._listeners:
                listener.look(loop.time())
                if not listener.path.exists() and listener.path.parent.is_dir():  # the launcher makes the folder again
                    with contextlib.suppress(LaunchError):  # the next look tries again
                        await listener.open_again()
