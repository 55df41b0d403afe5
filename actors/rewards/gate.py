"""Where calls of a reward function wait while its breaker is open. Knows breaker and asyncio; no reward, no actor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .breaker import Breaker, BreakerState

Tell = Callable[[str, str], None]
"""Kind and text of an event."""


class GaveUp(Exception):
    """The breaker gave up; the text says after how long."""


class RewardGate:
    """One per rewarder, on its loop. The clock is the loop's."""

    def __init__(self, breaker: Breaker) -> None:
        self.breaker = breaker
        self.num_waiting = 0
        """Calls that wait now."""
        self._changed = asyncio.Event()

    async def enter(self) -> bool:
        """Wait until a call may be made; True if it is the probe. Raises GaveUp once there is no hope."""
        self.num_waiting += 1
        try:
            while not self.breaker.may_call(_now_s()):
                if self.breaker.state is BreakerState.GIVEN_UP:
                    raise GaveUp
                await self._wait(self.breaker.wait_s(_now_s()))
        finally:
            self.num_waiting -= 1
        return self.breaker.state is BreakerState.PROBING

    def worked(self, *, is_probe: bool) -> None:
        """A call worked."""
        self.breaker.worked(is_probe=is_probe)
        if is_probe:
            self._ring()

    def failed(self, group_id: int, *, is_probe: bool) -> bool:
        """A call failed; True if it is to `enter` again."""
        is_for_later = self.breaker.failed(group_id, _now_s(), is_probe=is_probe)
        if is_probe:
            self._ring()
        return is_for_later

    def abandoned(self) -> None:
        """The probe was cancelled."""
        self.breaker.abandoned(_now_s())
        self._ring()

    @property
    def open_for_s(self) -> float:
        """Since the breaker opened last."""
        return _now_s() - self.breaker.opened_s

    async def _wait(self, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def _ring(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
