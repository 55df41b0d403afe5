"""When a reward function is called again, and when its failures end the run.

Failures of several groups in a row, after the function worked, are an outage: each call waits and is repeated until one
works, or `max_outage_s` are over. Failures that turn out to be the beginning of one count against no group. A function
that has never worked gets no pause: the run's error budget ends it. Failures count by group, so that one bad prompt is
not mistaken for an outage. The `ErrorBudget` is a share of the last calls, or groups, once there are enough.
"""

from __future__ import annotations

import asyncio
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from ...algos.rewards.outcome import RewardOutcome
from ...core.completions import Completion
from ...core.config import RewardSettings
from ...core.errors import (
    DataError,
    EngineError,
    MemberFailed,
    ModelError,
    MyxaError,
    PromptTooLong,
    RewardError,
    UserCodeError,
)
from ...core.samples import Prompt, Sample
from .call import CallFailed

T = TypeVar("T")

MAX_COOL_DOWN_S = 60.0

Tell = Callable[[str, str], None]
"""Kind and text of an event."""


def _now_s() -> float:
    return asyncio.get_running_loop().time()


async def all_ended(jobs: Iterable[Awaitable[T]]) -> list[T]:
    """Results in order, once all have ended: none waits for another, or fails by it. Raises the first error."""
    done = await asyncio.gather(*jobs, return_exceptions=True)
    results: list[T] = []
    for part in done:
        if isinstance(part, BaseException):
            raise part
        results.append(part)
    return results


MIN_CALLS = 20
WINDOW_CALLS = 100
"""Only the last calls count, so that a service that breaks late is noticed as soon as one that never worked."""

KINDS: tuple[type[MyxaError], ...] = (EngineError, DataError, ModelError)
"""Of what the run ends with; all else is the user's code."""


class ErrorBudget:
    """Which of the last calls, or groups, failed. Pure: no clock, no IO."""

    def __init__(self, max_rate: float) -> None:
        self.max_rate = max_rate
        self._recent: dict[object, bool] = {}

    def note(self, *, has_failed: bool, group_id: int | None = None) -> None:
        """One more call; with `group_id` one for a group, which is lost by any of its calls."""
        key = object() if group_id is None else group_id
        self._recent[key] = self._recent.get(key, False) or has_failed
        if len(self._recent) > WINDOW_CALLS:
            del self._recent[next(iter(self._recent))]

    @property
    def recent(self) -> tuple[int, int]:
        """Failures among the last calls (groups), and how many those are."""
        return sum(self._recent.values()), len(self._recent)

    @property
    def is_spent(self) -> bool:
        """Whether more than the allowed share failed."""
        failed, calls = self.recent
        return calls >= MIN_CALLS and failed / calls > self.max_rate


class GroupBudget:
    """Counts groups lost to a workflow, an engine, a row or the chat template; rewards have a budget of their own.
    Environments may fail as often as they like, but not all of them for ever."""

    def __init__(self, max_rate: float, max_outage_s: float = math.inf) -> None:
        """`max_outage_s`: for so long all groups may be lost through their environments."""
        self.lost = ErrorBudget(max_rate)
        self._max_outage_s = max_outage_s
        self._outage: tuple[float, int] | None = None
        """Since when, and how many groups."""

    def note(self, error: MyxaError | None, now_s: float = 0.0) -> None:
        """One more group, lost to `error` or finished. Raises an error of the same kind once there are too many."""
        if isinstance(error, MemberFailed) and error.kind != "policy":
            self._note_outage(error, now_s)
            return
        if isinstance(error, RewardError | PromptTooLong):
            return
        self._outage = None if error is None else self._outage
        self.lost.note(has_failed=error is not None)
        if error is None or not self.lost.is_spent:
            return
        failed, groups = self.lost.recent
        kind = next((kind for kind in KINDS if isinstance(error, kind)), UserCodeError)
        raise kind(
            f"{failed} of the last {groups} groups were lost, more than reward.max_error_rate = {self.lost.max_rate:g} "
            f"allows; the last one: {error.message}",
            remedy=error.remedy,
        )

    def _note_outage(self, error: MemberFailed, now_s: float) -> None:
        since_s, num_groups = self._outage or (now_s, 0)
        self._outage = since_s, num_groups + 1
        if num_groups + 1 >= MIN_CALLS and now_s - since_s > self._max_outage_s:
            raise MemberFailed(
                f"the environment failed all of the last {num_groups + 1} groups, for {now_s - since_s:.0f} s, longer "
                f"than reward.max_outage_s = {self._max_outage_s:g} allows; the last one: {error.message}",
                kind=error.kind,
                remedy=error.remedy,
            )


