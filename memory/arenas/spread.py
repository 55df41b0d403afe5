"""Arenas of several devices as one store: a tag is on all of them or on none.

What fails on one device is undone on the others: half of a tag is of no use, and the ledger knows only whole ones.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from ...core.device_memory import MovedBytes, MovedMemory, Tag, TagReport
from ...core.errors import MemoryFault
from .arena import Arena
from .tag_states import AWAY


class SpreadArenas:
    """An `AssetStore` of at least one arena, all of which have the same tags. Methods block; one caller at a time."""

    def __init__(self, arenas: Sequence[Arena]) -> None:
        """Raises MemoryFault without any."""
        if not arenas:
            raise MemoryFault("a store over no device", remedy="name at least one arena")
        self.arenas = tuple(arenas)

    def report(self) -> tuple[TagReport, ...]:
        """Of each tag what the fullest device has of it; it is away only where all have it away."""
        return tuple(_fullest(parts) for parts in zip(*(arena.report() for arena in self.arenas), strict=True))

    def release(self, tags: Collection[Tag]) -> MovedMemory:
        """See the protocol. A tag that fails on one device stays on the others."""
        return _sum([arena.release(tags) for arena in self.arenas])

    def restore(self, tags: Collection[Tag]) -> MovedMemory:
        """See the protocol. With MemoryFault the tags that were away are away again."""
        moved: list[MovedBytes] = []
        away = {report.tag for report in self.report() if report.backing in AWAY}
        for number, arena in enumerate(self.arenas):
            try:
                moved.append(arena.restore(tags))
            except MemoryFault:
                for done in self.arenas[:number]:
                    done.release([tag for tag in tags if tag in away])
                raise
        return _sum(moved)

    def close(self) -> None:
        """Give everything back on all devices; the first error met is raised at the end."""
        errors: list[MemoryFault] = []
        for arena in self.arenas:
            try:
                arena.close()
            except MemoryFault as error:
                errors.append(error)
        if errors:
            raise errors[0]


def _fullest(parts: Sequence[TagReport]) -> TagReport:
    worst = max(parts, key=lambda part: (part.backing == "poisoned", part.backing not in AWAY))
    num_bytes, host_bytes = max(p.num_bytes for p in parts), max(p.host_bytes for p in parts)
    return replace(worst, num_bytes=num_bytes, host_bytes=host_bytes)


def _sum(moved: Sequence[MovedBytes]) -> MovedMemory:
    return MovedMemory(
        copied_bytes=sum(m.copied_bytes for m in moved),
        dropped_bytes=sum(m.dropped_bytes for m in moved),
        seconds=sum(m.seconds for m in moved),
    )
