"""A control server on real sockets with a few verbs of its own, for tests of the protocol."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec

from myxa.core.clock import SystemClock
from myxa.core.errors import ConfigError, DeadlineExceeded
from myxa.core.knobs import AuditRecord, Operator
from myxa.launch.control.server import ControlServer, Handler, ServerLimits, VerbContext
from myxa.launch.verbs import COORDINATOR, Arguments, Verb


class Place:
    """What the server needs of a node."""

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


@dataclass
class Bench:
    """The server, its socket, and everything that its verbs did."""

    control: Path
    server: ControlServer
    audit: list[AuditRecord]
    value: int = 0
    gazes: int = 0
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    leave: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def noted(self) -> list[tuple[str, str]]:
        return [(record.verb, record.result) for record in self.audit]


def handlers_of(bench: Bench) -> dict[Verb[Any], Handler]:
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

    return {
        Verb("echo", "read", Echo, "says it again"): echo, Verb("put", "change", Put, "sets the value"): put,
        Verb("refuse", "change", Put, "says no"): refuse,
        Verb("elsewhere", "change", Put, "noted elsewhere", by=COORDINATOR): put,
        Verb("elsewhere-refuse", "change", Put, "noted elsewhere", by=COORDINATOR): refuse,
        Verb("elsewhere-unsure", "change", Put, "noted elsewhere", by=COORDINATOR): unsure,
        Verb("crash", "read", Arguments, "has a bug"): crash, Verb("slow", "change", Put, "waits"): slow,
        Verb("gaze", "read", Arguments, "looks for long"): gaze,
    }  # fmt: skip


@asynccontextmanager
async def control_bench(folder: Path, limits: ServerLimits | None = None) -> AsyncGenerator[Bench]:
    """Open in `folder`."""
    bench = Bench(folder / "control.sock", cast(ControlServer, None), [])
    context = cast(Any, VerbContext)(Place(), None, None, None, 0.0)
    bench.server = ControlServer(
        context, handlers_of(bench), bench.audit.append, bench.control, limits=limits or ServerLimits()
    )
    await bench.server.open()
    try:
        yield bench
    finally:
        bench.leave.set()
        await bench.server.close()


async def speak(path: Path, data: bytes, *, timeout_s: float = 20.0) -> bytes:
    """Send bytes and read until the other side closes."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    try:
        writer.write(data)
        return await asyncio.wait_for(reader.read(), timeout_s)
    except ConnectionError:
        return b""
    finally:
        writer.close()


def request(head: str, body: bytes = b"", *headers: str, host: str = "myxa") -> bytes:
    """One request as bytes."""
    lines = [f"{head} HTTP/1.1", f"Host: {host}", *headers, *([f"Content-Length: {len(body)}"] if body else [])]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def http(path: Path, head: str, body: bytes = b"", *headers: str, host: str = "myxa") -> tuple[int, Any]:
    """One request: status (0: closed without an answer) and decoded body."""
    answer = await speak(path, request(head, body, *headers, host=host))
    top, _, rest = answer.partition(b"\r\n\r\n")
    return int(top.split()[1]) if top else 0, json.loads(rest) if rest else None


async def ask(path: Path, verb: str, **arguments: Any) -> Any:
    """A verb's answer, or its error."""
    _, answer = await http(path, f"POST /{verb}", json.dumps(arguments).encode())
    return answer


def connect(path: Path) -> socket.socket:
    """A plain socket."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.connect(str(path))
    return link
