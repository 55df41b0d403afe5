"""The control socket of a run, in the launcher of node 0: it answers even when the coordinator hangs or is dead.

`control.sock` is 0600, in a folder that only this user enters. POST /<verb> with a JSON body, GET /<verb>?name=value
for verbs that only read; JSON answers; one request a connection. The user that the kernel names goes into the audit
log. Forwarded by `ssh -L`, web pages can reach it, so host, origin and content type are checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pwd
import re
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
from aiohttp import web

from ...actors.http_guard import Head, HttpAccess
from ...core.config import RunConfig
from ...core.daemon_thread import in_daemon_thread
from ...core.errors import CallError, ConfigError, DeadlineExceeded, LaunchError, MyxaError, NotExecuted, Overloaded
from ...core.knobs import AuditRecord, Operator
from ...core.record import Record
from ...core.suggestion import suggest
from ...transport.node import Node
from ..run_dir import RunDir
from ..verbs import HOST, WHO, Verb, argument_names, find_verb

if TYPE_CHECKING:
    from ..supervisor.run_supervisor import RunSupervisor

USAGE = "POST /<verb> with a JSON body, or GET /<verb>?name=value for verbs that only read; GET /verbs lists them"
MAX_BODY_BYTES = 1 << 20
MAX_NOTED_CHARS = 2000
"""Of a request's arguments, in the audit log."""
BACKLOG = 64
LOOK_EVERY_S = 0.5
_log = logging.getLogger("myxa.control")


@dataclass(frozen=True, slots=True)
class VerbContext:
    """What verbs may use. The launcher of node 0 makes it."""

    node: Node
    """Makes references to every actor: `context.node.ref(CoordinatorContract, "coordinator")`."""
    run_dir: RunDir
    config: RunConfig
    supervisor: RunSupervisor
    started_wall_s: float


Handler = Callable[[VerbContext, Any, Operator], Awaitable[Any]]
"""Carries a verb out: answers with JSON types or msgspec structs; raises MyxaError."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What callers may cost."""

    num_requests: int = 64
    """That only read, at the same time, also for callers that left."""
    request_s: float = 20.0
    close_s: float = 1.0
    """For running requests to end when the run ends."""


def caller_of(request: web.Request) -> Operator:
    """Who opened the connection, by the kernel. Raises ConnectionError if it is gone already."""
    link = request.transport.get_extra_info("socket") if request.transport is not None else None
    try:
        if link is None:
            raise OSError("not connected")
        raw = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError as error:
        raise ConnectionResetError("the caller is gone") from error
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return operator_of(uid, pid, "http")


def operator_of(uid: int, pid: int, via: str) -> Operator:
    return Operator(user=_user(uid), uid=uid, pid=pid, host=socket.gethostname(), via=via)


_CREDENTIALS = struct.Struct("3i")


@cache
def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _noted_arguments(arguments: Record) -> dict[str, Any]:
    table = msgspec.to_builtins(arguments)
    table.pop("who", None)
    text = msgspec.json.encode(table)
    return table if len(text) <= MAX_NOTED_CHARS else {"cut": text[:MAX_NOTED_CHARS].decode(errors="replace")}


