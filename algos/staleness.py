"""The staleness rule: how old the tokens of a training step may be. Events in, decisions out; no clock, no IO.

`lag = version being trained from - version of the oldest token of the group`. `max_staleness = eta` is a hard bound on
it. The policy keeps the bound. `Admission.select` checks every group once more, because a lower eta, an engine that
stamps older than it announced or a ledger of another batch size can break it.

The buffer reports each event of a group and obeys the answers; after a restart it rebuilds the line from its
ledger with `restore`. Group ids must grow in the order of dispatch. The line (`GroupLine`) holds groups in that order,
with the index that each has among the groups that count. An ordered dictionary with a base index is enough for it;
`sortedcontainers` was considered and not used, because ids only grow and removal is by key.

The policies decide which groups may start, and which ready groups a step takes.

B = groups a step takes, eta = `max_staleness`, step s = the version trained from, a = the version that an
engine serves. `lag = s - version of the oldest token of the group`.

**pace** (default). A group with effective index e may start on an engine that serves a only if `e < N + B*a`, with
`N = (eta + 1)*B` slots. A group of version a is due at step `a + eta`. A step takes the ready groups that are due
earliest, in order of dispatch among equals: one slow group holds nothing back. It takes them only if what is left can
still be trained in time; else the step waits. Then `lag <= eta`, whatever the lengths and the engines, by the
invariant

    I(s): for every d >= s, at most `(d - s + 1)*B` open groups are due by step d.

1. A start at a keeps it. All taken groups have lower indexes, and there are `B*s` of them; so with the new one
   `e + 1 - B*s <= N + B*(a - s) <= (eta + 1)*B + B*(a - s)` groups are open, and only d >= a + eta concern it.
2. Groups that are dropped, or turn out younger, only lower the counts. A group that is handed back without tokens is
   due at no step until it restarts, which is allowed if I holds afterwards (`_fits`); with tokens it keeps its step.
3. A step takes B groups so that I(s + 1) holds and nothing due at s is left: `_choose` sees to that. If all open
   groups are ready it succeeds: I(s) is the condition under which earliest deadline first succeeds.

So every group is taken by `a + eta`, and with one slot more it might not be. No drop, hence no length bias: a slow
group is trained later than others, never left out.

**wait**. A group started at a must be taken by step a + eta: earliest-deadline scheduling with B places a step. A
group starts only if I holds with it; a step takes the earliest due of those that are ready (dispatch order among
equals) unless that would break I; then it waits for the older ones. No drop.

**drop**. The slots of `pace`, greedy consumption in dispatch order, and whatever can no longer make its deadline is
dropped. Long generations are dropped more often than short ones: the bias is counted.

Sources: earliest deadline first is optimal for unit jobs (Liu & Layland 1973; Horn 1974), so a feasible set stays
feasible when all of it is ready.
"""

from __future__ import annotations

import bisect
import enum
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from ..core.errors import ConfigError, StalenessError

NO_TOKEN = 1 << 60
"""Version of a group that holds no engine token: it can start on any weights and is never too old."""


class LineStage(enum.Enum):
    """The state of a group, as far as admission needs it."""

    UNDER_WAY = "under way"
    WAITING = "waiting"
    """Handed back by an engine that died or was drained; needs another one. Keeps its place."""
    READY = "ready"
    TAKEN = "taken"
    """Claimed for a step. Stays in the line until every older group is taken too."""


@dataclass(slots=True)
class LineEntry:
    """One group in the line."""

    group_id: int
    version: int
    """Lower bound on the version of its oldest token; the exact value once it is ready."""
    stage: LineStage
    ceiling: int = NO_TOKEN
    """Stamps above this belong to weights that a rewind undid; they count as this version."""


