"""Two engines and a sender, each a process of its own, and the coordinator's real adopter over a real node between them.

The engine that is hurt is `rollout/0`, which adopts first; `rollout/1` shows that the others go on. A fault strikes once,
at a named moment of the adoption of one version:

    fetch         a file of the version is asked for                                                     tcp only
    plan, join    the engine asks the sender for its cut; a new engine is about to join its channel      nccl only
    prepare       before the first byte is looked at
    transfer      in the middle of the bytes: the fifth tensor (shm, disk, tcp), the third bucket (nccl)
    before commit, commit, after commit
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from tests.harness.manifests import join
from tests.harness.programs import Program, start_program
from tests.weights.fault_cells import Channel
from tests.weights.fingerprint import greedy
from tests.weights.weight_lab import CONTEXT, VOCAB, SenderProcess, Server, sending, serving

from myxa.actors.contracts import RolloutContract, TrainerContract
from myxa.actors.engines.sglang.engine import SglangEngine, SglangOptions
from myxa.actors.engines.sglang.weight_routes import DeviceRouteOptions, device_routes
from myxa.actors.stream_checks import StreamChecks
from myxa.actors.telemetry import Reporter
from myxa.actors.weights.channels.host import RebuiltFolder
from myxa.actors.weights.receive import EngineWeights
from myxa.actors.weights.rollout_update import Adopter, Adoption, AdoptionLimits
from myxa.core.activity import ActivityMeter, TelemetryBuffer
from myxa.core.actor import Actor
from myxa.core.clock import SystemClock
from myxa.core.errors import DeadlineExceeded, EngineError, MyxaError, RemoteError
from myxa.core.messages import WeightAck, WeightManifest
from myxa.core.process import boot_id
from myxa.core.weight_channel import JoinRequest, LeaveOrder, PlanRequest, WeightProgress
from myxa.transport.node import Node

Hook = Callable[[str], Awaitable[None]]
Answer = tuple[list[int], list[float], list[int]]
BUCKET_BYTES = 1 << 18
LIMITS = AdoptionLimits(prepare_s=8.0, commit_s=10.0, stall_s=3.0)
ROUTES = DeviceRouteOptions(host=boot_id(), join_s=3.0, send_s=3.0, leave_s=0.5)
VICTIM, WITNESS = "rollout/0", "rollout/1"
START_S = 60.0


async def unhurt(point: str) -> None:
    """The hook of an engine that nothing happens to."""


class LabEngine:
    """An engine in a process of its own: what can be done to the process. The kinds add what a rollout actor has of it
    (`prepare_weights`, `commit_weights`, `progress`), `answer`, `slow`, `is_alive` and `close`."""

    pid: int
    hook: Hook = staticmethod(unhurt)

    def signal(self, number: signal.Signals) -> None:
        if self.is_alive():  # or the number may be somebody else's
            os.kill(self.pid, number)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class PipeEngine(LabEngine):
    """`engine_process.py`: reads shared memory and folders."""

    def __init__(self, process: Program) -> None:
        self.process, self.pid = process, process.pid
        self._waiting: dict[int, asyncio.Future[Any]] = {0: asyncio.get_running_loop().create_future()}
        self._number = 0
        self._reading = asyncio.get_running_loop().create_task(self._read())

    def is_alive(self) -> bool:
        return self.process.returncode is None

    async def _read(self) -> None:
        async for line in self.process.stdout:
            reply = msgspec.json.decode(line)
            if "held" in reply:
                held = reply["held"]
                point = "transfer" if ": tensor" in held else "commit" if held == "commit" else "prepare"
                await self.hook(point)
                with suppress(EngineError, OSError):
                    await self._post("go", None)
            else:
                waiting = self._waiting.pop(reply["number"])
                if not waiting.done():  # whoever asked may have given up
                    waiting.set_result(reply)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(EngineError("the engine's process is dead"))
                waiting.exception()  # nobody waits for the answer to "go"

    async def _post(self, method: str, argument: Any) -> asyncio.Future[Any]:
        self._number += 1
        waiting = self._waiting[self._number] = asyncio.get_running_loop().create_future()
        if self._reading.done():
            raise EngineError("the engine's process is dead")
        self.process.stdin.write(
            msgspec.json.encode({"number": self._number, "method": method, "argument": argument}) + b"\n"
        )
        return waiting

    async def ask(self, method: str, argument: Any = None) -> Any:
        reply = await (await self._post(method, argument))
        if "error" in reply:
            raise EngineError(reply["error"])
        return reply["reply"]

    async def started(self) -> None:
        await self._waiting[0]

    async def hold(self, phase: str) -> None:
        places = {"prepare": "digest", "transfer": ": tensor 5 of", "commit": "commit"}
        if phase in places:
            await self.ask("hold", places[phase])

    async def prepare_weights(self, manifest: WeightManifest) -> None:
        await self.ask("prepare", manifest)

    async def commit_weights(self, version: int) -> None:
        await self.ask("commit", version)

    async def progress(self) -> WeightProgress:
        return msgspec.convert(await self.ask("progress"), WeightProgress)

    async def answer(self) -> Answer:
        ids, logprobs, versions = await self.ask("answer", f"look{time.monotonic()}")
        return ids, logprobs, versions

    async def slow(self) -> None:
        await self.ask("slow", 0.1)

    async def close(self) -> None:
        self.signal(signal.SIGKILL)
        await self.process.wait()
        await self._reading


class HurtSenders:
    """The senders as the engine under test reaches them."""

    def __init__(self, engine: ServerEngine, inner: Callable[[], SenderProcess]) -> None:
        self._engine = engine
        self._inner = inner

    async def ask(self, sender: str, order: Any) -> Any:
        if isinstance(order, (PlanRequest, JoinRequest)):
            await self._engine.hook("plan" if isinstance(order, PlanRequest) else "join")
        try:
            async with asyncio.timeout(ROUTES.leave_s if isinstance(order, LeaveOrder) else None):
                return await self._inner().ask(sender, order)
        except TimeoutError as err:
            raise DeadlineExceeded("the sender does not answer") from err


class FarSenders:
    """The writer as a rollout actor of another host reaches it."""

    def __init__(self, engine: LabEngine, inner: Callable[[], SenderProcess]) -> None:
        self._engine, self._inner = engine, inner

    async def ask(self, sender: str, order: Any) -> Any:
        await self._engine.hook("fetch")
        try:
            async with asyncio.timeout(ROUTES.send_s):
                return await self._inner().ask(sender, order)
        except TimeoutError as err:
            raise DeadlineExceeded("rollout/0: trainer/0 does not answer") from err


class ServerEngine(LabEngine):
    """An engine server and SGLang's client: takes broadcasts."""

    def __init__(self, server: Server, sender: Callable[[], SenderProcess], name: str) -> None:
        self.pid = server.process.pid
        self._server = server
        self._pause_s = 0.0
        self.drops = False
        routes = device_routes(HurtSenders(self, sender), ROUTES)
        options = SglangOptions(vocab_size=VOCAB, context_length=CONTEXT, name=name, call_s=4.0)
        self.client = SglangEngine(server.url, options, routes)
        self._num_buckets = 0
        self._post = self.client._http.post
        self.client._http.post = self.post

    async def prepare_weights(self, manifest: WeightManifest) -> None:
        await self.hook("prepare")
        await self.client.prepare_weights(manifest)

    async def commit_weights(self, version: int) -> None:
        await self.client.commit_weights(version)

    async def progress(self) -> WeightProgress:
        return self.client.weight_progress()

    async def answer(self) -> Answer:
        return await greedy(self.client, f"look{time.monotonic()}")

    async def slow(self) -> None:
        self._pause_s = 0.3

    def is_alive(self) -> bool:
        return self._server.process.poll() is None

    async def post(self, path: str, body: Mapping[str, Any], *, within_s: float = 0.0) -> Mapping[str, Any]:
        """A request on its way to the server: watched, held up, or lost."""
        if path in ("/pause_generation", "/init_weights_update_group"):
            self._num_buckets = 0
        if path == "/pause_generation":
            await self.hook("commit")
        if path == "/update_weights_from_distributed":
            self._num_buckets += 1
            if self._num_buckets == 3:
                await self.hook("transfer")
            await asyncio.sleep(self._pause_s)
            if self.drops and self._num_buckets % 3 == 0:
                return {"success": True, "message": "lost on the way"}
        return await self._post(path, body, within_s=within_s)

    async def close(self) -> None:
        self.signal(signal.SIGCONT)
        self._server.kill()
        await self.client.close()


