"""Real servers and real senders in processes of their own, and a hook on what a route tells its server."""

from __future__ import annotations

import asyncio
import base64
import os
import subprocess
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
from tests.harness import engine_server
from tests.harness.commands import Command
from tests.harness.programs import Program, start_program
from tests.weights import fingerprint

from myxa.actors.engines.embedded.engine import EmbeddedEngine
from myxa.actors.engines.sglang.engine import SglangEngine, SglangOptions
from myxa.actors.engines.sglang.weight_routes import DeviceRouteOptions, WeightRoute, device_routes
from myxa.actors.weights.channels.sender import DeviceWeightSender
from myxa.core.errors import MyxaError, PeerDied, RemoteError
from myxa.core.messages import WeightManifest
from myxa.core.process import boot_id
from myxa.core.protocols import WeightSenders
from myxa.core.weight_channel import AnyAnswer, LeaveOrder

ENGINE_SERVER = Path(engine_server.__file__)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
VOCAB, CONTEXT = 320, 128


@dataclass
class Server:
    """`tests/harness/engine_server.py` in a process of its own."""

    process: subprocess.Popen[str]
    url: str

    def kill(self) -> None:
        """At once, and for good."""
        self.process.kill()
        self.process.wait()


@contextmanager
def serving(folder: Path, port: int = 0, key: str = "") -> Iterator[Server]:
    """A server of a model folder; it is dead afterwards."""
    words = (str(folder), "--port", str(port), "--key", key)
    with Command(words, folder, is_merged=False, env=ENVIRONMENT, program=ENGINE_SERVER) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert "http://" in line, line
            yield Server(process, line[line.index("http://") :].split()[0])
        finally:
            process.kill()


class InProcess:
    """Senders in this process."""

    def __init__(self, *senders: DeviceWeightSender) -> None:
        self.senders = {sender.name: sender for sender in senders}
        self.left: list[str] = []

    async def ask(self, sender: str, order: Any) -> Any:
        if isinstance(order, LeaveOrder):
            self.left.append(order.reason)
        try:
            return await asyncio.to_thread(self.senders[sender].answer, order)
        except MyxaError as err:
            raise RemoteError(err.message, remote_type=type(err).__name__) from err


REPLIES: dict[str, Any] = {
    "ask": AnyAnswer, "publish": WeightManifest, "release": type(None), "harm": type(None), "progress": dict[str, str],
}  # fmt: skip


def array_of(kind: Any, text: str) -> Any:
    return np.frombuffer(base64.b64decode(text), np.uint8)


@dataclass
class SenderProcess:
    """A sender in a process of its own, as a `WeightSenders` of one."""

    process: Program
    waiting: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    number: int = 0
    is_dead: bool = False

    async def do(self, method: str, argument: object) -> Any:
        self.number += 1
        answer = self.waiting[self.number] = asyncio.get_running_loop().create_future()
        order = {"number": self.number, "method": method, "argument": argument}
        if self.is_dead:
            raise PeerDied("the sender's process is dead")
        self.process.stdin.write(msgspec.json.encode(order) + b"\n")
        reply = await answer
        if "error" in reply:
            raise RemoteError(reply["error"], remote_type="TrainError")
        return msgspec.convert(reply["reply"], REPLIES[method], dec_hook=array_of)

    async def read(self) -> None:
        async for line in self.process.stdout:
            reply = msgspec.json.decode(line)
            answer = self.waiting.pop(reply["number"])
            if not answer.done():  # whoever asked may have given up
                answer.set_result(reply)
        self.is_dead = True
        for answer in self.waiting.values():
            if not answer.done():
                answer.set_exception(PeerDied("the sender's process is dead"))
        self.waiting.clear()

    async def ask(self, sender: str, order: Any) -> Any:
        return await self.do("ask", order)


@asynccontextmanager
async def sending(name: str, bucket_bytes: int, *rest: str) -> AsyncGenerator[SenderProcess, None]:
    """A sender in a process of its own; it is dead afterwards. `rest`: see `sender_process.py`."""
    script = Path(__file__).with_name("sender_process.py")
    process = await start_program(script, name, str(bucket_bytes), *rest)
    made = SenderProcess(process)
    reading = asyncio.get_running_loop().create_task(made.read())
    try:
        yield made
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await reading


Hook = Callable[[int], Awaitable[None]]


class Watched:
    """A server's control; before the n-th bucket is told (from 1), the hook runs."""

    def __init__(self, inner: Any, hook: Hook) -> None:
        self._inner = inner
        self._hook = hook
        self._num_buckets = 0
        self.place, self.url = inner.place, inner.url
        self.get, self.answer = inner.get, inner.answer

    async def post(self, path: str, body: Mapping[str, Any], *, within_s: float = 0.0) -> Mapping[str, Any]:
        if path == "/update_weights_from_distributed":
            self._num_buckets += 1
            await self._hook(self._num_buckets)
        return await self._inner.post(path, body, within_s=within_s)


async def nothing(number: int) -> None:
    """The hook that does not interfere."""


def engine_of(url: str, senders: WeightSenders, hook: Hook = nothing, **options: Any) -> SglangEngine:
    """A client of that server, with all routes."""
    routes = device_routes(senders, DeviceRouteOptions(host=boot_id(), **options))

    def watched(server: Any) -> Mapping[str, WeightRoute]:
        return routes(cast(Any, Watched(server, hook)))

    return SglangEngine(
        url, SglangOptions(vocab_size=VOCAB, context_length=CONTEXT, name="rollout/0", call_s=30), watched
    )


@asynccontextmanager
async def started(engine: SglangEngine) -> AsyncGenerator[SglangEngine, None]:
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


async def own_answer(folder: Path) -> tuple[list[int], list[float], list[int]]:
    """Of an engine that has read the folder itself."""
    engine = EmbeddedEngine(folder)
    try:
        await engine.start()
        return await fingerprint.greedy(engine, "own")
    finally:
        await engine.close()


async def greedy(engine: Any, name: str) -> tuple[list[int], list[float], set[int]]:
    """`fingerprint.greedy`, the stamps as a set."""
    ids, logprobs, versions = await fingerprint.greedy(engine, name)
    return ids, logprobs, set(versions)
