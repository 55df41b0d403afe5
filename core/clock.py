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
