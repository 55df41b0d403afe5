"""How many failures are too many: a share of the last calls, once there were enough of them."""

from __future__ import annotations

from collections import deque

MIN_CALLS = 20
WINDOW_CALLS = 100
"""Only the last calls count, so that a service that breaks late is noticed as soon as one that never worked."""


class ErrorBudget:
    """Counts calls. Pure: no clock, no IO."""

    def __init__(self, max_rate: float) -> None:
        self._max_rate = max_rate
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
        return calls >= MIN_CALLS and failed / calls > self._max_rate
