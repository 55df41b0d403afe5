"""After a pause, running generations go on first: new requests wait a moment before they are sent.

A server that has new requests in hand when it goes on reads their prompts first, one batch after another, and whoever
was in the middle of a sentence waits for that too, on top of the pause. New requests come in crowds exactly then: an
engine that has a new version is given new work. Knows time, nothing else.
"""

from __future__ import annotations

import asyncio

HEAD_START_S = 0.01
"""Two or three steps of a small model on a GPU; a version takes much longer than that to make."""


class HeadStart:
    """One server's."""

    def __init__(self, seconds: float = HEAD_START_S) -> None:
        self._seconds = seconds
        self._ends_s = 0.0

    def begin(self) -> None:
        """The server goes on, now."""
        self._ends_s = asyncio.get_running_loop().time() + self._seconds

    async def over(self) -> None:
        """Wait for its end; at once if there is none under way."""
        left_s = self._ends_s - asyncio.get_running_loop().time()
        if left_s > 0:
            await asyncio.sleep(left_s)
