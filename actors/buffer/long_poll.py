"""Calls that wait until something changes, until their own time is over or shortly before the caller's deadline.

Knows an actor's context. Everybody who waits is woken by each change and looks again for itself: conditions differ from
caller to caller, and callers are few.
"""

from __future__ import annotations

import asyncio
import math

from ...core.actor import ActorContext

LONGEST_WAIT_S = 600.0
DEADLINE_SHARE = 0.9
"""A long poll ends after this share of the caller's time, so that the answer arrives before the caller gives up."""


class LongPolls:
    """The waiting calls of one actor. Made on its loop."""

    def __init__(self, ctx: ActorContext) -> None:
        self._ctx = ctx
        self._changed = asyncio.Event()

    def ring(self) -> None:
        """Wake everybody who waits."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def until_s(self, wait_s: float) -> float:
        """When the call that is being handled has to answer, on the actor's clock, if it would wait `wait_s`."""
        left_s = self._ctx.deadline()
        limit_s = LONGEST_WAIT_S if left_s is None else left_s * DEADLINE_SHARE
        wanted_s = wait_s if wait_s > 0 else 0.0  # NaN and negative: do not wait
        return self._ctx.clock.monotonic() + min(wanted_s, limit_s)

    async def wait(self, until_s: float, look_at_s: float = math.inf, *, is_urgent: bool = False) -> float | None:
        """Seconds waited until something changed, or until `look_at_s`; None if the time was over first. `is_urgent`:
        only until others had their turn."""
        started_s = self._ctx.clock.monotonic()
        if started_s >= until_s:
            return None
        if is_urgent:
            await asyncio.sleep(0)
            return 0.0
        try:
            async with asyncio.timeout(min(until_s, look_at_s) - started_s):
                await self._changed.wait()
        except TimeoutError:
            if self._ctx.clock.monotonic() >= until_s:
                return None
        return self._ctx.clock.monotonic() - started_s
