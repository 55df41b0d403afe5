"""Judges the samples of a rollout actor: with one function, with several, or with a fixed reward.

`Rewarder` runs one function. Where it runs depends on its kind:

| function | `reward.workers = 0` | `reward.workers = n` |
|---|---|---|
| exact, numeric, format without a pattern | in the loop | n processes |
| remote | in the loop | - |
| regex, format with a pattern | up to 4 processes; with `isolate = false` in the loop | n processes |
| math | 1 process | n processes |
| your own `async def` | 1 process, side by side; with `isolate = false` in the loop | n processes |
| your own `def` | up to 4 processes; with `isolate = false` in threads | n processes |

Consecutive failures are treated as an outage: the calls wait and are repeated (`guard.py`). `SeveralRewards` adds up
functions by weight, or calls the one that the row names; each has its own workers, errors and outages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...algos.rewards.builtin import BUILTINS, bind_builtin
from ...algos.rewards.outcome import RewardOutcome, overlong_penalty
from ...core.completions import Completion
from ...core.config import RewardSettings, RunConfig
from ...core.config.data import OVERLONG
from ...core.errors import DeadlyReward, MyxaError, UserCodeError
from ..user_code.calls import TookTooLong, UserRaised, within
from .call import (
    ALONE,
    REMOTE,
    Answers,
    BadReward,
    Outcomes,
    RewardFn,
    RewardKeys,
    await_reward,
    call_reward,
    checked,
    load_reward,
    raised,
)
from .guard import MAX_PROBES, CallGuard, GaveUp, Tell
from .pool import BlockingCalls, RewardPool, SideBySide, ThreadsBusy
from .worker_messages import RewardWorkerSpec

if TYPE_CHECKING:
    from .remote import RemoteReward


def by_length(of: RewardSettings, answers: Answers, outcomes: Outcomes) -> Outcomes:
    """Outcomes lowered by the cost of length, which is a separate part in them."""
    if not of.overlong_tokens:
        return outcomes
    lowered: list[RewardOutcome] = []
    for one, outcome in zip(answers, outcomes, strict=True):
        share = overlong_penalty(one.num_tokens, max_tokens=of.overlong_tokens, buffer=of.overlong_buffer)
        cost = of.overlong_penalty * share
        lowered.append(RewardOutcome(outcome.value + cost, {**outcome.parts, OVERLONG: cost}))
    return tuple(lowered)


MAX_THREADS = 8
MAX_WORKERS = 4
"""Processes for a function that should have some and was given no number; started as they are needed."""
REMEDY = "mend the function or the row; reward.max_error_rate says how many failures a run bears"


class Rewarder:
    """One per rollout actor; `score` and `score_group` may be called concurrently."""

    def __init__(self, settings: RewardSettings, keys: RewardKeys = ALONE) -> None:
        """Load the function. `keys`: of the run file, that say so. Raises ConfigError or UserCodeError."""
        self._settings = settings
        self._keys = keys
        self.judges_groups = settings.scope == "group"
        """Whether the function gets all answers of a group at once."""
        self._remote = _remote(settings, keys)
        self._reward = (
            RewardFn(settings.fn, self._remote.ask, is_async=True)
            if self._remote is not None
            else load_reward(
                settings.fn,
                pattern=settings.pattern,
                args=settings.args,
                takes_group=self.judges_groups,
                strip_thinking=settings.strip_thinking,
                keys=keys,
            )
        )
        self._guard = CallGuard(settings, f'reward function "{self._reward.name}"', place=self._reward.place)
        self._pool: RewardPool | SideBySide | None = None
        self._run = self._way_to_run(self._reward)

    def _way_to_run(self, reward: RewardFn) -> Callable[[Answers], Awaitable[Outcomes]]:
        if self._remote is not None:
            return self._remote.ask
        of = self._settings
        spec = RewardWorkerSpec(
            fn=of.fn,
            pattern=of.pattern,
            args=of.args,
            takes_group=self.judges_groups,
            strip_thinking=of.strip_thinking,
            keys=self._keys,
        )
        if num_workers := self._num_workers(reward):
            self._pool = RewardPool(num_workers, spec)
            return self._in_process
        if reward.is_async and of.isolate:
            self._pool = SideBySide(spec, of.max_block_s)
            return self._in_process
        if reward.is_async:
            return self._in_loop
        if reward.is_light:
            return self._at_once
        self._threads = BlockingCalls[Outcomes](MAX_THREADS, "reward")
        return self._in_thread

    def _num_workers(self, reward: RewardFn) -> int:
        settings = self._settings
        if settings.workers or reward.needs_process:
            return max(settings.workers, 1)
        is_harmless = reward.is_async or (reward.is_light and not settings.pattern)
        return MAX_WORKERS if settings.isolate and not is_harmless else 0

    def listen(self, tell: Tell) -> None:
        self._guard.listen(tell)

    async def score(self, completion: Completion) -> RewardOutcome:
        """The reward of one completion, after a while if the function is out of order. Raises UserCodeError naming
        function, group, sample and cause, DeadlyReward if the call ended its worker."""
        return (await self.score_group((completion,)))[0]

    async def score_group(self, completions: Sequence[Completion]) -> Outcomes:
        """The rewards of all answers of a group, by one call. Raises as `score`."""
        answers = tuple(completions)
        return by_length(self._settings, answers, await self._score(answers))

    async def _score(self, answers: Answers) -> Outcomes:
        is_nought = [one.is_truncated and self._settings.truncated == "zero" for one in answers]
        if all(is_nought):
            return tuple(RewardOutcome(0.0) for _ in answers)
        outcomes = await self._called(answers)
        return tuple(RewardOutcome(0.0) if nought else one for nought, one in zip(is_nought, outcomes, strict=True))

    async def _called(self, answers: Answers) -> Outcomes:
        num_failed, is_probe = 0, False
        while True:
            try:
                is_probe = await self._guard.enter()
                outcomes = await self._run(answers)
            except GaveUp:
                raise self._failure(f"is not called any more; it last {self._guard.last_error}", answers) from None
            except BadReward as bad:
                num_failed += 1
                if self._guard.failed(str(bad), answers[0].group_id, is_probe=is_probe) and num_failed <= MAX_PROBES:
                    is_probe = False
                    continue
                if self._settings.on_error == "zero" and not self.too_many_errors:
                    return tuple(RewardOutcome(0.0) for _ in answers)
                raise self._failure(str(bad), answers, is_deadly=bad.is_deadly) from bad
            except MyxaError as error:
                self._guard.ends(str(error), is_probe=is_probe)
                raise
            except BaseException:
                self._guard.abandon(is_probe=is_probe)
                raise
            self._guard.worked(answers[0].group_id, is_probe=is_probe)
            return outcomes

    def _failure(self, words: str, answers: Answers, *, is_deadly: bool = False) -> UserCodeError:
        place = f"group {answers[0].group_id}" + ("" if self.judges_groups else f", sample {answers[0].index}")
        kind = DeadlyReward if is_deadly else UserCodeError
        return kind(f'reward function "{self._reward.name}" {words} ({place})', remedy=REMEDY)

    def gauges(self) -> dict[str, float]:
        return {**self._guard.gauges(), "reward/workers": float(len(self.worker_pids))}

    def allow(self, max_error_rate: float) -> None:
        self._guard.allow(max_error_rate)

    @property
    def num_errors(self) -> int:
        return self._guard.num_errors

    @property
    def too_many_errors(self) -> str:
        """Empty, or the sentence that ends the run."""
        return self._guard.too_many_errors

    @property
    def worker_pids(self) -> tuple[int, ...]:
        return self._pool.pids if self._pool is not None else ()

    async def close(self) -> None:
        if self._remote is not None:
            await self._remote.close()
        if self._pool is not None:
            await self._pool.close()

    async def _at_once(self, answers: Answers) -> Outcomes:
        return call_reward(self._reward, answers)

    async def _in_loop(self, answers: Answers) -> Outcomes:
        try:
            return await within(await_reward(self._reward, answers), self._settings.timeout_s)
        except TookTooLong as late:
            more = ", and still runs although it was cancelled; with reward.workers it would be stopped"
            raise BadReward(f"took longer than {self._settings.timeout_s:g} s{more if late.hangs else ''}") from None
        except UserRaised as error:
            raise raised(error.cause) from error

    async def _in_thread(self, answers: Answers) -> Outcomes:
        try:
            return await self._threads.run(lambda: call_reward(self._reward, answers), self._settings.timeout_s)
        except TimeoutError:
            raise BadReward(
                f"took longer than {self._settings.timeout_s:g} s in a thread, which cannot be stopped; "
                "with reward.workers it would be"
            ) from None
        except ThreadsBusy as busy:
            why = f": {busy.__cause__}" if busy.__cause__ else f": all {MAX_THREADS} threads hang in earlier calls"
            raise BadReward(f"could not be called{why}; use reward.workers") from None

    async def _in_process(self, answers: Answers) -> Outcomes:
        assert self._pool is not None
        return await self._pool.score(answers, self._settings.timeout_s)


def _remote(settings: RewardSettings, keys: RewardKeys) -> RemoteReward | None:
    if settings.fn != REMOTE:
        return None
    from .remote import RemoteReward, remote_options  # a client for HTTP, which no other reward needs

    takes_group = settings.scope == "group"
    return RemoteReward(remote_options(settings.args, keys.args), timeout_s=settings.timeout_s, takes_group=takes_group)


def check_args(name: str, *, pattern: str, args: Mapping[str, Any], keys: RewardKeys = ALONE) -> None:
    """Whether a built-in takes these arguments; nothing of a function of the user's. Raises ConfigError."""
    if name == REMOTE:
        from .remote import remote_options  # a client for HTTP, which no other reward needs

        remote_options(args, keys.args)
    elif name in BUILTINS:
        bind_builtin(name, pattern=pattern, args=args, key=keys.args)


