"""Time is an argument: everything that waits or stamps takes a `Clock`, so tests own the hours."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds for deadlines and wall seconds for people."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...

    def wall(self) -> float:
        """Seconds since the Unix epoch."""
        ...


class SystemClock:
    """The machine's clocks."""

    monotonic = staticmethod(time.monotonic)  # the functions themselves: a call of ours on top costs as much again
    wall = staticmethod(time.time)


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
