"""Several reward functions: the sum of what they say, by their weights, or what the one says that the row chooses.

Each is a rewarder of its own, with its own workers, errors and outages. Knows rewarders; must not know how they run
their functions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ...algos.rewards.outcome import RewardOutcome
from ...core.completions import Completion
from ...core.config import RewardSettings
from ...core.errors import UserCodeError
from .call import Answers, BadReward, Keys, Outcomes, checked
from .gate import Tell
from .length_cost import by_length
from .rewarder import REMEDY, Rewarder

WORST = frozenset({"reward/error_rate", "reward/is_paused"})
"""Gauges of which the highest is shown; the others are added up."""


class SeveralRewards:
    """One per rollout actor; `score` and `score_group` may be called concurrently."""

    def __init__(self, settings: RewardSettings) -> None:
        """Load all functions. Raises ConfigError or UserCodeError."""
        self._settings = settings
        self._by_name = {name: Rewarder(part, Keys.of_one(name)) for name, part in settings.parts().items()}
        self.judges_groups = any(one.judges_groups for one in self._by_name.values())
        """Whether a function gets all answers of a group at once."""

    async def score(self, completion: Completion) -> RewardOutcome:
        """The reward of one completion. Raises as a `Rewarder`."""
        return (await self.score_group((completion,)))[0]

    async def score_group(self, completions: Sequence[Completion]) -> Outcomes:
        """The rewards of all answers of a group. Raises as a `Rewarder`."""
        answers = tuple(completions)
        names = self._names_for(answers[0])
        done = await asyncio.gather(*(self._judged(name, answers) for name in names), return_exceptions=True)
        found: list[Outcomes] = []
        for one in done:
            if isinstance(one, BaseException):  # the first; the others have ended too
                raise one
            found.append(one)
        try:
            sums = checked([self._sum(names, of) for of in zip(*found, strict=True)], len(answers))
        except BadReward as bad:
            raise UserCodeError(
                f"the sum of reward.functions {bad} (group {answers[0].group_id})", remedy=REMEDY
            ) from bad
        return by_length(self._settings, answers, sums)

    async def _judged(self, name: str, answers: Answers) -> Outcomes:
        rewarder = self._by_name[name]
        if rewarder.judges_groups:
            return await rewarder.score_group(answers)
        done = await asyncio.gather(*(rewarder.score(one) for one in answers), return_exceptions=True)
        for one in done:
            if isinstance(one, BaseException):
                raise one
        return tuple(one for one in done if not isinstance(one, BaseException))

    def _names_for(self, answer: Completion) -> tuple[str, ...]:
        key = self._settings.choose_by
        if not key:
            return tuple(self._by_name)
        name = answer.metadata.get(key, self._settings.choose_else)
        if not isinstance(name, str) or name not in self._by_name:
            raise UserCodeError(
                f"the metadata of group {answer.group_id} says {key} = {name!r}, which is none of reward.functions",
                remedy="name one of them in the row, or set reward.choose_else",
            )
        return (name,)

    def _sum(self, names: Sequence[str], outcomes: Sequence[RewardOutcome]) -> RewardOutcome:
        total, parts = 0.0, dict[str, float]()
        for name, outcome in zip(names, outcomes, strict=True):
            total += self._settings.functions[name].weight * outcome.value
            parts[name] = outcome.value
            parts |= {f"{name}/{part}": value for part, value in outcome.parts.items()}
        return RewardOutcome(total, parts)

    # -- what all of them are told, and tell

    @property
    def num_errors(self) -> int:
        """Failed calls so far."""
        return sum(one.num_errors for one in self._by_name.values())

    @property
    def too_many_errors(self) -> str:
        """Empty, or the sentence that ends the run."""
        return next((words for one in self._by_name.values() if (words := one.too_many_errors)), "")

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Worker processes now alive."""
        return tuple(pid for one in self._by_name.values() for pid in one.worker_pids)

    def listen(self, tell: Tell) -> None:
        """Whom to tell when calls stop and go on."""
        for one in self._by_name.values():
            one.listen(tell)

    def allow(self, max_error_rate: float) -> None:
        """Another share of failed calls from now on."""
        for one in self._by_name.values():
            one.allow(max_error_rate)

    def gauges(self) -> dict[str, float]:
        """What the monitor shows of them."""
        shown = [one.gauges() for one in self._by_name.values()]
        return {key: (max if key in WORST else sum)(one[key] for one in shown) for key in shown[0]}

    async def close(self) -> None:
        """End all worker processes and connections."""
        await asyncio.gather(*(one.close() for one in self._by_name.values()))
