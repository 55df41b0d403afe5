"""Waiting for a change of something that one event loop owns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LOOK_S = 0.0005
"""For each that looks, the next round of looks is put off by so much: looks take a bounded share of the loop, however
many wait and however often something changes. With ten that wait it is 5 ms, with a thousand 0.5 s."""


class Changes:
    """Wakes all that wait for a change; each looks for itself."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self._num_waiting = 0
        self._next_s = 0.0
        """Moment of the loop's clock before which there is no further round of looks."""
        self._timer: asyncio.TimerHandle | None = None

    def tell(self) -> None:
        """Something has changed."""
        if self._timer is not None or not self._num_waiting:
            return
        loop = asyncio.get_running_loop()
        if loop.time() >= self._next_s:
            self._wake()
        else:
            self._timer = loop.call_at(self._next_s, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._next_s = asyncio.get_running_loop().time() + LOOK_S * self._num_waiting
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def next(self, timeout_s: float) -> bool:
        """Wait for a change from now on; False: there was none within `timeout_s`."""
        self._num_waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        finally:
            self._num_waiting -= 1
            if not self._num_waiting and self._timer is not None:
                self._timer.cancel()
                self._timer = None
        return True

    async def until(self, is_met: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until a change fulfils `is_met`; False: not within `timeout_s`."""
        give_up_s = asyncio.get_running_loop().time() + timeout_s
        while not is_met():
            if not await self.next(give_up_s - asyncio.get_running_loop().time()):
                return is_met()
        return True