class GroupLine:
    """Groups from the oldest unconsumed one on. A group that is dropped leaves, and all behind it move up by one.
    `base` is the *effective index* of the first entry: the number of groups consumed or in front of it since version 0
    (a run that starts at version k counts from `k * batch_size`)."""

    __slots__ = ("_entries", "base", "num_open", "num_ready")

    def __init__(self, base: int = 0, entries: Iterable[LineEntry] = ()) -> None:
        self.base = base
        self._entries: OrderedDict[int, LineEntry] = OrderedDict((e.group_id, e) for e in entries)
        self.num_ready = sum(e.stage is LineStage.READY for e in self._entries.values())
        self.num_open = sum(e.stage is not LineStage.TAKEN for e in self._entries.values())
        self._trim()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._entries

    def __iter__(self) -> Iterator[LineEntry]:
        return iter(self._entries.values())

    def get(self, group_id: int) -> LineEntry:
        """The entry of a group; raises StalenessError if it is not in the line."""
        entry = self._entries.get(group_id)
        if entry is None:
            raise StalenessError(f"group {group_id} is not in the line of the staleness policy")
        return entry

    @property
    def next_index(self) -> int:
        return self.base + len(self._entries)

    def append(self, entry: LineEntry) -> None:
        """A group starts. Ids must grow: dispatch order is id order, so the ledger can rebuild the line."""
        if self._entries and entry.group_id <= next(reversed(self._entries)):
            raise StalenessError(f"group {entry.group_id} is dispatched after a younger one; ids must grow")
        self._entries[entry.group_id] = entry
        self.num_open += 1

    def set_stage(self, entry: LineEntry, stage: LineStage) -> None:
        self.num_ready += (stage is LineStage.READY) - (entry.stage is LineStage.READY)
        entry.stage = stage

    def remove(self, group_id: int) -> None:
        """A group is dropped or filtered: its place closes up."""
        entry = self.get(group_id)
        if entry.stage is LineStage.TAKEN:
            raise StalenessError(f"group {group_id} is claimed for a step and cannot be dropped")
        del self._entries[group_id]
        self.num_open -= 1
        self.num_ready -= entry.stage is LineStage.READY
        self._trim()

    def take(self, group_ids: Iterable[int]) -> None:
        for group_id in group_ids:
            entry = self.get(group_id)
            if entry.stage is not LineStage.READY:
                raise StalenessError(f"group {group_id} is {entry.stage.value}, not ready, and cannot be claimed")
            entry.stage = LineStage.TAKEN
            self.num_ready -= 1
            self.num_open -= 1
        self._trim()

    def _trim(self) -> None:
        while self._entries:
            first = next(iter(self._entries.values()))
            if first.stage is not LineStage.TAKEN:
                return
            del self._entries[first.group_id]
            self.base += 1


