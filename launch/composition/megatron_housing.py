"""Memory of a GPU by tag for the Megatron trainer: our arenas, or torch-memory-saver. Part of the composition root."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager

from ...actors.backends.megatron.residence import Coming
from ...core.device_memory import MovedBytes, Tag, TagPolicy, TagReport
from ...memory.arenas.cuda_vmm import CudaMemory
from ...memory.arenas.torch_saver import TorchSaver


class ArenaHousing:
    """By arenas on the driver's virtual memory."""

    def __init__(self, memory: CudaMemory) -> None:
        self._memory = memory

    def region(self, tag: Tag, policy: TagPolicy) -> AbstractContextManager[None]:
        """See `Housing`."""
        return self._memory.region(tag, policy)

    def shrink(self, tags: Collection[Tag]) -> None:
        """See `Housing`."""
        for tag in tags:
            self._memory.pools.drop(tag)

    def divide(self, parts: Sequence[Tag]) -> None:
        """See `Housing`."""
        for part in parts[1:]:
            self._memory.arena.tag(part, "backup")
        self._memory.arena.divide(parts)

    def mark_dirty(self, tag: Tag) -> None:
        """See `Housing`."""
        self._memory.arena.mark_dirty(tag)

    def release(self, tags: Collection[Tag]) -> MovedBytes:
        """See `Housing`; staged weights that an engine has let go of leave too."""
        return self._memory.release(tags)

    def begin_restore(self, tags: Collection[Tag], *, awaited: Collection[Tag]) -> Coming:
        """See `Housing`."""
        self._memory.trim()
        return self._memory.arena.begin_restore(tags, awaited=awaited)

    def report(self) -> tuple[TagReport, ...]:
        """See `Housing`."""
        return self._memory.report()

    def close(self) -> None:
        """See `Housing`."""
        self._memory.close()


class _Here:
    def wait(self, tag: Tag) -> None:
        """Everything came at once."""


class SaverHousing:
    """By torch-memory-saver: what it copies it copies every time, and it comes back as a whole."""

    def __init__(self, saver: TorchSaver) -> None:
        self._saver = saver

    def region(self, tag: Tag, policy: TagPolicy) -> AbstractContextManager[None]:
        """See `Housing`."""
        return self._saver.region(tag, policy)

    def shrink(self, tags: Collection[Tag]) -> None:
        """It cannot."""

    def divide(self, parts: Sequence[Tag]) -> None:
        """It cannot: a tag of it leaves whole."""

    def mark_dirty(self, tag: Tag) -> None:
        """See `Housing`."""
        self._saver.mark_dirty(tag)

    def release(self, tags: Collection[Tag]) -> MovedBytes:
        """See `Housing`; what torch keeps outside of the regions leaves before."""
        return self._saver.release(tags)

    def begin_restore(self, tags: Collection[Tag], *, awaited: Collection[Tag]) -> Coming:
        """See `Housing`; blocks until everything is there."""
        self._saver.restore(tags)
        return _Here()

    def report(self) -> tuple[TagReport, ...]:
        """See `Housing`."""
        return self._saver.report()

    def close(self) -> None:
        """See `Housing`."""
        self._saver.close()
