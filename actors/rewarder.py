"""Judges completions inside a rollout actor: built-ins at once, async functions in the loop, others beside it.

| function | `reward.workers = 0` | `reward.workers = n` |
|---|---|---|
| exact, numeric, regex, format | in the loop | n processes |
| math | 1 process | n processes |
| your own `async def` | in the loop | n processes |
| your own `def` | threads | n processes |

Knows how a function is run and what counts as a failure. Must not know groups' fates or other actors.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from ..algos.rewards import RewardOutcome
from ..core.completions import Completion
from ..core.config import RewardSettings, RunConfig
from ..core.errors import MyxaError, UserCodeError
from .error_budget import ErrorBudget
from .reward_call import BadReward, RewardFn, await_reward, call_reward, load_reward
from .reward_pool import RewardPool
from .reward_protocol import WorkerSpec
from .reward_threads import BlockingCalls, ThreadsBusy

MAX_THREADS = 8
REMEDY = "mend the function or the row; reward.max_error_rate says how many failures a run bears"


class RunReward(Protocol):
    """One way to run a reward function. Raises BadReward when it fails."""

    async def __call__(self, completion: Completion) -> RewardOutcome: ...


class Rewarder:
    """One per rollout actor; `score` may be called concurrently."""

    def __init__(self, settings: RewardSettings) -> None:
        """Load the function. Raises ConfigError or UserCodeError."""
        self._settings = settings
        self._reward = load_reward(settings.fn, pattern=settings.pattern, args=settings.args)
        self._budget = ErrorBudget(settings.max_error_rate)
        self._pool: RewardPool | None = None
        self._fatal = ""
        self._last_error = ""
        self._run = self._way_to_run(self._reward)

    def _way_to_run(self, reward: RewardFn) -> RunReward:
        num_workers = max(self._settings.workers, int(reward.needs_process))
        if num_workers:
            spec = WorkerSpec(fn=self._settings.fn, pattern=self._settings.pattern, args=self._settings.args)
            self._pool = RewardPool(num_workers, spec)
            return self._in_process
        if reward.is_async:
            return self._in_loop
        if reward.is_light:
            return self._at_once
        self._threads = BlockingCalls[RewardOutcome](MAX_THREADS, "reward")
        return self._in_thread

    async def score(self, completion: Completion) -> RewardOutcome:
        """The reward of one completion. Raises UserCodeError naming function, group, sample and cause."""
        if completion.is_truncated and self._settings.truncated == "zero":
            return RewardOutcome(0.0)
        try:
            outcome = await self._run(completion)
        except BadReward as bad:
            self._budget.note(has_failed=True)
            self._last_error = str(bad)
            raise UserCodeError(
                f'reward function "{self._reward.name}" {bad} (group {completion.group_id}, sample {completion.index})',
                remedy=REMEDY,
            ) from bad
        except MyxaError as error:
            self._budget.note(has_failed=True)
            self._fatal = str(error)
            raise
        self._budget.note(has_failed=False)
        return outcome

    @property
    def num_errors(self) -> int:
        """Failed calls so far."""
        return self._budget.num_errors

    @property
    def too_many_errors(self) -> str:
        """Empty, or the sentence that ends the run."""
        if self._fatal:
            return self._fatal
        if not self._budget.is_spent:
            return ""
        failed, calls = self._budget.recent
        return (
            f'reward function "{self._reward.name}" failed in {failed} of the last {calls} calls, more than '
            f"reward.max_error_rate = {self._settings.max_error_rate:g} allows; last: {self._last_error}"
        )

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Worker processes now alive."""
        return self._pool.pids if self._pool is not None else ()

    async def close(self) -> None:
        """End all worker processes; nothing of them is left afterwards."""
        if self._pool is not None:
            await self._pool.close()

    async def _at_once(self, completion: Completion) -> RewardOutcome:
        return call_reward(self._reward, completion)

    async def _in_loop(self, completion: Completion) -> RewardOutcome:
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                return await await_reward(self._reward, completion)
        except TimeoutError:
            raise BadReward(f"took longer than {self._settings.timeout_s:g} s") from None

    async def _in_thread(self, completion: Completion) -> RewardOutcome:
        try:
            return await self._threads.run(lambda: call_reward(self._reward, completion), self._settings.timeout_s)
        except TimeoutError:
            raise BadReward(
                f"took longer than {self._settings.timeout_s:g} s in a thread, which cannot be stopped; "
                "with reward.workers it would be"
            ) from None
        except ThreadsBusy:
            raise BadReward(
                f"could not be called: all {MAX_THREADS} threads hang in earlier calls; use reward.workers"
            ) from None

    async def _in_process(self, completion: Completion) -> RewardOutcome:
        assert self._pool is not None
        return await self._pool.score(completion, self._settings.timeout_s)


class FixedReward:
    """The same reward for everything: what demonstrations get in supervised fine-tuning."""

    num_errors = 0
    too_many_errors = ""

    def __init__(self, value: float = 1.0) -> None:
        self._outcome = RewardOutcome(value)

    async def score(self, completion: Completion) -> RewardOutcome:
        return self._outcome

    async def close(self) -> None:
        """Nothing to end."""


def make_rewarder(config: RunConfig) -> Rewarder | FixedReward:
    """What judges the samples of this run. Raises ConfigError or UserCodeError when the function cannot be loaded."""
    return FixedReward() if config.algo.kind == "sft" else Rewarder(config.reward)
