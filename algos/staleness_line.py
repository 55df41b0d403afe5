"""The line: groups in the order of their dispatch, with the index that each has among the groups that count.

Knows which groups are under way, ready or taken and how old their oldest token is. Knows no policy, no clock, no
ledger. Hand-written: an ordered dictionary with a base index is the whole mechanism; `sortedcontainers` was
considered and not used, because ids only ever grow and removal by key is all that is needed.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..core.errors import StalenessError

NO_TOKEN = 1 << 60
"""Version of a group that holds no engine token: it can start on any weights and is never too old."""


class Stage(enum.Enum):
    """Where a group stands, as far as admission cares."""

    UNDER_WAY = "under way"
    """An engine works on it."""
    WAITING = "waiting"
    """Handed back by an engine that died or was drained; needs another one. Keeps its place."""
    READY = "ready"
    TAKEN = "taken"
    """Claimed for a step. Stays in the line until every older group is taken too."""


@dataclass(slots=True)
class Entry:
    """One group in the line."""

    group_id: int
    version: int
    """Lower bound on the version of its oldest token; the exact value once it is ready."""
    stage: Stage
    announced: int = 0
    """What the engine said that it serves when the group started there."""
    era: int = 0
    """Number of retunes before its dispatch: an older era may break the newer, tighter rules."""
    ceiling: int = NO_TOKEN
    """Stamps above this belong to weights that a rewind undid; they count as this version."""


class Line:
    """Groups from the oldest unconsumed one on. A group that is dropped leaves, and all behind it move up by one.

    `base` is the *effective index* of the first entry: the number of groups consumed or in front of it since
    version 0 (a run that starts at version k counts from `k * batch_size`).
    """

    __slots__ = ("_entries", "base", "num_open", "num_ready")

    def __init__(self, base: int = 0, entries: Iterable[Entry] = ()) -> None:
        self.base = base
        self._entries: OrderedDict[int, Entry] = OrderedDict((e.group_id, e) for e in entries)
        self.num_ready = sum(e.stage is Stage.READY for e in self._entries.values())
        self.num_open = sum(e.stage is not Stage.TAKEN for e in self._entries.values())
        self._trim()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._entries

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, group_id: int) -> Entry:
        """The entry of a group; raises StalenessError if it is not in the line."""
        entry = self._entries.get(group_id)
        if entry is None:
            raise StalenessError(f"group {group_id} is not in the line of the staleness policy")
        return entry

    @property
    def next_index(self) -> int:
        """Effective index that the next dispatched group gets."""
        return self.base + len(self._entries)

    def index_of(self, group_id: int) -> int:
        """Effective index of a group; walks the line."""
        for index, key in enumerate(self._entries, self.base):
            if key == group_id:
                return index
        raise StalenessError(f"group {group_id} is not in the line of the staleness policy")

    def append(self, entry: Entry) -> None:
        """A group starts. Ids must grow: dispatch order is id order, so the ledger can rebuild the line."""
        if self._entries and entry.group_id <= next(reversed(self._entries)):
            raise StalenessError(f"group {entry.group_id} is dispatched after a younger one; ids must grow")
        self._entries[entry.group_id] = entry
        self.num_open += 1

    def set_stage(self, entry: Entry, stage: Stage) -> None:
        """Move an open entry to another open stage."""
        self.num_ready += (stage is Stage.READY) - (entry.stage is Stage.READY)
        entry.stage = stage

    def remove(self, group_id: int) -> None:
        """A group is dropped or filtered: its place closes up."""
        entry = self.get(group_id)
        if entry.stage is Stage.TAKEN:
            raise StalenessError(f"group {group_id} is claimed for a step and cannot be dropped")
        del self._entries[group_id]
        self.num_open -= 1
        self.num_ready -= entry.stage is Stage.READY
        self._trim()

    def take(self, group_ids: Iterable[int]) -> None:
        """Groups are claimed for a step."""
        for group_id in group_ids:
            entry = self.get(group_id)
            if entry.stage is not Stage.READY:
                raise StalenessError(f"group {group_id} is {entry.stage.value}, not ready, and cannot be claimed")
            entry.stage = Stage.TAKEN
            self.num_ready -= 1
            self.num_open -= 1
        self._trim()

    def _trim(self) -> None:
        while self._entries:
            first = next(iter(self._entries.values()))
            if first.stage is not Stage.TAKEN:
                return
            del self._entries[first.group_id]
            self.base += 1
