"""The leader's loop: claim -> plan -> train on all ranks -> publish -> report; one pass makes one weight version.

    waits for the buffer (wait-data), for the ranks (compute), and, before publishing, for engines that still read
    old weights (wait-weights); every wait is a call with a deadline or an event that the coordinator sets

Runs inside the trainer actor of rank 0, and speaks to all ranks, itself included, by their contract. The hard
staleness bound is checked here once more before a step: a batch that breaks it stops the run.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ..core.activity import ActivityMeter, TelemetryBuffer
from ..core.actor import ActorContext
from ..core.clock import Clock
from ..core.errors import DataError, GatherError, TrainError
from ..core.messages import Claim, StepReport, WeightManifest
from ..core.patience import until_answered
from ..core.samples import Group, TrainShard
from .canary import CanaryOptions
from .checkpoints import CheckpointOptions, Checkpoints
from .contracts import BufferContract, CoordinatorContract, TrainerContract
from .guard import Guard
from .manifest_parts import join_parts
from .step_plan import PlanOptions, batch_metrics, plan_step
from .time_share import TimeShare

T = TypeVar("T")

CLAIM_WAIT_S = 5.0
RELEASE_DEADLINE_S = 300.0


@dataclass(frozen=True, slots=True)
class LeaderOptions:
    """Plain settings of the loop."""

    world_size: int
    num_steps: int
    """0: until the data ends or the run is stopped."""
    plan: PlanOptions
    publishes: bool
    """False when no engine wants weights (supervised runs)."""
    run_dir: str
    checkpoints: CheckpointOptions
    export_at_end: bool = True
    setup_timeout_s: float = 300.0
    shard_of_rank: tuple[int, ...] = ()
    """Number of the shard that each rank trains, where ranks share one; empty: each its own."""
    guard: CanaryOptions = field(default_factory=lambda: CanaryOptions(every=0, bound=0.0))
    max_unreleased: int = 3
    """Published versions that engines may still be reading; one more waits."""


class Leader:
    """See the module's head."""

    def __init__(
        self,
        ctx: ActorContext,
        options: LeaderOptions,
        meter: ActivityMeter,
        telemetry: TelemetryBuffer,
        clock: Clock,
        share: TimeShare | None = None,
    ) -> None:
        """`share`: where the ranks and the engines have the devices in turns."""
        self._share = share
        self._ctx = ctx
        self._options = options
        self._meter = meter
        self._telemetry = telemetry
        self._clock = clock
        self._ranks = ctx.group(TrainerContract, [f"trainer/{r}" for r in range(options.world_size)])
        self._together = self._ranks.options(fails_fast=True, cancels_rest=False)
        """For collectives: with one rank gone the others may hang in them, and cannot be cancelled there."""
        self._buffer = ctx.ref(BufferContract, "buffer")
        self._coordinator = ctx.ref(CoordinatorContract, "coordinator")
        self._guard = Guard(ctx, options.guard, self._together, meter, telemetry)
        self._is_written = False
        """The last version is in a checkpoint and exported, as far as that was asked for."""
        self._checkpoints = Checkpoints(
            ctx, options.checkpoints, self._together, self._tell_durable, meter, telemetry, clock
        )
        self._knobs: dict[str, float] = {}
        self._unreleased: dict[int, tuple[str, ...]] = {}
        """Version -> ranks that published it."""
        self._release_seen = asyncio.Event()
        self._may_go = asyncio.Event()
        self._stop_reason = ""
        self._inventory = ""

    # -- told by the coordinator

    def go(self, start_version: int) -> None:
        """Start stepping. The version is the coordinator's view and must be ours."""
        self._ctx.log.info("the coordinator lets the loop start at version %d", start_version)
        self._may_go.set()

    def stop(self, reason: str) -> None:
        """End after the step in hand."""
        self._stop_reason = self._stop_reason or reason
        self._may_go.set()

    async def released(self, version: int) -> None:
        """No engine reads `version` any more; ranks beside this one that published a part of it are told."""
        others = [name for name in self._unreleased.pop(version, ()) if name != self._ctx.name]
        self._release_seen.set()
        if others:
            await self._ctx.group(TrainerContract, others).all(TrainerContract.release_weights, version)

    def set_knobs(self, knobs: dict[str, float]) -> None:
        """Live values, used from the next step on."""
        self._knobs = {**self._knobs, **knobs}

    # -- the loop

    async def run(self, version: int, facts: dict[str, str]) -> None:
        """From set-up to the end of the run."""
        await self._ctx.wait_for("coordinator", "buffer", *self._ranks.names, timeout_s=self._options.setup_timeout_s)
        if version > 0:
            await self._ask("buffer", lambda: self._buffer.rewind(version))
        manifest = await self._publish(version) if self._options.publishes else None
        async with self._engines_turn(version):
            await self._coordinator.trainer_ready(version, manifest, facts)
        with self._meter.during("other", "waiting for the first engine"):
            await self._may_go.wait()
        start_version = version
        last = self._options.num_steps or sys.maxsize
        await self._compare(version, start_version)
        reason = f"all {last} steps done"
        while version < last:
            groups = await self._next_batch(version)
            if groups is None:
                reason = self._stop_reason or self._end_of_data(version)
                break
            version = await self._step(version, groups)
            await self._compare(version, start_version)
            if self._stop_reason:
                reason = self._stop_reason
                break
        await self._finish(version, start_version, reason)

    async def _compare(self, version: int, start_version: int) -> None:
        """With an engine, when that is due; the trainer stands at `version` meanwhile."""
        if self._options.publishes and not self._stop_reason and version != self._options.num_steps:
            await self._guard.check(version, start_version, lambda: self._trainers_turn(version))

    async def _next_batch(self, version: int) -> list[Group] | None:
        """Wait for a whole batch; None when there is none to come or the run was told to stop."""
        with self._meter.during("wait-data", f"claim {version}"):
            while not self._stop_reason:
                claim: Claim = await self._ask("buffer", lambda: self._buffer.claim(version, CLAIM_WAIT_S))
                if claim.finished:
                    self._inventory = claim.reason
                    return None
                if claim.groups:
                    return await self._fetch(tuple(g.group_id for g in claim.groups))
                if self._share is not None and self._share.has_newcomers:
                    async with self._trainers_turn(version):
                        self._ctx.log.info("version %d is handed over again, to engines that came anew", version)
        return None

    async def _fetch(self, group_ids: tuple[int, ...]) -> list[Group]:
        return list(await self._ask("buffer", lambda: self._buffer.fetch(group_ids)))

    def _end_of_data(self, version: int) -> str:
        """Why the loop ends now. A run that could not make a single step did not do what it was started for."""
        if version == 0:
            raise DataError(
                f"the data ended before the first batch was whole ({self._inventory})",
                remedy="lower algo.batch_size, raise data.max_passes, or see why groups were left out",
            )
        return f"no more data after {version} steps"

    async def _step(self, version: int, groups: Sequence[Group]) -> int:
        """One optimizer step (or several mini-batches), told to buffer, engines and people."""
        started = self._clock.monotonic()
        metrics, lags = batch_metrics(version, groups)
        shards = plan_step(version, groups, self._options.plan)
        if self._share is not None:
            await self._share.take()
        metrics.update(await self._train(shards))
        made = version + 1
        await self._ask("buffer", lambda: self._buffer.trained(version))
        if self._share is not None:
            await self._write_if_due(made)
            self._share.trained()
        publish_started = self._clock.monotonic()
        manifest = await self._publish(made) if self._options.publishes else None
        metrics["weights/publish_s"] = self._clock.monotonic() - publish_started
        metrics["leader/step_wall_s"] = self._clock.monotonic() - started
        report = StepReport(
            step=version,
            version=made,
            metrics=metrics,
            lags=lags,
            group_ids=tuple(g.group_id for g in groups),
        )
        self._telemetry.metric(made, metrics)
        async with self._engines_turn(made):
            await self._ask("coordinator", lambda: self._coordinator.version_made(manifest, report))
        if self._share is None:
            await self._write_if_due(made)
        else:
            self._telemetry.metric(made, self._share.metrics())
        return made

    async def _train(self, shards: Sequence[TrainShard]) -> dict[str, float]:
        """All ranks at once; one that fails fails the step, by name."""
        try:
            numbers = self._options.shard_of_rank or range(self._options.world_size)
            metrics = await self._ranks.scatter(lambda rank, i: rank.train_shard(shards[numbers[i]], self._knobs))
        except GatherError as error:
            name, cause = next(iter(error.errors.items()))
            message = f"{name} failed in step {shards[0].step}: {cause}"
            raise TrainError(message, remedy=f"see the log of {name}") from cause
        return dict(metrics["trainer/0"])

    async def _publish(self, version: int) -> WeightManifest:
        if len(self._unreleased) >= self._options.max_unreleased:
            with self._meter.during("wait-weights", f"publish {version}"):
                await self._await_release(self._options.max_unreleased - 1)
        parts = await self._together.all(TrainerContract.publish, version)
        manifest = join_parts(parts)
        if manifest is None:
            raise TrainError(f"no rank gathered weights for version {version}", remedy="see the log of trainer/0")
        self._unreleased[version] = tuple(name for name, part in parts.items() if part is not None)
        return manifest

    async def _await_release(self, at_most: int) -> None:
        """Wait until the engines let go of all published versions but `at_most`."""
        try:
            async with asyncio.timeout(RELEASE_DEADLINE_S):
                while len(self._unreleased) > at_most:
                    self._release_seen.clear()
                    await self._release_seen.wait()
        except TimeoutError as err:
            raise TrainError(
                f"the coordinator did not release any of the versions {sorted(self._unreleased)} "
                f"within {RELEASE_DEADLINE_S:g} s",
                remedy="an engine is stuck in a weight update; see the coordinator's log for its name",
            ) from err

    async def _finish(self, version: int, start_version: int, reason: str) -> None:
        if not self._is_written:
            is_new = self._options.checkpoints.every > 0 and version > start_version
            if is_new or self._checkpoints.is_pending or self._options.export_at_end:
                async with self._trainers_turn(version):
                    await self._write_last(version, is_new=is_new)
        await self._ask("coordinator", lambda: self._coordinator.trainer_finished(version, reason))

    async def _write_last(self, version: int, *, is_new: bool) -> None:
        """What is left of a run: a whole checkpoint, the exported model."""
        if is_new:
            await self._checkpoints.save(version)
        await self._checkpoints.settle()
        if self._options.export_at_end:
            folder = str(Path(self._options.run_dir) / "export")
            await self._together.all(TrainerContract.export_hf, folder)
        self._is_written = True

    async def _write_if_due(self, version: int) -> None:
        """Checkpoints; where engines have the device next, also what is written at the end if this is it."""
        await self._checkpoints.at_boundary()
        if self._share is not None and version == self._options.num_steps:
            await self._write_last(version, is_new=self._options.checkpoints.every > 0)
        elif self._checkpoints.is_due(version):
            await self._checkpoints.save(version)

    async def _tell_durable(self, version: int) -> None:
        await self._ask("buffer", lambda: self._buffer.durable(version))

    # -- turns on a device that engines share

    @asynccontextmanager
    async def _engines_turn(self, version: int) -> AsyncGenerator[None]:
        """Around telling that `version` was published: before, engines have room for it; after, once all of them took
        it, their turn. Nothing but the telling where they have devices of their own."""
        if self._share is None:
            yield
            return
        await self._share.offer()
        yield
        with self._meter.during("wait-weights", f"hand over {version}"):
            await self._await_release(0)
        await self._share.give()

    @asynccontextmanager
    async def _trainers_turn(self, version: int) -> AsyncGenerator[None]:
        """The ranks compute inside, between two steps; then `version`, which may have left the engines, is handed over
        again."""
        if self._share is None:
            yield
            return
        await self._share.take()
        yield
        self._share.trained()
        manifest = await self._publish(version)
        async with self._engines_turn(version):
            await self._ask("coordinator", lambda: self._coordinator.weights_offered(manifest))

    async def _ask(self, who: str, send: Callable[[], Awaitable[T]]) -> T:
        return await until_answered(send, who=who, clock=self._clock, log=self._ctx.log)
