"""HTTP/1.1 on a connection: `POST /v1/<verb>` with a JSON body, `GET /v1/<verb>?name=value` for verbs that only show,
`GET /v1/verbs`. `curl --unix-socket` is a client. By aiohttp, whose parser and limits are used as they are.
One request a connection: a new one costs microseconds here, and requests sent ahead would have to be kept somewhere.

There are no cookies, no uploads, no files, no redirects.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from aiohttp import web

from ...core.errors import CallError, ConfigError, DeadlineExceeded, MyxaError, NotExecuted
from .connection import ControlConnection
from .dispatcher import Dispatcher, VerbCall, VerbCaller
from .verb import Arguments, Verb
from .wire import MAX_REQUEST_BYTES, arguments_from_text, encode, error_answer

CLOSE_S = 1.0
USAGE = "POST /v1/<verb> with a JSON body, GET /v1/<verb>?name=value for verbs that only show, GET /v1/verbs"
_log = logging.getLogger("myxa.control")


class HttpServer:
    """Serves connections that were handed to `protocol`."""

    def __init__(self, dispatcher: Dispatcher, caller: VerbCaller) -> None:
        self._dispatcher = dispatcher
        self._caller = caller
        self._connections: dict[Any, ControlConnection] = {}
        app = web.Application(client_max_size=MAX_REQUEST_BYTES, middlewares=[self._guarded])
        app.router.add_get("/v1/{verb}", self._get)
        app.router.add_post("/v1/{verb}", self._post)
        self._runner = web.AppRunner(
            app, handle_signals=False, access_log=None, handler_cancellation=True, auto_decompress=False,
            logger=_CountedLogger(dispatcher.counters), keepalive_timeout=3600.0,
            lingering_time=CLOSE_S, shutdown_timeout=CLOSE_S,
        )  # fmt: skip

    async def start(self) -> None:
        """Make ready for connections."""
        await self._runner.setup()

    async def close(self) -> None:
        """End all connections."""
        await self._runner.cleanup()

    def protocol(self, connection: ControlConnection) -> asyncio.Protocol:
        """A protocol for that connection."""
        server: Any = self._runner.server
        made: asyncio.Protocol = server()
        self._connections[made] = connection
        return made

    def forget(self, connection: ControlConnection) -> None:
        """That connection is over."""
        for made in [made for made, kept in self._connections.items() if kept is connection]:
            del self._connections[made]

    # -- requests ------------------------------------------------------------------------------------------------

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Any) -> web.StreamResponse:
        connection = self._connections.get(request.protocol)
        if connection is None:
            raise ConnectionResetError("the caller is gone")
        response = await self._answer(request, handler, connection)
        response.force_close()
        return response

    async def _answer(self, request: web.Request, handler: Any, connection: ControlConnection) -> web.StreamResponse:
        try:
            await request.read()  # its connection's limits cut off a slow caller
        except web.HTTPException as error:
            return self._malformed(error.status, f"{error.reason}; the limit is {MAX_REQUEST_BYTES} bytes")
        except ValueError as error:  # a chunked or declared body that does not add up
            return self._malformed(400, f"the body cannot be read: {error}")
        connection.begin()
        try:
            return await handler(request)
        except web.HTTPException as error:
            return self._malformed(error.status, f"{error.reason}: {request.method} {request.path[:100]}")
        finally:
            connection.end()

    async def _get(self, request: web.Request) -> web.StreamResponse:
        pairs = list(request.query.items())
        return await self._serve(request, partial(_from_query, pairs), only_shows=True)

    async def _post(self, request: web.Request) -> web.StreamResponse:
        body = (await request.read()).strip() or b"{}"
        return await self._serve(request, partial(_from_body, body))

    async def _serve(
        self, request: web.Request, arguments: Callable[[Verb[Any]], Arguments], *, only_shows: bool = False
    ) -> web.StreamResponse:
        name = request.match_info["verb"]
        who = self._connections[request.protocol].peer.operator("http")
        try:
            order = self._dispatcher.order(name, arguments, who, self._caller, only_shows=only_shows)
        except MyxaError as error:
            await self._dispatcher.refuse(name, who, self._caller, error)
            is_unknown = all(verb.name != name for verb in self._dispatcher.verbs)
            return _error(404 if is_unknown else _status(error), error)
        if order.verb.stream is not None:
            return await self._stream(request, order)
        try:
            return _ok(await self._dispatcher.answer(order))
        except Exception as error:  # noqa: BLE001 - the dispatcher logged it; every error is an answer to the caller
            return _error(_status(error), error)

    async def _stream(self, request: web.Request, order: VerbCall) -> web.StreamResponse:
        """One JSON object a line, until the verb ends or the caller goes (aiohttp cancels this then)."""
        connection = self._connections[request.protocol]
        connection.is_stream = True
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})
        response.force_close()
        if connection.has_ended:
            return response
        await response.prepare(request)
        try:
            async with self._dispatcher.items(order) as items:
                async for item in items:
                    await response.write(encode({"ok": True, "item": item}))
            await response.write(encode({"ok": True, "end": True}))
        except ConnectionError:
            return response
        except Exception as error:  # noqa: BLE001 - as above
            if not isinstance(error, MyxaError):
                _log.exception("%s failed", order.verb.name)
            await response.write(encode({"ok": False, "error": error_answer(error)}))
        await response.write_eof()
        return response

    def _malformed(self, status: int, what: str) -> web.Response:
        self._dispatcher.counters["malformed"] += 1
        return _error(status, ConfigError(what, remedy=USAGE))


def _from_query(pairs: list[tuple[str, str]], verb: Verb[Any]) -> Arguments:
    return arguments_from_text(verb.name, verb.arguments, pairs)


def _from_body(body: bytes, verb: Verb[Any]) -> Arguments:
    return Dispatcher.decode(verb, body)


def _ok(result: Any) -> web.Response:
    return _response(200, {"ok": True, "result": result})


def _error(status: int, error: BaseException) -> web.Response:
    return _response(status, {"ok": False, "error": error_answer(error)})


def _response(status: int, answer: dict[str, Any]) -> web.Response:
    return web.Response(status=status, body=encode(answer), content_type="application/json")


def _status(error: BaseException) -> int:
    """For clients that look at nothing else; the body has the error itself."""
    if isinstance(error, DeadlineExceeded):
        return 504
    if isinstance(error, NotExecuted | CallError):
        return 503
    return 400 if isinstance(error, MyxaError) and error.exit_code == ConfigError.exit_code else 500


class _CountedLogger(logging.Logger):
    """aiohttp logs each malformed request with a traceback: they are counted instead. Its real errors are kept."""

    def __init__(self, counters: Counter[str]) -> None:
        super().__init__("myxa.control.http", logging.DEBUG)
        self._counters = counters

    def handle(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, Exception) and type(error).__module__.startswith("aiohttp"):
            self._counters["malformed"] += 1
        elif record.levelno >= logging.ERROR:
            self._counters["bug"] += 1
            _log.handle(record)
