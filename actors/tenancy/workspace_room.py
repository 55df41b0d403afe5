"""Room on a device that a tenant needs while it has its turn and that nobody allocates ahead: activations, logits.

Nothing is mapped or moved; the ledger counts it, so that the engine leaves as much as the trainer's step will take. But
torch keeps what a step took: when the room is given up, that has to be given back, or the others find it occupied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from ...core.assets import Moved, MovedBytes
from ...core.device_memory import Tag, TagReport

WORKSPACE: Tag = "workspace"


class WorkspaceRoom:
    """An `AssetStore` of so many bytes that are only counted; `vacate` gives back what is in them and unused."""

    def __init__(self, num_bytes: int, vacate: Callable[[], None]) -> None:
        self._num_bytes = num_bytes
        self._vacate = vacate
        self._is_held = True

    def report(self) -> tuple[TagReport, ...]:
        """See the protocol."""
        backing = "mapped_dirty" if self._is_held else "discarded"
        return (TagReport(tag=WORKSPACE, num_bytes=self._num_bytes, policy="discard", backing=backing),)

    def release(self, tags: Collection[Tag]) -> MovedBytes:
        """See the protocol."""
        left, self._is_held = self._is_held and WORKSPACE in tags, self._is_held and WORKSPACE not in tags
        if left:
            self._vacate()
        return Moved(dropped_bytes=self._num_bytes if left else 0)

    def restore(self, tags: Collection[Tag]) -> MovedBytes:
        """See the protocol."""
        self._is_held = self._is_held or WORKSPACE in tags
        return Moved()
