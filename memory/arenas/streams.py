"""Moves that are under way: what a caller holds while contents stream in or out."""

from __future__ import annotations

from collections.abc import Sequence
from threading import RLock

from ...core.device_memory import Tag
from ...core.errors import MemoryFault
from .arrival import settle
from .moving import Account, Floor, Moved
from .tagged_memory import TaggedMemory


class Stream:
    """Tags with copies under way. Not waiting for them leaks nothing: the arena's next call on a tag waits."""

    def __init__(self, floor: Floor, lock: RLock, memories: Sequence[TaggedMemory], account: Account) -> None:
        self._floor = floor
        self._lock = lock
        self._memories: dict[Tag, TaggedMemory] = {memory.tag: memory for memory in memories}
        self._account = account

    def wait(self, tag: Tag) -> None:
        """Until this tag is done. Raises MemoryFault when a copy failed; the tag is poisoned then."""
        memory = self._memories.get(tag)
        if memory is None:
            others = ", ".join(self._memories) or "nothing is"
            raise MemoryFault(
                f"{self._floor.place}: tag {tag!r} is not on its way here ({others})",
                remedy="wait for a tag that was asked for",
            )
        self._settle(memory)

    def wait_all(self) -> Moved:
        """Until everything is done."""
        for memory in self._memories.values():
            self._settle(memory)
        return self._account.total()

    def _settle(self, memory: TaggedMemory, until: int | None = None) -> None:
        with self._lock, self._account.part("copy"):
            settle(self._floor, memory, until=until)


class Saving(Stream):
    """From `Arena.begin_backup`."""


class Restoring(Stream):
    """From `Arena.begin_restore`."""

    def wait_address(self, address: int) -> None:
        """Until the chunk that holds this address has arrived (and those of its tag that were begun before it)."""
        for memory in self._memories.values():
            if any(r.address <= address < r.address + r.mapped_bytes for r in memory.regions.values()):
                self._settle(memory, until=address)
                return
        raise MemoryFault(
            f"{self._floor.place}: {address:#x} is in none of {', '.join(self._memories)}",
            remedy="wait for an address of a region of these tags",
        )
