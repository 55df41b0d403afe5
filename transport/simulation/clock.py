"""A process's clocks in virtual time: they may disagree with those of others, as real ones do."""

from __future__ import annotations

import asyncio

WALL_S = 1_700_000_000.0
"""Wall time at virtual time 0."""


class SimClock:
    """Implements `core.clock.Clock` over a loop's virtual time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, offset_s: float = 0.0) -> None:
        """`offset_s`: by how much this process's clocks are ahead of virtual time."""
        self._loop = loop
        self._offset_s = offset_s
        self._stepped_s = 0.0

    def monotonic(self) -> float:
        return self._loop.time() + self._offset_s

    def wall(self) -> float:
        return self._loop.time() + WALL_S + self._offset_s + self._stepped_s

    def step(self, seconds: float) -> None:
        """Somebody sets the wall clock, forward or back; the monotonic clock does not care."""
        self._stepped_s += seconds
