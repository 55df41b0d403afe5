"""Keeps a trace loadable when a run makes dozens of steps a second: a row gets so many short slices a second, a counter
so many points. What is long is always drawn; what is left out is counted. Knows numbers; must not know files."""

from __future__ import annotations

_SHORT_US = 2_000
_SLICES_PER_S = 60
_COUNTER_GAP_US = 100_000
_SECOND_US = 1_000_000


class TraceVolume:
    """Decides slice by slice, point by point."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, int], tuple[int, int]] = {}
        """Row -> (second, short slices drawn in it)."""
        self._newest_us: dict[tuple[int, str], int] = {}
        self.num_skipped = 0
        """Slices and points that were left out."""

    def has_room(self, row: tuple[int, int], start_us: int, duration_us: int) -> bool:
        """Whether a slice is to be drawn."""
        if duration_us >= _SHORT_US:
            return True
        second, num = self._seconds.get(row, (0, 0))
        now = start_us // _SECOND_US
        num = num if now == second else 0
        if num >= _SLICES_PER_S:
            self.num_skipped += 1
            return False
        self._seconds[row] = (now, num + 1)
        return True

    def is_due(self, pid: int, counter: str, at_us: int) -> bool:
        """Whether a point of a counter is to be drawn."""
        before_us = self._newest_us.get((pid, counter))
        if before_us is not None and 0 <= at_us - before_us < _COUNTER_GAP_US:
            self.num_skipped += 1
            return False
        self._newest_us[pid, counter] = at_us
        return True
