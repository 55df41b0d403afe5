"""Judges the samples of a rollout actor: with one function, with several, or with a fixed reward.

`Rewarder` runs one function. Where it runs depends on its kind:

| function | `reward.workers = 0` | `reward.workers = n` |
|---|---|---|
| exact, numeric, format without a pattern | in the loop | n processes |
| remote, judge | in the loop | - |
| regex, format with a pattern | up to 4 processes | n processes |
| math | 1 process | n processes |
| unit_tests | 1 process, and sandboxes side by side | n processes |
| your own `async def` | 1 process, side by side | n processes |
| your own `def` | up to 4 processes | n processes |

Consecutive failures are treated as an outage: the calls wait and are repeated (`guard.py`). `SeveralRewards` adds up
functions by weight, or calls the one that the row names; each has its own workers, errors and outages.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ...algos.rewards.builtin import BUILTINS, bind_builtin
from ...algos.rewards.outcome import SCALAR_KEY, RewardOutcome, overlong_penalty
from ...core.completions import Completion
from ...core.config import RewardSettings, RunConfig
from ...core.errors import ConfigError, DeadlyReward, MemberFailed, UserCodeError
from ...core.ids import OVERLONG
from .call import (
    ALONE,
    JUDGE,
    REMOTE,
    UNIT_TESTS,
    Answers,
    CallFailed,
    Outcomes,
    RewardFn,
    RewardKeys,
    RewardSpec,
    call_reward,
    judged,
    load_reward,
)
from .guard import CallGuard, Scorer, all_ended
from .pool import RewardPool

if TYPE_CHECKING:
    from .judge import JudgeReward, Judges
    from .remote import RemoteReward


def by_length(settings: RewardSettings, answers: Answers, outcomes: Outcomes) -> Outcomes:
    """Outcomes lowered by the cost of length, which is a separate part in them."""
    if not settings.overlong_tokens:
        return outcomes
    penalty = partial(overlong_penalty, max_tokens=settings.overlong_tokens, buffer=settings.overlong_buffer)
    costs = [settings.overlong_penalty * penalty(answer.num_tokens) for answer in answers]
    return tuple(
        RewardOutcome(outcome.value + cost, {**outcome.parts, OVERLONG: cost})
        for outcome, cost in zip(outcomes, costs, strict=True)
    )


SLACK_S = 1.0
"""For a built-in to end by its own limit, before its process is killed."""
MAX_WORKERS = 4
"""Processes for a function that should have some and was given no number; started as they are needed."""
REMEDY = "mend the function or the row; reward.max_error_rate says how many failures a run bears"


class Rewarder(Scorer):
    """One per rollout actor; `score` and `score_group` may be called concurrently."""

    def __init__(self, settings: RewardSettings, keys: RewardKeys = ALONE, judges: Judges | None = None) -> None:
        """Load the function. `keys`: of the run file, that say so. Raises ConfigError or UserCodeError."""
        self._settings = settings
        self.judges_groups = settings.scope == "group"
        """Whether the function gets all answers of a group at once."""
        self._remote = _remote(settings, keys, judges)
        self._pool: RewardPool | None = None
        spec = RewardSpec(
            fn=settings.fn,
            pattern=settings.pattern,
            args=settings.args,
            takes_group=self.judges_groups,
            strip_thinking=settings.strip_thinking,
            keys=keys,
            max_block_s=settings.max_block_s,
        )
        self._reward = RewardFn(settings.fn, self._remote.ask) if self._remote is not None else load_reward(spec)
        masks = settings.fn == JUDGE
        self._guard = CallGuard(settings, f'reward function "{self._reward.name}"', masks=masks)
        super().__init__(self._guard)
        self.run = self._way_to_run(spec)

    def _way_to_run(self, spec: RewardSpec) -> Callable[[Answers], Awaitable[Outcomes]]:
        reward, num_workers = self._reward, self._settings.workers
        if self._remote is not None:
            return self._remote.ask
        if reward.is_light and not num_workers:
            return partial(call_reward, reward)
        num_default = 0 if reward.is_async else 1 if reward.seconds else MAX_WORKERS
        pool = self._pool = RewardPool(spec, num_workers or num_default, reward.at_once)
        if reward.seconds:
            return lambda answers: self._in_time(pool, answers, reward.seconds)
        return lambda answers: pool.score(answers, self._settings.timeout_s)

    async def _in_time(self, pool: RewardPool, answers: Answers, seconds: float) -> Outcomes:
        """By a built-in for which an answer that takes too long, or too much memory, is wrong."""
        try:
            return await pool.score(answers, seconds + SLACK_S)
        except CallFailed as failed:
            if failed.is_late or failed.is_deadly:
                return tuple(RewardOutcome(0.0) for _ in answers)
            raise

    async def score_group(self, completions: Sequence[Completion]) -> Outcomes:
        """By one call; it waits while the function is out of order. Raises DeadlyReward if it ended its worker."""
        answers = tuple(completions)
        return by_length(self._settings, answers, await self._score(answers))

    async def _score(self, answers: Answers) -> Outcomes:
        is_nought = [answer.is_truncated and self._settings.truncated == "zero" for answer in answers]
        if all(is_nought):
            return tuple(RewardOutcome(0.0) for _ in answers)
        pairs = zip(is_nought, await self._called(answers), strict=True)
        return tuple(RewardOutcome(0.0) if nought else outcome for nought, outcome in pairs)

    async def _called(self, answers: Answers) -> Outcomes:
        try:
            return await self._guard.called(answers[0].group_id, lambda: self.run(answers))
        except CallFailed as bad:
            if self._settings.on_error == "zero" and not self.too_many_errors:
                return tuple(RewardOutcome(0.0) for _ in answers)
            place = f"group {answers[0].group_id}" + ("" if self.judges_groups else f", sample {answers[0].index}")
            if self._settings.fn == JUDGE:  # the answer may be as good as any: its sample is left out
                raise MemberFailed(f"the judge {bad} ({place})", remedy="see the judge's log, and [judge]") from bad
            kind = DeadlyReward if bad.is_deadly else UserCodeError
            raise kind(f'reward function "{self._reward.name}" {bad} ({place})', remedy=REMEDY) from bad

    def gauges(self) -> dict[str, float]:
        remote_gauges = self._remote.gauges() if self._remote is not None else {}
        return {**super().gauges(), "reward/workers": float(len(self.worker_pids)), **remote_gauges}

    def seconds(self) -> dict[str, float]:
        return dict(self._pool.seconds) if self._pool is not None else {}

    @property
    def worker_pids(self) -> tuple[int, ...]:
        return self._pool.pids if self._pool is not None else ()

    async def close(self) -> None:
        if self._remote is not None:
            await self._remote.close()
        if self._pool is not None:
            await self._pool.close()


def _remote(settings: RewardSettings, keys: RewardKeys, judges: Judges | None) -> RemoteReward | JudgeReward | None:
    if settings.fn == JUDGE:
        if judges is None:
            raise ConfigError(f'{keys.fn} = "judge": there is no judge here', remedy="make it by make_rewarder")
        return judges.made(settings.args, keys.args, strips=settings.strip_thinking)
    if settings.fn != REMOTE:
        return None
    from .remote import RemoteReward, remote_options  # a client for HTTP, which no other reward needs

    takes_group = settings.scope == "group"
    return RemoteReward(remote_options(settings.args, keys.args), timeout_s=settings.timeout_s, takes_group=takes_group)


def check_args(settings: RewardSettings, config: RunConfig, keys: RewardKeys = ALONE) -> None:
    """Whether a built-in takes its arguments; nothing of a function of the user's. Raises ConfigError."""
    if settings.fn == REMOTE:
        from .remote import remote_options  # a client for HTTP, which no other reward needs

        remote_options(settings.args, keys.args)
    elif settings.fn == JUDGE:
        from .judge import Judges

        Judges(config.judge).settings_with(settings.args, keys.args, config.models)
    elif settings.fn == UNIT_TESTS:
        from .unit_tests import unit_test_options

        unit_test_options(settings.args, keys.args)
    elif settings.fn in BUILTINS:
        bind_builtin(settings.fn, pattern=settings.pattern, args=settings.args, key=keys.args)


