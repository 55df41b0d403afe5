"""What a rollout actor tells of itself once a second: rates and counts. Knows the engine's status and running sums."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from ...core.activity import TelemetryBuffer
from ...core.clock import Clock
from ...core.errors import EngineError
from ...core.messages import EngineStatus, EngineUsage
from ..telemetry import ReportPace
from .group_runner import RunnerStats


@dataclass(slots=True)
class GroupCounts:
    """Of this actor, since it began."""

    num_groups: int = 0
    num_errors: int = 0
    num_breaks: int = 0
    """Groups that went elsewhere because the engine failed them."""
    num_lies: int = 0
    """Streams in which the engine said what cannot be."""


async def gauge_forever(
    telemetry: TelemetryBuffer,
    stats: RunnerStats,
    counts: GroupCounts,
    *,
    status: Callable[[], Awaitable[EngineStatus]],
    room: Callable[[], Mapping[str, float]],
    pace: ReportPace,
    has_engine: bool,
    clock: Clock,
    log: logging.Logger,
) -> None:
    """Until cancelled, as often as `pace` says. `room`: how much the actor may have in hand, and has."""
    started, usage = clock.monotonic(), EngineUsage()
    while True:
        await pace.pause()
        now = clock.monotonic()
        elapsed, started = max(now - started, 1e-6), now
        try:
            told = await status()
        except EngineError as err:  # whether it is lost is for `until_lost` to say, and it says why
            log.warning("the engine does not tell its load: %s", err)
            continue
        taken = stats.take()
        values = {
            "rollout/tokens_per_s": taken.num_tokens / elapsed,
            "rollout/running": float(told.running),
            "rollout/waiting": float(told.waiting),
            "rollout/num_groups": float(counts.num_groups),
            "rollout/num_errors": float(counts.num_errors),
            "rollout/num_breaks": float(counts.num_breaks),
            "rollout/num_lies": float(counts.num_lies),
            **room(),
            **told.usage.rates_since(usage),
        }
        usage = told.usage
        if taken.num_samples:
            values["rollout/reward_s_mean"] = taken.reward_s / taken.num_samples
            values["rollout/env_s_mean"] = taken.env_s / taken.num_samples
            values["rollout/env_s_max"] = taken.max_env_s
            values["rollout/truncated_fraction"] = taken.num_truncated / taken.num_samples
        telemetry.metric(told.version if has_engine else -1, values)