@dataclass(eq=False)
class ControlServer:
    """The socket of one run, and the verbs that are served on it. `open`, then `close`."""

    context: VerbContext
    handlers: dict[Verb[Any], Handler]
    append: Callable[[AuditRecord], object]
    """Writes into the audit log what the coordinator does not write itself, in a thread of its own."""
    path: Path
    _: KW_ONLY
    limits: ServerLimits = field(default_factory=ServerLimits)

    def __post_init__(self) -> None:
        self.counters: Counter[str] = Counter()
        """Absent in a healthy run: "malformed", "refused", "failed", "bug"."""
        self.handlers = dict(self.handlers)
        """The dashboard adds its own."""
        self._audit_turn = asyncio.Lock()
        self._access = HttpAccess(host=HOST)
        self._running: set[asyncio.Task[Any]] = set()
        self._watch: asyncio.Task[None] | None = None
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guarded])
        app.router.add_get("/{verb}", self._verb)
        app.router.add_post("/{verb}", self._verb)
        self._runner = web.AppRunner(
            app, handle_signals=False, access_log=None, handler_cancellation=True, auto_decompress=False,
            logger=_CountedLogger(self.counters), keepalive_timeout=self.limits.request_s,
            lingering_time=self.limits.close_s, shutdown_timeout=self.limits.close_s,
        )  # fmt: skip

    async def open(self) -> None:
        """Listen. Raises LaunchError."""
        await self._runner.setup()
        await self._listen()
        self._watch = asyncio.get_running_loop().create_task(self._keep_listening())

    async def _listen(self) -> None:
        before = os.umask(0o177)  # never open to others, not even for a moment: this binds before it waits
        try:
            await web.UnixSite(self._runner, self.path, backlog=BACKLOG).start()
        except OSError as error:
            raise LaunchError(
                f"the control socket {self.path} cannot be made: {error.strerror or error}",
                remedy="set control.socket = false to run without it",
            ) from error
        finally:
            os.umask(before)

    async def _keep_listening(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if not self.path.exists() and self.path.parent.is_dir():  # the launcher makes the folder again
                with contextlib.suppress(LaunchError):  # the next look tries again
                    await self._listen()

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        for task in self._running:
            task.cancel()
        await self._runner.cleanup()
        if self._running:
            await asyncio.wait(self._running, timeout=self.limits.close_s)
        self.path.unlink(missing_ok=True)
        if self.counters:
            _log.info("control socket: %s", ", ".join(f"{name} {n}" for name, n in sorted(self.counters.items())))

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Any) -> web.Response:
        try:
            refused = self._access.refusal(Head.of(request.method, request.headers))
            response = self._malformed(refused.status, refused.text) if refused else await handler(request)
        except web.HTTPException as error:
            response = self._malformed(error.status, f"{error.text}: {request.method} {request.path[:100]}")
        response.force_close()
        return response

    async def _verb(self, request: web.Request) -> web.Response:
        return await self.answer(request, list(request.query.items()), caller_of)

    async def answer(
        self, request: web.Request, pairs: list[tuple[str, str]], caller: Callable[[web.Request], Operator]
    ) -> web.Response:
        """Carry out the verb that the request's path names. `pairs`: of its query; `caller`: who asks."""
        try:
            async with asyncio.timeout(self.limits.request_s):
                await request.read()
        except TimeoutError:
            return self._malformed(408, f"the request was not whole within {self.limits.request_s:g} s")
        except ValueError as error:  # a chunked or declared body that does not add up
            return self._malformed(400, f"the body cannot be read: {error}")
        name, operator = request.match_info["verb"], caller(request)
        known = {verb.name: verb for verb in self.handlers}
        verb = known.get(name)
        try:
            verb = find_verb(name, known)
            if request.method == "POST":
                arguments = arguments_from_body(verb, (await request.read()).strip() or b"{}", operator)
            elif verb.effect == "change":
                raise ConfigError(f"{verb.name} changes the run, and GET only shows", remedy="POST it")
            else:
                arguments = arguments_from_query(verb, pairs, operator)
            if verb.effect == "read" and len(self._running) >= self.limits.num_requests:  # room to steer is left
                served = f"{self.limits.num_requests} requests are being served"
                raise Overloaded(served, remedy="wait for the answers of earlier ones")
        except MyxaError as error:
            self.counters["refused"] += 1
            if verb is not None and verb.effect == "change":
                await self._note(verb, operator, None, "refused", str(error))
            return error_response(error, 404 if verb is None else 0)
        try:
            result = await self._to_its_end(self.carry_out(verb, arguments, operator))
        except Exception as error:  # noqa: BLE001 - it is in the log; every error is an answer to the caller
            return error_response(error)
        return _response(200, result)

    async def carry_out(self, verb: Verb[Any], arguments: Record, operator: Operator) -> Any:
        """The verb's answer; a change is in the audit log. Raises what the handler raises."""
        is_change = verb.effect == "change"
        is_noted_here = is_change and not verb.by
        try:
            result = await self.handlers[verb](self.context, arguments, operator)
        except MyxaError as error:
            self.counters["failed"] += 1
            # The coordinator notes what it refuses, but not what never reached it.
            if is_noted_here or (is_change and isinstance(error, CallError)):
                outcome = "refused" if error.exit_code == ConfigError.exit_code else "failed"
                await self._note(verb, operator, arguments, outcome, str(error))
            raise
        except Exception as error:
            self.counters["bug"] += 1
            _log.exception("%s failed", verb.name)
            if is_change:
                await self._note(verb, operator, arguments, "failed", f"{type(error).__name__}: {error}")
            raise
        if is_noted_here:
            is_told = result is not None and not verb.is_secret
            await self._note(verb, operator, arguments, "done", encode(result).decode() if is_told else "")
        return result

    async def _note(
        self, verb: Verb[Any], operator: Operator, arguments: Record | None, result: str, detail: str
    ) -> None:
        """Log what the audit log does not take: the caller gets the verb's own outcome."""
        noted = {} if arguments is None else _noted_arguments(arguments)
        record = AuditRecord(
            number=0, wall_s=self.context.node.clock.wall(), verb=verb.name, who=operator, arguments=noted,
            result=result, detail=detail[:MAX_NOTED_CHARS], reason=str(noted.get("reason", "")),
        )  # fmt: skip
        try:
            async with self._audit_turn:
                # not in the loop's own threads: verbs that only read may keep all of those busy
                await in_daemon_thread(partial(self.append, record), name="audit")
        except (OSError, MyxaError) as error:
            _log.error("the audit log did not take %s: %s", verb.name, error)

    async def _to_its_end(self, work: Coroutine[Any, Any, Any]) -> Any:
        """In its own task: a caller that goes away must not leave a change half made."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # the caller has the error, if it is still there

    def _malformed(self, status: int, cause: str) -> web.Response:
        self.counters["malformed"] += 1
        return error_response(ConfigError(cause, remedy=USAGE), status)


def error_response(error: BaseException, status: int = 0) -> web.Response:
    """The error as JSON. `status`: 0 for that of its kind. Of an unexpected error the caller gets the name alone."""
    cause = f"the launcher failed at this: {type(error).__name__}"
    bug = MyxaError(cause, remedy="this is a bug; the launcher's log has the rest")
    answer = error if isinstance(error, MyxaError) else bug
    return _response(status or _status(error), {"error": answer.facts()})


def _response(status: int, answer: Any) -> web.Response:
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


# -- requests and answers as JSON --------------------------------------------------------------------------------------

MAX_QUOTED_CHARS = 200
"""Of what a caller sent, in an answer to it."""
_BEYOND = re.compile(r"Expected `(?:int|float)` ([<>]=?) (\S+) - at `\$\.(\w+)`")
_RELATIONS = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}


def arguments_from_body(verb: Verb[Any], body: bytes, operator: Operator) -> Record:
    """The verb's arguments from JSON, types checked. Raises ConfigError with a hint."""
    try:
        table: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ConfigError(f"{verb.name}: that is no JSON: {error}", remedy=_taken(verb)) from None
    if not isinstance(table, dict):
        raise ConfigError(f"{verb.name}: the body must be an object of arguments", remedy=_taken(verb))
    return _arguments(verb, cast("dict[str, Any]", table), operator, strict=True)


