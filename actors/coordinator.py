"""The coordinator role: run state machine, version clock, adoption of weights, evaluation, the end of the run.

It moves no data and admits no sample: rollout, buffer and trainer go on without it, up to the admission limit.

    starting   waits for the trainer and for the first engine that serves the trainer's version
    running    every version made is adopted by the engines, one after another; evaluation on the side
    draining   the leader ended: last adoption, last evaluation
    finished / failed   the launcher reads it here and ends the processes
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from ..core.activity import ActivityMeter, TelemetryBuffer
from ..core.actor import MailboxPolicy, PeerEvent, with_deadline
from ..core.clock import Clock
from ..core.errors import CallError, Draining, EngineError, LaunchError, MyxaError, NoSuchActor, PeerDied
from ..core.messages import (
    BufferStats,
    CanaryAnswers,
    EngineStatus,
    EvalRequest,
    RunPhase,
    RunStatus,
    SamplingParams,
    StepReport,
    WeightManifest,
)
from ..core.patience import until_answered
from .adoption import Adopt, Adoption
from .contracts import (
    BufferContract,
    CoordinatorContract,
    DataContract,
    MonitorContract,
    RolloutContract,
    TrainerContract,
)
from .telemetry import report_forever

_ALLOWED: dict[RunPhase, frozenset[RunPhase]] = {
    "starting": frozenset({"running", "draining", "failed"}),
    "running": frozenset({"draining", "failed"}),
    "draining": frozenset({"finished", "failed"}),
    "finished": frozenset(),
    "failed": frozenset(),
}


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """Plain settings of the role."""

    name: str
    num_steps: int
    has_engines: bool
    """False for supervised runs: nothing to adopt, nothing to evaluate on."""
    max_wall_s: float = 0.0
    stop_reward: float = 0.0
    eval_every: int = 0
    eval_at_start: bool = True
    eval_prompts: int = 0
    """0: no evaluation set."""
    eval_samples: int = 1
    eval_sampling: SamplingParams = field(default_factory=SamplingParams)
    canary_prompts: int = 8
    canary_sampling: SamplingParams = field(default_factory=SamplingParams)
    start_timeout_s: float = 300.0
    prepare_s: float = 60.0
    commit_s: float = 30.0
    takes_turns: bool = False
    """Trainer and engines share devices in turns: a version is let go as soon as every engine has it, and engines may
    lose their weights between two versions."""


class Coordinator(CoordinatorContract):
    """See the module's head."""

    mailbox = MailboxPolicy(size=4096)

    def __init__(self, *, options: CoordinatorOptions, clock: Clock) -> None:
        self._options = options
        self._clock = clock
        self._phase: RunPhase = "starting"
        self._adoption = Adoption(keeps_newest=not options.takes_turns)
        self._changed = asyncio.Event()
        self._adopting = asyncio.Lock()
        self._evaluating = asyncio.Lock()
        self._trainer_version = -1
        self._engines: dict[str, EngineStatus] = {}
        self._ready_rollouts = 0
        self._error = ""
        self._reason = ""
        self._eval_reward: float | None = None
        self._trainer_is_up = asyncio.Event()
        self._leader_reason: str | None = None
        self._paused = ""
        self._adopted = asyncio.Event()
        self._asked: dict[str, int] = {}
        """Rollout actor -> version at which the canary was last put to it."""

    # -- life

    async def on_start(self) -> None:
        self._meter = ActivityMeter(self.ctx.name, self._clock)
        self._telemetry = TelemetryBuffer(self.ctx.name, self._clock, meter=self._meter)
        self._meter.switch("other", "start")
        self._buffer = self.ctx.ref(BufferContract, "buffer")
        self._leader = self.ctx.ref(TrainerContract, "trainer/0")
        self.ctx.watch("rollout/")
        send = self.ctx.ref(MonitorContract, "monitor").telemetry
        self.ctx.spawn(report_forever(self._telemetry, send), name="coordinator-telemetry")
        self.ctx.spawn(self._run(), name="coordinator-run")

    async def on_peer(self, event: PeerEvent) -> None:
        if event.kind in ("down", "restarted") and event.name in self._engines:
            self._event("engine-gone", f"{event.name} (epoch {event.epoch}): {event.reason}")
            self._adoption.gone(event.name, event.epoch)
            self._engines.pop(event.name, None)
            self._changed.set()

    async def _run(self) -> None:
        await self._start_run()
        if self._options.max_wall_s:
            self.ctx.spawn(self._end_by_wall_clock(), name="wall-clock")
        await self._adopt_forever()

    async def _start_run(self) -> None:
        """Bring one engine to the trainer's version, evaluate once, let the leader go."""
        try:
            async with asyncio.timeout(self._options.start_timeout_s):
                await self._trainer_is_up.wait()
                while self._phase == "starting" and self._options.has_engines and not self._adoption.serving:
                    await self._adopt_pending()
                    if not self._adoption.serving:
                        await self._wait_change()
        except TimeoutError as err:
            missing = "trainer/0" if not self._trainer_is_up.is_set() else "any rollout actor with a serving engine"
            raise LaunchError(
                f"{missing} was not ready within {self._options.start_timeout_s:g} s",
                remedy="see its log; a model that does not load or a missing package is the usual cause",
            ) from err
        self._meter.switch("other", "conduct")
        if self._options.eval_at_start:
            await self._evaluate()
        if self._phase == "starting":
            self._move("running")
            await until_answered(
                lambda: self._leader.run_leader(self._trainer_version),
                who="trainer/0",
                clock=self._clock,
                log=self.ctx.log,
            )

    async def _end_by_wall_clock(self) -> None:
        await asyncio.sleep(self._options.max_wall_s)
        await self.stop(f"run.max_wall_s = {self._options.max_wall_s:g} s is over")

    # -- adoption of weights

    async def _adopt_forever(self) -> None:
        while self._phase in ("running", "draining"):
            await self._adopt_pending()
            if self._leader_reason is not None:
                await self._end(self._leader_reason)
                return
            await self._wait_change()

    async def _wait_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _adopt_pending(self) -> None:
        """One engine after another until all serve the newest version; then let go of old versions."""
        async with self._adopting:
            while (instruction := self._adoption.next()) is not None:
                started = self._clock.monotonic()
                await self._adopt(instruction)
                seconds = self._clock.monotonic() - started
                self._telemetry.metric(instruction.manifest.version, {"weights/adopt_s": seconds})
                await self._release()
            await self._release()

    async def _adopt(self, instruction: Adopt) -> None:
        """Prepare and commit one engine. A refusal or a missed deadline fences that engine; the others go on."""
        name, manifest = instruction.engine, instruction.manifest
        engine, options = self.ctx.ref(RolloutContract, name), self._options
        phase = "prepare"
        try:
            async with asyncio.timeout(options.prepare_s):
                ack = await with_deadline(engine, options.prepare_s).prepare_weights(manifest)
            if ack.accepted:
                phase = "commit"
                async with asyncio.timeout(options.commit_s):
                    ack = await with_deadline(engine, options.commit_s).commit_weights(manifest.version)
        except (Draining, NoSuchActor, PeerDied) as err:
            self._event("engine-left", f"{name} (epoch {instruction.epoch}) left during {phase}: {err.message}")
            self._adoption.gone(name, instruction.epoch)
            return
        except (CallError, TimeoutError) as err:
            await self._fence(instruction, f"{phase} of version {manifest.version}: {err or 'deadline'}")
            return
        if not ack.accepted:
            await self._fence(instruction, f"{phase} of version {manifest.version} refused: {ack.reason}")
            return
        self._adoption.adopted(name, instruction.epoch, manifest.version)
        self._adopted.set()
        if name in self._engines:
            self._engines[name] = EngineStatus(rollout=name, version=manifest.version, running=0, waiting=0)

    async def _fence(self, instruction: Adopt, reason: str) -> None:
        self._adoption.fenced(instruction.engine, instruction.epoch)
        self._event("engine-fenced", f"{instruction.engine}: {reason}")
        self.ctx.log.error("%s is fenced: %s", instruction.engine, reason)
        try:
            await self.ctx.ref(RolloutContract, instruction.engine).fence(reason)
        except CallError as err:
            self.ctx.log.info("%s could not be told: %s", instruction.engine, err)

    async def _release(self) -> None:
        for version in self._adoption.releasable():
            try:
                await self._leader.release_weights(version)
            except CallError as err:
                self.ctx.log.warning("release of version %d: %s", version, err)

    # -- told by others

    async def rollout_ready(self, status: EngineStatus, epoch: int) -> None:
        self._engines[status.rollout] = status
        if self._options.has_engines:
            self._adoption.joined(status.rollout, epoch)
        self._event("engine-joined", f"{status.rollout} (epoch {epoch})")
        self._changed.set()

    async def weights_lost(self, rollout: str, epoch: int) -> None:
        self._adoption.lost(rollout, epoch)

    async def weights_offered(self, manifest: WeightManifest) -> None:
        self._adoption.published(manifest)
        self._changed.set()

    async def trainer_ready(self, version: int, manifest: WeightManifest | None, facts: dict[str, str]) -> None:
        if self._phase != "starting":
            await self.actor_failed("trainer/0", "it restarted in mid-run; go on with trainer.resume = <this run>")
            return
        self._trainer_version = version
        if manifest is not None:
            self._adoption.published(manifest)
        self._event("trainer-ready", f"version {version}", **facts)
        self._trainer_is_up.set()
        self._changed.set()

    async def version_made(self, manifest: WeightManifest | None, report: StepReport) -> None:
        self._trainer_version = report.version
        if manifest is not None:
            self._adoption.published(manifest)
        self._changed.set()
        every = self._options.eval_every
        is_last = report.version == self._options.num_steps
        if every and report.version % every == 0 and not is_last:
            self.ctx.spawn(self._evaluate(), name=f"evaluate-{report.version}")

    async def trainer_finished(self, version: int, reason: str) -> None:
        self._leader_reason = reason
        self._changed.set()

    async def actor_failed(self, name: str, error: str) -> None:
        self._error = self._error or f"{name}: {error}"
        self._reason = self._error
        if self._phase not in ("finished", "failed"):
            self._move("failed")
        self._changed.set()

    async def set_max_staleness(self, max_staleness: int) -> BufferStats:
        stats = await self._buffer.set_admission(max_staleness=max_staleness)
        self._event("knob", f"max_staleness = {max_staleness}")
        return stats

    async def stop(self, reason: str) -> None:
        self._reason = self._reason or reason
        if self._phase == "starting":
            self._leader_reason = reason
            self._move("draining")
            self._changed.set()
            return
        await self._leader.stop_leader(reason)

    # -- evaluation

    async def _evaluate(self) -> None:
        """Held-out reward on the engine that serves the newest version; a failure is told, not fatal."""
        options = self._options
        if not options.eval_prompts or not (options.takes_turns or self._adoption.serving):
            return
        async with self._evaluating:
            try:
                name = max(await self._engines_at(None), key=lambda n: self._adoption.serving.get(n, -1))
                prompts = await self.ctx.ref(DataContract, "buffer").eval_prompts(options.eval_prompts)
                request = EvalRequest(prompts=prompts, num_samples=options.eval_samples, sampling=options.eval_sampling)
                result = await self.ctx.ref(RolloutContract, name).evaluate(request)
            except MyxaError as err:
                self._event("eval-failed", str(err))
                self.ctx.log.exception("evaluation")
                return
        self._eval_reward = result.mean_reward
        self._telemetry.metric(result.newest_version, {"eval/reward": result.mean_reward})
        self._event(
            "eval",
            f"held-out reward {result.mean_reward:.3f} over {result.num_samples} samples "
            f"(versions {result.oldest_version} to {result.newest_version})",
        )
        target = options.stop_reward
        if target and result.mean_reward >= target and self._phase == "running":
            await self.stop(f"held-out reward {result.mean_reward:.3f} reached run.stop_reward = {target:g}")

    # -- comparison with the trainer

    async def canary(self, version: int) -> CanaryAnswers:
        prompts = await self.ctx.ref(DataContract, "buffer").canary_prompts(self._options.canary_prompts)
        request = EvalRequest(prompts=prompts, num_samples=1, sampling=self._options.canary_sampling)
        try:
            return await self._ask_canary(version, request)
        except MyxaError as err:
            self.ctx.log.warning("canary of version %d: %s; another engine is asked", version, err)
        return await self._ask_canary(version, request)

    async def _ask_canary(self, version: int, request: EvalRequest) -> CanaryAnswers:
        name = min(await self._engines_at(version), key=lambda n: (self._asked.get(n, -1), n))
        self._asked[name] = version
        return await self.ctx.ref(RolloutContract, name).answer(request)

    async def _engines_at(self, version: int | None) -> list[str]:
        """Engines that serve exactly that version (None: any)."""
        try:
            async with asyncio.timeout(self._options.prepare_s + self._options.commit_s):
                while not (ready := [n for n, v in self._adoption.serving.items() if version in (None, v)]):
                    self._adopted.clear()
                    await self._adopted.wait()
        except TimeoutError as err:
            what = "a version" if version is None else f"version {version}"
            raise EngineError(f"no engine came to {what} in time", remedy="see the engines' logs") from err
        return ready

    async def pause(self, reason: str) -> None:
        self._paused = reason
        self._event("run-paused", reason)
        await self._buffer.set_paused(True)

    async def resume(self) -> None:
        self._paused = ""
        self._event("run-resumed", "by request")
        await self._buffer.set_paused(False)

    # -- the end

    async def _end(self, reason: str) -> None:
        if self._phase == "running":
            self._move("draining")
        self._reason = self._reason or reason
        await self._adopt_pending()
        await self._evaluate()
        if self._phase == "draining":
            self._move("finished")

    def _move(self, phase: RunPhase) -> None:
        if phase not in _ALLOWED[self._phase]:
            raise LaunchError(f"the run cannot go from {self._phase} to {phase}", remedy="this is a bug; report it")
        self._event("phase", f"{self._phase} -> {phase}")
        self._phase = phase
        if phase == "finished":
            self._event("run-ended", self._reason)
        elif phase == "failed":
            self._event("run-failed", self._error)

    async def status(self) -> RunStatus:
        return RunStatus(
            name=self._options.name,
            phase=self._phase,
            version=max(self._trainer_version, 0),
            num_steps=self._options.num_steps,
            engines=tuple(self._engines.values()),
            error=self._error,
            reason=self._reason,
            eval_reward=self._eval_reward,
            paused=self._paused,
        )

    # -- telling

    def _event(self, kind: str, text: str, **data: str) -> None:
        self.ctx.log.info("%s: %s", kind, text)
        self._telemetry.event(kind, text, **data)