PolicyName = Literal["pace", "wait", "drop"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


@dataclass(frozen=True, slots=True)
class Policy:
    """Rules only; the line is the state. See the module's head."""

    name: PolicyName
    max_staleness: int
    batch_size: int

    @property
    def num_slots(self) -> int:
        """Most groups between dispatch and the end of their step."""
        return (self.max_staleness + 1) * self.batch_size

    def admits(self, line: GroupLine, version: int, next_step: int) -> bool:
        """May a new group start on an engine that serves `version`?"""
        due = version + self.max_staleness
        if self.name == "wait":
            return _fits(line, due, next_step, self, leaving=None)
        has_slot = line.next_index < self.num_slots + self.batch_size * version
        return has_slot and (self.name == "pace" or due >= next_step)

    def readmits(self, line: GroupLine, entry: LineEntry, version: int, next_step: int) -> bool:
        """May a group that was handed back continue there? Older tokens make nothing worse."""
        if self.name == "drop":
            return min(version, entry.version) + self.max_staleness >= next_step
        return entry.version <= version or _fits(line, version + self.max_staleness, next_step, self, leaving=entry)

    def choose(self, line: GroupLine, step: int) -> list[int] | None:
        """The batch of `step`, or None while it has to wait."""
        if line.num_ready < self.batch_size:
            return None
        if self.name == "drop":  # what is too old is dropped by the caller's sweep
            return [e.group_id for e in line if e.stage is LineStage.READY][: self.batch_size]
        return _choose(line, step, self)


def _has_deadline(entry: LineEntry) -> bool:
    return entry.stage is not LineStage.TAKEN and entry.version != NO_TOKEN


def _fits(line: GroupLine, due: int, next_step: int, rules: Policy, *, leaving: LineEntry | None) -> bool:
    """Whether I(next_step) holds with one more group due then. `leaving`: one counted again."""
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


def _choose(line: GroupLine, step: int, rules: Policy) -> list[int] | None:
    """The earliest due of those that are ready, if I(step + 1) holds after them; None: there is no batch yet. At least
    a batch is ready."""
    ready = sorted((e for e in line if e.stage is LineStage.READY), key=lambda e: e.version)  # stable: dispatch order
    claim = ready[: rules.batch_size]
    claimed_ids = [entry.group_id for entry in claim]
    unfinished = Counter(e.version for e in line if e.stage is not LineStage.READY and _has_deadline(e))
    if not unfinished:
        return claimed_ids
    taken = set(claimed_ids)
    num_due_of = Counter(e.version for e in line if _has_deadline(e) and e.group_id not in taken)
    newest = max(entry.version for entry in claim)
    num_due = num_unfinished = 0
    for version in sorted(num_due_of):
        num_due += num_due_of[version]
        num_unfinished += unfinished[version]
        room = max(0, version + rules.max_staleness - step) * rules.batch_size
        # After a retune I may not hold at all: then waiting helps only if an older group is still under way and would
        # push out a younger one.
        if num_due > room and num_unfinished and newest > version:
            return None
    return claimed_ids


def make_policy(name: str, max_staleness: int, batch_size: int) -> Policy:
    """The policy of that name. Raises ConfigError if there is none."""
    if name in POLICIES:
        return Policy(name, max_staleness, batch_size)
    raise ConfigError(f"async.policy is {name!r}", remedy=f"choose one of {', '.join(POLICIES)}")


@dataclass(frozen=True, slots=True)
class Selection:
    """Answer to `select`."""

    claim: tuple[int, ...] | None = None
    """The batch; None: wait."""
    overdue: tuple[int, ...] = ()
    """Groups that can no longer be trained within the bound; the caller drops them and draws their prompts again."""


class Admission:
    """The staleness bound of one buffer."""

    def __init__(self, policy: str = "pace", *, max_staleness: int, batch_size: int, next_step: int = 0) -> None:
        """`next_step`: the version that training starts from. Raises ConfigError for an unknown policy."""
        self.rules = make_policy(policy, max_staleness, batch_size)
        self.max_staleness = max_staleness
        self.batch_size = batch_size
        self.next_step = next_step
        """The first step that has no claim yet."""
        self.newest_version = next_step
        """The newest version that the trainer made."""
        self._line = GroupLine(next_step * batch_size)
        self._swept_for = -1

    # ---- facts

    @property
    def policy(self) -> PolicyName:
        return self.rules.name

    @property
    def num_open(self) -> int:
        return self._line.num_open

    @property
    def num_ready(self) -> int:
        """Groups that a step may claim, as far as age allows."""
        return self._line.num_ready

    @property
    def slots_total(self) -> int:
        """Most groups between dispatch and training."""
        return self.rules.num_slots

    @property
    def slots_used(self) -> int:
        return self._line.next_index - self.batch_size * self.newest_version

    # ---- events of a group

    def may_dispatch(self, engine_version: int, group_id: int | None = None) -> bool:
        """May an engine that serves `engine_version` start a new group, or continue the handed-back `group_id`? An
        engine that announces a version that does not exist (left over from before a rewind) counts as newest."""
        version = min(engine_version, self.newest_version)
        if group_id is None:
            return self.rules.admits(self._line, version, self.next_step)
        return self.rules.readmits(self._line, self._line.get(group_id), version, self.next_step)

    def dispatched(self, group_id: int, engine_version: int, *, is_undone: bool = False) -> None:
        """A new group, or one that was handed back, starts on an engine that serves `engine_version`. `is_undone`: in
        truth it serves a version that a rewind undid, and its stamps count as `engine_version`."""
        version = min(engine_version, self.newest_version)
        ceiling = version if is_undone else NO_TOKEN
        if group_id not in self._line:
            self._line.append(LineEntry(group_id, version, LineStage.UNDER_WAY, ceiling))
            return
        entry = self._line.get(group_id)
        _expect(entry, LineStage.WAITING)
        if entry.version == NO_TOKEN:  # it starts again: nothing that it had counts any more
            entry.ceiling = ceiling
        entry.ceiling = min(entry.ceiling, ceiling)
        entry.version = min(entry.version, version)
        self._line.set_stage(entry, LineStage.UNDER_WAY)

    def counted(self, group_id: int, stamp: int) -> int:
        """What a stamp of an open group counts as; negative where there is none."""
        version = self._credible(self._line.get(group_id), stamp)
        return -1 if version == NO_TOKEN else version

    def version_of(self, group_id: int) -> int:
        """Of the oldest token of an open group, or its lower bound; negative when it has none."""
        version = self._line.get(group_id).version
        return -1 if version == NO_TOKEN else version

    def requeued(self, group_id: int, oldest_version: int) -> None:
        """A group was handed back. `oldest_version`: of the tokens that it keeps; negative when it keeps none."""
        entry = self._line.get(group_id)
        _expect(entry, LineStage.UNDER_WAY, LineStage.WAITING)
        entry.version = self._credible(entry, oldest_version)
        self._line.set_stage(entry, LineStage.WAITING)
        self._swept_for = -1

    def filtered(self, group_id: int) -> None:
        """A group is given up (filter, error, bad samples): it leaves the line and its slot is free at once."""
        self._line.remove(group_id)

    def ready(self, group_id: int, oldest_version: int) -> None:
        """A group is finished and kept. `oldest_version`: stamp of its oldest token. Without any stamp (demonstrations)
        it is negative, and what was announced at the dispatch counts."""
        entry = self._line.get(group_id)
        _expect(entry, LineStage.UNDER_WAY, LineStage.WAITING)
        if oldest_version >= 0:
            entry.version = self._credible(entry, oldest_version)
        self._line.set_stage(entry, LineStage.READY)
        self._swept_for = -1

    def select(self, step: int) -> Selection:
        """The batch of the next step if it can be formed now, and the groups that have become too old. After a batch is
        chosen, `overdue` also holds what cannot make the step after it. Raises StalenessError when `step` is not the
        next one."""
        if step != self.next_step:
            raise StalenessError(f"step {step} asks for a batch, but the next step is {self.next_step}")
        overdue = self._sweep(step)
        claim = self.rules.choose(self._line, step)
        if claim is None:
            return Selection(overdue=overdue)
        for group_id in claim:
            self._check(self._line.get(group_id), step)
        self._line.take(claim)
        self.next_step = step + 1
        return Selection(claim=tuple(claim), overdue=overdue + self._sweep(step + 1))

    def trained(self, step: int) -> None:
        if step >= self.next_step:
            raise StalenessError(f"step {step} was trained, but no batch of it was ever selected")
        self.newest_version = max(self.newest_version, step + 1)

    # ---- changes of course

    def retune(self, *, max_staleness: int | None = None, policy: str | None = None) -> tuple[int, ...]:
        """Change the bound or the policy; None leaves a value. Returns what is too old for the new bound. Raises
        ConfigError and changes nothing for an unknown policy."""
        eta = self.max_staleness if max_staleness is None else max_staleness
        self.rules = make_policy(policy or self.policy, eta, self.batch_size)
        self.max_staleness = eta
        self._swept_for = -1
        return self._sweep(self.next_step)

    def num_beyond(self, max_staleness: int) -> int:
        """Groups not claimed yet that are too old for the next step under that bound."""
        oldest = self.next_step - max_staleness
        return sum(entry.version < oldest and entry.stage is not LineStage.TAKEN for entry in self._line)

    def restore(self, places: Iterable[LineEntry], *, next_step: int, newest_version: int) -> tuple[int, ...]:
        """Rebuild the line from the ledger: after a restart of the buffer, and after a rewind of the trainer.

        `places`: the groups that are not dropped, in order of id, from the oldest unconsumed one on, those claimed or
        trained since included; a negative version where there is no token. All counters follow from them and from
        `next_step`: a run that resumes at version k has `B * k` groups behind it, so there is no burst. Stamps newer
        than `newest_version` count as that version.
        """
        self.next_step, self.newest_version = next_step, newest_version
        self._swept_for = -1
        ceilings = {entry.group_id: min(entry.ceiling, newest_version) for entry in self._line}
        entries = list(places)
        for entry in entries:
            has_token = entry.version >= 0 or entry.stage is not LineStage.WAITING
            version = entry.version if entry.version >= 0 else newest_version
            entry.version = min(version, newest_version) if has_token else NO_TOKEN
            entry.ceiling = ceilings.get(entry.group_id, newest_version)
        num_taken = sum(entry.stage is LineStage.TAKEN for entry in entries)
        self._line = GroupLine(next_step * self.batch_size - num_taken, entries)
        return self._sweep(next_step)

    # ---- inside

    def _credible(self, entry: LineEntry, stamp: int) -> int:
        """The version to count for a stamp: none, or at most what can have existed when the tokens were made."""
        return NO_TOKEN if stamp < 0 else min(stamp, entry.ceiling, self.newest_version)

    def _sweep(self, step: int) -> tuple[int, ...]:
        """Remove and return the groups that are too old for `step`."""
        if self._swept_for == step:
            return ()
        self._swept_for = step  # nothing ages between two events that reset this
        oldest = step - self.max_staleness
        overdue: list[int] = []
        for entry in self._line:
            if entry.stage is LineStage.TAKEN:
                continue
            # One without a token has nothing to lose, and would overtake those in front of it, which are drawn again.
            is_behind = overdue and entry.stage is LineStage.WAITING and entry.version == NO_TOKEN
            if entry.version < oldest or is_behind:
                overdue.append(entry.group_id)
        for group_id in overdue:
            self._line.remove(group_id)
        return tuple(overdue)

    def _check(self, entry: LineEntry, step: int) -> None:
        lag = step - entry.version
        if lag > self.max_staleness:
            raise StalenessError(
                f"group {entry.group_id} has lag {lag} at step {step}, above max_staleness {self.max_staleness}",
                remedy=f"a bug in the {self.policy} policy: report it with the ledger",
            )


def _expect(entry: LineEntry, *stages: LineStage) -> None:
    if entry.stage not in stages:
        expected = " or ".join(stage.value for stage in stages)
        raise StalenessError(f"group {entry.group_id} is {entry.stage.value}, expected {expected}")
