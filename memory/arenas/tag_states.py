"""Where the contents of a tag are, and what may happen to them next. Knows no memory: a table and its reader.

    backing        on the device        on the host             may be touched
    mapped_dirty   the contents         nothing, or an old copy yes
    mapped_clean   the contents         the same                yes
    copy_out       leaving              arriving                no
    host           nothing              the contents            no (touching it is a fault)
    discarded      nothing              nothing                 no
    copy_in        arriving             the contents, if copied by its owner alone, to fill it
    poisoned       unknown in parts     unknown in parts        no: a copy failed; nothing is moved or overwritten again

Own work: `transitions` and the like are made for objects with callbacks; this is one dictionary.
"""

from __future__ import annotations

from enum import Enum
from types import MappingProxyType

from ...core.device_memory import Backing, Tag, TagPolicy
from ...core.errors import MemoryFault

MAPPED: frozenset[Backing] = frozenset({"mapped_dirty", "mapped_clean"})
"""On the device, whole, and free to be used."""
AWAY: frozenset[Backing] = frozenset({"host", "discarded"})
"""Not on the device."""


class Event(Enum):
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


TRANSITIONS: MappingProxyType[tuple[Backing, Event], Backing] = MappingProxyType(
    {
        ("mapped_dirty", Event.WRITTEN): "mapped_dirty",
        ("mapped_clean", Event.WRITTEN): "mapped_dirty",
        ("copy_in", Event.WRITTEN): "mapped_dirty",
        ("mapped_dirty", Event.EQUAL): "mapped_clean",
        ("mapped_clean", Event.EQUAL): "mapped_clean",
        ("mapped_clean", Event.COPY_LOST): "mapped_dirty",
        ("mapped_dirty", Event.COPY_LOST): "mapped_dirty",
        ("mapped_dirty", Event.COPY_BEGUN): "copy_out",
        ("copy_out", Event.COPY_STOPPED): "mapped_dirty",
        ("copy_out", Event.LEFT): "host",
        ("mapped_clean", Event.LEFT): "host",
        ("mapped_dirty", Event.DROPPED): "discarded",
        ("mapped_clean", Event.DROPPED): "discarded",
        ("copy_in", Event.DROPPED): "discarded",
        ("host", Event.MAPPED): "copy_in",
        ("discarded", Event.MAPPED): "copy_in",
        ("copy_in", Event.ARRIVED): "mapped_clean",
        ("mapped_dirty", Event.FAULT): "poisoned",
        ("mapped_clean", Event.FAULT): "poisoned",
        ("copy_out", Event.FAULT): "poisoned",
        ("copy_in", Event.FAULT): "poisoned",
    }
)

LEAVES_BY: MappingProxyType[tuple[TagPolicy, Backing], Event] = MappingProxyType(
    {
        ("backup", "mapped_dirty"): Event.COPY_BEGUN,
        ("backup", "mapped_clean"): Event.LEFT,
        ("discard", "mapped_dirty"): Event.DROPPED,
        ("rematerialise", "mapped_dirty"): Event.DROPPED,
        ("rematerialise", "copy_in"): Event.DROPPED,
    }
)
"""First event of a release. What is not here cannot leave: kept, poisoned, on its way already."""


def after(place: str, tag: Tag, backing: Backing, event: Event) -> Backing:
    """The backing after `event`; MemoryFault when the table has no such line."""
    result = TRANSITIONS.get((backing, event))
    if result is None:
        raise MemoryFault(
            f"{place}: tag {tag!r} is {backing} and cannot be {event.value}", remedy=REMEDIES.get(backing, "")
        )
    return result


def bytes_to_copy(policy: TagPolicy, backing: Backing, num_bytes: int) -> int:
    """What a release of the tag will move to the host, exactly."""
    return num_bytes if LEAVES_BY.get((policy, backing)) is Event.COPY_BEGUN else 0


REMEDIES: MappingProxyType[Backing, str] = MappingProxyType(
    {
        "host": "restore the tag first",
        "discarded": "restore the tag first",
        "copy_out": "wait until its release is over",
        "copy_in": "wait for its restore, and fill what comes back empty, first",
        "poisoned": "a copy of it failed: restart this process, its state comes back from a checkpoint",
    }
)