class SeveralRewards(Scorer):
    """One per rollout actor; `score` and `score_group` may be called concurrently."""

    def __init__(self, settings: RewardSettings, judges: Judges | None = None) -> None:
        """Load all functions. Raises ConfigError or UserCodeError."""
        self._settings = settings
        parts = settings.parts().items()
        self._by_name = {name: Rewarder(part, RewardKeys.of_one(name), judges) for name, part in parts}
        super().__init__(*self._by_name.values())
        self.judges_groups = any(rewarder.judges_groups for rewarder in self._by_name.values())
        """Whether a function gets all answers of a group at once."""

    async def score_group(self, completions: Sequence[Completion]) -> Outcomes:
        answers = tuple(completions)
        names = self._names_for(answers[0])
        outcomes = await all_ended(self._judged(name, answers) for name in names)
        try:
            sums = judged([self._sum(names, row) for row in zip(*outcomes, strict=True)], len(answers))
        except CallFailed as bad:
            raise UserCodeError(
                f"the sum of reward.functions {bad} (group {answers[0].group_id})", remedy=REMEDY
            ) from bad
        return by_length(self._settings, answers, sums)

    async def _judged(self, name: str, answers: Answers) -> Outcomes:
        rewarder = self._by_name[name]
        if rewarder.judges_groups:
            return await rewarder.score_group(answers)
        return tuple(await all_ended(rewarder.score(answer) for answer in answers))

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

    def _sum(self, names: Sequence[str], outcomes: Sequence[RewardOutcome]) -> dict[str, float]:
        total, parts = 0.0, dict[str, float]()
        for name, outcome in zip(names, outcomes, strict=True):
            total += self._settings.functions[name].weight * outcome.value
            parts[name] = outcome.value
            parts |= {f"{name}/{part}": value for part, value in outcome.parts.items()}
        return {**parts, SCALAR_KEY: total}


class FixedReward(Scorer):
    """The same reward for all demonstrations of supervised fine-tuning; what the workflow says of pairs."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self._outcome = RewardOutcome(value)

    async def score_group(self, completions: Sequence[Completion]) -> Outcomes:
        return tuple(self._outcome if answer.reward is None else RewardOutcome(answer.reward) for answer in completions)


def make_rewarder(config: RunConfig, judges: Judges | None = None) -> Rewarder | SeveralRewards | FixedReward:
    """What judges the samples of this run. Raises ConfigError or UserCodeError when a function cannot be loaded."""
    if config.algo.is_given:
        return FixedReward()
    return SeveralRewards(config.reward, judges) if config.reward.functions else Rewarder(config.reward, ALONE, judges)
