"""The training loop: claim -> plan -> train on all ranks -> publish -> report. One pass makes one weight version.

    claim      the buffer gives whole groups within the staleness bound; `ClaimedBatch.check` checks the bound once more
    plan       advantages and one shard per rank (`step_plan.py`); knobs of the boundary "step" change before it
    train      every rank trains its shard; then the buffer records the groups as trained
    publish    the ranks write the new version (`weights/publish.py`); knobs of the boundary "weights" change before it
    report     the coordinator gets the metrics and offers the version to the engines; checkpoints are written

The loop runs in the trainer actor of rank 0 and calls all ranks, itself included, by their contract. Each wait is a
call with a deadline or an event that the coordinator sets, and is booked: wait-data, wait-weights, or paused.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path

import msgspec

from ...core.actor import PeerEvent
from ...core.config import TrainerConfig
from ...core.daemon_thread import in_daemon_thread
from ...core.errors import (
    DataError,
    DeadlineExceeded,
    GatherError,
    MessageTooLarge,
    MyxaError,
    TrainError,
    UserCodeError,
)
from ...core.files import until_written
from ...core.ids import LEADER
from ...core.knobs import KnobValue, LiveKnobs, Operator
from ...core.messages import ActivityKind, Claim, EvalResult, StepReport, WeightChannel, WeightManifest
from ...core.protocols import StepStats
from ...core.refs import together, with_deadline
from ...core.samples import Group, Prompt, TrainShard
from ...core.timeouts import TIMEOUTS
from ..contracts import BufferContract, CoordinatorContract, TrainerContract
from ..knobs.owner import KnobOwner, pull
from ..ledger.file import State
from ..telemetry import Reporter
from ..tenancy.time_share import TimeShare
from ..weights.publish import Publisher, max_unreleased
from .checkpoints import CheckpointOptions, CheckpointOrders, Checkpoints
from .knobs import TrainerKnobs
from .step_plan import ClaimedBatch, PartMetrics, StepPlanOptions, planned_step

_RESTING = ("paused", "disk")
"""Reasons of the buffer for having no batch that no other work of the run can end."""
COORDINATOR = "coordinator"
PAIR_METRICS = ("loss", "accuracy", "margin", "rewards/chosen", "rewards/rejected")
"""Metrics of an evaluation on pairs."""
GUARD = Operator(user="guard", via="auto")
GUARD_REMEDY = "compare both by hand before going on: see docs/engines.md; `guard.bound = 0` switches the check off"


@dataclass(frozen=True, slots=True)
class TrainLoopOptions:
    """Plain settings of the loop."""

    world_size: int
    num_steps: int
    """0: until the data ends or the run is stopped. A live knob."""
    plan: StepPlanOptions
    publishes: bool
    """False when no engine wants weights (supervised runs)."""
    run_dir: str
    checkpoints: CheckpointOptions
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    setup_timeout_s: float = 300.0
    shard_of_rank: tuple[int, ...] = ()
    """Number of the shard that each rank trains, where ranks share one; empty: each its own."""
    guard_bound: float = 0.0
    """Mean |difference| (nats) of engine and trainer above which the run pauses (`guard_fails`: fails); 0: none."""
    guard_fails: bool = False
    channel: WeightChannel = "shm"
    make_pair: Callable[[Prompt], Group] | None = None
    """Writes a row's two answers as samples; blocks. None: this run has no pairs."""
    step_values: Mapping[str, KnobValue] = field(default_factory=dict[str, KnobValue])
    """What the run file says of the knobs that ranks use; see `step_values` in `knobs.py`."""

    def knobs(self, *, takes_turns: bool) -> TrainerKnobs:
        """The live knobs of a run with these settings. `takes_turns`: with engines on the same devices, which are then
        given every version, since they lose their weights in between."""
        values: dict[str, KnobValue] = {
            **self.step_values,
            "num_steps": self.num_steps,
            "max_tokens_per_microbatch": self.plan.max_tokens,
            "checkpoint_every": self.checkpoints.trainer.checkpoint_every,
            "keep_last": self.checkpoints.trainer.keep_last,
        }
        if self.publishes and not takes_turns:
            values["weights_every"] = 1
        return TrainerKnobs(values)


