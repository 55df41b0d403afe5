"""What we tell the owners of blocks: that we keep one, and that we need it no longer.

Releases are gathered per turn of the loop and told until they are answered: one that got lost would keep a block for as
long as we live.
"""

from __future__ import annotations

import asyncio
import logging

from ...core.errors import CallError, MyxaError
from ...core.ids import PeerKey
from .neighbourhood import Neighbourhood
from .slab import SlabMapping

RETRY_S = 1.0
MAX_ATTEMPTS = 60

_log = logging.getLogger("myxa.transport")


class Releases:
    """Tells. `add_from_anywhere` may be called in any thread, all else on the loop."""

    def __init__(self, neighbourhood: Neighbourhood) -> None:
        self._neighbourhood = neighbourhood
        self._loop = asyncio.get_running_loop()
        self._due: dict[PeerKey, list[int]] = {}
        self._is_closed = False

    async def hold(self, owner: PeerKey, ticket: int) -> bool:
        """Keep a block; False: its offer is over, or its owner cannot be asked."""
        try:
            return await self._neighbourhood.ref(owner).hold(ticket)
        except CallError:
            return False

    def add_from_anywhere(self, owner: PeerKey, ticket: int, _mapping: SlabMapping) -> None:
        """The last array over a block is gone (the mapping was kept until now)."""
        if self._is_closed or self._loop.is_closed():
            return
        try:
            self._loop.call_soon_threadsafe(self.add, owner, ticket)
        except RuntimeError:
            return  # the loop was closed meanwhile; the owner hears of our end

    def add(self, owner: PeerKey, ticket: int) -> None:
        """We have read that block."""
        if self._is_closed:
            return
        waiting = self._due.get(owner)
        if waiting is not None:
            waiting.append(ticket)
            return
        self._due[owner] = [ticket]
        self._neighbourhood.spawn(self._tell(owner), f"releases blocks of {owner}")

    async def _tell(self, owner: PeerKey) -> None:
        try:
            for _ in range(MAX_ATTEMPTS):
                while due := self._due[owner]:
                    self._due[owner] = []
                    if not await self._told(owner, tuple(due)):
                        self._due[owner] += due
                        break
                else:
                    return
                if self._neighbourhood.is_over(owner):
                    return
                await asyncio.sleep(RETRY_S)
            _log.warning("%s was not told that %d of its blocks are not needed", owner, len(self._due[owner]))
        finally:
            del self._due[owner]

    async def _told(self, owner: PeerKey, tickets: tuple[int, ...]) -> bool:
        try:
            await self._neighbourhood.ref(owner).release(tickets)
        except MyxaError:
            return False
        return True

    def close(self) -> None:
        """Tell nobody any more: our end says it all."""
        self._is_closed = True
