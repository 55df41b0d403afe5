"""What was decided about the knobs while the run went on: for owners that join, for checkpoints, and to be taken back.

Sans-IO. Nothing in here is in force by being in here: owners use what they are told (`knobs/owner.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from ...core.errors import ConfigError
from ...core.knobs import KnobCommit, KnobState, KnobValue, LiveKnob, LiveKnobs
from .knob_plan import MANY, ChangePlan, Roster, fits, make_plan, overlap

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
        """Note a change. `version`: where the run stands."""
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

    def go_on_from(self, epoch: int) -> None:
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

    # -- for whoever takes this one's place

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
        """What an owner that was started anew must use, oldest first; knobs that it does not have are among them."""
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
        """The time of a change is over, and nothing uses it any more: nobody goes back to it."""
        if (decided := self._find(epoch)) is not None:
            decided.undone.update(names)

    def plan_undo(
        self, epoch: int, roster: Roster, names: Iterable[str] | None = None, spared: Collection[str] = ()
    ) -> tuple[int, ChangePlan]:
        """Epoch and plan that take a change back: the newest (0), or that of `epoch`; with `names` only these knobs.
        `spared`: targets, narrower than the change's, that were set again since and stay as they are.

        Raises ConfigError naming what stands in the way.
        """
        decided = self._newest() if not epoch else self._require(epoch)
        wanted = decided.standing if names is None else decided.standing.intersection(names)
        if not wanted:
            raise ConfigError(
                f"change {decided.epoch} was taken back before", remedy="`myxa history` lists the changes"
            )
        for later in self._past:
            touched = later.standing & wanted
            if any(fits(later.plan.target, target) for target in spared):
                continue
            if later.epoch > decided.epoch and touched and overlap(later.plan.target, decided.plan.target):
                raise ConfigError(
                    f"{', '.join(sorted(touched))} was changed again by change {later.epoch}",
                    remedy=f"undo change {later.epoch} first, or set the values",
                )
        return decided.epoch, self._plan_before(decided, sorted(wanted), roster, spared)

    def _plan_before(self, decided: Decided, names: list[str], roster: Roster, spared: Collection[str]) -> ChangePlan:
        target = decided.plan.target
        states: dict[str, Mapping[str, KnobState]] = {name: roster.states(name, target) for name in names}
        missing = [name for name in names if not states[name]]
        if missing:
            raise ConfigError(
                f"no owner of {', '.join(missing)} answers", remedy=f"silent are: {', '.join(roster.silent) or 'none'}"
            )
        states = {name: found for name, found in states.items() if _has_room(found, spared)}
        names = list(states)
        first = decided.plan.first
        common = {name: self._before(decided.epoch, target, name, first[name]) for name in names}
        wanted: dict[str, dict[str, KnobValue]] = {}
        own: dict[str, dict[str, KnobValue]] = {}
        for name in names:
            for owner, state in states[name].items():
                if any(fits(owner, each) for each in spared):
                    continue
                value = self._before(decided.epoch, owner, name, state.first)
                wanted.setdefault(owner, {})[name] = value
                if value != common[name]:
                    own.setdefault(owner, {})[name] = value
            for each in spared:
                own.setdefault(each, {})[name] = self._latest_for(each, name, common[name])
        return make_plan(target, common, wanted, states, own, spared)

    def _before(self, epoch: int, target: str, name: str, first: KnobValue) -> KnobValue:
        for decided in reversed(self._past):
            if decided.epoch < epoch and (value := decided.value_for(target, name)) is not None:
                return value
        return first

    def _latest_for(self, target: str, name: str, otherwise: KnobValue) -> KnobValue:
        """What was decided last for a target, so that it outlives a newer value of a wider one."""
        found = [k for k in self.live().knobs if k.name == name and fits(target, k.target)]
        return found[-1].value if found else otherwise

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


def _has_room(states: Mapping[str, KnobState], spared: Collection[str]) -> bool:
    """Whether beside the spared there is an owner of a knob, or may come one."""
    return any(
        state.tunable.owner in MANY or not any(fits(owner, each) for each in spared) for owner, state in states.items()
    )
