"""The memory of one tag: its regions, their chunks, and the table of its states. It makes no driver call.

    backing        on the device        on the host             may be touched
    mapped_dirty   the contents         nothing, or an old copy yes
    mapped_clean   the contents         the same                yes
    copy_out       leaving              arriving                no
    host           nothing              the contents            no (touching it is a fault)
    discarded      nothing              nothing                 no
    copy_in        arriving             the contents, if copied by its owner alone, to fill it
    poisoned       unknown in parts     unknown in parts        no: a copy failed; nothing is moved or overwritten again

`deal` splits a tag's regions into parts of about the same size, so that one part can leave while the others stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from ...core.device_memory import Backing, Tag, TagPolicy, TagReport
from ...core.errors import MemoryFault

MAPPED: frozenset[Backing] = frozenset({"mapped_dirty", "mapped_clean"})
"""On the device, whole, and free to be used."""
AWAY: frozenset[Backing] = frozenset({"host", "discarded"})
"""Not on the device."""


class TagEvent(Enum):
    """What happens to a tag."""

    WRITTEN = "written"
    """Its owner changed it, or filled it after it came back empty."""
    EQUAL = "found equal to its host copy"
    COPY_LOST = "robbed of its host copy"
    COPY_BEGUN = "copied out"
    COPY_STOPPED = "left where it was"
    LEFT = "taken off the device"
    DROPPED = "dropped"
    MAPPED = "mapped"
    ARRIVED = "copied in"
    FAULT = "hit by a fault"


TRANSITIONS: MappingProxyType[tuple[Backing, TagEvent], Backing] = MappingProxyType(
    {
        ("mapped_dirty", TagEvent.WRITTEN): "mapped_dirty",
        ("mapped_clean", TagEvent.WRITTEN): "mapped_dirty",
        ("copy_in", TagEvent.WRITTEN): "mapped_dirty",
        ("mapped_dirty", TagEvent.EQUAL): "mapped_clean",
        ("mapped_clean", TagEvent.EQUAL): "mapped_clean",
        ("mapped_clean", TagEvent.COPY_LOST): "mapped_dirty",
        ("mapped_dirty", TagEvent.COPY_LOST): "mapped_dirty",
        ("mapped_dirty", TagEvent.COPY_BEGUN): "copy_out",
        ("copy_out", TagEvent.COPY_STOPPED): "mapped_dirty",
        ("copy_out", TagEvent.LEFT): "host",
        ("mapped_clean", TagEvent.LEFT): "host",
        ("mapped_dirty", TagEvent.DROPPED): "discarded",
        ("mapped_clean", TagEvent.DROPPED): "discarded",
        ("copy_in", TagEvent.DROPPED): "discarded",
        ("host", TagEvent.MAPPED): "copy_in",
        ("discarded", TagEvent.MAPPED): "copy_in",
        ("copy_in", TagEvent.ARRIVED): "mapped_clean",
        ("mapped_dirty", TagEvent.FAULT): "poisoned",
        ("mapped_clean", TagEvent.FAULT): "poisoned",
        ("copy_out", TagEvent.FAULT): "poisoned",
        ("copy_in", TagEvent.FAULT): "poisoned",
    }
)

LEAVES_BY: MappingProxyType[tuple[TagPolicy, Backing], TagEvent] = MappingProxyType(
    {
        ("backup", "mapped_dirty"): TagEvent.COPY_BEGUN,
        ("backup", "mapped_clean"): TagEvent.LEFT,
        ("discard", "mapped_dirty"): TagEvent.DROPPED,
        ("rematerialise", "mapped_dirty"): TagEvent.DROPPED,
        ("rematerialise", "copy_in"): TagEvent.DROPPED,
    }
)
"""First event of a release. What is not here cannot leave: kept, poisoned, on its way already."""


def after(place: str, tag: Tag, backing: Backing, event: TagEvent) -> Backing:
    """The backing after `event`; MemoryFault when the table has no such line."""
    result = TRANSITIONS.get((backing, event))
    if result is None:
        raise MemoryFault(
            f"{place}: tag {tag!r} is {backing} and cannot be {event.value}", remedy=REMEDIES.get(backing, "")
        )
    return result


REMEDIES: MappingProxyType[Backing, str] = MappingProxyType(
    {
        "host": "restore the tag first",
        "discarded": "restore the tag first",
        "copy_out": "wait until its release is over",
        "copy_in": "wait for its restore, and fill what comes back empty, first",
        "poisoned": "a copy of it failed: restart this process, its state comes back from a checkpoint",
    }
)


@dataclass(slots=True, eq=False)
class MemoryChunk:
    """One piece of physical memory, always at the same address."""

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
    chunks: list[MemoryChunk]

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
    pending: list[tuple[int, MemoryChunk]] = field(default_factory=list[tuple[int, MemoryChunk]])
    """(ticket, chunk) of copies and fills that were begun and not waited for."""
    is_saving: bool = False
    """The pending copies go out while it stays, and nothing was written since they began."""

    def step(self, event: TagEvent) -> None:
        """Take the table's next state."""
        self.backing = after(self.place, self.tag, self.backing, event)

    def chunks(self) -> Iterator[MemoryChunk]:
        """In the order of allocation; a reader may use it while another thread adds or takes a region."""
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
        """As reported to a manager."""
        return TagReport(
            tag=self.tag, num_bytes=self.num_bytes, policy=self.policy, backing=self.backing, host_bytes=self.host_bytes
        )


LEAST_GRANULES = 16
"""A part below so many of the device's granules is not worth a separate command."""


def shares(sizes: Sequence[int], num_parts: int, least_bytes: int) -> list[list[int]]:
    """Indices of `sizes` by part: at most `num_parts` parts, none empty, as equal as the largest sizes allow, and as
    few as parts of `least_bytes` need. Every index is in one part; inside a part they ascend."""
    num = max(1, min(num_parts, sum(sizes) // max(least_bytes, 1), len(sizes)))
    parts: list[list[int]] = [[] for _ in range(num)]
    filled = [0] * num
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        part = min(range(num), key=lambda p: (filled[p], p))
        parts[part].append(index)
        filled[part] += sizes[index]
    return [sorted(part) for part in parts if part]


def deal(whole: TaggedMemory, parts: Sequence[TaggedMemory], granularity: int) -> None:
    """Give the regions of `whole`, which is the first of `parts`, to all of them. Nothing moves: a region's bytes are
    where they were, and so is its copy on the host."""
    regions: list[Region] = list(whole.regions.values())
    dealt = shares([region.mapped_bytes for region in regions], len(parts), LEAST_GRANULES * granularity)
    for part, indices in zip(parts, dealt, strict=False):
        part.regions = {regions[index].address: regions[index] for index in indices}
