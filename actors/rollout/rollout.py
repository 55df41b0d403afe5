"""The rollout role: pulls groups from the buffer, has them generated and rewarded, and returns them.

An actor serves nothing before its first commit: the coordinator brings every engine to the trainer's version first,
so that what an engine calls version v is what the trainer calls version v, whatever folder it was started from. It
reports to the coordinator when its engine is up, and again to one that restarted. Generation
continues while weights are prepared and committed.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from copy import copy

from msgspec.structs import replace

from ...core.activity import ActivityMeter, TelemetryBuffer
from ...core.actor import MailboxPolicy, PeerEvent
from ...core.clock import Clock
from ...core.device_memory import MemoryCommand, MemoryReply, TenantReport
from ...core.errors import CallError, EngineError, EngineLied
from ...core.knobs import KnobValue, KnobVerdict
from ...core.messages import (
    CanaryAnswers,
    EngineStatus,
    EngineUsage,
    EvalRequest,
    EvalResult,
    SamplingParams,
    WeightAck,
    WeightChannel,
    WeightManifest,
)
from ...core.protocols import Engine, EngineTrace, PausesByMode, ProfilesItself, Tokenizer
from ...core.retry import until_answered
from ...core.samples import NO_VERSION
from ...core.weight_channel import WeightProgress
from ..contracts import BufferContract, CoordinatorContract, MonitorContract, RolloutContract
from ..knobs.owner import KnobOwner, OwnsKnobs
from ..knobs.process import process_knobs
from ..rewards.guard import Guarded, Reference, Scorer
from ..stream_checks import StreamChecks
from ..telemetry import ReportPace, report_forever
from ..weights.engine_versions import ALWAYS_NEWEST, ServedWeights
from ..weights.receive import EngineWeights, channel_refusal
from ..workflows.episode import Generate, ModelAccess, Workflow
from ..workflows.pool import WorkflowPool
from .evaluation import Evaluation, answer_canary
from .group_pull import GroupPull
from .group_runner import GroupRunner, RolloutOptions, no_engine
from .knobs import crowding, rollout_knobs
from .tenant import RolloutTenant, Tenancy, require

COORDINATOR = "coordinator"
MEET_S = 120.0
START_LIMIT_S = 600.0  # an engine that loads a model may hold the interpreter lock for so long


class Rollout(OwnsKnobs, RolloutContract):
    """One engine and the groups that use it. See the module's head."""

    mailbox = MailboxPolicy(size=4096)

    def __init__(
        self,
        *,
        engine: Engine | None,
        workflow: Workflow | WorkflowPool,
        scorer: Scorer,
        tokenizer: Tokenizer,
        options: RolloutOptions,
        clock: Clock,
        tenancy: Tenancy | None = None,
        evaluation: Evaluation | None = None,
        reference: Reference | None = None,
    ) -> None:
        """`tenancy`: where the engine shares its device with a trainer in turns."""
        self._engine = engine
        self._workflow = workflow
        self._scorer = scorer
        self._judges = Guarded(scorer, *([] if reference is None else [reference]))
        self._reference = reference
        self._tokenizer = tokenizer
        self._options = options = copy(options)
        options.pause_mode = engine.pause_mode if isinstance(engine, PausesByMode) else None
        self._clock = clock
        self._version = NO_VERSION
        self._serving = asyncio.Event()
        self._tenancy = tenancy
        self._tenant: RolloutTenant | None = None
        self._runner: GroupRunner | None = None
        self._max_running = 0
        self._is_given_up = False
        self._evaluation = evaluation or Evaluation()

    async def on_start(self) -> None:
        self._meter = ActivityMeter(self.ctx.name, self._clock)
        self._telemetry = TelemetryBuffer(self.ctx.name, self._clock, meter=self._meter)
        self._buffer = self.ctx.ref(BufferContract, "buffer")
        self._coordinator = self.ctx.ref(CoordinatorContract, COORDINATOR)
        self._has_reported = False
        self.ctx.watch(COORDINATOR)
        self._evaluation.listen(self._telemetry.event, self._telemetry.sample)
        self._checks = StreamChecks(self.ctx.name, may_be_older=self._options.through_router, on_lie=self._on_lie)
        self._weights_turn = asyncio.Lock()
        """A coordinator that died may have left a step of an adoption that still runs when the next one asks."""
        self._weights = EngineWeights(self.ctx.name, self._engine, self._checks, self._telemetry, self._clock)
        self._meter.switch("other", "start")
        self._pull = GroupPull(
            self.ctx,
            self._buffer,
            self._options,
            self._judges,
            self._meter,
            self._telemetry,
            has_turn=self._tenancy is None,
            saves=self._engine is not None,
        )
        if self._tenancy is not None and self._engine is not None:  # from the first moment: the leader asks for it
            self._tenant = RolloutTenant(
                self.ctx, self._engine, self._tenancy,
                telemetry=self._telemetry, clock=self._clock, on_change=self._pull.note_turn,
            )  # fmt: skip
        self._pace = ReportPace(self._options.report_s)
        self.knob_owner = KnobOwner(self.ctx.name, rollout_knobs(self._options, self._apply), self._telemetry)
        self.knob_owner.add(process_knobs(self._pace))
        send = self.ctx.ref(MonitorContract, "monitor").telemetry
        self.ctx.spawn(report_forever(self._telemetry, send, self._pace), name="rollout-telemetry")
        self.ctx.spawn(self._run(), name="rollout-run")

    def _apply(self) -> None:
        """Put the live values where they act."""
        self._pull.retuned()
        if self._options.pause_mode is not None and isinstance(self._engine, PausesByMode):
            self._engine.pause_mode = self._options.pause_mode

    async def judge_knobs(self, values: dict[str, KnobValue], at: int) -> KnobVerdict:
        verdict = await super().judge_knobs(values, at)
        if "concurrency" not in values:
            return verdict
        remark = crowding(int(values["concurrency"]), self._pull.num_samples, self._max_running)
        return KnobVerdict(refusal=verdict.refusal, remark=remark)

    async def _run(self) -> None:
        """Start the engine, report in, then pull work until it drains."""
        vocab_size: int | None = None
        context_length = self._options.context_length or 1 << 30
        generate: Generate = no_engine
        await self._start_workers()
        if self._engine is not None:
            generate = await self._wait_for_room(self._engine)
            with self.ctx.busy(START_LIMIT_S, "starts its engine"):
                info = await self._engine.start()
            if self._tenant is not None:
                await self._tenant.loaded()
            vocab_size = info.vocab_size
            context_length = min(context_length, info.context_length)
            self._max_running = info.max_running
            self._checks.vocab_size = info.vocab_size
            generate = self._checks.watch(generate)
            self.ctx.spawn(self._watch(self._engine), name="engine-watch")
        self._runner = runner = GroupRunner(
            workflow=self._workflow,
            scorer=self._scorer,
            tokenizer=self._tokenizer,
            model=ModelAccess(
                generate=generate,
                sampling=SamplingParams(),
                context_length=context_length,
                request_prefix=f"{self.ctx.name}.{self.ctx.epoch}.",
                goes_on=lambda: not self._pull.is_draining,
            ),
            clock=self._clock,
            options=self._options,
            on_load=self._pull.note_load,
            on_hop=lambda hop, group_id, began_s, took_s: self._telemetry.hop(hop, (group_id,), began_s, took_s),
            vocab_size=vocab_size,
        )
        runner.reference, runner.on_failure = self._reference, self._tell_failure
        if self._engine is None:
            self._version = ALWAYS_NEWEST
            self._serving.set()
        self.ctx.spawn(self._gauge_forever(runner), name="rollout-gauges")
        self._meter.switch("wait-weights", "first weights")
        await self.ctx.wait_for(COORDINATOR, "buffer", timeout_s=MEET_S)
        await self._report()
        self._has_reported = True
        if self._tenant is not None:
            self._tenant.has_joined.set()
        await self._serving.wait()
        await self._pull.run(runner, lambda: ServedWeights(self._weights.lineage, self._version))

    async def _start_workers(self) -> None:
        if self._tenant is not None:
            await self._tenant.register()  # room for the engine may be asked for meanwhile
        if isinstance(self._workflow, WorkflowPool):
            await self._workflow.start()

    async def _wait_for_room(self, engine: Engine) -> Generate:
        """How requests reach the engine; where it takes turns, only once there is room for it to load."""
        if self._tenant is None:
            return engine.generate
        self._meter.switch("wait-memory", "room to load")
        await self._tenant.may_load.wait()
        self._meter.switch("other", "start")
        return self._tenant.turn.generate

    async def on_peer(self, event: PeerEvent) -> None:
        if event.name == COORDINATOR and event.kind in ("up", "restarted") and self._has_reported:
            self.ctx.log.info("the coordinator is new (epoch %d): this actor reports in again", event.epoch)
            self.ctx.spawn(self._report(), name=f"report in {event.epoch}")
        if self._tenant is not None:
            await self._tenant.tenant.on_peer(event)

    async def on_stop(self, why: str) -> None:
        tasks = self._pull.end()
        if self._tenant is not None:
            self._tenant.turn.end()
        for task in tasks:
            task.cancel()
        closing = [self._judges.close(), self._evaluation.close()]
        closing += [] if self._engine is None else [self._engine.close()]
        closing += [self._workflow.close()] if isinstance(self._workflow, WorkflowPool) else []
        # Neither waits for the other, or fails by it.
        for error in filter(None, await asyncio.gather(*closing, return_exceptions=True)):
            raise error

    async def judge_channel(self, channel: WeightChannel, host: str) -> str:
        return channel_refusal(channel, host, self._options.run_dir)

    async def prepare_weights(self, manifest: WeightManifest) -> WeightAck:
        async with self._weights_turn:
            return await self._weights.prepare(manifest)

    async def commit_weights(self, version: int) -> WeightAck:
        async with self._weights_turn:
            ack = await self._weights.commit(version)
        if not ack.accepted:
            return ack
        self._version = version
        if self._tenant is not None:
            self._tenant.has_weights = True
        self._serving.set()
        self._telemetry.event("weights-adopted", f"serves version {version}", version=version)
        try:
            await self._buffer.adopted(self.ctx.name, self.ctx.epoch, version, self._weights.lineage)
        except CallError as err:
            self.ctx.log.warning("the buffer did not hear of version %d: %s (the next draw reports it)", version, err)
        return ack

    async def weight_progress(self) -> WeightProgress:
        return self._weights.progress()

    async def fence(self, epoch: int, reason: str) -> bool:
        if epoch != self.ctx.epoch:
            return False
        error = EngineError(f"{self.ctx.name} was fenced: {reason}", remedy="it is restarted with new weights")
        self.ctx.spawn(self._give_engine_up(error, is_fenced=True), name="fenced")
        return True

    async def _watch(self, engine: Engine) -> None:
        try:
            await engine.until_lost()
        except EngineError as err:
            await self._give_engine_up(err)

    def _on_lie(self, lie: EngineLied) -> None:
        self._pull.counts["num_lies"] += 1
        self._telemetry.event("engine-lied", lie.message)
        self.ctx.spawn(self._give_engine_up(lie), name="lied")

    async def _give_engine_up(self, error: EngineError, *, is_fenced: bool = False) -> None:
        """Its groups go elsewhere with their tokens; then this actor fails and is restarted."""
        if self._is_given_up:
            return
        self._is_given_up = True
        num_groups = await self._pull.hand_back(None if is_fenced else error)
        self.ctx.log.error("the engine is given up, %d groups go elsewhere: %s", num_groups, error)
        raise error

    async def load_engine(self) -> None:
        await require(self._tenant, self.ctx.name).load()

    async def memory_command(self, command: MemoryCommand) -> MemoryReply:
        return await require(self._tenant, self.ctx.name).tenant.command(command)

    async def memory_report(self) -> TenantReport | None:
        return None if self._tenant is None else self._tenant.tenant.report()

    async def evaluate(self, request: EvalRequest) -> EvalResult:
        runner, log = self._ready_runner(), self.ctx.log
        return await self._evaluation.answer(runner, request, self.ctx.name, self._version, log=log)

    async def answer(self, request: EvalRequest) -> CanaryAnswers:
        prefix = f"{self.ctx.name}.{self.ctx.epoch}.canary{self._evaluation.number()}."
        with self._meter.working("canary"):
            model = self._ready_runner().model
            return await answer_canary(model, self._tokenizer, request, name=self.ctx.name, prefix=prefix)

    async def status(self) -> EngineStatus:
        status = EngineStatus(
            rollout=self.ctx.name, version=self._version, running=0, waiting=0, draining=self._pull.is_draining
        )
        if self._engine is None or not self._serving.is_set():
            return status
        info = await self._engine.info()
        return replace(status, running=info.running, waiting=info.waiting, usage=info.usage)

    async def profile_engine(self, duration_s: float) -> tuple[EngineTrace, ...]:
        if not isinstance(self._engine, ProfilesItself):
            return ()
        try:
            return await self._engine.profile(duration_s)
        except EngineError as error:  # a refusal is an answer: the engine serves
            return (EngineTrace(engine=self.ctx.name, refused=str(error)),)

    async def _report(self) -> None:
        """Tell the coordinator that this actor serves, and what it must be handed."""

        async def send() -> None:
            status = await self.status()
            if self._tenant is not None and not self._tenant.has_weights:
                status = replace(status, version=NO_VERSION)
            await self._coordinator.rollout_ready(status, self.ctx.epoch)

        await until_answered(send, who=COORDINATOR, clock=self.ctx.clock, log=self.ctx.log)

    async def drain(self) -> int:
        tasks = self._pull.end()
        if self._tenant is not None:
            self._tenant.turn.end()
        if self._engine is not None and tasks:
            await self._engine.abort()
        if tasks:
            await asyncio.wait(tasks, timeout=30)
        return len(tasks)

    def _ready_runner(self) -> GroupRunner:
        if self._runner is None:
            raise EngineError(f"{self.ctx.name} has no engine yet", remedy="ask again once it serves")
        return self._runner

    async def _gauge_forever(self, runner: GroupRunner) -> None:
        started_s, usage = self._clock.monotonic(), EngineUsage()
        while True:
            await self._pace.pause()
            elapsed_s = max(self._clock.monotonic() - started_s, 1e-6)
            started_s += elapsed_s
            try:
                load = await self.status()
            except EngineError as err:  # whether it is lost is for `until_lost` to say, and it says why
                self.ctx.log.warning("the engine does not report its load: %s", err)
                continue
            sums = defaultdict[str, float](float, runner.sums)
            runner.sums.clear()
            values = {
                "rollout/tokens_per_s": sums["tokens"] / elapsed_s,
                "rollout/running": float(load.running),
                "rollout/waiting": float(load.waiting),
                "rollout/in_flight": float(self._pull.num_groups),
                "rollout/concurrency": float(self._options.concurrency),
                "rollout/max_running": float(self._max_running),
                **{f"rollout/{name}": float(count) for name, count in self._pull.counts.items()},
                **{name: float(count) for name, count in runner.failures.items()},
                **self._judges.gauges(),
                **load.usage.rates_since(usage),
            }
            usage = load.usage
            if num_samples := sums["samples"]:
                values["rollout/reward_s_mean"] = sums["reward_s"] / num_samples
                values["rollout/env_s_mean"] = sums["env_s"] / num_samples
                values["rollout/env_s_max"] = sums["max_env_s"]
                values["rollout/truncated_fraction"] = sums["truncated"] / num_samples
            self._telemetry.metric(load.version if self._engine is not None else -1, values)

    def _tell_failure(self, kind: str, words: str) -> None:
        self.ctx.log.warning("member-failed (%s): %s", kind, words)
        self._telemetry.event("member-failed", f"{kind}: {words}", failure=kind)
