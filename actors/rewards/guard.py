"""What stands between whoever wants answers judged and what judges them, which may fail: when it is called, when it is
left alone, and when that is the end of the run.

Calls that fail in a row are an outage until shown otherwise: they wait at a gate (`gate.py`) and are repeated; until
then their failures are in doubt, and held against nobody. Knows gate and budget. Must not know what is called.
"""

from __future__ import annotations

from ...core.config import RewardSettings
from .breaker import Breaker, BreakerState
from .error_budget import ErrorBudget
from .gate import RewardGate, Tell

MAX_PROBES = 2
"""Failed probes with the same answers, before it is they that are blamed."""


class Guard:
    """Of one thing that is called, in one rollout actor, on its loop."""

    def __init__(self, settings: RewardSettings, what: str, kind: str = "reward") -> None:
        """`what` is called, for messages; `kind`: first word of its events and gauges."""
        self._settings = settings
        self._what = what
        self._kind = kind
        self._budget = ErrorBudget(settings.max_error_rate)
        self._gate = RewardGate(
            Breaker(after=settings.pause_after, cool_down_s=settings.cool_down_s, max_wait_s=settings.max_outage_s)
        )
        self.num_errors = 0
        """Failed calls so far."""
        self._in_doubt = 0
        """Failures in a row that are not held against it yet: it may be an outage."""
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

    def worked(self, *, is_probe: bool) -> None:
        """A call worked."""
        self._is_well(is_probe=is_probe)
        self._budget.note(has_failed=False)

    def _is_well(self, *, is_probe: bool) -> None:
        breaker = self._gate.breaker
        if is_probe:
            waited_s = self._gate.open_for_s
            self._tell(f"{self._kind}-works-again", f"{self._what} works again after {waited_s:.0f} s")
        self._gate.worked(is_probe=is_probe)
        if breaker.state is BreakerState.CLOSED:
            for _ in range(self._in_doubt):  # it was no outage: they count
                self._budget.note(has_failed=True)
            self._in_doubt = 0

    def refused(self, cause: str, *, is_probe: bool) -> None:
        """It is well, and says no to these answers."""
        self._is_well(is_probe=is_probe)
        self.num_errors += 1
        self.last_error = cause
        self._budget.note(has_failed=True)

    def failed(self, cause: str, group_id: int, *, is_probe: bool) -> bool:
        """A call failed: book it; True if the call is to be repeated later."""
        breaker = self._gate.breaker
        self.num_errors += 1
        self.last_error = cause
        is_in_doubt, num_opened = breaker.is_in_doubt, breaker.num_opened
        is_for_later = self._gate.failed(group_id, is_probe=is_probe)
        if breaker.num_opened > num_opened:
            self._in_doubt = 0
            self._tell(
                f"{self._kind}-paused",
                f"{self._what} failed for {self._settings.pause_after} groups in a row and is left alone for "
                f"{self._settings.cool_down_s:g} s; answers wait; last: it {cause}",
            )
        elif is_in_doubt:
            self._in_doubt += 1
        elif breaker.state is BreakerState.GIVEN_UP and is_probe:
            self._fatal = (
                f"{self._what} has not worked for {self._gate.open_for_s:.0f} s, more than "
                f"reward.max_outage_s = {self._settings.max_outage_s:g} allows; last: it {cause}"
            )
            self._tell(f"{self._kind}-given-up", self._fatal)
        elif breaker.state is BreakerState.CLOSED:
            self._budget.note(has_failed=True)
        return is_for_later

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
        self._budget.max_rate = max_error_rate

    @property
    def too_many_errors(self) -> str:
        """Empty, or the sentence that ends the run."""
        if self._fatal:
            return self._fatal
        if not self._budget.is_spent:
            return ""
        failed, calls = self._budget.recent
        return (
            f"{self._what} failed in {failed} of the last {calls} calls, more than "
            f"reward.max_error_rate = {self._budget.max_rate:g} allows; last: {self.last_error}"
        )


def _tell_nobody(kind: str, text: str) -> None:
    """Until somebody listens."""
