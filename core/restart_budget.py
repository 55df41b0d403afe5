"""How often a branch may restart (intensity per period), and its pause before it does. Pure: time is passed in."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pause before a restart: none at first, for others wait for whoever died; for one that fails again and again
    `first_s`, doubled each time up to `limit_s`, less up to half by lot."""

    first_s: float = 0.5
    limit_s: float = 30.0
    calm_s: float = 20.0
    """Whoever has lived for so long since its last start does not fail again and again."""

    def delay(self, restarts: int, lot: float) -> float:
        """Seconds before the restart that follows `restarts` earlier ones, one soon after the other; `lot` is in
        [0, 1)."""
        if restarts == 0:
            return 0.0
        full = min(self.limit_s, self.first_s * 2.0 ** min(restarts - 1, 60))
        return full * (1.0 - 0.5 * lot)


class RestartBudget:
    """At most `max_restarts` in any `period_s` seconds. A restart is reserved when it is decided and spent when the
    last process that it has to wait for is gone: one that is decided meanwhile must not find its place free."""

    def __init__(self, max_restarts: int, period_s: float) -> None:
        self.max_restarts = max_restarts
        self.period_s = period_s
        self._spent: deque[float] = deque()
        self._num_reserved = 0
        self._streak = 0
        """Restarts one soon after the other."""
        self._calm_at = 0.0

    def __str__(self) -> str:
        return f"{self.max_restarts} restarts in {self.period_s:g} s"

    def left(self, now: float) -> int:
        """How many more are allowed now."""
        self._forget(now)
        return max(0, self.max_restarts - len(self._spent) - self._num_reserved)

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

    def spend(self, now: float, backoff: Backoff, lot: float) -> float:
        """A reserved restart happens; returns the pause before it in seconds."""
        self._forget(now)
        self._num_reserved -= 1
        self._streak = self._streak + 1 if self._spent and now < self._calm_at else 0
        self._spent.append(now)
        delay_s = backoff.delay(self._streak, lot)
        self._calm_at = now + delay_s + backoff.calm_s
        return delay_s

    def _forget(self, now: float) -> None:
        while self._spent and now - self._spent[0] >= self.period_s:
            self._spent.popleft()
