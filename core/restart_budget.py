"""How often a branch may restart (intensity per period), and its pause before it does. Pure: time is passed in."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pause before the n-th restart within a period: `first_s * 2^(n-1)`, at most `limit_s`, less up to half by lot."""

    first_s: float = 0.5
    limit_s: float = 30.0

    def delay(self, restarts: int, lot: float) -> float:
        """Seconds before the restart that follows `restarts` earlier ones; `lot` is in [0, 1)."""
        full = min(self.limit_s, self.first_s * 2.0 ** min(restarts, 60))
        return full * (1.0 - 0.5 * lot)


class RestartBudget:
    """At most `max_restarts` in any `period_s` seconds. A restart is reserved when it is decided and spent when the
    last process that it has to wait for is gone: one that is decided meanwhile must not find its place free."""

    def __init__(self, max_restarts: int, period_s: float) -> None:
        self.max_restarts = max_restarts
        self.period_s = period_s
        self._spent: deque[float] = deque()
        self._num_reserved = 0

    def __str__(self) -> str:
        return f"{self.max_restarts} restarts in {self.period_s:g} s"

    def reserve(self, now: float) -> bool:
        """Whether one more is allowed; then it is reserved."""
        self._forget(now)
        if len(self._spent) + self._num_reserved >= self.max_restarts:
            return False
        self._num_reserved += 1
        return True

    def release(self) -> None:
        """A reserved restart will not happen."""
        self._num_reserved -= 1

    def spend(self, now: float) -> int:
        """A reserved restart happens; returns how many there were before it within the period."""
        self._forget(now)
        self._num_reserved -= 1
        self._spent.append(now)
        return len(self._spent) - 1

    def _forget(self, now: float) -> None:
        while self._spent and now - self._spent[0] >= self.period_s:
            self._spent.popleft()
