"""Admission: bounds how old the tokens of a training step may be. Events in, decisions out; no clock, no IO.

`lag = version being trained from - version of the oldest token of the group`, `max_staleness = eta` bounds it hard:
the policy (`staleness_policy.py`) prevents violations, and `select` checks every group once more, whatever happened
before (a lower eta, an engine that stamps older than it announced, a ledger of another batch size).

Knows the line of groups and the policy in force. Must not know the ledger, the clock, engines by name, or payloads.
The caller reports each event of a group's life and obeys the answers; after a restart it rebuilds the line from its
ledger with `restore`. Group ids must grow in the order of dispatch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..core.errors import StalenessError
from .staleness_line import NO_TOKEN, Entry, Line, Stage
from .staleness_policy import POLICIES, Policy, PolicyName, default_window, make_policy

__all__ = [
    "NO_TOKEN",
    "POLICIES",
    "STALE",
    "STALE_AFTER_RETUNE",
    "STALE_STAMP",
    "Admission",
    "LinePlace",
    "Overdue",
    "PolicyName",
    "Selection",
    "Stage",
    "default_window",
]

STALE = "stale"
"""Dropped by the `drop` policy: it could not be trained in time."""
STALE_AFTER_RETUNE = "stale-after-retune"
"""Dispatched under looser rules (higher eta, another policy, before a rewind) than those that now hold; or without a
token behind such a group."""
STALE_STAMP = "stale-stamp"
"""The engine stamped an older version than it had announced."""


@dataclass(frozen=True, slots=True)
class Overdue:
    """A group that can no longer be trained within the bound; the caller drops it and draws its prompt again."""

    group_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Selection:
    """Answer to `select`: the batch (None: wait) and the groups to drop."""

    claim: tuple[int, ...] | None = None
    overdue: tuple[Overdue, ...] = ()


@dataclass(frozen=True, slots=True)
class LinePlace:
    """One group as the ledger remembers it, for `restore`."""

    group_id: int
    version: int
    """Oldest token's version, or its lower bound; negative when there is none."""
    stage: Stage


