"""What was decided about the knobs during the run: for owners that join, for checkpoints, for undo and expiry. Sans-IO.

`Decisions` holds the changes and their values. Owners use only what they receive (`knobs/owner.py`). `Expiries` holds
the changes that revert after a number of training steps or seconds. Steps are exact for knobs with numbered boundaries:
their revert starts some versions early and is committed for the exact number. Other knobs revert at that version.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from ...core.errors import ConfigError
from ...core.knobs import KnobCommit, KnobState, KnobValue, LiveKnob, LiveKnobs
from .knob_plan import ChangePlan, OwnerStates, fits, make_plan, overlap

KEPT = 1000
"""Changes that can be taken back."""


@dataclass(slots=True)
class Decided:
    """One change."""

    epoch: int
    at: int
    plan: ChangePlan
    undoes: int = 0
    """Epoch of the change that it took back."""
    is_restored: bool = False
    """Taken over from a checkpoint."""
    undone: set[str] = field(default_factory=set[str])
    """Knobs of it that were taken back since."""

    @property
    def standing(self) -> set[str]:
        """Knobs whose values still come from this change, unless a later one set them again."""
        return set() if self.undoes else set(self.plan.common) - self.undone

    def value_for(self, owner: str, name: str) -> KnobValue | None:
        """What it gave an owner; None: nothing."""
        if name not in self.standing:
            return None
        if name in (own := self.plan.own.get(owner, {})):
            return own[name]
        return self.plan.common[name] if fits(owner, self.plan.target) else None


class Decisions:
    """See the module's head."""

    def __init__(self) -> None:
        self.epoch = 0
        """Of the newest change that was decided."""
        self._past: list[Decided] = []
        self._live: dict[tuple[str, str], list[LiveKnob]] = {}
        """(target, knob) -> values in the order of their epochs: the one in force and those whose number is to come."""

    # -- deciding

    def decide(
        self, epoch: int, at: int, version: int, plan: ChangePlan, *, undoes: int = 0, is_restored: bool = False
    ) -> Decided:
        """Note a change. `version`: the run's newest."""
        decided = Decided(epoch=epoch, at=at, plan=plan, undoes=undoes, is_restored=is_restored)
        self.epoch = max(self.epoch, epoch)
        self._past = [*self._past[1 - KEPT :], decided]
        for name, value in plan.common.items():
            self._put(plan.target, name, value, decided, version)
        for owner, values in plan.own.items():
            for name, value in values.items():
                self._put(owner, name, value, decided, version)
        if undoes and (original := self._find(undoes)) is not None:
            original.undone.update(plan.common)
        return decided

    def continue_from(self, epoch: int) -> None:
        """Count on from a resumed run's epoch."""
        self.epoch = max(self.epoch, epoch)

    def rewound(self, old_version: int, version: int) -> None:
        """The trainer was thrown back from one version to another: what was in force stays so, at once, and what was
        still to come keeps its number."""
        for key, kept in self._live.items():
            passed = [k for k in kept if k.at <= old_version]
            now = [msgspec.structs.replace(k, at=min(k.at, version)) for k in passed[-1:]]
            self._live[key] = [*now, *(k for k in kept if k.at > old_version)]

    def has_due(self, old_version: int, version: int) -> bool:
        """Whether a numbered value came into force between these versions."""
        return any(old_version < k.at <= version for kept in self._live.values() for k in kept)

    # -- for the next incarnation

    def past(self) -> tuple[Decided, ...]:
        """All that is needed to take changes back, and no more; stays as it is when more is decided."""
        return tuple(
            replace(each, plan=replace(each.plan, values={}, moves=()), undone=set(each.undone)) for each in self._past
        )

    def restore(self, epoch: int, past: Iterable[Decided], live: Iterable[LiveKnob]) -> None:
        """As `epoch`, `past()` and `live()` of an earlier incarnation, or moment, said."""
        self.epoch = epoch
        self._past = list(past)
        self._live = {}
        for knob in live:
            self._live.setdefault((knob.target, knob.name), []).append(knob)

    def _put(self, target: str, name: str, value: KnobValue, decided: Decided, version: int) -> None:
        at = decided.at if name in decided.plan.numbered else 0
        new = LiveKnob(
            name=name, target=target, value=value, first=decided.plan.first[name], epoch=decided.epoch, at=at
        )
        kept = [*(k for k in self._live.get((target, name), []) if k.at < at), new]
        passed = [k for k in kept if k.at <= version]
        self._live[target, name] = [*passed[-1:], *(k for k in kept if k.at > version)]

    # -- asking

    def live(self) -> LiveKnobs:
        """For a checkpoint."""
        knobs = sorted((k for kept in self._live.values() for k in kept), key=lambda k: (k.epoch, k.target, k.name))
        return LiveKnobs(epoch=self.epoch, knobs=tuple(knobs))

    def commits_for(self, owner: str) -> tuple[KnobCommit, ...]:
        """What a restarted owner must use, oldest first; knobs that it does not have are included."""
        commits: dict[tuple[int, int], dict[str, KnobValue]] = {}
        # A value of its own comes after the common one of the same change.
        for knob in sorted(self.live().knobs, key=lambda k: (k.epoch, k.target == owner)):
            if fits(owner, knob.target):
                commits.setdefault((knob.epoch, knob.at), {})[knob.name] = knob.value
        return tuple(KnobCommit(epoch=epoch, at=at, values=values) for (epoch, at), values in sorted(commits.items()))

    def newest(self, name: str, default: KnobValue) -> KnobValue:
        """What was decided last for a knob with one owner, in force or not."""
        found = [k for k in self.live().knobs if k.name == name]
        return found[-1].value if found else default

    # -- taking back

    def lapse(self, epoch: int, names: Iterable[str]) -> None:
        """The time of a change is over: an undo never returns to it."""
        if (decided := self._find(epoch)) is not None:
            decided.undone.update(names)

    def plan_undo(self, epoch: int, roster: OwnerStates, names: Iterable[str] | None = None) -> tuple[int, ChangePlan]:
        """Epoch and plan that take a change back: the newest (0), or that of `epoch`; with `names` only these knobs.

        Raises ConfigError naming the obstacle.
        """
        decided = self._newest() if not epoch else self._require(epoch)
        wanted = decided.standing if names is None else decided.standing.intersection(names)
        if not wanted:
            raise ConfigError(
                f"change {decided.epoch} was taken back before", remedy="`myxa history` lists the changes"
            )
        for later in self._past:
            touched = later.standing & wanted
            if later.epoch > decided.epoch and touched and overlap(later.plan.target, decided.plan.target):
                raise ConfigError(
                    f"{', '.join(sorted(touched))} was changed again by change {later.epoch}",
                    remedy=f"undo change {later.epoch} first, or set the values",
                )
        return decided.epoch, self._plan_before(decided, sorted(wanted), roster)

    def _plan_before(self, decided: Decided, names: list[str], roster: OwnerStates) -> ChangePlan:
        target, first = decided.plan.target, decided.plan.first
        states: dict[str, Mapping[str, KnobState]] = {name: roster.states(name, target) for name in names}
        missing = [name for name in names if not states[name]]
        if missing:
            raise ConfigError(
                f"no owner of {', '.join(missing)} answers", remedy=f"silent are: {', '.join(roster.silent) or 'none'}"
            )
        common = {name: self._before(decided.epoch, target, name, first[name]) for name in names}
        wanted: dict[str, dict[str, KnobValue]] = {}
        own: dict[str, dict[str, KnobValue]] = {}
        for name in names:
            for owner, state in states[name].items():
                value = self._before(decided.epoch, owner, name, state.first)
                wanted.setdefault(owner, {})[name] = value
                if value != common[name]:
                    own.setdefault(owner, {})[name] = value
        return make_plan(target, common, wanted, states, own)

    def _before(self, epoch: int, target: str, name: str, first: KnobValue) -> KnobValue:
        for decided in reversed(self._past):
            if decided.epoch < epoch and (value := decided.value_for(target, name)) is not None:
                return value
        return first

    def _newest(self) -> Decided:
        for decided in reversed(self._past):
            if decided.standing and not decided.is_restored:
                return decided
        raise ConfigError("there is no change to take back", remedy="`myxa history` lists the changes")

    def _find(self, epoch: int) -> Decided | None:
        return next((decided for decided in self._past if decided.epoch == epoch), None)

    def _require(self, epoch: int) -> Decided:
        decided = self._find(epoch)
        if decided is None:
            raise ConfigError(f"there is no change {epoch} in this run", remedy="`myxa history` lists the changes")
        if decided.undoes:
            raise ConfigError(
                f"change {epoch} took change {decided.undoes} back", remedy="set the values again instead"
            )
        return decided


