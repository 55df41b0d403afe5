"""A trainer rank's memory that can leave its device between steps: what both trainers do. See `core.device_memory`.

Parameters and gradients are there when `restore` returns; the optimizer's parts may still be on their way, since
forward and backward do without them: the update waits.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from ...core.device_memory import OPTIMIZER_PARTS, Tag, TagReport

if TYPE_CHECKING:
    from ...memory.arenas.arena import Arena, Restoring
    from ...memory.arenas.cuda_memory import CudaMemory


class RankOffload:
    """One rank's. All methods block and belong to the backend's thread, `report` to any."""

    def __init__(self, memory: Arena | CudaMemory | None = None) -> None:
        """`memory` None: not there yet."""
        self._movable = memory
        self._coming: dict[Tag, Restoring] = {}
        """Parts of the optimizer that `restore` did not wait for."""

    def ready(self) -> None:
        """Before parameters are read. May be collective."""

    def arrived(self) -> None:
        for tag, coming in self._coming.items():
            coming.wait(tag)
        self._coming.clear()

    def written(self) -> None:
        """Parameters and the optimizer's state changed."""
        self.arrived()
        for tag in self._known(("params", "masters", *OPTIMIZER_PARTS)):
            self._memory().mark_dirty(tag)

    def reference_written(self) -> None:
        for tag in self._known(("frozen",)):
            self._memory().mark_dirty(tag)

    def report(self) -> tuple[TagReport, ...]:
        return () if self._movable is None else tuple(r for r in self._movable.report() if r.num_bytes)

    def release(self, tags: Collection[Tag]) -> int:
        self.arrived()
        self._vacate()
        return self._memory().release(self._known(tags))

    def restore(self, tags: Collection[Tag]) -> int:
        self.arrived()
        self._vacate()
        own_tags = self._known(tags)
        awaited: list[Tag] = [tag for tag in own_tags if tag not in OPTIMIZER_PARTS]
        away: dict[Tag, TagReport] = {
            r.tag: r for r in self.report() if r.tag in own_tags and r.backing in ("host", "discarded")
        }
        coming = self._memory().begin_restore(own_tags, awaited=awaited)
        self._coming = {tag: coming for tag in own_tags if tag in OPTIMIZER_PARTS}
        for tag in awaited:
            coming.wait(tag)
        self._came_back(away)
        return sum(r.num_bytes for r in away.values() if r.backing == "host")

    def close(self) -> None:
        """Give everything back; no tensor on it may be used again."""
        self._coming.clear()
        if self._movable is not None:
            self._movable.close()
            self._movable = None

    def _memory(self) -> Arena | CudaMemory:
        if self._movable is None:
            raise RuntimeError("the rank's memory is not open")
        return self._movable

    def _known(self, tags: Collection[Tag]) -> list[Tag]:
        return [report.tag for report in self.report() if report.tag in tags]

    def _vacate(self) -> None:
        """What torch's allocator keeps goes back, where it is in the way."""

    def _came_back(self, tags: Collection[Tag]) -> None:
        """These had left."""
