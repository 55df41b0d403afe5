"""The rollout role: pulls groups from the buffer, has them generated and rewarded, hands them back.

Knows the contracts of buffer, coordinator and engine; knows no concrete engine. Who waits for whom:

    pull loop      waits for room here, then for work in the buffer (long poll)
    group tasks    wait for the engine, then for rewards, then for the buffer's answer
    weight update  prepare (beside the old weights) -> commit (between two tokens); generation goes on meanwhile

An actor serves nothing before its first commit: the coordinator brings every engine to the trainer's version first,
so that what an engine calls version v is what the trainer calls version v, whatever folder it was started from.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TypeVar

from ..core.activity import ActivityMeter, TelemetryBuffer
from ..core.actor import MailboxPolicy, PeerEvent
from ..core.clock import Clock
from ..core.device_memory import MemoryCommand, MemoryReply, TenantReport
from ..core.errors import CallError, EngineError, MyxaError, RequestRefused
from ..core.messages import (
    ActivityKind,
    Assignment,
    CanaryAnswers,
    DrawRequest,
    EngineStatus,
    EvalRequest,
    EvalResult,
    SamplingParams,
    WeightAck,
    WeightManifest,
)
from ..core.protocols import Engine, Tokenizer
from ..core.samples import NO_VERSION
from .canary_answer import answer_canary
from .contracts import BufferContract, CoordinatorContract, MonitorContract, RolloutContract
from .evaluation import evaluate
from .group_handover import GroupHandover
from .group_runner import GroupRunner, Load, NoEngine, Partial, PooledScorer
from .rollout_gauges import gauge_forever
from .rollout_tenant import RolloutTenant, Tenancy, require
from .telemetry import report_forever
from .workflows.context import Workflow
from .workflows.episode import Generate, ModelAccess

R = TypeVar("R")

START_LIMIT_S = 600.0  # an engine that loads a model may hold the interpreter lock for so long
POLL_S = 5.0
"""Long poll for work: the buffer holds a draw that long at most."""
RETRY_S = 0.2
"""Pause after a call that failed because its callee is being restarted."""
LOSS_S = 1.0
"""Before a group is dropped for the engine's fault: an engine that is lost, or about to be fenced, ends this actor
within that time, and its groups are drawn anew instead."""
DRAW_AT_ONCE = 8
"""Groups taken by one draw: small bites share the slots among engines that ask at the same time."""
ALWAYS_NEWEST = (1 << 31) - 1
"""Version an actor without an engine announces: its samples carry no version, so no age ever holds them back."""


_IDLE_KIND: dict[str, ActivityKind] = {"": "wait-data", "paused": "paused", "data-exhausted": "wait-data"}
"""Why the buffer gave no work -> how the waiting is booked; staleness and the end of the run are want of capacity."""


@dataclass(frozen=True, slots=True)
class RolloutOptions:
    """Plain settings of the role."""

    max_groups: int
    """Groups in flight at most."""
    max_turns: int
    context_length: int
    """0: the engine's own."""
    report_s: float = 1.0
    workflow_timeout_s: float = 600.0
    max_error_rate: float = 0.1
    """Share of groups that may be lost to the workflow or the engine."""


