"""From a claimed batch to what is told of it and one shard per rank, with the user's functions called on the way.

Those may take long, and may hang: they run in a thread of their own, by a deadline. Without them nothing here waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...core.errors import UserCodeError
from ...core.samples import Group, TrainShard
from ..own_thread import in_own_thread
from .step_plan import Batch, PlanOptions, batch_metrics, plan_step


@dataclass(frozen=True, slots=True)
class Planned:
    """A step, ready for the ranks."""

    metrics: dict[str, float]
    lags: tuple[int, ...]
    """Of each group; -1: no engine took part."""
    shards: tuple[TrainShard, ...]


async def planned_step(version: int, batch: Batch, options: PlanOptions, timeout_s: float) -> Planned:
    """The step from `version`. Raises UserCodeError for a function that fails or takes longer than `timeout_s`."""
    metrics, lags = batch_metrics(version, batch, options.sources)
    if not options.functions:
        return Planned(metrics, lags, plan_step(version, batch.groups, options))

    def work() -> Planned:
        groups = options.functions.rewarded(version, batch.groups)
        shards = plan_step(version, groups, options)
        return Planned(metrics | _processed(groups, options), lags, shards)

    try:
        async with asyncio.timeout(timeout_s):
            return await in_own_thread(work, "batch functions")
    except TimeoutError as error:
        named = (options.functions.reward_post_process, options.functions.advantage_fn)
        names = " and ".join(f'"{one.name}"' for one in named if one is not None)
        raise UserCodeError(
            f"{names} did not return within {timeout_s:g} s (step {version})",
            remedy="make it faster, or raise trainer.step_timeout_s",
        ) from error


def _processed(groups: Sequence[Group], options: PlanOptions) -> dict[str, float]:
    if options.functions.reward_post_process is None:
        return {}
    rewards = np.concatenate([group.rewards for group in groups]).astype(np.float64)
    return {"reward/processed_mean": float(rewards.mean()), "reward/processed_std": float(rewards.std())}
