"""Has an adoption stood still for too long? Pure: what the engine says and the time are passed in."""

from __future__ import annotations

from ...core.weight_channel import WeightProgress

SILENT = "it did not say where it is"


class Stall:
    """Of one phase of one engine's adoption."""

    def __init__(self, limit_s: float, now_s: float) -> None:
        """`limit_s`: without any movement at most; 0: as long as it likes."""
        self._limit_s = limit_s
        self._moved_s = now_s
        self._last: WeightProgress | None = None
        self._is_silent = False

    @property
    def at(self) -> str:
        """Where it was when it was heard last, for errors."""
        where = self._last.at if self._last is not None else SILENT
        return f"{where}, silent since" if self._is_silent and self._last is not None else where

    def heard(self, progress: WeightProgress | None, now_s: float) -> bool:
        """What the engine answered, None for no answer; whether it stands still for longer than it may.

        An answer that says that nothing can be counted just now is a sign of life: the phase's deadline has the say.
        """
        last, self._last = self._last, progress or self._last
        self._is_silent = progress is None
        if progress is not None:
            is_first = last is None
            if is_first or not progress.is_counted or progress.num_done != last.num_done:
                self._moved_s = now_s
        return bool(self._limit_s) and now_s - self._moved_s > self._limit_s