class LabRollout(RolloutContract):
    """As much of a rollout actor as an adoption needs."""

    def __init__(self, engine: LabEngine, telemetry: TelemetryBuffer, rebuilder: RebuiltFolder | None) -> None:
        self.engine, self._rebuilder = engine, rebuilder
        self.version = -1
        self.fenced: list[str] = []
        self.refused: list[str] = []
        self.is_there = True
        self._telemetry = telemetry

    async def on_start(self) -> None:
        checks = StreamChecks(self.ctx.name, may_be_older=False, on_lie=lambda lie: None)
        engine: Any = self.engine
        nothing: Any = None
        self._weights = EngineWeights(Reporter(self.ctx, nothing, self._telemetry), engine, checks, self._rebuilder)

    async def prepare_weights(self, manifest: WeightManifest) -> WeightAck:
        return self._noted(await self._weights.prepare(manifest))

    async def commit_weights(self, version: int) -> WeightAck:
        await self.engine.hook("before commit")
        ack = self._noted(await self._weights.commit(version))
        if ack.accepted:
            self.version = version
            await self.engine.hook("after commit")
        return ack

    def _noted(self, ack: WeightAck) -> WeightAck:
        if not ack.accepted:
            self.refused.append(ack.reason)
        return ack

    async def weight_progress(self) -> WeightProgress:
        return await self.engine.progress()

    async def fence(self, epoch: int, reason: str) -> bool:
        self.fenced.append(reason)
        return True


