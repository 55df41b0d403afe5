"""Samples for people: the groups that were finished last, and dumps of the ledger's.

Part of the buffer. Knows shelf and dumps; must not know who looks.
"""

from __future__ import annotations

from ...core.messages import DumpReport, RecentGroup
from .dumps import BufferDumps
from .recent_groups import RecentGroups


class ShownGroups:
    """See the module's head."""

    _recent: RecentGroups
    _dumps: BufferDumps

    async def recent(self, num_groups: int) -> tuple[RecentGroup, ...]:
        return self._recent.newest(num_groups)

    async def dump(self, max_bytes: int) -> DumpReport:
        return await self._dumps.whole(max_bytes)

    async def dump_next(self, num_groups: int, max_bytes: int) -> DumpReport:
        return await self._dumps.begin_next(num_groups, max_bytes)

    async def dumps(self) -> tuple[DumpReport, ...]:
        return self._dumps.reports()
