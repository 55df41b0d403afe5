"""What the run file lets length cost, taken from rewards. Knows outcomes; nothing of how they came about."""

from __future__ import annotations

from ...algos.rewards.outcome import RewardOutcome, overlong_penalty
from ...core.config import RewardSettings
from ...core.config.reward import OVERLONG
from .call import Answers, Outcomes


def by_length(of: RewardSettings, answers: Answers, outcomes: Outcomes) -> Outcomes:
    """Lowered by what their length costs, which is told as a part of its own."""
    if not of.overlong_tokens:
        return outcomes
    lowered: list[RewardOutcome] = []
    for one, outcome in zip(answers, outcomes, strict=True):
        share = overlong_penalty(one.num_tokens, max_tokens=of.overlong_tokens, buffer=of.overlong_buffer)
        cost = of.overlong_penalty * share
        lowered.append(RewardOutcome(outcome.value + cost, {**outcome.parts, OVERLONG: cost}))
    return tuple(lowered)
