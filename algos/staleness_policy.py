"""The three staleness policies: who may start, and which ready groups a step takes. Pure functions of the line.

Words: B = groups a step takes, eta = `max_staleness`, step s = the version trained from, a = the version that an
engine serves. `lag = s - version of the oldest token of the group`.

**pace** (default). A group with effective index e may start on an engine that serves a only if `e < N + B*a`
(N slots, B more per adopted version). A group of version a is due at step `a + eta`. A step takes the oldest groups
that are ready, first those below `head + W`, head being the index of the oldest unconsumed group; if these are too
few, any that are ready, the earliest due first: one slow group holds nothing back. In both cases only if what is left
can still be trained in time; else the step waits. Then `lag <= eta = (N + W - 2) // B`, whatever the lengths and the
engines, by the invariant

    I(s): for every d >= s, at most `(d - s + 1)*B` open groups are due by step d.

1. A start at a keeps it. All taken groups have lower indexes, and there are `B*s` of them; so with the new one
   `e + 1 - B*s <= N + B*(a - s) <= (eta + 1)*B + B*(a - s)` groups are open, and only d >= a + eta concern it.
2. Groups that are dropped, or turn out younger, only lower the counts. A group that is handed back without tokens is
   due at no step until it restarts, which is allowed if I holds afterwards (`_fits`); with tokens it keeps its step.
3. A step takes B groups so that I(s + 1) holds and nothing due at s is left: `_chosen` sees to that. If all open
   groups are ready it succeeds: I(s) is the condition under which earliest deadline first succeeds.

So every group is taken by `a + eta`. It needs `N + W <= (eta + 1)*B + 1`, and `N >= B`, or no batch could ever be full.
No drop, hence no length bias: a slow group is trained later than others, never left out.

**wait**. A group started at a must be taken by step a + eta: earliest-deadline scheduling with B places a step. A
group starts only if I holds with it; a step takes the earliest due of those that are ready (dispatch order among
equals) unless that would break I; then it waits for the older ones. No drop.

**drop**. `(eta + 1)*B` slots given back as in `pace`, greedy consumption in dispatch order, and whatever can no longer
make its deadline is dropped. Long generations are dropped more often than short ones: the bias is counted.

Sources: earliest deadline first is optimal for unit jobs (Liu & Layland 1973; Horn 1974), so a feasible set stays
feasible when all of it is ready.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ..core.errors import ConfigError
from .staleness_line import NO_TOKEN, Entry, Line, Stage

PolicyName = Literal["pace", "wait", "drop"]
POLICIES: tuple[PolicyName, ...] = ("pace", "wait", "drop")


class Policy(Protocol):
    """Rules only; the line is the state."""

    @property
    def name(self) -> PolicyName: ...

    @property
    def num_slots(self) -> int:
        """Most groups between dispatch and the end of the step that trains them."""
        ...

    def admits(self, line: Line, version: int, next_step: int) -> bool:
        """May a new group start on an engine that serves `version`?"""
        ...

    def readmits(self, line: Line, entry: Entry, version: int, next_step: int) -> bool:
        """May a group that was handed back go on there?"""
        ...

    def choose(self, line: Line, step: int) -> list[int] | None:
        """The batch of `step`, or None while it has to wait."""
        ...


def default_window(max_staleness: int, batch_size: int) -> int:
    """W for `pace`, chosen by simulation (`staleness_sim.py`; the table is in docs/walk-prompt.md).

    Up to eta = 1 every place in the window costs a slot that is missed: W = 1. From eta = 2 on, a window of a quarter
    of a batch makes the trainer wait no longer, and the tokens are younger.
    """
    return 1 if max_staleness < 2 else 1 + batch_size // 4


@dataclass(frozen=True, slots=True)
class Pace:
    """Slots paced by adopted versions; oldest first, past the slow."""

    max_staleness: int
    batch_size: int
    window: int
    """W >= 1."""
    name: PolicyName = "pace"

    @property
    def num_slots(self) -> int:
        """N, the most that the bound allows beside W."""
        return (self.max_staleness + 1) * self.batch_size + 1 - self.window

    def admits(self, line: Line, version: int, next_step: int) -> bool:
        return line.next_index < self.num_slots + self.batch_size * version

    def readmits(self, line: Line, entry: Entry, version: int, next_step: int) -> bool:
        if entry.version <= version:  # it has older tokens already: this engine makes nothing worse
            return True
        return _fits(line, version + self.max_staleness, next_step, self, leaving=entry)

    def choose(self, line: Line, step: int) -> list[int] | None:
        if line.num_ready < self.batch_size:
            return None
        near = self._in_window(line)
        chosen = _chosen(line, step, self, near) if near is not None else None
        return chosen or _chosen(line, step, self)

    def _in_window(self, line: Line) -> list[Entry] | None:
        """The oldest that are ready, if a batch of them is near the head."""
        chosen: list[Entry] = []
        limit = NO_TOKEN
        for index, entry in enumerate(line, line.base):
            if index >= limit:
                return None
            if entry.stage is Stage.READY:
                chosen.append(entry)
                if len(chosen) == self.batch_size:
                    return chosen
            elif entry.stage is not Stage.TAKEN and limit == NO_TOKEN:
                limit = index + self.window  # head stops here: everything older is taken by this very batch
        return None


@dataclass(frozen=True, slots=True)
class Wait:
    """Earliest deadline first; the trainer waits rather than drop."""

    max_staleness: int
    batch_size: int
    name: PolicyName = "wait"

    @property
    def num_slots(self) -> int:
        return (self.max_staleness + 1) * self.batch_size

    def admits(self, line: Line, version: int, next_step: int) -> bool:
        return _fits(line, version + self.max_staleness, next_step, self, leaving=None)

    def readmits(self, line: Line, entry: Entry, version: int, next_step: int) -> bool:
        due = version + self.max_staleness
        return entry.version <= version or _fits(line, due, next_step, self, leaving=entry)

    def choose(self, line: Line, step: int) -> list[int] | None:
        return None if line.num_ready < self.batch_size else _chosen(line, step, self)


@dataclass(frozen=True, slots=True)
class Drop:
    """Greedy: whatever is ready, oldest first; the too old is dropped by the caller's sweep."""

    max_staleness: int
    batch_size: int
    name: PolicyName = "drop"

    @property
    def num_slots(self) -> int:
        return (self.max_staleness + 1) * self.batch_size

    def admits(self, line: Line, version: int, next_step: int) -> bool:
        has_slot = line.next_index < self.num_slots + self.batch_size * version
        return has_slot and version + self.max_staleness >= next_step

    def readmits(self, line: Line, entry: Entry, version: int, next_step: int) -> bool:
        return min(version, entry.version) + self.max_staleness >= next_step

    def choose(self, line: Line, step: int) -> list[int] | None:
        if line.num_ready < self.batch_size:
            return None
        ready = [e.group_id for e in line if e.stage is Stage.READY]
        return ready[: self.batch_size]