class LabTrainer(TrainerContract):
    """Tells the sender which versions may go."""

    def __init__(self, lab: FaultLab) -> None:
        self._lab = lab

    async def release_weights(self, version: int) -> None:
        self._lab.released.append(version)
        try:
            await self._lab.sender.do("release", version)
        except MyxaError as err:
            raise RemoteError(str(err), remote_type="TrainError") from err


class Host(Actor):
    """Has a context for the adopter."""


class TimedAdoption(Adoption):
    def __init__(self) -> None:
        super().__init__()
        self.adopted_s: dict[str, float] = {}
        """Engine -> when it adopted last."""

    def adopted(self, name: str, epoch: int, version: int) -> bool:
        self.adopted_s[name] = time.monotonic()
        return super().adopted(name, epoch, version)


class FaultLab:
    """See the module's head."""

    def __init__(self, node: Node, stack: AsyncExitStack, channel: Channel, folders: list[Path], scratch: Path) -> None:
        self.node, self.channel, self.folders = node, channel, folders
        self._stack, self._scratch = stack, scratch
        self.adoption = TimedAdoption()
        self.rollouts: dict[str, LabRollout] = {}
        self.released: list[int] = []
        self._epoch = 1
        self.sender: SenderProcess
        self.announced: dict[int, Path] = {}
        """Version -> folder with its weights."""
        self.newest = 0

    async def open(self) -> None:
        clock = SystemClock()
        self.telemetry = TelemetryBuffer("lab", clock)
        host = Host()
        await self.node.start(host, name="coordinator")
        await self.node.start(LabTrainer(self), name="trainer/0")
        self.adopter = Adopter(
            Reporter(host.ctx, ActivityMeter("lab", clock), self.telemetry), self.adoption, limits=LIMITS,
        )  # fmt: skip
        parts = self.new_sender(), self.add(VICTIM), self.add(WITNESS)
        for end in await asyncio.gather(*parts, return_exceptions=True):  # so that all are there to be ended
            if isinstance(end, BaseException):
                raise end

    async def new_sender(self) -> None:
        rest = () if self.channel == "nccl" else (self.channel, str(self._scratch), str(self.folders[0]))
        sender = await self._stack.enter_async_context(sending("trainer/0", BUCKET_BYTES, *rest))
        async with asyncio.timeout(START_S):
            await sender.do("progress", None)
        self.sender = sender  # from here on engines find it

    async def replace_sender(self) -> None:
        """As the trainer's restart does: what was published is gone, and numbers may come again."""
        with suppress(ProcessLookupError):
            self.sender.process.kill()
        await self.new_sender()
        self.adoption.rewound()

    async def add(self, name: str) -> None:
        """An engine, for the first time or again after it died or was fenced."""
        if name in self.rollouts:
            self.adoption.gone(name, self._epoch)
            await self.leave(name)
            await self.rollouts[name].engine.close()
        engine = await self._engine(name)
        rebuilder = None
        if self.channel == "tcp":
            rebuilder = RebuiltFolder(FarSenders(engine, lambda: self.sender))
            self._stack.push_async_callback(rebuilder.close)
        rollout = self.rollouts[name] = LabRollout(engine, self.telemetry, rebuilder)
        await self.node.start(rollout, name=name)
        self._epoch += 1
        join(self.adoption, name, self._epoch)

    def told(self) -> list[str]:
        """Texts of all events so far."""
        return [event.text for event in self.telemetry.drain().events]

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Done beside the rest; ended with the lab."""
        task = asyncio.get_running_loop().create_task(work)
        self._stack.push_async_callback(_ended, task)
        return task

    async def leave(self, name: str) -> None:
        """As an actor does whose engine is lost."""
        if name in self.rollouts and self.rollouts[name].is_there:
            self.rollouts[name].is_there = False
            await self.node.stop(name, grace_s=0.1)

    async def _engine(self, name: str) -> LabEngine:
        if self.channel != "nccl":
            script = Path(__file__).with_name("engine_process.py")
            engine = PipeEngine(await start_program(script, name, str(self.folders[0])))
            self._stack.push_async_callback(engine.close)
            async with asyncio.timeout(START_S):
                await engine.started()
            return engine
        servers = ExitStack()
        self._stack.callback(servers.close)
        server = await asyncio.to_thread(servers.enter_context, serving(self.folders[0]))
        made = ServerEngine(server, lambda: self.sender, name)
        self._stack.push_async_callback(made.close)
        await made.client.start()
        return made

    async def publish(self, version: int) -> None:
        folder = self.folders[version % len(self.folders)]
        manifest = await self.sender.do("publish", (version, str(folder)))
        self.announced[version] = folder
        self.newest = version
        self.adoption.published(manifest)


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def fault_lab(channel: Channel, folders: list[Path], scratch: Path) -> AsyncGenerator[FaultLab, None]:
    """Open it; every process is dead afterwards."""
    node = await Node.attach(name="fault-lab")
    try:
        async with AsyncExitStack() as stack:
            lab = FaultLab(node, stack, channel, folders, scratch)
            await lab.open()
            yield lab
    finally:
        await node.close(grace_s=1.0)
