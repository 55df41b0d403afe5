"""Newline JSON on a connection: a request a line, an answer a line, in order; a stream has the connection for itself.

asyncio's own stream reader does the buffering and stops reading when its limit is reached. aiohttp has no such framing,
and gRPC or JSON-RPC libraries would keep `nc -U` from being a client.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from typing import Any

from ...core.errors import ConfigError, MyxaError
from ...core.knobs import Operator
from .connection import Connection
from .desk import Desk, Entrance, Order
from .wire import MAX_REQUEST_BYTES, Request, decode_request, encode, told

_log = logging.getLogger("myxa.control")


class LineServer:
    """Serves one connection at a time per call of `protocol`; keeps the tasks."""

    def __init__(self, desk: Desk, entrance: Entrance) -> None:
        self._desk = desk
        self._entrance = entrance
        self._tasks: set[asyncio.Task[None]] = set()

    def protocol(self, connection: Connection) -> asyncio.Protocol:
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

    async def _serve(self, connection: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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
        """The next line, or what is left of one at the end; nothing when there is nothing more to come."""
        try:
            return await reader.readuntil(b"\n")
        except asyncio.IncompleteReadError as error:
            return error.partial
        except asyncio.LimitOverrunError:
            self._desk.counters["malformed"] += 1
            error = ConfigError(f"the request is longer than {MAX_REQUEST_BYTES} bytes", remedy="say it in several")
            writer.write(_refusal(None, error))
            return b""

    async def _serve_line(
        self, line: bytes, who: Operator, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Whether the connection may go on."""
        try:
            request = decode_request(line)
        except ConfigError as error:
            self._desk.counters["malformed"] += 1
            return await _send(writer, _refusal(None, error))
        order = await self._order(request, who, writer)
        if order is None:
            return True
        if order.verb.stream is not None:
            await self._stream(order, request, reader, writer)
            return False
        return await _send(writer, await self._answer(order, request))

    async def _order(self, request: Request, who: Operator, writer: asyncio.StreamWriter) -> Order | None:
        try:
            return self._desk.understand(request.verb, request.args, who, self._entrance)
        except MyxaError as error:
            await self._desk.refuse(request.verb, who, self._entrance, error)
            await _send(writer, _refusal(request.id, error))
            return None

    async def _answer(self, order: Order, request: Request) -> bytes:
        try:
            result = await self._desk.answer(order)
            return encode({"id": request.id, "ok": True, "result": result})
        except Exception as error:  # noqa: BLE001 - the desk logged it; the caller must hear of it, whatever it is
            return _refusal(request.id, error)

    async def _stream(
        self, order: Order, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Until it ends, or until the caller goes away or says anything more."""
        try:
            async with self._desk.items(order) as items, contextlib.aclosing(until_heard(items, reader)) as told_items:
                async for item in told_items:
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
    return encode({"id": number, "ok": False, "error": told(error)})


async def _send(writer: asyncio.StreamWriter, line: bytes) -> bool:
    writer.write(line)
    await writer.drain()  # a caller that does not read is cut off by its connection's limits
    return True