def _has_deadline(entry: Entry) -> bool:
    return entry.stage is not Stage.TAKEN and entry.version != NO_TOKEN


def _fits(line: Line, due: int, next_step: int, rules: Pace | Wait, *, leaving: Entry | None) -> bool:
    """Whether I(next_step) holds with one more group that is due at that step. `leaving`: a group that is handed back,
    and is counted anew."""
    if due < next_step:
        return False
    eta, size = rules.max_staleness, rules.batch_size
    older = sorted(e.version + eta for e in line if e is not leaving and _has_deadline(e))
    num_due = bisect.bisect_right(older, due) + 1
    if num_due > (due - next_step + 1) * size:
        return False
    # Groups that are due later have one more in front of them.
    return all(
        num_before + 2 <= (older[num_before] - next_step + 1) * size for num_before in range(num_due - 1, len(older))
    )


def _chosen(line: Line, step: int, rules: Pace | Wait, wanted: Sequence[Entry] | None = None) -> list[int] | None:
    """A batch after which I(step + 1) holds: `wanted`, or the earliest due of those that are ready; None: there is none
    yet. At least a batch is ready."""
    if wanted is None:
        ready = sorted((e for e in line if e.stage is Stage.READY), key=lambda e: e.version)  # stable: dispatch order
        chosen = ready[: rules.batch_size]
    else:
        chosen = list(wanted)
    taken = {entry.group_id for entry in chosen}
    unfinished = Counter(e.version for e in line if e.stage is not Stage.READY and _has_deadline(e))
    if not unfinished and wanted is None:
        return [entry.group_id for entry in chosen]
    left = Counter(e.version for e in line if _has_deadline(e) and e.group_id not in taken)
    newest = max(entry.version for entry in chosen)
    num_due = num_unfinished = 0
    for version in sorted(left):
        num_due += left[version]
        num_unfinished += unfinished[version]
        room = max(0, version + rules.max_staleness - step) * rules.batch_size
        # After a retune I may not hold at all: then waiting helps only if an older group is still under way and would
        # push out a younger one.
        if num_due > room and (wanted is not None or (num_unfinished and newest > version)):
            return None
    return [entry.group_id for entry in chosen]


def make_policy(name: str, max_staleness: int, batch_size: int, window: int = 0) -> Policy:
    """The policy of that name. `window` is W of `pace`; 0 chooses it. Raises ConfigError for impossible numbers."""
    if batch_size < 1:
        raise ConfigError(f"algo.batch_size is {batch_size}", remedy="a step needs at least one group")
    if max_staleness < 0:
        raise ConfigError(f"async.max_staleness is {max_staleness}", remedy="0 is on-policy, 1 is one step off")
    if name == "pace":
        chosen = window or default_window(max_staleness, batch_size)
        limit = max_staleness * batch_size + 1
        if not 1 <= chosen <= limit:
            raise ConfigError(
                f"async.window is {window}, but may be 1 to {limit} at this max_staleness and batch_size",
                remedy="leave it 0 to have it chosen",
            )
        return Pace(max_staleness, batch_size, chosen)
    if name == "wait":
        return Wait(max_staleness, batch_size)
    if name == "drop":
        return Drop(max_staleness, batch_size)
    raise ConfigError(f"async.policy is {name!r}", remedy=f"choose one of {', '.join(POLICIES)}")
