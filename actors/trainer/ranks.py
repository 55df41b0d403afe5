"""The ranks as their leader calls them: all at once, by one deadline, and by name when one does not answer.

A rank that is gone ends the wait at once, for its mates would wait for it in a collective; one that hangs ends it at
the deadline. Both fail the leader, and so the gang, which is started again as one. Knows ranks by their contract.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.activity import TelemetryBuffer
from ...core.actor import ActorContext
from ...core.actor_group import ActorGroup
from ...core.clock import Clock
from ...core.errors import DeadlineExceeded, GatherError, MyxaError, TrainError, UserCodeError
from ...core.protocols import StepStats
from ...core.samples import TrainShard
from ..contracts.roles import TrainerContract


class Ranks:
    """See the module's head. One per leader."""

    def __init__(
        self,
        ctx: ActorContext,
        world_size: int,
        *,
        shard_of_rank: Sequence[int],
        step_timeout_s: float,
        telemetry: TelemetryBuffer,
        clock: Clock,
    ) -> None:
        """`shard_of_rank`: empty where each rank trains a shard of its own."""
        self._shard_of_rank = tuple(shard_of_rank) or tuple(range(world_size))
        self._step_timeout_s = step_timeout_s
        self._telemetry = telemetry
        self._clock = clock
        members = ctx.group(TrainerContract, [f"trainer/{rank}" for rank in range(world_size)])
        self.together: ActorGroup[TrainerContract] = members.options(
            deadline_s=step_timeout_s, fails_fast=True, cancels_rest=False
        )
        """For collectives: with one rank gone the others may hang in them, and cannot be cancelled there."""

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, rank 0 first."""
        return self.together.names

    async def train(self, shards: Sequence[TrainShard], knobs: dict[str, float]) -> StepStats:
        """All ranks at once, with the same values; returns rank 0's metrics and the scores of all. Raises TrainError
        naming who failed, UserCodeError if it was the user's loss."""
        started, began = self._clock.wall(), self._clock.monotonic()
        try:
            stats = await self.together.scatter(lambda rank, i: rank.train_shard(shards[self._shard_of_rank[i]], knobs))
        except GatherError as error:
            raise self._failed(shards[0].step, error) from error
        group_ids = {sample.group_id for shard in shards for sample in shard.samples}
        self._telemetry.hop("train", group_ids, started, self._clock.monotonic() - began, step=shards[0].step)
        scores = tuple(score for told in stats.values() for score in told.scores)
        return StepStats(metrics=stats["trainer/0"].metrics, scores=scores)

    def _failed(self, step: int, error: GatherError) -> MyxaError:
        name, cause = next(iter(error.errors.items()))
        if isinstance(cause, UserCodeError):  # it would fail again: no restart helps
            return UserCodeError(cause.message, remedy=cause.remedy)
        if not isinstance(cause, DeadlineExceeded):
            return TrainError(f"{name} failed in step {step}: {cause}", remedy=f"see the log of {name}")
        silent = ", ".join((name, *error.unheard))
        return TrainError(
            f"step {step} was not done within {self._step_timeout_s:g} s: no answer from {silent}",
            remedy="see their logs for where they hang; a step that needs longer wants a higher trainer.step_timeout_s",
        )