class Rollout(RolloutContract):
    """One engine and the groups that use it. See the module's head."""

    mailbox = MailboxPolicy(size=4096)

    def __init__(
        self,
        *,
        engine: Engine | None,
        workflow: Workflow,
        scorer: PooledScorer,
        tokenizer: Tokenizer,
        options: RolloutOptions,
        clock: Clock,
        tenancy: Tenancy | None = None,
    ) -> None:
        """`tenancy`: where the engine shares its device with a trainer in turns."""
        self._engine = engine
        self._workflow = workflow
        self._scorer = scorer
        self._tokenizer = tokenizer
        self._options = options
        self._clock = clock
        self._version = NO_VERSION
        self._in_flight: dict[int, asyncio.Task[None]] = {}
        self._room = asyncio.Event()
        self._serving = asyncio.Event()
        self._is_draining = False
        self._prepared: WeightManifest | None = None
        self._tenancy = tenancy
        self._tenant: RolloutTenant | None = None
        self._load = Load()

    # -- life

    async def on_start(self) -> None:
        self._meter = ActivityMeter(self.ctx.name, self._clock)
        self._telemetry = TelemetryBuffer(self.ctx.name, self._clock, meter=self._meter)
        self._buffer = self.ctx.ref(BufferContract, "buffer")
        self._coordinator = self.ctx.ref(CoordinatorContract, "coordinator")
        self._handover = GroupHandover(
            self.ctx.name,
            self._buffer,
            scorer=self._scorer,
            max_error_rate=self._options.max_error_rate,
            telemetry=self._telemetry,
            clock=self._clock,
            log=self.ctx.log,
        )
        self._meter.switch("other", "start")
        send = self.ctx.ref(MonitorContract, "monitor").telemetry
        self.ctx.spawn(report_forever(self._telemetry, send), name="rollout-telemetry")
        self.ctx.spawn(self._run(), name="rollout-run")

    async def _run(self) -> None:
        """Start the engine, report in, then pull work until told to stop."""
        vocab_size: int | None = None
        context_length = self._options.context_length or 1 << 30
        generate = NoEngine().generate
        if self._engine is not None:
            generate = await self._wait_for_room(self._engine)
            with self.ctx.busy(START_LIMIT_S, "starts its engine"):
                info = await self._engine.start()
            if self._tenant is not None:
                await self._tenant.loaded()
            vocab_size = info.vocab_size
            context_length = min(context_length, info.context_length)
            self.ctx.spawn(self._engine.until_lost(), name="engine-watch")
        self._runner = GroupRunner(
            workflow=self._workflow,
            scorer=self._scorer,
            tokenizer=self._tokenizer,
            model=ModelAccess(
                generate=generate,
                sampling=SamplingParams(),
                context_length=context_length,
                request_prefix=f"{self.ctx.name}.{self.ctx.epoch}.",
                goes_on=lambda: not self._is_draining,
            ),
            max_turns=self._options.max_turns,
            clock=self._clock,
            on_load=self._on_load,
            vocab_size=vocab_size,
            workflow_timeout_s=self._options.workflow_timeout_s,
        )
        if self._engine is None:
            self._version = ALWAYS_NEWEST
            self._serving.set()
        gauges = gauge_forever(
            self._telemetry,
            self._runner.stats,
            self._handover.counts,
            status=self.status,
            has_engine=self._engine is not None,
            every_s=self._options.report_s,
            clock=self._clock,
            log=self.ctx.log,
        )
        self.ctx.spawn(gauges, name="rollout-gauges")
        self._meter.switch("wait-weights", "first weights")
        await self.ctx.wait_for("coordinator", "buffer", timeout_s=120)
        await self._coordinator.rollout_ready(await self.status(), self.ctx.epoch)
        if self._tenant is not None:
            self._tenant.joined()
        await self._serving.wait()
        await self._pull()

    async def _wait_for_room(self, engine: Engine) -> Generate:
        """How requests reach the engine; where it takes turns, only once there is room for it to load."""
        if self._tenancy is None:
            return engine.generate
        self._meter.switch("wait-memory", "room to load")
        self._tenant = RolloutTenant(
            self.ctx,
            engine,
            self._tenancy,
            telemetry=self._telemetry,
            clock=self._clock,
            on_change=lambda _: self._on_load(self._load),
        )
        await self._tenant.until_room()
        self._meter.switch("other", "start")
        return self._tenant.turn.generate

    async def on_peer(self, event: PeerEvent) -> None:
        if self._tenant is not None:
            await self._tenant.on_peer(event)

    async def on_stop(self, why: str) -> None:
        self._is_draining = True
        if self._tenant is not None:
            self._tenant.turn.end()
        for task in list(self._in_flight.values()):
            task.cancel()
        await self._scorer.close()
        if self._engine is not None:
            await self._engine.close()

    # -- work

    async def _pull(self) -> None:
        """Ask for work while there is room. Never gives up on a buffer that is being restarted."""
        while not self._is_draining:
            free = self._options.max_groups - len(self._in_flight)
            if free <= 0:
                self._room.clear()
                await self._room.wait()
                continue
            self._idle("wait-data")
            request = DrawRequest(
                rollout=self.ctx.name,
                epoch=self.ctx.epoch,
                version=self._version,
                max_groups=min(free, DRAW_AT_ONCE),
                wait_s=POLL_S,
                holding=tuple(self._in_flight),
            )
            try:
                reply = await self._buffer.draw(request)
            except CallError as err:
                self.ctx.log.warning("draw: %s", err)
                await asyncio.sleep(RETRY_S)
                continue
            if not reply.assignments:
                self._idle(_IDLE_KIND.get(reply.blocked_by, "wait-capacity"))
                if reply.blocked_by:
                    await asyncio.sleep(RETRY_S)
            for assignment in reply.assignments:
                self._take(assignment)

    def _take(self, assignment: Assignment) -> None:
        group_id = assignment.prompt.group_id
        if group_id in self._in_flight:
            self.ctx.log.warning("group %d was assigned twice; the second is ignored", group_id)
            return
        task = self.ctx.spawn(self._run_group(assignment), name=f"group-{group_id}")
        self._in_flight[group_id] = task

    async def _run_group(self, assignment: Assignment) -> None:
        """One group from assignment to the buffer's answer. Only a broken error budget or engine ends the actor."""
        group_id = assignment.prompt.group_id
        try:
            group = await self._runner.run(assignment)
            await self._handover.deliver(group, assignment.attempt)
        except Partial as partial:
            await self._handover.give_back(assignment, partial)
        except MyxaError as err:
            if isinstance(err, CallError):
                raise
            if isinstance(err, EngineError) and not isinstance(err, RequestRefused):
                await asyncio.sleep(LOSS_S)
            await self._handover.drop(assignment, err)
        finally:
            self._in_flight.pop(group_id, None)
            self._room.set()

    # -- weights

    async def prepare_weights(self, manifest: WeightManifest) -> WeightAck:
        if self._engine is None:
            return self._ack(manifest.version)
        try:
            await self._engine.prepare_weights(manifest)
        except MyxaError as err:
            return self._ack(manifest.version, reason=str(err))
        self._prepared = manifest
        return self._ack(manifest.version)

    async def commit_weights(self, version: int) -> WeightAck:
        if self._engine is None:
            self._version = version
        else:
            if self._prepared is None or self._prepared.version != version:
                return self._ack(version, reason=f"{self.ctx.name} has not prepared version {version}")
            try:
                await self._swap(self._engine, version)
            except MyxaError as err:
                return self._ack(version, reason=str(err))
            self._prepared = None
            self._version = version
        self._serving.set()
        self._telemetry.event("weights-adopted", f"serves version {version}", version=version)
        try:
            await self._buffer.adopted(self.ctx.name, self.ctx.epoch, version)
        except CallError as err:
            self.ctx.log.warning("buffer was not told of version %d: %s (the next draw tells it)", version, err)
        return self._ack(version)

    async def _swap(self, engine: Engine, version: int) -> None:
        """Commit, and note it on a track of its own in the trace: generation goes on around it."""
        started, wall_s = self._clock.monotonic(), self._clock.wall()
        await engine.commit_weights(version)
        self._telemetry.span(
            f"adopt {version}",
            "compute",
            wall_s,
            self._clock.monotonic() - started,
            track="weights",
            adopts_version=version,
        )

    def _ack(self, version: int, *, reason: str = "") -> WeightAck:
        return WeightAck(rollout=self.ctx.name, version=version, accepted=not reason, reason=reason)

    async def fence(self, reason: str) -> None:
        raise_later = EngineError(f"{self.ctx.name} was fenced: {reason}", remedy="it is restarted with new weights")
        self.ctx.spawn(_fail(raise_later), name="fenced")

    # -- memory

    async def load_engine(self) -> None:
        await require(self._tenant, self.ctx.name).load()

    async def memory_command(self, command: MemoryCommand) -> MemoryReply:
        return await require(self._tenant, self.ctx.name).command(command)

    async def memory_report(self) -> TenantReport | None:
        return None if self._tenant is None else self._tenant.report()

    # -- questions

    async def evaluate(self, request: EvalRequest) -> EvalResult:
        return await evaluate(self._runner, request, name=self.ctx.name, version=self._version, log=self.ctx.log)

    async def answer(self, request: EvalRequest) -> CanaryAnswers:
        prefix = f"{self.ctx.name}.{self.ctx.epoch}.canary{self._version}."
        return await answer_canary(self._runner.model, self._tokenizer, request, name=self.ctx.name, prefix=prefix)

    async def status(self) -> EngineStatus:
        running, waiting = 0, 0
        if self._engine is not None and self._serving.is_set():
            info = await self._engine.info()
            running, waiting = info.running, info.waiting
        return EngineStatus(
            rollout=self.ctx.name,
            version=self._version,
            running=running,
            waiting=waiting,
            draining=self._is_draining,
        )

    async def drain(self) -> int:
        self._is_draining = True
        if self._tenant is not None:
            self._tenant.turn.end()
        tasks = list(self._in_flight.values())
        if self._engine is not None and tasks:
            await self._engine.abort()
        if tasks:
            await asyncio.wait(tasks, timeout=30)
        return len(tasks)

    # -- telling

    def _on_load(self, load: Load) -> None:
        self._load = load
        if self._tenant is not None and not self._tenant.turn.has_turn:
            self._meter.switch("wait-memory", "the trainer's turn")
        elif load.generating:
            self._meter.switch("compute", "generate")
        elif load.rewarding:
            self._meter.switch("wait-data", "reward")
        else:
            self._meter.switch("wait-data", "draw")

    def _idle(self, kind: ActivityKind) -> None:
        """The reason why nothing runs here; ignored while something runs, or may not."""
        if not self._in_flight and (self._tenant is None or self._tenant.turn.has_turn):
            self._meter.switch(kind, "draw")


async def _fail(error: MyxaError) -> None:
    raise error
