"""Mutations of valid requests: nothing crashes, nothing changes, everything that is whole is answered."""

from __future__ import annotations

import asyncio
import gc
import json
import random
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from tests.control.control_room import Place, ask, speak

from myxa.core.errors import NoSuchActor
from myxa.core.knobs import AuditRecord
from myxa.launch.control.handlers import HANDLERS
from myxa.launch.control.server import ControlServer, ServerLimits, VerbContext
from myxa.launch.verbs import ALL, argument_names

SEED = 20_240_611
NUM_REQUESTS = 10_000
"""By `make soak`; otherwise a twenty-fifth."""

WORDS = [
    "", "a", "lr", "../../x", "\x00", "💥", "__class__", "os.system", "a" * 5000, "rollout/*", "node:1", "%s%n",
    "' OR 1",
]  # fmt: skip
NUMBERS: list[Any] = [0, -1, 1, 2**31, 2**63, -(2**64), 10**400, 0.5, -1e308, 1e-320, True, False, None]


class Nobody:
    """Stands for every part of a run: whatever is asked of it is refused and noted."""

    def __init__(self, touched: list[str], name: str = "") -> None:
        self._touched = touched
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nobody(self._touched, f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._touched.append(self._name)
        raise NoSuchActor(f"{self._name} is not here")


def wild(drawn: random.Random, depth: int = 0) -> Any:
    """Any JSON value."""
    kind = drawn.randrange(5 if depth < 4 else 3)
    if kind == 0:
        return drawn.choice(WORDS)
    if kind in (1, 2):
        return drawn.choice(NUMBERS)
    if kind == 3:
        return [wild(drawn, depth + 1) for _ in range(drawn.randrange(4))]
    return {drawn.choice(WORDS): wild(drawn, depth + 1) for _ in range(drawn.randrange(4))}


def request(drawn: random.Random) -> tuple[str, Any]:
    """A valid verb with its own argument names and wild values, or nearly so."""
    verb: Any = drawn.choice(ALL)
    names = argument_names(verb)
    args: Any = {name: wild(drawn) for name in names if drawn.random() < 0.7}
    if drawn.random() < 0.1:
        args[drawn.choice(WORDS)] = wild(drawn)
    if drawn.random() < 0.1:
        args = wild(drawn)
    return verb.name, args


def mutated(drawn: random.Random, data: bytes) -> bytes:
    """Flipped, cut, doubled, spliced bytes."""
    body = bytearray(data)
    for _ in range(drawn.randrange(4)):
        at = drawn.randrange(len(body) + 1)
        match drawn.randrange(5):
            case 0 if body:
                body[at % len(body)] ^= 1 << drawn.randrange(8)
            case 1:
                del body[at : at + drawn.randrange(20)]
            case 2:
                body[at:at] = body[at : at + drawn.randrange(40)]
            case 3:
                body[at:at] = drawn.randbytes(drawn.randrange(12))
            case _:
                body[at:at] = drawn.choice([b"{", b"[" * 50, b'"', b"\r\n", b"\n", b"\xff", b"null", b"1e999", b":"])
    return bytes(body)


def http_of(drawn: random.Random) -> bytes:
    name, args = request(drawn)
    body = json.dumps(args).encode()
    length = drawn.choice([len(body), len(body), len(body), 0, len(body) * 2, 10**12, -1])
    method = drawn.choice(["POST", "POST", "GET", "PUT", "HEAD", "OPTIONS", "CONNECT", "TRACE"])
    query = "?" + "&".join(f"{drawn.choice(WORDS)[:20]}={drawn.choice(WORDS)[:20]}" for _ in range(drawn.randrange(3)))
    extra = drawn.choice(["", "", "Transfer-Encoding: chunked\r\n", "Content-Encoding: gzip\r\n", "Expect: 100-continue\r\n",
                        "Upgrade: websocket\r\nConnection: Upgrade\r\n", "X: " + "y" * 9000 + "\r\n"])  # fmt: skip
    head = f"{method} /{name}{query} HTTP/1.1\r\nHost: myxa\r\nContent-Length: {length}\r\n{extra}\r\n"
    return mutated(drawn, head.encode(errors="replace") + body)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [NUM_REQUESTS // 25, pytest.param(NUM_REQUESTS, marks=pytest.mark.soak)])
async def test_nonsense_neither_crashes_nor_changes_anything(tmp_path: Path, number: int):
    print(f"seed {SEED}")
    drawn = random.Random(SEED)
    touched: list[str] = []
    audit: list[AuditRecord] = []
    node = Nobody(touched, "node")
    cast(Any, node).clock = Place.clock
    context = cast(Any, VerbContext)(
        node, Nobody(touched, "run_dir"), Nobody(touched, "config"), Nobody(touched, "supervisor"), 0.0
    )
    paths = (tmp_path / "c.sock",)
    server = ControlServer(context, HANDLERS, audit.append, *paths, limits=ServerLimits(request_s=0.5))
    await server.open()
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    try:
        await burst(drawn, paths, 200)  # warm: caches, lazy imports
        before = footprint()
        await burst(drawn, paths, number)
        gc.collect()
        after = footprint()
        assert "ps" in {verb["name"] for verb in await ask(paths[0], "verbs")}
        assert failures == []
        assert touched, "no request was good enough to reach a verb"
        assert after[0] <= before[0] + 8, "file descriptors grew"
        assert after[1] <= before[1] + (64 << 20), "memory grew"
        assert server.counters["malformed"] > number // 25
        assert {record.result for record in audit} <= {"refused", "failed"}, "something was changed"
    finally:
        await server.close()


async def burst(drawn: random.Random, paths: tuple[Path, ...], count: int) -> None:
    """Requests, several connections at a time."""
    gate = asyncio.Semaphore(48)

    async def one(data: bytes) -> None:
        async with gate:
            await speak(drawn.choice(paths), data, timeout_s=30)

    await asyncio.gather(*(one(http_of(drawn)) for _ in range(count)))


def footprint() -> tuple[int, int]:
    """Open descriptors and resident bytes of this process."""
    process = psutil.Process()
    return process.num_fds(), process.memory_info().rss
