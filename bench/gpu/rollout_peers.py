"""What a rollout actor needs around it to be driven by a benchmark: a buffer that hands out a round's prompts, a
coordinator that hears of engines, a monitor that swallows. They live in the benchmark's own process, as in a run they
live in processes of their own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from myxa.actors.contracts import BufferContract, CoordinatorContract, MonitorContract
from myxa.core.messages import (
    Assignment,
    DrawReply,
    DrawRequest,
    EngineStatus,
    GroupDropped,
    GroupFinished,
    GroupReturned,
    PutResult,
    Telemetry,
)


class RoundBuffer(BufferContract):
    """Hands out what `begin` was given and notes what comes back."""

    def __init__(self) -> None:
        self._left: list[Assignment] = []
        self._news = asyncio.Event()
        self._done = asyncio.Event()
        self._num_open = 0
        self.num_tokens = 0
        self.first_s = 0.0
        self.last_s = 0.0
        self.trouble = ""

    def begin(self, assignments: Sequence[Assignment]) -> None:
        self._left = list(reversed(assignments))
        self._num_open = len(assignments)
        self.num_tokens, self.first_s = 0, 0.0
        self._done.clear()
        self._news.set()

    async def finished(self, limit_s: float) -> None:
        """Until all groups came back. Raises TimeoutError, or RuntimeError for a group that was given up."""
        async with asyncio.timeout(limit_s):
            await self._done.wait()
        if self.trouble:
            raise RuntimeError(self.trouble)

    async def draw(self, request: DrawRequest) -> DrawReply:
        try:
            async with asyncio.timeout(request.wait_s):
                await self._news.wait()
        except TimeoutError:
            return DrawReply()
        self.first_s = self.first_s or time.monotonic()
        taken = [self._left.pop() for _ in range(min(request.max_groups, len(self._left)))]
        if not self._left:
            self._news.clear()
        return DrawReply(assignments=tuple(taken))

    async def put_groups(self, finished: tuple[GroupFinished, ...], rollout: str) -> tuple[PutResult, ...]:
        for one in finished:
            self.num_tokens += sum(len(sample.response_ids) for sample in one.group.samples)
            self._one_less()
        return tuple(PutResult(outcome="ready") for _ in finished)

    async def drop_group(self, dropped: GroupDropped) -> None:
        self.trouble = f"group {dropped.group_id} was dropped: {dropped.reason} {dropped.detail}"
        self._one_less()

    async def return_group(self, returned: GroupReturned) -> int:
        self.trouble = f"group {returned.group_id} was returned"
        self._one_less()
        return 1

    async def adopted(self, rollout: str, epoch: int, version: int, lineage: int) -> None:
        return

    def _one_less(self) -> None:
        self._num_open -= 1
        if self._num_open == 0:
            self.last_s = time.monotonic()
            self._done.set()


class QuietCoordinator(CoordinatorContract):
    """Knows when the engine is up."""

    def __init__(self) -> None:
        self._is_ready = asyncio.Event()

    async def rollout_ready(self, status: EngineStatus, epoch: int) -> None:
        self._is_ready.set()

    async def engine_up(self, limit_s: float) -> None:
        async with asyncio.timeout(limit_s):
            await self._is_ready.wait()


class QuietMonitor(MonitorContract):
    """Takes telemetry and forgets it."""

    async def telemetry(self, bundle: Telemetry) -> None:
        return
