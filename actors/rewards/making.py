"""What judges the samples of a run: nothing, one function, or several. Knows all of them."""

from __future__ import annotations

from collections.abc import Sequence

from ...algos.rewards.outcome import RewardOutcome
from ...core.completions import Completion
from ...core.config import RunConfig
from .call import Outcomes
from .gate import Tell
from .rewarder import Rewarder
from .several import SeveralRewards


class FixedReward:
    """The same reward for everything: what demonstrations get in supervised fine-tuning."""

    judges_groups = False
    num_errors = 0
    too_many_errors = ""

    def __init__(self, value: float = 1.0) -> None:
        self._outcome = RewardOutcome(value)

    async def score(self, completion: Completion) -> RewardOutcome:
        return self._outcome

    async def score_group(self, completions: Sequence[Completion]) -> Outcomes:
        return tuple(self._outcome for _ in completions)

    def allow(self, max_error_rate: float) -> None:
        """Nothing to fail."""

    def listen(self, tell: Tell) -> None:
        """Nothing to tell."""

    def gauges(self) -> dict[str, float]:
        """Nothing to show."""
        return {}

    async def close(self) -> None:
        """Nothing to end."""


def make_rewarder(config: RunConfig) -> Rewarder | SeveralRewards | FixedReward:
    """What judges the samples of this run. Raises ConfigError or UserCodeError when a function cannot be loaded."""
    if config.algo.kind == "sft":
        return FixedReward()
    return SeveralRewards(config.reward) if config.reward.functions else Rewarder(config.reward)
