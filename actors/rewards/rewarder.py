"""Judges completions for a rollout actor: built-ins at once, your own functions in processes.

| function | `reward.workers = 0` | `reward.workers = n` |
|---|---|---|
| exact, numeric, format without a pattern | in the loop | n processes |
| remote | in the loop | - |
| regex, format with a pattern | up to 4 processes; with `isolate = false` in the loop | n processes |
| math | 1 process | n processes |
| your own `async def` | 1 process, side by side; with `isolate = false` in the loop | n processes |
| your own `def` | up to 4 processes; with `isolate = false` in threads | n processes |

Calls that fail in a row are an outage until shown otherwise: they wait and are repeated (`guard.py`).
Knows how a function is run and what counts as a failure. Must not know groups' fates or other actors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from ...algos.rewards.outcome import RewardOutcome
from ...core.completions import Completion
from ...core.config import RewardSettings
from ...core.errors import DeadlyReward, MyxaError, UserCodeError
from ..user_call import TookTooLong, UserRaised, within
from .call import (
    ALONE,
    REMOTE,
    Answers,
    BadReward,
    Keys,
    Outcomes,
    RewardFn,
    await_reward,
    call_reward,
    load_reward,
    raised,
)
from .gate import GaveUp, Tell
from .guard import MAX_PROBES, Guard
from .length_cost import by_length
from .pool import RewardPool
from .protocol import WorkerSpec
from .side_by_side import SideBySide
from .threads import BlockingCalls, ThreadsBusy

if TYPE_CHECKING:
    from .remote import RemoteReward

MAX_THREADS = 8
MAX_WORKERS = 4
"""Processes for a function that should have some and was given no number; started as they are needed."""
REMEDY = "mend the function or the row; reward.max_error_rate says how many failures a run bears"


class RunReward(Protocol):
    """One way to run a reward function. Raises BadReward when it fails."""

    async def __call__(self, answers: Answers) -> Outcomes: ...


class Rewarder:
    """One per rollout actor; `score` and `score_group` may be called concurrently."""

    def __init__(self, settings: RewardSettings, keys: Keys = ALONE) -> None:
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
        self._guard = Guard(settings, f'reward function "{self._reward.name}"', place=self._reward.place)
        self._pool: RewardPool | SideBySide | None = None
        self._run = self._way_to_run(self._reward)

    def _way_to_run(self, reward: RewardFn) -> RunReward:
        if self._remote is not None:
            return self._remote.ask
        of = self._settings
        spec = WorkerSpec(
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
        """Whom to tell when calls stop and go on."""
        self._guard.listen(tell)

    async def score(self, completion: Completion) -> RewardOutcome:
        """The reward of one completion, after a while if the function is out of order.

        Raises UserCodeError naming function, group, sample and cause, DeadlyReward if the call ended its worker.
        """
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
        """What the monitor shows of it."""
        return {**self._guard.gauges(), "reward/workers": float(len(self.worker_pids))}

    def allow(self, max_error_rate: float) -> None:
        """Another share of failed calls from now on."""
        self._guard.allow(max_error_rate)

    @property
    def num_errors(self) -> int:
        """Failed calls so far."""
        return self._guard.num_errors

    @property
    def too_many_errors(self) -> str:
        """Empty, or the sentence that ends the run."""
        return self._guard.too_many_errors

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Worker processes now alive."""
        return self._pool.pids if self._pool is not None else ()

    async def close(self) -> None:
        """End all worker processes and connections; nothing of them is left afterwards."""
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
            more = ", and goes on although it was cancelled; with reward.workers it would be stopped"
            raise BadReward(f"took longer than {self._settings.timeout_s:g} s{more if late.goes_on else ''}") from None
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


def _remote(settings: RewardSettings, keys: Keys) -> RemoteReward | None:
    if settings.fn != REMOTE:
        return None
    from .remote import RemoteReward, remote_options  # a client for HTTP, which no other reward needs

    takes_group = settings.scope == "group"
    return RemoteReward(remote_options(settings.args, keys.args), timeout_s=settings.timeout_s, takes_group=takes_group)
