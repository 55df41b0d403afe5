"""What stands between whoever wants answers judged and what judges them, which may fail: when it is called, when it is
left alone, and when that is the end of the run.

Calls that fail in a row are an outage until shown otherwise: they wait at a gate (`gate.py`) and are repeated; until
then their failures are in doubt, and held against nobody. Knows gate and budget. Must not know what is called.
"""

from __future__ import annotations

import re

from ...core.config import RewardSettings
from .breaker import Breaker, BreakerState
from .error_budget import ErrorBudget, LostGroups
from .gate import RewardGate, Tell

MAX_PROBES = 2
"""Failed probes with the same answers, before it is they that are blamed."""


MAX_CAUSES = 100
"""Kinds of failures that are told apart."""
_VALUES = re.compile(r"'[^']*'|\"[^\"]*\"|(?<![:\w])[-+]?\d[\d.]*")


def kind_of_cause(cause: str) -> str:
    """The cause without what differs from row to row: quoted texts and numbers, but for the line of the file."""
    return _VALUES.sub("...", cause)


class Guard:
    """Of one thing that is called, in one rollout actor, on its loop."""

    def __init__(self, settings: RewardSettings, what: str, kind: str = "reward", place: str = "") -> None:
        """`what` is called, for messages; `kind`: first word of its events and gauges; `place`: file and line where it
        is defined."""
        self._settings = settings
        self._what = what
        self._kind = kind
        self._place = place
        self._budget = ErrorBudget(settings.max_error_rate)
        self._groups = LostGroups(settings.max_error_rate)
        self._is_reward = kind == "reward"
        """Whose failures are told by their causes, and counted by the groups that they lose."""
        self._causes: dict[str, int] = {}
        """How often it failed, by kind of cause."""
        self._gate = RewardGate(
            Breaker(after=settings.pause_after, cool_down_s=settings.cool_down_s, max_wait_s=settings.max_outage_s)
        )
        self.num_errors = 0
        """Failed calls so far."""
        self._in_doubt: list[int] = []
        """Groups of failures in a row that are not held against it yet: it may be an outage."""
        self._tell: Tell = _tell_nobody
        self._fatal = ""
        self.last_error = ""
        """What it did when it failed last: a sentence without its subject."""

    def listen(self, tell: Tell) -> None:
        """Whom to tell when calls stop and go on."""
        self._tell = tell

    async def enter(self) -> bool:
        """Wait until it may be called; True if this call is the probe. Raises GaveUp once there is no hope."""
        return await self._gate.enter()

    def worked(self, group_id: int, *, is_probe: bool) -> None:
        """A call worked."""
        self._is_well(is_probe=is_probe)
        self._book(group_id, has_failed=False)

    def _book(self, group_id: int, *, has_failed: bool) -> None:
        self._budget.note(has_failed=has_failed)
        if self._is_reward and self._settings.on_error == "drop":
            self._groups.note(group_id, is_lost=has_failed)

    def _is_well(self, *, is_probe: bool) -> None:
        breaker = self._gate.breaker
        if is_probe:
            waited_s = self._gate.open_for_s
            self._tell(f"{self._kind}-works-again", f"{self._what} works again after {waited_s:.0f} s")
        self._gate.worked(is_probe=is_probe)
        if breaker.state is BreakerState.CLOSED:
            for group_id in self._in_doubt:  # it was no outage: they count
                self._book(group_id, has_failed=True)
            self._in_doubt.clear()

    def refused(self, cause: str, group_id: int, *, is_probe: bool) -> None:
        """It is well, and says no to these answers."""
        self._is_well(is_probe=is_probe)
        self.num_errors += 1
        self.last_error = cause
        self._tell_cause(cause, group_id)
        self._book(group_id, has_failed=True)

    def failed(self, cause: str, group_id: int, *, is_probe: bool) -> bool:
        """A call failed: book it; True if the call is to be repeated later."""
        breaker = self._gate.breaker
        self.num_errors += 1
        self.last_error = cause
        is_in_doubt, num_opened = breaker.is_in_doubt, breaker.num_opened
        is_for_later = self._gate.failed(group_id, is_probe=is_probe)
        if breaker.num_opened > num_opened:
            self._in_doubt.clear()
            self._tell(
                f"{self._kind}-paused",
                f"{self._what} failed for {self._settings.pause_after} groups in a row and is left alone for "
                f"{self._settings.cool_down_s:g} s; answers wait; last: it {cause}",
            )
        elif is_in_doubt:
            self._in_doubt.append(group_id)
        elif breaker.state is BreakerState.GIVEN_UP and is_probe:
            self._fatal = (
                f"{self._what} has not worked for {self._gate.open_for_s:.0f} s, more than "
                f"reward.max_outage_s = {self._settings.max_outage_s:g} allows; last: it {cause}"
            )
            self._tell(f"{self._kind}-given-up", self._fatal)
        elif breaker.state is BreakerState.CLOSED:
            self._book(group_id, has_failed=True)
        self._tell_cause(cause, group_id, is_for_later=is_for_later)
        return is_for_later

    def _tell_cause(self, cause: str, group_id: int, *, is_for_later: bool = False) -> None:
        """The first failure of a kind, then the 10th, the 100th and so on."""
        kind = kind_of_cause(cause)
        kind = kind if kind in self._causes or len(self._causes) < MAX_CAUSES else "other"
        number = self._causes[kind] = self._causes.get(kind, 0) + 1
        if not self._is_reward or number != 10 ** (len(str(number)) - 1):
            return
        place = f" (defined at {self._place})" if self._place and " at " not in cause else ""
        so_far = f"; {number} such failures so far" if number > 1 else ""
        lost = "its group is lost" if self._settings.on_error == "drop" else "its answer gets 0"
        then = "it waits" if is_for_later else lost
        self._tell(f"{self._kind}-failed", f"{self._what} {cause}{place} (group {group_id}): {then}{so_far}")

    def ends(self, why: str, *, is_probe: bool) -> None:
        """No further call has any sense."""
        self.abandon(is_probe=is_probe)
        self.num_errors += 1
        self._budget.note(has_failed=True)
        self._fatal = why

    def abandon(self, *, is_probe: bool) -> None:
        """The call was cancelled."""
        if is_probe:
            self._gate.abandoned()

    def gauges(self) -> dict[str, float]:
        """What the monitor shows of it."""
        failed, calls = self._budget.recent
        is_paused = self._gate.breaker.state is not BreakerState.CLOSED
        return {
            f"{self._kind}/num_errors": float(self.num_errors),
            f"{self._kind}/error_rate": failed / max(calls, 1),
            f"{self._kind}/is_paused": float(is_paused),
            f"{self._kind}/waiting": float(self._gate.num_waiting),
        }

    def allow(self, max_error_rate: float) -> None:
        """Another share of failed calls from now on."""
        self._budget.max_rate = self._groups.max_rate = max_error_rate

    @property
    def too_many_errors(self) -> str:
        """Empty, or the sentence that ends the run."""
        if self._fatal:
            return self._fatal
        failed, calls = self._budget.recent
        lost, groups = self._groups.recent
        if self._budget.is_spent:
            words = f"failed in {failed} of the last {calls} calls"
        elif self._groups.is_spent:
            words = f"lost {lost} of the last {groups} groups, by {failed} of the last {calls} calls"
        else:
            return ""
        allowed = f"more than reward.max_error_rate = {self._budget.max_rate:g} allows"
        return f"{self._what} {words}, {allowed}; last: {self.last_error}"


def _tell_nobody(kind: str, text: str) -> None:
    """Until somebody listens."""