def arguments_from_query(verb: Verb[Any], pairs: list[tuple[str, str]], operator: Operator) -> Record:
    """The same from the text of a URL's query: a key that is given again makes a list longer."""
    lists = {field.name for field in msgspec.structs.fields(verb.arguments) if isinstance(field.default, tuple)}
    table: dict[str, Any] = {}
    for name, text in pairs:
        if name in lists:
            table.setdefault(name, []).append(text)
        else:
            table[name] = text
    return _arguments(verb, table, operator, strict=False)


def _arguments(verb: Verb[Any], table: dict[str, Any], operator: Operator, *, strict: bool) -> Record:
    names = argument_names(verb)
    for name in (name for name in table if name not in names):
        hint = suggest(name[:MAX_QUOTED_CHARS], names) if names else _taken(verb)
        raise ConfigError(f"{verb.name}: it takes no {name[:MAX_QUOTED_CHARS]!r}", remedy=hint)
    if WHO in verb.arguments.__struct_fields__:
        table = {**table, WHO: operator}
    try:
        return msgspec.convert(table, verb.arguments, strict=strict)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{verb.name}: {_in_words(str(error))[:MAX_QUOTED_CHARS]}", remedy=_taken(verb)) from None


def _taken(verb: Verb[Any]) -> str:
    names = argument_names(verb)
    return f"it takes {', '.join(names)}" if names else "it takes no arguments"


def _in_words(text: str) -> str:
    """The message about a number beyond its range, without the path into a JSON that the caller may not see."""
    match = _BEYOND.fullmatch(text)
    return text if match is None else f"{match[3]} must be {_RELATIONS[match[1]]} {match[2]}"


def encode(answer: Any) -> bytes:
    return _ENCODER.encode(answer) + b"\n"


_ENCODER = msgspec.json.Encoder(enc_hook=str)
