"""Where the coordinator records what operators and rules change: the audit log, written off the loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from ...core.clock import Clock
from ...core.knobs import AuditRecord
from ..audit import AuditLog, read_audit
from ..own_thread import in_own_thread

NUM_LOOKED_AT = 1000
"""Newest records among which one that may be missing is looked for."""


class AuditDesk:
    """See the module's head."""

    def __init__(self, path: Path, version: Callable[[], int], clock: Clock) -> None:
        """`version`: where the run stands."""
        self._log = AuditLog(path)
        self._version = version
        self._clock = clock

    def stamp(self, record: AuditRecord) -> AuditRecord:
        """With time and version of this moment."""
        return msgspec.structs.replace(record, wall_s=self._clock.wall(), version=self._version())

    async def write(self, record: AuditRecord) -> AuditRecord:
        """As `append`, stamped."""
        return await self.append(self.stamp(record))

    async def append(self, record: AuditRecord) -> AuditRecord:
        """Durable once this returns. Raises as `AuditLog.append` does."""
        return await in_own_thread(lambda: self._log.append(record), "audit")

    async def complete(self, record: AuditRecord) -> bool:
        """Append a record, with its time as it is, unless an earlier incarnation came to that; returns whether it was
        missing. Raises as `AuditLog.append` and `read_audit` do."""
        there = await self.newest(NUM_LOOKED_AT)
        if any(msgspec.structs.replace(each, number=0, previous="", digest="") == record for each in there):
            return False
        await self.append(record)
        return True

    async def newest(self, limit: int) -> tuple[AuditRecord, ...]:
        """The newest records, oldest first."""
        return await in_own_thread(lambda: read_audit(self._log.path, max(limit, 1)), "audit")
