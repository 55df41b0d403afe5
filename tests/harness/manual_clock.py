"""A clock for tests and simulations."""

from __future__ import annotations


class ManualClock:
    """A clock that moves only by `advance`; for tests and simulations."""

    def __init__(self, start_s: float = 0.0, wall_s: float = 1_700_000_000.0) -> None:
        self._now_s = start_s
        self._offset_s = wall_s - start_s

    def monotonic(self) -> float:
        return self._now_s

    def wall(self) -> float:
        return self._now_s + self._offset_s

    def advance(self, seconds: float) -> None:
        """Move both clocks forward; raises ValueError for a negative step."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back ({seconds} s)")
        self._now_s += seconds
