"""A control server on real sockets with a few verbs of its own, for tests of the protocol."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec

from myxa.core.clock import SystemClock
from myxa.core.errors import ConfigError, DeadlineExceeded
from myxa.core.knobs import AuditRecord, Operator
from myxa.launch.control.connection import ConnectionLimits
from myxa.launch.control.dispatcher import Dispatcher
from myxa.launch.control.server import ControlServer
from myxa.launch.control.verb import Arguments, Verb, VerbContext, VerbTable


class Place:
    """What the dispatcher needs of a node."""

    clock = SystemClock()


class Echo(Arguments, frozen=True, kw_only=True):
    text: Annotated[str, msgspec.Meta(max_length=1 << 21)] = ""
    number: Annotated[int, msgspec.Meta(ge=-(1 << 40))] = 0
    ratio: float = 0.0
    flag: bool = False
    names: Annotated[tuple[str, ...], msgspec.Meta(max_length=8)] = ()


class Put(Arguments, frozen=True, kw_only=True):
    value: int
    reason: str = ""


class Count(Arguments, frozen=True, kw_only=True):
    until: int = 3
    bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 22)] = 0


@dataclass
class Bench:
    """The server, its sockets, and everything that its verbs did."""

    control: Path
    view: Path
    server: ControlServer
    dispatcher: Dispatcher
    audit: list[AuditRecord]
    value: int = 0
    streams: int = 0
    gazes: int = 0
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    leave: asyncio.Event = field(default_factory=asyncio.Event)


@asynccontextmanager
async def control_bench(folder: Path, limits: ConnectionLimits | None = None, gid: int = -1) -> AsyncGenerator[Bench]:
    """Open in `folder`."""
    audit: list[AuditRecord] = []
    bench = cast(Bench, None)

    async def echo(context: VerbContext, arguments: Echo, who: Operator) -> Any:
        return {**msgspec.to_builtins(arguments), "who": who}

    async def put(context: VerbContext, arguments: Put, who: Operator) -> int:
        bench.value = arguments.value
        return arguments.value

    async def refuse(context: VerbContext, arguments: Put, who: Operator) -> None:
        raise ConfigError(f"{arguments.value}: must be nice", remedy="be nice")

    async def unsure(context: VerbContext, arguments: Put, who: Operator) -> None:
        raise DeadlineExceeded("nobody answered")

    async def crash(context: VerbContext, arguments: Arguments, who: Operator) -> None:
        raise ZeroDivisionError("secret insides")

    async def gaze(context: VerbContext, arguments: Arguments, who: Operator) -> int:
        bench.gazes += 1
        await bench.leave.wait()
        return bench.value

    async def slow(context: VerbContext, arguments: Put, who: Operator) -> int:
        bench.entered.set()
        await bench.leave.wait()
        bench.value = arguments.value
        return arguments.value

    async def count(context: VerbContext, arguments: Count, who: Operator) -> AsyncIterator[Any]:
        bench.streams += 1
        try:
            number = 0
            while number < arguments.until:
                yield {"number": number, "fill": "x" * arguments.bytes}
                number += 1
                await asyncio.sleep(0 if arguments.until < 1000 else 0.01)
        finally:
            bench.streams -= 1

    verbs: list[Verb[Any]] = [
        Verb("echo", "view", Echo, "says it again", run=echo),
        Verb("put", "operate", Put, "sets the value", run=put),
        Verb("refuse", "operate", Put, "says no", run=refuse),
        Verb("elsewhere", "operate", Put, "noted elsewhere", run=put, is_noted_elsewhere=True),
        Verb("elsewhere-refuse", "operate", Put, "noted elsewhere", run=refuse, is_noted_elsewhere=True),
        Verb("elsewhere-unsure", "operate", Put, "noted elsewhere", run=unsure, is_noted_elsewhere=True),
        Verb("crash", "view", Arguments, "has a bug", run=crash),
        Verb("slow", "operate", Put, "waits", run=slow),
        Verb("gaze", "view", Arguments, "looks for long", run=gaze),
        Verb("count", "view", Count, "counts", stream=count),
    ]
    context = cast(Any, VerbContext)(Place(), None, None, None, 0.0)
    dispatcher = Dispatcher(context, VerbTable(verbs), audit.append)
    control, view = folder / "control.sock", folder / "view.sock"
    server = ControlServer(dispatcher, control, view, view_gid=gid, limits=limits)
    bench = Bench(control, view, server, dispatcher, audit)
    await server.open()
    try:
        yield bench
    finally:
        bench.leave.set()
        await server.close()


async def speak(path: Path, data: bytes, *, ends: bool = True, timeout_s: float = 20.0) -> bytes:
    """Send bytes, optionally say that there are no more, and read until the other side closes."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    try:
        writer.write(data)
        if ends:
            writer.write_eof()
        return await asyncio.wait_for(reader.read(), timeout_s)
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def ask(path: Path, verb: str, timeout_s: float = 20.0, **args: Any) -> dict[str, Any]:
    """One request by lines."""
    line = json.dumps({"id": 7, "verb": verb, "args": args}).encode() + b"\n"
    answer = await speak(path, line, timeout_s=timeout_s)
    return json.loads(answer.splitlines()[0])


async def http(path: Path, head: str, body: bytes = b"", *, ends: bool = False) -> tuple[int, Any]:
    """One request by HTTP: status and decoded body."""
    extra = f"Content-Length: {len(body)}\r\n" if body else ""
    data = f"{head} HTTP/1.1\r\nHost: x\r\n{extra}\r\n".encode() + body
    answer = await speak(path, data, ends=ends)
    if not answer:
        return 0, None
    top, _, rest = answer.partition(b"\r\n\r\n")
    status = int(top.split()[1])
    try:
        return status, json.loads(rest)
    except ValueError:
        return status, rest


def connect(path: Path) -> socket.socket:
    """A plain socket."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.connect(str(path))
    return link