MAX_CAUSES = 100
"""Kinds of failures that are counted apart."""
_VALUES = re.compile(r"'[^']*'|\"[^\"]*\"|(?<![:\w])[-+]?\d[\d.]*")


def kind_of_cause(cause: str) -> str:
    """The cause without what differs from row to row: quoted texts and numbers, but for the line of the file."""
    return _VALUES.sub("...", cause)


class Guarded:
    """What calls something that may fail: as one, for an actor's checks of errors, its reports and its end."""

    def __init__(self, *parts: Guarded) -> None:
        self._parts = parts

    def listen(self, tell: Tell) -> None:
        """`tell` (kind, text) is called when calls stop and when they resume."""
        for guard in self._parts:
            guard.listen(tell)

    def allow(self, max_error_rate: float) -> None:
        """Another share of failed calls from now on."""
        for guard in self._parts:
            guard.allow(max_error_rate)

    @property
    def num_errors(self) -> int:
        return sum(guard.num_errors for guard in self._parts)

    @property
    def too_many_errors(self) -> str:
        """Empty, or the sentence that ends the run."""
        return next((reason for guard in self._parts if (reason := guard.too_many_errors)), "")

    def gauges(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for guard in self._parts:
            for key, value in guard.gauges().items():
                values[key] = max(values.get(key, 0.0), value) if key in WORST else values.get(key, 0.0) + value
        return values

    def seconds(self) -> dict[str, float]:
        """Of all calls that ended, by what took them: "queue" until a worker had it, "function", and "messages" to the
        worker and back. Nothing of what has no workers."""
        parts = [guard.seconds() for guard in self._parts]
        return {kind: sum(part.get(kind, 0.0) for part in parts) for part in parts for kind in part}

    async def close(self) -> None:
        await all_ended(guard.close() for guard in self._parts)


class Scorer(Guarded, ABC):
    """Judges samples."""

    judges_groups = False
    """Whether it gets all answers of a group at once."""

    async def score(self, completion: Completion) -> RewardOutcome:
        """Of one completion. Raises UserCodeError naming function, group, sample and cause."""
        return (await self.score_group((completion,)))[0]

    @abstractmethod
    async def score_group(self, completions: Sequence[Completion]) -> Sequence[RewardOutcome]:
        """Of all answers of a group. Raises as `score`."""


class Reference(Guarded, ABC):
    """A reference model that is not the trainer's."""

    @abstractmethod
    async def judged(self, prompt: Prompt, sample: Sample) -> Sample:
        """The sample with its reference log-probs. Raises ReferenceFailed."""


WORST = frozenset({"reward/error_rate", "reward/is_paused"})
"""Gauges of which the highest is shown; the others are added up."""


class CallGuard(Guarded):
    """Of one thing that is called, in one rollout actor, on its loop."""

    def __init__(self, settings: RewardSettings, subject: str, kind: str = "reward", *, masks: bool = False) -> None:
        """Of `subject`. `kind`: first word of its events and gauges. `masks`: failures cost samples, not groups."""
        super().__init__()
        self._settings = settings
        self._subject = subject
        self._kind = kind
        self._masks = masks
        self._budget = ErrorBudget(settings.max_error_rate)
        self._groups = ErrorBudget(settings.max_error_rate)
        self._is_reward = kind == "reward"
        """A reward's failures are reported by cause, and counted by the groups that they lose."""
        self._causes: dict[str, int] = {}
        """How often it failed, by kind of cause."""
        self._has_worked = False
        self._num_waiting = self._num_errors = 0
        self._in_a_row: list[int] = []
        """Groups of the failures since a call worked: not held against them yet, for it may be an outage."""
        self._outage_s: float | None = None
        """Since when calls wait."""
        self._changed = asyncio.Event()
        """Set, and replaced by a new one, when waiting calls are to be made at once."""
        self._tell: Tell = lambda kind, text: None
        self._fatal = ""
        self.last_error = ""
        """What it did when it failed last: a sentence without its subject."""

    def listen(self, tell: Tell) -> None:
        self._tell = tell

    @property
    def num_errors(self) -> int:
        return self._num_errors

    async def called(self, group_id: int, call: Callable[[], Awaitable[T]]) -> T:
        """Of `call()`, repeated while an outage lasts. Raises CallFailed that counts, and what else `call` raises."""
        pause_s = self._settings.cool_down_s
        while True:
            if self._outage_s is not None and self._fatal:
                raise CallFailed(f"is not called any more; it last {self.last_error}")
            begun_s = _now_s()
            try:
                result = await call()
            except CallFailed as failed:
                if not self._failed(failed, group_id, begun_s):
                    raise
            except MyxaError as error:  # no further call has any sense
                self._num_errors += 1
                self._budget.note(has_failed=True)
                self._fatal = str(error)
                raise
            else:
                self._is_well(begun_s)
                self._book(group_id, has_failed=False)
                return result
            self._num_waiting += 1
            try:
                async with asyncio.timeout(pause_s):
                    await self._changed.wait()
            except TimeoutError:
                pause_s = min(2 * pause_s, MAX_COOL_DOWN_S)
            finally:
                self._num_waiting -= 1

    def _ring(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _book(self, group_id: int, *, has_failed: bool) -> None:
        self._budget.note(has_failed=has_failed)
        if self._is_reward and self._settings.on_error == "drop" and not self._masks:
            self._groups.note(has_failed=has_failed, group_id=group_id)

    def _is_well(self, begun_s: float) -> None:
        self._has_worked = True
        if self._outage_s is not None and begun_s < self._outage_s:
            return  # it says nothing of the time since
        if self._outage_s is not None:
            waited_s, self._outage_s = _now_s() - self._outage_s, None
            self._tell(f"{self._kind}-works-again", f"{self._subject} works again after {waited_s:.0f} s")
            self._ring()
        else:
            for group_id in self._in_a_row:  # it was no outage: they count
                self._book(group_id, has_failed=True)
        self._in_a_row.clear()

    def _failed(self, failed: CallFailed, group_id: int, begun_s: float) -> bool:
        """Book a failure; True if the call is to be repeated later."""
        cause = self.last_error = str(failed)
        self._num_errors += 1
        if failed.is_refusal:
            self._is_well(begun_s)
        elif self._has_worked and self._settings.pause_after:
            self._in_a_row.append(group_id)
            self._note_outage(cause)
        is_for_later = not failed.is_refusal and self._outage_s is not None and not self._fatal
        if not self._in_a_row:
            self._book(group_id, has_failed=True)
        self._tell_cause(cause, group_id, is_for_later=is_for_later)
        return is_for_later

    def _note_outage(self, cause: str) -> None:
        settings = self._settings
        if self._outage_s is None and len(set(self._in_a_row)) >= settings.pause_after:
            self._outage_s = _now_s()
            self._tell(
                f"{self._kind}-paused",
                f"{self._subject} failed for {settings.pause_after} groups in a row and is left alone for "
                f"{settings.cool_down_s:g} s; answers wait; last: it {cause}",
            )
        elif self._outage_s is not None and not self._fatal and _now_s() - self._outage_s >= settings.max_outage_s:
            self._fatal = (
                f"{self._subject} has not worked for {_now_s() - self._outage_s:.0f} s, more than "
                f"reward.max_outage_s = {settings.max_outage_s:g} allows; last: it {cause}"
            )
            self._tell(f"{self._kind}-given-up", self._fatal)
            self._ring()

    def _tell_cause(self, cause: str, group_id: int, *, is_for_later: bool = False) -> None:
        """The first failure of a kind, then the 10th, the 100th and so on."""
        kind = kind_of_cause(cause)
        kind = kind if kind in self._causes or len(self._causes) < MAX_CAUSES else "other"
        number = self._causes[kind] = self._causes.get(kind, 0) + 1
        if not self._is_reward or number != 10 ** (len(str(number)) - 1):
            return
        so_far = f"; {number} such failures so far" if number > 1 else ""
        lost = "its answer gets 0"
        if self._settings.on_error == "drop":
            lost = "its sample is masked" if self._masks else "its group is lost"
        then = "it waits" if is_for_later else lost
        self._tell(f"{self._kind}-failed", f"{self._subject} {cause} (group {group_id}): {then}{so_far}")

    def gauges(self) -> dict[str, float]:
        failed, calls = self._budget.recent
        return {
            f"{self._kind}/num_errors": float(self._num_errors),
            f"{self._kind}/error_rate": failed / max(calls, 1),
            f"{self._kind}/is_paused": float(self._outage_s is not None),
            f"{self._kind}/waiting": float(self._num_waiting),
        }

    def allow(self, max_error_rate: float) -> None:
        self._budget.max_rate = self._groups.max_rate = max_error_rate

    @property
    def too_many_errors(self) -> str:
        """Empty, or the sentence that ends the run."""
        if self._fatal:
            return self._fatal
        failed, calls = self._budget.recent
        lost, groups = self._groups.recent
        if self._budget.is_spent:
            failures = f"failed in {failed} of the last {calls} calls"
        elif self._groups.is_spent:
            failures = f"lost {lost} of the last {groups} groups, by {failed} of the last {calls} calls"
        else:
            return ""
        allowed = f"more than reward.max_error_rate = {self._budget.max_rate:g} allows"
        return f"{self._subject} {failures}, {allowed}; last: {self.last_error}"
