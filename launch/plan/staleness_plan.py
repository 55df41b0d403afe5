"""Whether the staleness bound, the slots and the engines' concurrency go together, and about how long the trainer will
wait. Pure; the simulation is `algos/staleness_sim.py`, the rule is in docs/walk-prompt.md.

The simulation knows no lengths of this run. It looks at two tails of lengths (the slowest of a hundred samples takes 3
times, or 10 times as long as the median) and at three lengths of a step, counted in generations: the median time of a
group, which ends with its slowest sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import NormalDist

from ...algos.staleness import make_policy
from ...algos.staleness_sim import Scenario, simulate
from ...core.config import RunConfig
from ...core.errors import ConfigError
from ..preflight.finding import ConfigFinding

SKEWS = (3.0, 10.0)
"""p99 / p50 of the time of one sample."""
STEP_RATIOS = (0.25, 0.5, 1.0)
"""Time of a step / time of a group."""
P99 = NormalDist().inv_cdf(0.99)
"""Standard deviations above the median of a lognormal's logarithm."""
NUM_STEPS = 40
MAX_GROUPS = 32
MAX_ENGINES = 8
"""Larger runs are simulated at these sizes: shares hardly depend on them, time does."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a simulation says."""

    step_ratio: float
    """Time of a step / median time of a group."""
    waiting_share: float
    """Of the time, that the trainer has no batch."""
    mean_lag: float


@dataclass(frozen=True, slots=True)
class LengthTail:
    """One tail of lengths."""

    skew: float
    """p99 / p50."""
    steps: tuple[Waiting, ...]


@dataclass(frozen=True, slots=True)
class StalenessPlan:
    """Numbers of the bound."""

    policy: str
    max_staleness: int
    num_slots: int
    """N: groups between dispatch and the end of their step."""
    window: int
    """W of `pace`; 0 for the other policies."""
    batch_size: int
    num_engines: int
    concurrency: int
    """Groups that all rollout actors take at a time."""
    waiting: tuple[LengthTail, ...]

    @property
    def fills_slots(self) -> bool:
        """Whether concurrency can use all slots."""
        return self.concurrency >= self.num_slots


def staleness_of(config: RunConfig, num_rollouts: int) -> StalenessPlan:
    """Numbers and simulated waiting. Raises ConfigError for impossible settings."""
    settings, batch = config.asynchrony, config.algo.batch_size
    policy = make_policy(settings.policy, settings.max_staleness, batch, settings.window)
    return StalenessPlan(
        policy=settings.policy,
        max_staleness=settings.max_staleness,
        num_slots=policy.num_slots,
        window=getattr(policy, "window", 0),
        batch_size=batch,
        num_engines=num_rollouts,
        concurrency=num_rollouts * config.rollout.max_groups,
        waiting=tuple(_tail(config, num_rollouts, skew) for skew in SKEWS) if num_rollouts else (),
    )


def _tail(config: RunConfig, num_rollouts: int, skew: float) -> LengthTail:
    scenario = scaled_scenario(config, num_rollouts)
    sigma = math.log(skew) / P99
    # The median of the slowest of n is the quantile 0.5 ** (1 / n).
    group_s = scenario.generate_s + math.exp(sigma * NormalDist().inv_cdf(0.5 ** (1.0 / scenario.group_size)))
    return LengthTail(skew, tuple(_waiting(replace(scenario, sigma=sigma), ratio, group_s) for ratio in STEP_RATIOS))


def scaled_scenario(config: RunConfig, num_rollouts: int) -> Scenario:
    """The run's policy, batch and concurrency, at a size that is simulated in milliseconds."""
    batch, settings = config.algo.batch_size, config.asynchrony
    size = min(batch, MAX_GROUPS)
    engines = min(num_rollouts, MAX_ENGINES)
    in_flight = num_rollouts * config.rollout.max_groups * size / batch / engines
    window = max(1, round(settings.window * size / batch)) if settings.window else 0
    return Scenario(
        policy=settings.policy,
        max_staleness=settings.max_staleness,
        batch_size=size,
        window=min(window, settings.max_staleness * size + 1),
        num_steps=NUM_STEPS,
        num_engines=engines,
        groups_per_engine=max(1, round(in_flight)),
        group_size=min(config.rollout.num_samples, 64),
        generate_s=0.0,
    )


def _waiting(scenario: Scenario, ratio: float, group_s: float) -> Waiting:
    step_s = ratio * group_s
    outcome = simulate(replace(scenario, step_s=step_s, adopt_s=0.05 * step_s))
    mean_lag = sum(outcome.lags) / len(outcome.lags) if outcome.lags else 0.0
    return Waiting(ratio, outcome.waiting_share, mean_lag)


def staleness_findings(config: RunConfig, plan: StalenessPlan) -> Iterator[ConfigFinding]:
    """Concurrency that starves the trainer, and slots that stay empty."""
    key, batch = "rollout.max_groups", config.algo.batch_size
    takes = f"{key} = {config.rollout.max_groups}: rollout actors ({plan.num_engines}) take {plan.concurrency} groups"
    enough = -(-plan.num_slots // max(1, plan.num_engines))
    if plan.concurrency < batch:
        error = ConfigError(
            f"{takes} at a time, fewer than one batch of {batch}: the trainer waits for several rounds of answers",
            remedy=f"raise it to {enough}, which uses all {plan.num_slots} slots, or start more rollout actors",
        )
        yield ConfigFinding(key, error, is_warning=True)
    elif not plan.fills_slots:
        error = ConfigError(
            f"{takes} at a time, of {plan.num_slots} that max_staleness = {plan.max_staleness} allows",
            remedy=f"raise it to {enough} to use them all",
        )
        yield ConfigFinding(key, error, is_warning=True)