AHEAD = 3
"""Versions before its number at which the way back is begun, at least."""
AHEAD_S = 1.0
"""And so long before it, as fast as versions come: steps of milliseconds do not wait until all owners have answered."""
PACE_OF = 16
"""Number of the newest versions from which their rate is computed."""
_AT_ONCE_S = 1e-9
"""A time that is over: 0 means none."""


@dataclass(frozen=True, slots=True)
class Expiry:
    """Knobs of one change that go back together."""

    epoch: int
    names: frozenset[str]
    target: str
    due_version: int = 0
    due_s: float = 0.0
    """Monotonic; 0: by version."""
    not_before: int = 0
    """Number at which the old values are to be in force; 0: at once."""


class Expiries:
    """See the module's head."""

    def __init__(self) -> None:
        self._open: list[Expiry] = []
        self._seen: deque[tuple[int, float]] = deque(maxlen=PACE_OF)
        """(version, monotonic seconds) of the newest ones."""

    def add(self, decided: Decided, *, for_steps: int, for_s: float, version: int, now_s: float) -> None:
        """That change is to go back. `version`: the run's newest."""
        names, target = frozenset(decided.plan.common), decided.plan.target
        if for_s > 0:
            self._open.append(Expiry(decided.epoch, names, target, due_s=now_s + for_s))
        if for_steps <= 0:
            return
        numbered = names & decided.plan.numbered
        if numbered:
            end = decided.at + for_steps
            self._open.append(Expiry(decided.epoch, numbered, target, due_version=end - AHEAD, not_before=end))
        if names - numbered:
            self._open.append(Expiry(decided.epoch, names - numbered, target, due_version=version + for_steps))

    def ended_by(self, plan: ChangePlan) -> list[Expiry]:
        """A change sets knobs again, or takes them back: the time of what they had before is over. Returns what ended.

        `check` has refused changes for some of the actors only.
        """
        ended: list[Expiry] = []
        for expiry in list(self._open):
            names = expiry.names.intersection(plan.common)
            if not names or not overlap(expiry.target, plan.target):
                continue
            ended.append(replace(expiry, names=names))
            self._open.remove(expiry)
            if left := expiry.names - names:
                self._open.append(replace(expiry, names=left))
        return ended

    def check(self, plan: ChangePlan, now_s: float) -> None:
        """Raises ConfigError for a change of some of the actors that are to go back together."""
        for expiry in self._open:
            names = expiry.names & plan.shared
            if names and overlap(expiry.target, plan.target) and not fits(expiry.target, plan.target):
                when = self.words(now_s)
                back = ", ".join(f"{name} goes back {when[name]}" for name in sorted(names))
                raise ConfigError(
                    f"{back} at {expiry.target or 'all its owners'} by change {expiry.epoch}",
                    remedy=f"undo change {expiry.epoch} first, or set the value for all of them",
                )

    def due(self, version: int, now_s: float) -> tuple[Expiry, ...]:
        """What is to go back now; it stays listed until `done`. To be asked at every version."""
        more = self._more_ahead(version, now_s)
        return tuple(
            e
            for e in self._open
            if (e.due_s <= now_s if e.due_s else e.due_version - (more if e.not_before else 0) <= version)
        )

    def _more_ahead(self, version: int, now_s: float) -> int:
        """By how many versions more than `AHEAD` the way back is begun early."""
        if self._seen and version < self._seen[-1][0]:
            self._seen.clear()  # the run fell back to a checkpoint
        if not self._seen or version > self._seen[-1][0]:
            self._seen.append((version, now_s))
        (first, began_s), (last, ended_s) = self._seen[0], self._seen[-1]
        per_s = (last - first) / (ended_s - began_s) if ended_s > began_s else 0.0
        return max(math.ceil(per_s * AHEAD_S) - AHEAD, 0)

    def done(self, expiry: Expiry) -> None:
        """It went back, or cannot any more."""
        self._open = [e for e in self._open if (e.epoch, e.names) != (expiry.epoch, expiry.names)]

    def kept(self, ahead_s: float) -> tuple[Expiry, ...]:
        """For another process; `ahead_s`: by how much the wall clock is ahead of the monotonic one."""
        return tuple(_shifted(e, ahead_s) for e in self._open)

    def restore(self, kept: Iterable[Expiry], ahead_s: float) -> None:
        """What an earlier process, or moment, kept; what was due meanwhile is due now."""
        self._open = [_shifted(e, -ahead_s) for e in kept]

    def next_s(self) -> float | None:
        """When the next one by time is due."""
        return min((e.due_s for e in self._open if e.due_s), default=None)

    def words(self, now_s: float) -> dict[str, str]:
        """Knob -> when it goes back."""
        return {
            name: f"in {max(e.due_s - now_s, 0):.0f} s" if e.due_s else f"at version {e.not_before or e.due_version}"
            for e in self._open
            for name in e.names
        }


def _shifted(expiry: Expiry, by_s: float) -> Expiry:
    return replace(expiry, due_s=max(expiry.due_s + by_s, _AT_ONCE_S)) if expiry.due_s else expiry
