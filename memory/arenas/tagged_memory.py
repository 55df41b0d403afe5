"""The memory of one tag: its regions, their chunks, and where each chunk is. Knows no driver and moves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ...core.device_memory import Backing, Tag, TagPolicy, TagReport
from .tag_states import Event, after


@dataclass(slots=True, eq=False)
class Chunk:
    """One piece of physical memory, at the same address for life."""

    address: int
    num_bytes: int
    handle: int | None = None
    """None: not on the device."""
    slab: int | None = None
    """Host address of its copy; None: none was ever made, or it was given up."""
    is_copied: bool = False
    """The slab has held its contents at some time; whether it still does is the tag's backing."""
    checksum: int | None = None
    """Of the slab as it was filled; only when copies are verified."""


@dataclass(slots=True, eq=False)
class Region:
    """One allocation: a reservation filled with chunks."""

    address: int
    num_bytes: int
    """As asked for."""
    chunks: list[Chunk]

    @property
    def mapped_bytes(self) -> int:
        """Rounded up to what the device hands out."""
        return sum(chunk.num_bytes for chunk in self.chunks)


@dataclass(slots=True, eq=False)
class TaggedMemory:
    """All regions of a tag share one backing."""

    place: str
    tag: Tag
    policy: TagPolicy
    priority: int
    backing: Backing = "mapped_dirty"
    regions: dict[int, Region] = field(default_factory=dict[int, Region])
    """By address, in the order of allocation."""
    pending: list[tuple[int, Chunk]] = field(default_factory=list[tuple[int, Chunk]])
    """(ticket, chunk) of copies and fills that were begun and not waited for."""
    is_saving: bool = False
    """The pending copies go out while it stays, and nothing was written since they began."""

    def step(self, event: Event) -> None:
        """Go on by the table."""
        self.backing = after(self.place, self.tag, self.backing, event)

    def chunks(self) -> Iterator[Chunk]:
        """In the order of allocation; whoever only looks may do so while another thread adds or takes a region."""
        for region in tuple(self.regions.values()):
            yield from region.chunks

    @property
    def num_bytes(self) -> int:
        """What it takes of the device when it is mapped."""
        return sum(chunk.num_bytes for chunk in self.chunks())

    @property
    def has_whole_copy(self) -> bool:
        """Every chunk was copied to the host once and the copies were kept."""
        return all(chunk.slab is not None and chunk.is_copied for chunk in self.chunks())

    @property
    def host_bytes(self) -> int:
        """Held of the host pool for it, by copies that are valid or not."""
        return sum(chunk.num_bytes for chunk in self.chunks() if chunk.slab is not None)

    def report(self) -> TagReport:
        """As told to a manager."""
        return TagReport(
            tag=self.tag, num_bytes=self.num_bytes, policy=self.policy, backing=self.backing, host_bytes=self.host_bytes
        )