def slowest_tenth(steps_s: Collection[float]) -> dict[str, float]:
    """Metric: the share of the time of these steps that the slowest tenth of them took; none of fewer than 20."""
    slowest = sorted(steps_s)[-(len(steps_s) // 10) :]
    return {"leader/slowest_tenth": sum(slowest) / sum(steps_s)} if len(steps_s) >= 20 and any(steps_s) else {}


@dataclass(eq=False)
class TrainLoop:
    """Claims, plans, trains, publishes and reports until the run ends. One per run, in the actor trainer/0."""

    report: Reporter
    options: TrainLoopOptions
    owner: KnobOwner
    """Puts changes of `knobs` into force."""
    knobs: TrainerKnobs
    share: TimeShare | None = None
    """Where ranks and engines have the devices in turns."""

    def __post_init__(self) -> None:
        report, options = self.report, self.options
        self._ctx, self._meter, self._telemetry = report.ctx, report.meter, report.telemetry
        self._clock, self._tell, self._ask = report.clock, report.tell, report.ask
        self._gang = TrainerGang(
            report,
            options.world_size,
            shard_of_rank=options.shard_of_rank,
            step_timeout_s=options.trainer.step_timeout_s,
        )
        ranks = self._gang.ranks
        self._buffer = self._ctx.ref(BufferContract, "buffer")
        self._fetcher = GroupFetcher(lambda ids: self._ask("buffer", lambda: self._buffer.fetch(ids)))
        self._coordinator = self._ctx.ref(CoordinatorContract, COORDINATOR)
        self._written = -1
        """Version that was written as the run's last: in a checkpoint and exported, as far as that was asked for."""
        self.checkpoints = Checkpoints(report, options.checkpoints, ranks, self._buffer, self._coordinator)
        self.orders = CheckpointOrders(report, self.checkpoints, ranks, options.run_dir)
        limit = max_unreleased(options.channel)
        self.publisher = Publisher(report, ranks, limit, Path(options.run_dir))
        self.link = CoordinatorLink(report, self.publisher)
        self._parts = PartMetrics()
        self._trained_s = deque[float](maxlen=50)
        """How long the newest steps took the ranks, but for the first one, which warms up."""
        self._is_warm = False
        self._rate = 1.0
        """Learning rate of the newest step."""
        self._may_go = asyncio.Event()
        self._ranks_are_free = asyncio.Lock()
        """Held by the loop but at boundaries: ranks take one call after another, all in the same order."""
        self._stop_reason = ""
        self._lost: TrainError | None = None
        """Why ranks may be left in a collective that others did not reach, since an evaluation."""
        self._inventory = ""

    def go(self, start_version: int) -> None:
        """Start stepping from the version that the ranks have; `start_version` is the coordinator's view of it. An
        order that arrives before the gang reported in was meant for the gang before it, and is void."""
        version = self.link.version
        if version < 0:
            self._ctx.log.warning("an order to start at version %d was not for this gang; ignored", start_version)
            return
        self._ctx.log.info("the coordinator lets the loop start at version %d; it is at %d", start_version, version)
        self.link.is_leading = True
        self._may_go.set()

    def stop(self, reason: str) -> None:
        self._stop_reason = self._stop_reason or reason
        self._may_go.set()

    async def run(
        self, version: int, facts: dict[str, str], live: LiveKnobs | None = None, *, is_restart: bool = False
    ) -> None:
        """From set-up to the end of the run. `live`: knobs as the checkpoint that it continues from holds them.
        `is_restart`: the gang was here before, so what was trained after `version` is undone."""
        self.checkpoints.continue_from(version)
        await self._ctx.wait_for("coordinator", "buffer", *self._gang.ranks, timeout_s=self.options.setup_timeout_s)
        if version > 0 or is_restart:
            await self._ask("buffer", lambda: self._buffer.rewind(version, self._ctx.epoch))
        manifest = await self.publisher.publish(version) if self.options.publishes else None
        async with self._engines_turn(version):
            await self.link.ready(version, manifest, facts, live)
        with self._meter.during("other", "start, first engine"):
            await self._may_go.wait()
        await self._ranks_are_free.acquire()
        await self._lead(version)
        self._ranks_are_free.release()

    async def _lead(self, version: int) -> None:
        start_version = version
        self._meter.switch("compute", "lead")
        reason = ""
        while not await self._is_end(version):
            batch = await self._next_batch(version)
            if batch is None:
                reason = self._stop_reason or self._end_of_data(version)
                break
            version = await self._step(version, batch)
            if self._stop_reason:
                reason = self._stop_reason
                break
        if not reason and version == start_version:
            reason = f"all {version} steps were done before; to train further, raise run.num_steps = {self._last}"
        await self._finish(version, start_version, reason or f"all {version} steps done")
        self._meter.switch("wait-data", "end of the run")

    @property
    def _last(self) -> int:
        """The version that ends the run, as far as knobs are in force."""
        return self.knobs.count("num_steps") or sys.maxsize

    async def _is_end(self, version: int) -> bool:
        """Whether no step is made from `version`. What was decided for that step is used before this is said; after it
        the end moves no more, and a change that would move it is refused."""
        if version >= self._last and not self.knobs.is_at_end:
            await self._pass_step(version)
            self.knobs.is_at_end = version >= self._last
        return self.knobs.is_at_end

    async def _next_batch(self, version: int) -> ClaimedBatch | None:
        """Wait for a whole batch; None when there is none to come or the run is to stop."""
        blocked_by = "wait-data"
        while not self._stop_reason:
            kind: ActivityKind = "paused" if blocked_by in _RESTING else "wait-data"
            with self._meter.during(kind, {"disk": "disk"}.get(blocked_by, f"claim {version}")):
                claim = await self._claim(version, blocked_by)
                if claim.groups:
                    batch = ClaimedBatch(await self._fetcher.groups(tuple(claim.groups)), claim.groups)
                    batch.check(version, claim.max_staleness)
                    return batch
            if claim.finished:
                self._inventory = claim.reason
                break
            blocked_by = claim.blocked_by or "wait-data"
            await self._between_claims(version, blocked_by)
        return None

    async def _claim(self, version: int, blocked_by: str) -> Claim:
        is_held_back = self.options.publishes and self.publisher.newest < version and blocked_by not in _RESTING
        wait_s = TIMEOUTS.trainer.held_back_s if is_held_back else TIMEOUTS.trainer.claim_s
        return await self._ask("buffer", lambda: self._buffer.claim(version, wait_s, blocked_by))

    async def _between_claims(self, version: int, blocked_by: str) -> None:
        """There is no batch yet: do what else can be done while the trainer is at `version`."""
        newcomers = self.share is not None and self.share.has_newcomers
        # in turns on a device, a checkpoint is finished with the next step, for a turn costs the engines seconds
        is_written = self.checkpoints.is_written and (self.share is None or blocked_by in _RESTING)
        if newcomers or is_written or self.orders.are_waiting:
            async with self._trainers_turn(version):
                await self.checkpoints.at_boundary(version)
                await self.orders.serve(version)
                if newcomers:
                    self._ctx.log.info("version %d is handed over again, to new engines", version)
        await self._let_evaluate()
        if blocked_by not in _RESTING:
            await self._give_held_back(version)

    def _end_of_data(self, version: int) -> str:
        """Why the loop ends now. A run that could not make a single step did not do what it was started for."""
        if version == 0:
            raise DataError(
                f"the data ended before the first batch was whole ({self._inventory})",
                remedy="lower algo.batch_size, raise data.max_passes, or see why groups were left out",
            )
        return f"no more data after {version} steps"

    async def _step(self, version: int, batch: ClaimedBatch) -> int:
        """One optimizer step (or several mini-batches), reported to buffer, engines and people."""
        started = self._clock.monotonic()
        await self._pass_step(version)
        with self._meter.during("compute", f"plan {version}"):
            options = self.knobs.plan_options(self.options.plan)
            plan = await planned_step(version, batch, options, self.options.trainer.step_timeout_s)
        if self.share is not None:
            await self.share.take()
        with self._meter.during("wait-data", "ranks"):
            stats = await self._gang.train(plan.shards, self.knobs.for_step())
        metrics = plan.metrics | self._parts.of(batch.groups) | stats.metrics | self.knobs.metrics()
        metrics["knobs/epoch"] = float(self.owner.epoch)
        self._check_rate(version, metrics.get("train/lr", self._rate))
        new_version = self.link.version = version + 1
        with self._meter.during("wait-data", "tell buffer"):
            await self._ask("buffer", lambda: self._buffer.trained(version))
        await self._is_end(new_version)  # before anything is written or published as the run's last
        if self.share is not None:
            await self._write_if_due(new_version)
            self.share.trained()
        publish_started = self._clock.monotonic()
        manifest = await self._publish_if_due(new_version)
        metrics["weights/publish_s"] = self._clock.monotonic() - publish_started
        metrics["leader/step_wall_s"] = self._clock.monotonic() - started
        self._trained_s.extend([metrics.get("train/step_s", 0.0)] * self._is_warm)
        self._is_warm = True
        metrics |= slowest_tenth(self._trained_s)
        group_ids = tuple(g.group_id for g in batch.groups)
        report = StepReport(step=version, version=new_version, metrics=metrics, lags=plan.lags, group_ids=group_ids)
        self._telemetry.metric(new_version, metrics)
        async with self._engines_turn(new_version):
            with self._meter.during("wait-weights", "tell coordinator"):
                await self._ask("coordinator", lambda: self._coordinator.version_made(manifest, report))
        if self.share is None:
            await self._write_if_due(new_version)
        else:
            self._telemetry.metric(new_version, self.share.metrics())
        if not any(plan.lags):
            await self._guard(version, stats.metrics.get("train/logprob_diff_abs_mean", 0.0))
        return new_version

    def _check_rate(self, version: int, rate: float) -> None:
        before, self._rate = self._rate, rate
        if before and not rate:
            text = f"from step {version} on nothing is learned: the schedule has ended, with the learning rate 0"
            self.report.warn("learning-rate-zero", f"{text} -- set decay_steps or min_lr_ratio")

    async def _guard(self, version: int, gap: float) -> None:
        """`gap`: mean |log p(engine) - log p(trainer)| of tokens that `version` generated: precision, kernels, a weight
        that never arrived. Raises TrainError above the bound if that is to fail the run."""
        bound = self.options.guard_bound
        if not bound or gap <= bound:
            return
        reason = (
            f"engines and trainer disagree at weight version {version}: mean |log-prob difference| {gap:.3g} nats, "
            f"guard.bound is {bound:g}"
        )
        if self.options.guard_fails:
            raise TrainError(reason, remedy=GUARD_REMEDY)
        self._ctx.log.error("%s -- %s", reason, GUARD_REMEDY)
        await self._ask(
            "coordinator", lambda: self._coordinator.set_pause("pause", GUARD, f"{reason} -- {GUARD_REMEDY}")
        )

    async def _pass_step(self, version: int) -> None:
        """What was decided for the step from `version` is in force from here on."""
        with self._meter.during("wait-data", "knobs"):
            used = await pull(self._ctx, self.owner, "step", version)
        if used:
            values = {name: self.knobs.count(name) for name in ("checkpoint_every", "keep_last")}
            options = self.checkpoints.options
            self.checkpoints.options = replace(options, trainer=options.trainer.model_copy(update=values))

    async def _publish_if_due(self, version: int) -> WeightManifest | None:
        """None where engines keep what they have. The last version is always published."""
        if not self.options.publishes:
            return None
        with self._meter.during("wait-weights", "knobs"):
            await pull(self._ctx, self.owner, "weights", version)
        is_due = version - self.publisher.newest >= self.knobs.count("weights_every", 1)
        return await self.publisher.publish(version) if is_due or version >= self._last else None

    async def _give_held_back(self, version: int) -> None:
        """Engines lack `version`: given once nothing is under way, for no group may start before they have it."""
        if not self.options.publishes or self.publisher.newest == version:
            return
        stats = await self._ask("buffer", self._buffer.stats)
        if not stats.states.get(State.DISPATCHED, 0):
            await self._offer(version)

    async def _offer(self, version: int) -> None:
        manifest = await self.publisher.publish(version)
        await self._ask("coordinator", lambda: self._coordinator.weights_offered(manifest))

    async def _finish(self, version: int, start_version: int, reason: str) -> None:
        self.orders.close(reason)
        self.knobs.is_at_end = True
        if self.options.publishes and self.publisher.newest < version:
            await self._offer(version)
        if self._written != version:
            options = self.checkpoints.options
            is_asked = options.trainer.checkpoint_every > 0 or (options.at_stop and bool(self._stop_reason))
            is_new = is_asked and (version > start_version or self.checkpoints.lacks(version))
            if is_new or self.checkpoints.is_pending or self.options.trainer.export_at_end:
                async with self._trainers_turn(version):
                    await self._write_last(version, is_new=is_new)
        await self.link.finished(version, reason)

    async def _write_last(self, version: int, *, is_new: bool) -> None:
        """What is left of a run: a whole checkpoint, the exported model. A disk that refuses them is waited for."""
        run_dir = Path(self.options.run_dir)
        await until_written(
            lambda: self._try_last(version, is_new=is_new), path=run_dir, tell=self._tell, meter=self._meter
        )
        self._written = version

    async def _try_last(self, version: int, *, is_new: bool) -> None:
        await self.checkpoints.settle_by_schedule(version)
        if is_new:
            await self.checkpoints.save(version)
            await self.checkpoints.settle()
        if self.options.trainer.export_at_end:
            folder = str(Path(self.options.run_dir) / "export")
            with self._meter.during("compute", "finish"):
                exports = {name: rank.export_hf(folder) for name, rank in self._gang.ranks.items()}
                await together(exports, fails_fast=True)

    async def _write_if_due(self, version: int) -> None:
        """Checkpoints; where engines have the device next, also what is written at the end if this is it."""
        await self.checkpoints.at_boundary(version)
        if self.share is not None and version >= self._last:
            await self._write_last(version, is_new=self.checkpoints.options.trainer.checkpoint_every > 0)
        elif self.checkpoints.is_due(version):
            await self.checkpoints.save_by_schedule(version)
        await self.orders.serve(version)
        await self._let_evaluate()

    async def _let_evaluate(self) -> None:
        """Evaluations that wait for the ranks have them now."""
        self._ranks_are_free.release()
        with self._meter.during("other", "evaluation"):
            await self._ranks_are_free.acquire()  # those that waited before come first
        if self._lost is not None:
            raise self._lost

    async def evaluate(self, prompts: Sequence[Prompt]) -> EvalResult:
        """Means over these pairs, in steps of `algo.batch_size`. Raises TrainError for a run without pairs, the error
        of the first pair if none can be compared, and what a step raises."""

        async def attempt() -> EvalResult | MyxaError:
            try:
                return await self._compare(prompts)
            except MyxaError as error:
                return error

        # A caller that goes away cancels nothing: some ranks may have begun what others would then leave out.
        outcome = await asyncio.shield(self._ctx.spawn(attempt(), name="evaluate"))
        if isinstance(outcome, MyxaError):
            raise outcome
        return outcome

    async def _compare(self, prompts: Sequence[Prompt]) -> EvalResult:
        make_pair, options = self.options.make_pair, replace(self.options.plan, minibatches=1)
        if make_pair is None or not prompts:
            raise TrainError("this run has no held-out pairs", remedy="name some as eval.data")
        pairs, errors = await in_daemon_thread(lambda: _make_pairs(make_pair, prompts), "write held-out pairs")
        if not pairs:
            raise errors[0]
        sums = Counter[str]()
        async with self._ranks_are_free:
            version, size = max(self.link.version, 0), options.algo.batch_size
            for start in range(0, len(pairs), size):
                if self._stop_reason and not self.knobs.is_at_end:
                    raise TrainError("the run stops before all held-out pairs are compared")
                batch = pairs[start : start + size]
                plan = await planned_step(
                    version, ClaimedBatch(batch), self.knobs.plan_options(options), self.options.trainer.step_timeout_s
                )
                shards = [msgspec.structs.replace(shard, is_held_out=True) for shard in plan.shards]
                try:
                    metrics = (await self._gang.train(shards, self.knobs.for_step())).metrics
                except TrainError as error:
                    self._lost = error if self.options.world_size > 1 else None
                    raise
                sums.update({name: metrics[f"train/{name}"] * len(batch) for name in PAIR_METRICS})
        means = {name: total / len(pairs) for name, total in sums.items()}
        return EvalResult(
            mean_reward=means["accuracy"],
            num_samples=2 * len(pairs),
            oldest_version=version,
            newest_version=version,
            num_errors=len(errors),
            metrics=means | {"reward": means["accuracy"], "num_errors": float(len(errors))},
        )

    @asynccontextmanager
    async def _engines_turn(self, version: int) -> AsyncGenerator[None]:
        """Around telling that `version` was published: before, engines have room for it; after, once all of them took
        it, their turn. Where engines have their own devices, only the announcement."""
        if self.share is None:
            yield
            return
        await self.share.offer()
        yield
        await self.publisher.await_release(version)
        await self.share.give()

    @asynccontextmanager
    async def _trainers_turn(self, version: int) -> AsyncGenerator[None]:
        """The ranks compute inside; then `version`, which may have left the engines, is handed over again."""
        if self.share is None:
            yield
            return
        await self.share.take()
        yield
        self.share.trained()
        manifest = await self.publisher.publish(version)
        async with self._engines_turn(version):
            await self._ask("coordinator", lambda: self._coordinator.weights_offered(manifest))


def _make_pairs(make_pair: Callable[[Prompt], Group], prompts: Sequence[Prompt]) -> tuple[list[Group], list[MyxaError]]:
    groups, errors = list[Group](), list[MyxaError]()
    for prompt in prompts:
        try:
            groups.append(make_pair(prompt))
        except MyxaError as error:  # too long, or not to be written by the template: it would not be trained on either
            errors.append(error)
    return groups, errors


@dataclass(eq=False)
class TrainerGang:
    """Calls all ranks at once, with one deadline, and names a rank that does not answer. A rank that died ends the wait
    at once, one that hangs at the deadline. Both fail the loop, and the gang restarts as one."""

    report: Reporter
    world_size: int
    _: KW_ONLY
    shard_of_rank: Sequence[int]
    """Empty where each rank trains its own shard."""
    step_timeout_s: float

    def __post_init__(self) -> None:
        ranks = range(self.world_size)
        self.shard_of_rank = self.shard_of_rank or ranks
        refs = {name: self.report.ctx.ref(TrainerContract, name) for name in (f"trainer/{rank}" for rank in ranks)}
        self.ranks = {name: with_deadline(ref, self.step_timeout_s) for name, ref in refs.items()}
        """To be called together and failing fast: with one rank gone the others may hang in a collective, and cannot be
        cancelled there."""

    async def train(self, shards: Sequence[TrainShard], knobs: dict[str, float]) -> StepStats:
        """All ranks at once; rank 0's metrics. Raises TrainError naming who failed, UserCodeError of a user's loss."""
        started, began = self.report.clock.wall(), self.report.clock.monotonic()
        try:
            ranks = zip(self.ranks.items(), self.shard_of_rank, strict=True)
            calls = {name: rank.train_shard(shards[shard], knobs) for (name, rank), shard in ranks}
            stats = await together(calls, fails_fast=True)
        except GatherError as error:
            raise self._failed(shards[0].step, error) from error
        if shards[0].is_held_out:
            return stats[LEADER]
        group_ids = {sample.group_id for shard in shards for sample in shard.samples}
        self.report.telemetry.hop(
            "train", group_ids, started, self.report.clock.monotonic() - began, step=shards[0].step
        )
        return stats[LEADER]

    def _failed(self, step: int, error: GatherError) -> MyxaError:
        name, cause = next(iter(error.errors.items()))
        if isinstance(cause, UserCodeError):  # it would fail again: no restart helps
            return UserCodeError(cause.message, remedy=cause.remedy)
        if not isinstance(cause, DeadlineExceeded):
            return TrainError(f"{name} failed in step {step}: {cause}", remedy=f"see the log of {name}")
        silent = ", ".join(name for name in self.ranks if name in error.errors or name in error.unheard)
        return TrainError(
            f"step {step} was not done within {self.step_timeout_s:g} s: no answer from {silent}",
            remedy="see their logs for where they hang; a step that needs longer wants a higher trainer.step_timeout_s",
        )


@dataclass(slots=True)
class CoordinatorLink:
    """Reports to the coordinator that the gang is up or finished, and reports again to a coordinator that restarted."""

    report: Reporter
    publisher: Publisher
    version: int = -1
    """That the ranks have; -1: the gang has not reported in yet."""
    is_leading: bool = False
    """Whether the loop was started."""
    _facts: dict[str, str] = field(default_factory=dict[str, str])
    _live: LiveKnobs | None = None
    _finished: str = ""

    @property
    def _coordinator(self) -> CoordinatorContract:
        return self.report.ctx.ref(CoordinatorContract, COORDINATOR)

    async def ready(
        self, version: int, manifest: WeightManifest | None, facts: dict[str, str], live: LiveKnobs | None
    ) -> None:
        """The gang is up. `live`: knobs of its checkpoint. A coordinator that restarts just now may get this twice."""
        self._facts, self._live, self.version = facts, live, version
        await self.report.ask(COORDINATOR, lambda: self._coordinator.trainer_ready(version, manifest, facts, live))

    async def finished(self, version: int, reason: str) -> None:
        self._finished = reason
        await self.report.ask(COORDINATOR, lambda: self._coordinator.trainer_finished(version, reason))

    def on_peer(self, event: PeerEvent) -> None:
        """A coordinator that came up after the gang reported in does not know it."""
        if event.name == COORDINATOR and event.kind in ("up", "restarted") and self.version >= 0:
            self.report.ctx.spawn(self._tell_again(), name=f"tell coordinator {event.epoch}")

    async def _tell_again(self) -> None:
        """The former coordinator's pending releases are void. The new one releases later ones."""
        version, live = self.version, None if self.is_leading else self._live
        manifest, newest = self.publisher.readable, self.publisher.newest
        self.report.ctx.log.info("the coordinator is new: it gets the trainer's version, %d", version)
        await self.report.ask(
            COORDINATOR,
            lambda: self._coordinator.trainer_ready(version, manifest, self._facts, live, is_leading=self.is_leading),
        )
        await self.publisher.release_older(newest)
        if self._finished:
            await self.report.ask(COORDINATOR, lambda: self._coordinator.trainer_finished(version, self._finished))


class GroupFetcher:
    """Fetches the groups of a claimed batch in as few messages as the limit allows: all of them, half as many after a
    reply was too large; it keeps that number for later batches."""

    def __init__(self, fetch: Callable[[tuple[int, ...]], Awaitable[tuple[Group, ...]]]) -> None:
        """`fetch`: asks the buffer; raises MessageTooLarge if the answer is."""
        self._fetch = fetch
        self.at_once = 1 << 20

    async def groups(self, group_ids: tuple[int, ...]) -> tuple[Group, ...]:
        """In that order. Raises TrainError for a group that is too large by itself, and what `fetch` raises."""
        groups: list[Group] = []
        while ids := group_ids[len(groups) :][: self.at_once]:
            try:
                groups += await self._fetch(ids)
            except MessageTooLarge as error:
                if len(ids) == 1:
                    raise TrainError(
                        f"group {ids[0]} cannot be handed to the trainer: {error.message}",
                        remedy="lower rollout.num_samples or rollout.max_new_tokens, or give the row less metadata",
                    ) from error
                self.at_once = len(ids) // 2
        return tuple(groups)
