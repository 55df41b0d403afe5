"""Which arrows a trace has: from station to station of a group, from the making of a weight version to each adoption.

Stations are told by different actors, in any order and some of them never. An arrow is given out once both of its ends
are known, as a pair: no arrow of the file is without an end. A group that has all its arrows is forgotten. What waits
for its other end is bounded; the oldest is forgotten first. Knows places in a trace. Must not know files or telemetry
records.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from ...core.flow_sampling import Hop

_ORDER: tuple[Hop, ...] = get_args(Hop)
_MAX_GROUPS = 8192
_MAX_VERSIONS = 256
_MAX_ADOPTIONS = 4096


@dataclass(frozen=True, slots=True)
class Place:
    """A slice of the trace; microseconds of the wall clock."""

    pid: int
    tid: int
    start_us: int
    end_us: int
    """Behind its last microsecond."""


@dataclass(frozen=True, slots=True)
class Arrow:
    """From inside one slice to inside another; `from_us <= to_us`."""

    name: str
    category: str
    source: Place
    target: Place
    from_us: int
    to_us: int


class TraceFlows:
    """Stations in, arrows out."""

    def __init__(self) -> None:
        self._groups: OrderedDict[int, dict[int, Place]] = OrderedDict()
        self._makers: OrderedDict[int, Place] = OrderedDict()
        self._adoptions: OrderedDict[int, list[Place]] = OrderedDict()

    def station(self, group_id: int, hop: str, place: Place) -> Iterator[Arrow]:
        """A group passed a station. A later visit (the group was handed out again) replaces an earlier one."""
        if hop not in _ORDER:
            return
        stations = self._groups.setdefault(group_id, {})
        self._groups.move_to_end(group_id)
        index = _ORDER.index(hop)
        known = stations.get(index)
        if known is not None and known.start_us >= place.start_us:
            return
        stations[index] = place
        name = f"group {group_id}"
        if (before := stations.get(index - 1)) is not None:
            yield from _arrow(name, "group", before, place)
        if (behind := stations.get(index + 1)) is not None:
            yield from _arrow(name, "group", place, behind)
        if len(stations) == len(_ORDER):
            self._groups.pop(group_id, None)
        while len(self._groups) > _MAX_GROUPS:
            self._groups.popitem(last=False)

    def made(self, version: int, place: Place) -> Iterator[Arrow]:
        """A weight version was made; also again, after a restart."""
        self._makers[version] = place
        self._makers.move_to_end(version)
        for adoption in self._adoptions.pop(version, []):
            yield from _arrow(f"version {version}", "weights", place, adoption)
        while len(self._makers) > _MAX_VERSIONS:
            self._makers.popitem(last=False)

    def adopted(self, version: int, place: Place) -> Iterator[Arrow]:
        """An engine took a version."""
        maker = self._makers.get(version)
        if maker is not None:
            yield from _arrow(f"version {version}", "weights", maker, place)
            return
        waiting = self._adoptions.setdefault(version, [])
        if len(waiting) < _MAX_ADOPTIONS:
            waiting.append(place)
        while len(self._adoptions) > _MAX_VERSIONS:
            self._adoptions.popitem(last=False)


def _arrow(name: str, category: str, source: Place, target: Place) -> Iterator[Arrow]:
    """Nothing where the target was over before the source began: clocks that differ, or a visit that was replaced."""
    to_us = max(target.start_us, source.start_us)
    if to_us >= target.end_us:
        return
    from_us = min(source.end_us - 1, to_us)
    yield Arrow(name, category, source, target, from_us, to_us)


class Lanes:
    """Rows for things that overlap: slices of one row must not, or viewers drop them."""

    def __init__(self, max_lanes: int = 32) -> None:
        self._max_lanes = max_lanes
        self._free_us: dict[tuple[str, str], list[int]] = {}
        """(actor, track) -> when each of its rows is free."""
        self.num_refused = 0
        """Slices for which there was no row."""

    def take(self, source: str, track: str, start_us: int, end_us: int) -> str | None:
        """The row's name: the first that is free at `start_us`; None when all of them are taken."""
        free_us = self._free_us.setdefault((source, track), [])
        lane = next((lane for lane, free in enumerate(free_us) if free <= start_us), len(free_us))
        if lane >= self._max_lanes:
            self.num_refused += 1
            return None
        if lane == len(free_us):
            free_us.append(0)
        free_us[lane] = end_us
        return track if lane == 0 else f"{track} {lane + 1}"