class Admission:
    """The staleness bound of one buffer."""

    def __init__(
        self, policy: str = "pace", *, max_staleness: int, batch_size: int, window: int = 0, next_step: int = 0
    ) -> None:
        """`next_step`: the version that training starts from. Raises ConfigError for impossible numbers."""
        self._rules: Policy = make_policy(policy, max_staleness, batch_size, window)
        self.max_staleness = max_staleness
        self.batch_size = batch_size
        self._window = window
        self.next_step = next_step
        """The first step that has no claim yet."""
        self.newest_version = next_step
        """The newest version that the trainer made."""
        self._era = 0
        self._line = Line(next_step * batch_size)
        self._swept_for = -1

    # ---- facts

    @property
    def policy(self) -> PolicyName:
        """Name of the policy in force."""
        return self._rules.name

    @property
    def rules(self) -> Policy:
        """The policy in force."""
        return self._rules

    @property
    def window(self) -> int:
        """W as it was asked for; 0: chosen by the rule."""
        return self._window

    @property
    def num_open(self) -> int:
        """Groups dispatched and not yet claimed."""
        return self._line.num_open

    @property
    def num_ready(self) -> int:
        """Groups that a step may claim, as far as age allows."""
        return self._line.num_ready

    @property
    def slots_total(self) -> int:
        """Most groups between dispatch and training."""
        return self._rules.num_slots

    @property
    def slots_used(self) -> int:
        """Groups between dispatch and training now."""
        return self._line.next_index - self.batch_size * self.newest_version

    # ---- the life of a group

    def may_dispatch(self, engine_version: int, group_id: int | None = None) -> bool:
        """May an engine that serves `engine_version` start a new group, or go on with the handed-back `group_id`?

        An engine that announces a version that does not exist (left over from before a rewind) counts as newest.
        """
        version = min(engine_version, self.newest_version)
        if group_id is None:
            return self._rules.admits(self._line, version, self.next_step)
        return self._rules.readmits(self._line, self._line.get(group_id), version, self.next_step)

    def dispatched(self, group_id: int, engine_version: int, *, is_undone: bool = False) -> None:
        """A new group, or one that was handed back, starts on an engine that serves `engine_version`. `is_undone`: in
        truth it serves a version that a rewind undid, and its stamps count as `engine_version`."""
        version = min(engine_version, self.newest_version)
        ceiling = version if is_undone else NO_TOKEN
        if group_id not in self._line:
            new = Entry(group_id, version, Stage.UNDER_WAY, era=self._era, announced=version, ceiling=ceiling)
            self._line.append(new)
            return
        entry = self._line.get(group_id)
        _expect(entry, Stage.WAITING)
        if entry.version == NO_TOKEN:  # it starts again: nothing that it had counts any more
            entry.era, entry.ceiling = self._era, ceiling
        entry.ceiling = min(entry.ceiling, ceiling)
        entry.version = entry.announced = min(entry.version, version)
        self._line.set_stage(entry, Stage.UNDER_WAY)

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
        _expect(entry, Stage.UNDER_WAY, Stage.WAITING)
        entry.version = self._credible(entry, oldest_version)
        self._line.set_stage(entry, Stage.WAITING)
        self._swept_for = -1

    def filtered(self, group_id: int) -> None:
        """A group is given up (filter, error, bad samples): it leaves the line and its slot is free at once."""
        self._line.remove(group_id)

    def ready(self, group_id: int, oldest_version: int) -> None:
        """A group is finished and kept. `oldest_version`: stamp of its oldest token.

        Without any stamp (demonstrations) it is negative, and what was announced at the dispatch counts.
        """
        entry = self._line.get(group_id)
        _expect(entry, Stage.UNDER_WAY, Stage.WAITING)
        if oldest_version >= 0:
            entry.version = self._credible(entry, oldest_version)
        self._line.set_stage(entry, Stage.READY)
        self._swept_for = -1

    def select(self, step: int) -> Selection:
        """The batch of the next step if it can be formed now, and the groups that have become too old.

        After a batch is chosen, `overdue` also holds what cannot make the step after it. Raises StalenessError when
        `step` is not the next one.
        """
        if step != self.next_step:
            raise StalenessError(f"step {step} asks for a batch, but the next step is {self.next_step}")
        overdue = self._sweep(step)
        chosen = self._rules.choose(self._line, step)
        if chosen is None:
            return Selection(overdue=overdue)
        for group_id in chosen:
            self._check(self._line.get(group_id), step)
        self._line.take(chosen)
        self.next_step = step + 1
        return Selection(claim=tuple(chosen), overdue=overdue + self._sweep(step + 1))

    def trained(self, step: int) -> None:
        """The batch of `step` was trained: version `step + 1` exists."""
        if step >= self.next_step:
            raise StalenessError(f"step {step} was trained, but no batch of it was ever selected")
        self.newest_version = max(self.newest_version, step + 1)

    # ---- changes of course

    def retune(
        self, *, max_staleness: int | None = None, policy: str | None = None, window: int | None = None
    ) -> tuple[Overdue, ...]:
        """Change the bound or the policy; None leaves a value. Returns what is too old for the new bound.

        Raises ConfigError and changes nothing when the values do not go together.
        """
        eta = self.max_staleness if max_staleness is None else max_staleness
        # A window chosen by hand fits one eta only: another eta without another window goes back to the rule.
        if window is None:
            window = self._window if eta == self.max_staleness else 0
        self._rules = make_policy(policy or self.policy, eta, self.batch_size, window)
        self._window = window
        self.max_staleness = eta
        self._era += 1
        self._swept_for = -1
        return self._sweep(self.next_step)

    def num_beyond(self, max_staleness: int) -> int:
        """Groups not claimed yet that are too old for the next step under that bound."""
        oldest = self.next_step - max_staleness
        return sum(entry.version < oldest and entry.stage is not Stage.TAKEN for entry in self._line)

    def restore(self, places: Iterable[LinePlace], *, next_step: int, newest_version: int) -> tuple[Overdue, ...]:
        """Rebuild the line from the ledger: after a restart of the buffer, and after a rewind of the trainer.

        `places`: the groups that are not dropped, in order of id, from the oldest unconsumed one on, those claimed or
        trained since included. All counters follow from them and from `next_step`: a run that resumes at version k
        has `B * k` groups behind it, so there is no burst. Stamps newer than `newest_version` count as that version.
        """
        self.next_step, self.newest_version = next_step, newest_version
        self._swept_for = -1
        ceilings = {entry.group_id: min(entry.ceiling, newest_version) for entry in self._line}
        entries = [
            Entry(
                place.group_id,
                _bounded(place.version, newest_version),
                place.stage,
                era=self._era,
                ceiling=ceilings.get(place.group_id, newest_version),
            )
            for place in places
        ]
        for entry in entries:
            if entry.version == NO_TOKEN and entry.stage is not Stage.WAITING:
                entry.version = newest_version
        num_taken = sum(entry.stage is Stage.TAKEN for entry in entries)
        self._line = Line(next_step * self.batch_size - num_taken, entries)
        return self._sweep(next_step)

    # ---- inside

    def _credible(self, entry: Entry, stamp: int) -> int:
        """The version to count for a stamp: none, or at most what can have existed when the tokens were made."""
        return NO_TOKEN if stamp < 0 else min(stamp, entry.ceiling, self.newest_version)

    def _sweep(self, step: int) -> tuple[Overdue, ...]:
        """Remove and return the groups that are too old for `step`."""
        if self._swept_for == step:
            return ()
        self._swept_for = step  # nothing ages between two events that reset this
        oldest = step - self.max_staleness
        found: list[Overdue] = []
        for entry in self._line:
            if entry.stage is Stage.TAKEN:
                continue
            if entry.version < oldest:
                found.append(Overdue(entry.group_id, self._reason(entry)))
            elif found and entry.stage is Stage.WAITING and entry.version == NO_TOKEN:
                # It has nothing to lose, and would overtake the prompts in front of it, which are drawn again.
                found.append(Overdue(entry.group_id, STALE_AFTER_RETUNE))
        for overdue in found:
            self._line.remove(overdue.group_id)
        return tuple(found)

    def _reason(self, entry: Entry) -> str:
        if entry.version < entry.announced:
            return STALE_STAMP
        return STALE if self.policy == "drop" and entry.era == self._era else STALE_AFTER_RETUNE

    def _check(self, entry: Entry, step: int) -> None:
        lag = step - entry.version
        if lag > self.max_staleness:
            raise StalenessError(
                f"group {entry.group_id} has lag {lag} at step {step}, above max_staleness {self.max_staleness}",
                remedy=f"a bug in the {self.policy} policy: report it with the ledger",
            )


def _bounded(version: int, newest: int) -> int:
    return NO_TOKEN if version < 0 else min(version, newest)


def _expect(entry: Entry, *stages: Stage) -> None:
    if entry.stage not in stages:
        wanted = " or ".join(stage.value for stage in stages)
        raise StalenessError(f"group {entry.group_id} is {entry.stage.value}, expected {wanted}")
