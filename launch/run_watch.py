"""Looks at a running run twice a second, for the live view and for the launcher's own decisions. Asks, never acts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ..actors.contracts import BufferContract, CoordinatorContract, MonitorContract
from ..core.errors import CallError
from ..core.refs import with_deadline
from ..transport.node import Node
from .views.run_view import RunView

T = TypeVar("T")

ASK_S = 2.0
"""How long one look may take; actors that do not answer in time are left out."""


async def answer_or_none(question: Awaitable[T]) -> T | None:
    """The answer; None if the actor does not answer."""
    try:
        return await question
    except CallError:
        return None


class RunWatch:
    """Takes looks; remembers the last one that had a status."""

    def __init__(self, node: Node) -> None:
        self._coordinator = node.ref(CoordinatorContract, "coordinator")
        self._buffer = node.ref(BufferContract, "buffer")
        self._monitor = node.ref(MonitorContract, "monitor")
        self._node = node
        self._started_wall_s = node.clock.wall()
        self.last = RunView(now_wall_s=self._started_wall_s, started_wall_s=self._started_wall_s)

    async def look(self, note: str = "") -> RunView:
        status, stats, snapshot = await asyncio.gather(
            self._answer("coordinator", with_deadline(self._coordinator, ASK_S).status),
            self._answer("buffer", with_deadline(self._buffer, ASK_S).stats),
            self._answer("monitor", with_deadline(self._monitor, ASK_S).snapshot),
        )
        state = RunView(
            now_wall_s=self._node.clock.wall(), started_wall_s=self._started_wall_s, status=status, buffer=stats,
            snapshot=snapshot if snapshot is not None else self.last.snapshot, note=note,
        )  # fmt: skip
        if status is not None or self.last.status is None:
            self.last = state
        return state

    async def ask_to_stop(self, reason: str, seconds: float) -> bool:
        """Ask the coordinator for an orderly end of the run; whether it answered."""
        try:
            await with_deadline(self._coordinator, seconds).stop(reason)
        except CallError:
            return False
        return True

    async def _answer(self, name: str, ask: Callable[[], Awaitable[T]]) -> T | None:
        """An absent actor is not waited for."""
        return await answer_or_none(ask()) if name in self._node.peers(name) else None
