"""The three staleness policies: who may start, and which ready groups a step takes. Pure functions of the line.

Words: B = groups a step takes, eta = `max_staleness`, step s = the version trained from, a = the version that an
engine serves. `lag = s - version of the oldest token of the group`.

**pace** (default). A group with effective index e may start on an engine that serves a only if `e < N + B*a`
(N slots, B more per adopted version). A step may take a ready group only if its index is below `head + W`, head being
the index of the oldest unconsumed group. Then `lag <= (N + W - 2) // B`, whatever the lengths and the engines:

1. e starts at `a >= ceil((e + 1 - N) / B) = floor((e - N) / B) + 1`. Groups in front of e that are dropped later only
   lower e, which keeps the inequality.
2. Let e be taken as the p-th group of the run (from 0), so by step `s = p // B`. Whenever another group was taken
   before it, head was at most e, so that group's index was below `e + W`. Hence at most `e + W - 1` groups came
   before: `p <= e + W - 1`. (Drops between the two only bring them closer, and nothing before head can be dropped.)
3. `s - a <= floor((e + W - 1) / B) - floor((e - N) / B) - 1`, and `floor((y + d) / B) - floor(y / B) <= ceil(d / B)`
   with `d = N + W - 1` gives `ceil((N + W - 1) / B) - 1 = (N + W - 2) // B`.

So all pairs with `N + W <= (eta + 1)*B + 1` keep the bound. It needs `N >= B`, or no batch could ever be full. A group
that is handed back keeps its index and restarts under the same rule. No drop, hence no length bias.

**wait**. A group started at a must be taken by step a + eta: earliest-deadline scheduling with B places a step. A
group starts only if the open groups stay feasible (`count(deadline <= d) <= (d - s + 1)*B` for every d); a step takes
the ready groups with the earliest deadlines (dispatch order among equals) unless that would make the rest infeasible;
then it waits for the older ones. No drop; the trainer idles for stragglers later than under strict FIFO, but it does.

**drop**. `(eta + 1)*B` slots given back as in `pace`, greedy consumption in dispatch order, and whatever can no longer
make its deadline is dropped. Long generations are dropped more often than short ones: the bias is counted.

Sources: the windowed FIFO bound as in reference/staleness.md 3.7; earliest deadline first is optimal for unit jobs
(Liu & Layland 1973; Horn 1974), so a feasible set stays feasible when all of it is ready.
"""

from __future__ import annotations

import bisect
from collections import Counter
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
    """W for `pace`, chosen by simulation (`staleness_sim.py`; the table is in docs/staleness.md).

    Up to eta = 1 every place in the window costs a slot that is missed: W = 1. From eta = 2 on, a window of a quarter
    of a batch makes the trainer wait no longer than strict FIFO does, and the tokens are younger.
    """
    return 1 if max_staleness < 2 else 1 + batch_size // 4


@dataclass(frozen=True, slots=True)
class Pace:
    """Slots paced by adopted versions, windowed FIFO."""

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
        return line.index_of(entry.group_id) < self.num_slots + self.batch_size * version

    def choose(self, line: Line, step: int) -> list[int] | None:
        if line.num_ready < self.batch_size:
            return None
        chosen: list[int] = []
        limit = NO_TOKEN
        for index, entry in enumerate(line, line.base):
            if index >= limit:
                return None
            if entry.stage is Stage.READY:
                chosen.append(entry.group_id)
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
        return self._fits(line, version, next_step, leaving=None)

    def readmits(self, line: Line, entry: Entry, version: int, next_step: int) -> bool:
        return entry.version <= version or self._fits(line, version, next_step, leaving=entry)

    def _fits(self, line: Line, version: int, next_step: int, leaving: Entry | None) -> bool:
        deadline = version + self.max_staleness
        if deadline < next_step:
            return False
        older = sorted(e.version for e in line if e is not leaving and _has_deadline(e))
        due = bisect.bisect_right(older, version) + 1
        if due > (deadline - next_step + 1) * self.batch_size:
            return False
        # Groups with later deadlines have one more in front of them.
        return all(
            num_before + 2 <= (older[num_before] + self.max_staleness - next_step + 1) * self.batch_size
            for num_before in range(due - 1, len(older))
        )

    def choose(self, line: Line, step: int) -> list[int] | None:
        if line.num_ready < self.batch_size:
            return None
        ready = sorted((e for e in line if e.stage is Stage.READY), key=lambda e: e.version)  # stable: dispatch order
        chosen, left = ready[: self.batch_size], ready[self.batch_size :]
        unfinished = Counter(e.version for e in line if e.stage is not Stage.READY and _has_deadline(e))
        if not unfinished:
            return [e.group_id for e in chosen]
        remaining = unfinished + Counter(e.version for e in left)
        due = num_unfinished = 0
        for version in sorted(remaining):
            due += remaining[version]
            num_unfinished += unfinished[version]
            room = max(0, version + self.max_staleness - step) * self.batch_size
            # Waiting helps only if an older group is still under way and would push out a younger one.
            if due > room and num_unfinished and chosen[-1].version > version:
                return None
        return [e.group_id for e in chosen]


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
