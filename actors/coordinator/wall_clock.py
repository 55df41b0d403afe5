"""The end of a run by time. It counts from when training began, and goes on counting while its owner is away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ...core.clock import Clock
from .run_state import RunState


class WallClock:
    """See the module's head."""

    def __init__(self, state: RunState, clock: Clock) -> None:
        self._state = state
        self._clock = clock
        gone_s = max(clock.wall() - state.started_wall_s, 0.0) if state.started_wall_s else 0.0
        self._started_s = clock.monotonic() - gone_s
        self._moved = asyncio.Event()

    def start(self) -> None:
        """Training begins now."""
        self._started_s, self._state.started_wall_s = self._clock.monotonic(), self._clock.wall()

    def move(self) -> None:
        """The limit is another one now."""
        self._moved.set()

    def age_s(self) -> float:
        """Since training began."""
        return self._clock.monotonic() - self._started_s

    async def run(self, limit_s: Callable[[], float], end: Callable[[str], Awaitable[None]]) -> None:
        """Until the limit (0: none) is reached, then `end` with the reason."""
        while True:
            seconds = limit_s()
            self._moved.clear()
            try:
                async with asyncio.timeout(seconds - self.age_s() if seconds else None):
                    await self._moved.wait()
            except TimeoutError:
                return await end(f"run.max_wall_s = {seconds:g} s is over")