WORST = frozenset({"reward/error_rate", "reward/is_paused"})
"""Gauges of which the highest is shown; the others are added up."""


class SeveralRewards:
    """One per rollout actor; `score` and `score_group` may be called concurrently."""

    def __init__(self, settings: RewardSettings) -> None:
        """Load all functions. Raises ConfigError or UserCodeError."""
        self._settings = settings
        self._by_name = {name: Rewarder(part, RewardKeys.of_one(name)) for name, part in settings.parts().items()}
        self.judges_groups = any(one.judges_groups for one in self._by_name.values())
        """Whether a function gets all answers of a group at once."""

    async def score(self, completion: Completion) -> RewardOutcome:
        return (await self.score_group((completion,)))[0]

    async def score_group(self, completions: Sequence[Completion]) -> Outcomes:
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

    @property
    def num_errors(self) -> int:
        return sum(one.num_errors for one in self._by_name.values())

    @property
    def too_many_errors(self) -> str:
        """Empty, or the sentence that ends the run."""
        return next((words for one in self._by_name.values() if (words := one.too_many_errors)), "")

    @property
    def worker_pids(self) -> tuple[int, ...]:
        return tuple(pid for one in self._by_name.values() for pid in one.worker_pids)

    def listen(self, tell: Tell) -> None:
        for one in self._by_name.values():
            one.listen(tell)

    def allow(self, max_error_rate: float) -> None:
        for one in self._by_name.values():
            one.allow(max_error_rate)

    def gauges(self) -> dict[str, float]:
        shown = [one.gauges() for one in self._by_name.values()]
        return {key: (max if key in WORST else sum)(one[key] for one in shown) for key in shown[0]}

    async def close(self) -> None:
        await asyncio.gather(*(one.close() for one in self._by_name.values()))


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
        """Nothing to report."""

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
