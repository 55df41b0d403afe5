"""How many failures are too many: a share of the last calls, or groups, once there were enough of them."""

from __future__ import annotations

import math
from collections import deque

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

MIN_CALLS = 20
WINDOW_CALLS = 100
"""Only the last calls count, so that a service that breaks late is noticed as soon as one that never worked."""

KINDS: tuple[type[MyxaError], ...] = (EngineError, DataError, ModelError)
"""Of what the run ends with; all else is the user's code."""


class ErrorBudget:
    """Counts calls. Pure: no clock, no IO."""

    def __init__(self, max_rate: float) -> None:
        self.max_rate = max_rate
        """The allowed share."""
        self._recent: deque[bool] = deque(maxlen=WINDOW_CALLS)
        self.num_calls = 0
        self.num_errors = 0

    def note(self, *, has_failed: bool) -> None:
        """One more call."""
        self._recent.append(has_failed)
        self.num_calls += 1
        self.num_errors += has_failed

    @property
    def recent(self) -> tuple[int, int]:
        """Failures among the last calls, and how many those are."""
        return sum(self._recent), len(self._recent)

    @property
    def is_spent(self) -> bool:
        """Whether more than the allowed share failed."""
        failed, calls = self.recent
        return calls >= MIN_CALLS and failed / calls > self.max_rate


class LostGroups:
    """Which of the last groups were lost to a reward: with a few failed calls many groups may be. Pure."""

    def __init__(self, max_rate: float) -> None:
        self.max_rate = max_rate
        """The allowed share."""
        self._recent: dict[int, bool] = {}

    def note(self, group_id: int, *, is_lost: bool) -> None:
        """One more call for a group; a group is lost by any of its calls."""
        self._recent[group_id] = self._recent.get(group_id, False) or is_lost
        if len(self._recent) > WINDOW_CALLS:
            del self._recent[next(iter(self._recent))]

    @property
    def recent(self) -> tuple[int, int]:
        """Lost ones among the last groups, and how many those are."""
        return sum(self._recent.values()), len(self._recent)

    @property
    def is_spent(self) -> bool:
        """Whether more than the allowed share was lost."""
        lost, groups = self.recent
        return groups >= MIN_CALLS and lost / groups > self.max_rate


class GroupBudget:
    """Counts groups that were lost to a workflow, an engine, a row or the chat template. Rewards have a budget of their
    own, and a prompt that does not fit is no failure of any of them. Environments may fail as often as they like, but
    not all of them for ever."""

    def __init__(self, max_rate: float, max_outage_s: float = math.inf) -> None:
        """`max_outage_s`: for so long all groups may be lost through their environments."""
        self._budget = ErrorBudget(max_rate)
        self._max_outage_s = max_outage_s
        self._outage: tuple[float, int] | None = None
        """Since when, and how many groups."""

    @property
    def max_rate(self) -> float:
        """The allowed share."""
        return self._budget.max_rate

    @max_rate.setter
    def max_rate(self, max_rate: float) -> None:
        self._budget.max_rate = max_rate

    def note(self, error: MyxaError | None, now_s: float = 0.0) -> None:
        """One more group, lost to `error` or finished. Raises an error of the same kind once there are too many."""
        if isinstance(error, MemberFailed) and error.kind != "policy":
            self._note_outage(error, now_s)
            return
        if isinstance(error, RewardError | PromptTooLong):
            return
        self._outage = None if error is None else self._outage
        self._budget.note(has_failed=error is not None)
        if error is None or not self._budget.is_spent:
            return
        failed, groups = self._budget.recent
        kind = next((kind for kind in KINDS if isinstance(error, kind)), UserCodeError)
        raise kind(
            f"{failed} of the last {groups} groups were lost, more than reward.max_error_rate = {self.max_rate:g} "
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
