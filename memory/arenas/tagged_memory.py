"""The memory of one tag: its regions, their chunks, and the table of its states. It makes no driver call.

backing        on the device        on the host             may be touched
mapped_dirty   the contents         nothing, or an old copy yes
mapped_clean   the contents         the same                yes
copy_out       leaving              arriving                no
host           nothing              the contents            no (touching it is a fault)
discarded      nothing              nothing                 no
copy_in        arriving             the contents, if copied by its owner alone, to fill it
poisoned       unknown in parts     unknown in parts        no: a copy failed; nothing is moved or overwritten again
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ...core.device_memory import Backing, Tag, TagPolicy, TagReport
from ...core.errors import MemoryFault

MAPPED: frozenset[Backing] = frozenset({"mapped_dirty", "mapped_clean"})
"""On the device, whole, and free to be used."""
AWAY: frozenset[Backing] = frozenset({"host", "discarded"})


class TagEvent(Enum):
    """What happens to a tag."""

    WRITTEN = "written"
    """Its owner changed it, or filled it after it came back empty."""
    COPY_BEGUN = "copied out"
    COPY_STOPPED = "left where it was"
    LEFT = "taken off the device"
    DROPPED = "dropped"
    MAPPED = "mapped"
    ARRIVED = "copied in"
    FAULT = "hit by a fault"


def _any_of(*backings: Backing) -> frozenset[Backing]:
    return frozenset(backings)


TRANSITIONS: Mapping[TagEvent, tuple[frozenset[Backing], Backing]] = {
    TagEvent.WRITTEN: (_any_of("mapped_dirty", "mapped_clean", "copy_in"), "mapped_dirty"),
    TagEvent.COPY_BEGUN: (_any_of("mapped_dirty"), "copy_out"),
    TagEvent.COPY_STOPPED: (_any_of("copy_out"), "mapped_dirty"),
    TagEvent.LEFT: (_any_of("copy_out", "mapped_clean"), "host"),
    TagEvent.DROPPED: (_any_of("mapped_dirty", "mapped_clean", "copy_in"), "discarded"),
    TagEvent.MAPPED: (AWAY, "copy_in"),
    TagEvent.ARRIVED: (_any_of("copy_in"), "mapped_clean"),
    TagEvent.FAULT: (_any_of("mapped_dirty", "mapped_clean", "copy_out", "copy_in"), "poisoned"),
}
"""From any of these backings, to that one."""

LEAVES_BY: Mapping[tuple[TagPolicy, Backing], TagEvent] = {
    ("backup", "mapped_dirty"): TagEvent.COPY_BEGUN,
    ("backup", "mapped_clean"): TagEvent.LEFT,
    ("discard", "mapped_dirty"): TagEvent.DROPPED,
    ("rematerialise", "mapped_dirty"): TagEvent.DROPPED,
    ("rematerialise", "copy_in"): TagEvent.DROPPED,
}
"""First event of a release. What is not here cannot leave: kept, poisoned, on its way already."""

REMEDIES: Mapping[Backing, str] = {
    "host": "restore the tag first",
    "discarded": "restore the tag first",
    "copy_out": "wait until its release is over",
    "copy_in": "wait for its restore, and fill what comes back empty, first",
    "poisoned": "a copy of it failed: restart this process, its state comes back from a checkpoint",
}


@dataclass(slots=True, eq=False)
class MemoryChunk:
    """One piece of physical memory, always at the same address."""

    address: int
    num_bytes: int
    handle: int | None = None
    """None: not on the device."""
    slab: int | None = None
    """Host address of its copy; None: none was ever made."""


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
    backing: Backing = "mapped_dirty"
    regions: dict[int, Region] = field(default_factory=dict[int, Region])
    """By address, in the order of allocation."""
    pending: list[int] = field(default_factory=list[int])
    """Tickets of copies in and fills that were begun and not waited for."""

    def step(self, event: TagEvent) -> None:
        """Take the table's next state; MemoryFault when it has none."""
        sources, to = TRANSITIONS[event]
        if self.backing not in sources:
            raise MemoryFault(
                f"{self.place}: tag {self.tag!r} is {self.backing} and cannot be {event.value}",
                remedy=REMEDIES.get(self.backing, ""),
            )
        self.backing = to

    def chunks(self) -> Iterator[MemoryChunk]:
        """In the order of allocation; a reader may use it while another thread adds or takes a region."""
        for region in tuple(self.regions.values()):
            yield from region.chunks

    @property
    def num_bytes(self) -> int:
        """What it takes of the device when it is mapped."""
        return sum(chunk.num_bytes for chunk in self.chunks())

    @property
    def host_bytes(self) -> int:
        """Held of the host pool for it, by copies that are valid or not."""
        return sum(chunk.num_bytes for chunk in self.chunks() if chunk.slab is not None)

    def report(self) -> TagReport:
        return TagReport(self.tag, self.num_bytes, self.policy, self.backing, self.host_bytes)


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
