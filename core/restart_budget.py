"""How often a branch may restart (intensity per period), and its pause before it does. Pure: time is passed in."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pause before a restart: none at first, for others wait for whoever died; for one that fails again and again
    `first_s`, doubled each time up to `limit_s`, less up to half by lot."""

    first_s: float = 1.0
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
    last process that it has to wait for is gone: one that is decided meanwhile must not find its place free.

    A restart begins to grow old when it has led to work (`prove`), not when it happened: attempts that take long to
    fail, and never come to work, would be forgotten one after the other and follow each other for ever."""

    def __init__(self, max_restarts: int, period_s: float) -> None:
        self.max_restarts = max_restarts
        self.period_s = period_s
        self._proven: deque[float] = deque()
        """When restarts that led to work did so."""
        self._unproven: list[float] = []
        """When the others happened."""
        self._num_reserved = 0
        self._streak = 0
        """Restarts one soon after the other."""
        self._calm_at = 0.0

    def __str__(self) -> str:
        return f"{self.max_restarts} restarts in {self.period_s:g} s"

    def words(self, now: float) -> str:
        """Which bound it is that was reached."""
        is_slow = bool(self._unproven) and now - self._unproven[0] >= self.period_s
        return f"{self.max_restarts} restarts that come to no work" if is_slow else str(self)

    def left(self, now: float) -> int:
        """How many more are allowed now."""
        self._forget(now)
        return max(0, self.max_restarts - self._num_counted)

    def reserve(self, now: float) -> bool:
        """Whether one more is allowed; then it is reserved."""
        self._forget(now)
        if self._num_counted >= self.max_restarts:
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
        has_before = bool(self._proven or self._unproven)
        self._streak = self._streak + 1 if has_before and now < self._calm_at else 0
        self._unproven.append(now)
        delay_s = backoff.delay(self._streak, lot)
        self._calm_at = now + delay_s + backoff.calm_s
        return delay_s

    @property
    def has_unproven(self) -> bool:
        """Whether there are restarts that have led to no work yet."""
        return bool(self._unproven)

    def prove(self, now: float) -> None:
        """What was started again is at work: its restarts count for `period_s` from now on."""
        self._proven.extend(now for _ in self._unproven)
        self._unproven.clear()

    @property
    def _num_counted(self) -> int:
        return len(self._proven) + len(self._unproven) + self._num_reserved

    def _forget(self, now: float) -> None:
        while self._proven and now - self._proven[0] >= self.period_s:
            self._proven.popleft()
