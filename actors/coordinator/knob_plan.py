"""What a request for a change means: whose knobs get which values, or why it is refused. Sans-IO.

Targets are actor names ("rollout/3"), roles ("rollout/*", or just "rollout"), or empty: every owner of the knob.
An actor that joins later and fits the target gets the same values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...core.errors import ConfigError
from ...core.knobs import NUMBERED, ChangeRequest, KnobMove, KnobSheet, KnobState, KnobValue
from ...core.suggestion import suggest

MAX_KNOBS = 64
"""In one change."""
MANY = ("rollout", "process")
"""`Tunable.owner` of knobs that several actors have, each its own value; of any other knob there is one."""


@dataclass(frozen=True, slots=True)
class ChangePlan:
    """What is to be changed."""

    target: str
    common: Mapping[str, KnobValue]
    """For all actors that fit the target, now and later."""
    values: Mapping[str, Mapping[str, KnobValue]]
    """Owner -> what it gets now."""
    moves: tuple[KnobMove, ...]
    """What differs from before."""
    first: Mapping[str, KnobValue]
    """Knob -> the run file's value."""
    numbered: frozenset[str]
    """Knobs whose boundary has numbers."""
    shared: frozenset[str] = frozenset()
    """Knobs that several actors may have."""
    own: Mapping[str, Mapping[str, KnobValue]] = field(default_factory=dict[str, Mapping[str, KnobValue]])
    """Owner -> values of its own, where they are not the common ones: an undo goes back to what each had."""


@dataclass(frozen=True, slots=True)
class OwnerStates:
    """The owners and their knobs."""

    sheets: Sequence[KnobSheet]
    silent: Mapping[str, str]
    """Owners that did not say: why."""

    def states(self, name: str, target: str) -> dict[str, KnobState]:
        """Owner -> that knob, for owners that fit the target."""
        return {
            sheet.owner: state
            for sheet in self.sheets
            if fits(sheet.owner, target)
            for state in sheet.knobs
            if state.tunable.name == name
        }

    def normal_target(self, target: str) -> str:
        """A role alone means all its actors. Raises ConfigError when no actor fits."""
        actors = {sheet.owner for sheet in self.sheets} | set(self.silent)
        if target and target not in actors and any(fits(actor, f"{target}/*") for actor in actors):
            target = f"{target}/*"
        if not any(fits(actor, target) for actor in actors):
            roles = {f"{actor.partition('/')[0]}/*" for actor in actors if "/" in actor}
            raise ConfigError(f"no actor fits {target!r}", remedy=suggest(target, actors | roles))
        return target


def fits(actor: str, target: str) -> bool:
    """Whether the target means that actor, or the narrower target `actor`."""
    if target.endswith("/*"):
        return actor.startswith(target[:-1])
    return target in ("", actor)


def breadth(target: str) -> tuple[int, str]:
    """Orders targets from the widest to the narrowest."""
    return (0 if not target else 1 if target.endswith("/*") else 2), target


def overlap(one: str, other: str) -> bool:
    """Whether some actor fits both targets."""
    return fits(one, other) or fits(other, one)


def latest(state: KnobState) -> KnobValue:
    """What was decided last for a knob, whether its boundary came or not."""
    return state.value if state.pending is None else state.pending


def plan_change(request: ChangeRequest, roster: OwnerStates) -> ChangePlan:
    """Raises ConfigError with every reason to refuse it."""
    _check_shape(request)
    target = roster.normal_target(request.target)
    complaints: list[str] = []
    wanted: dict[str, dict[str, KnobValue]] = {}
    states: dict[str, dict[str, KnobState]] = {}
    for name, value in request.values.items():
        states[name] = roster.states(name, target)
        complaints += _check_owners(name, target, states[name], roster)
        for owner, state in states[name].items():
            try:
                checked = state.tunable.check(value, first=state.first, force=request.force)
            except ConfigError as error:
                complaints.append(str(error))
                break
            wanted.setdefault(owner, {})[name] = checked
    complaints += _check_expected(request, roster, target)
    if complaints:
        raise ConfigError("; ".join(complaints))
    common = {name: next(v[name] for v in wanted.values() if name in v) for name in request.values}
    return make_plan(target, common, wanted, states)


def plan_restored(request: ChangeRequest, roster: OwnerStates) -> ChangePlan:
    """As `plan_change` for values of a checkpoint, each the knob of some actor. Whom the target means may be still to
    come: it gets the values when it joins. Raises ConfigError likewise."""
    complaints: list[str] = []
    common: dict[str, KnobValue] = {}
    wanted: dict[str, dict[str, KnobValue]] = {}
    states = {name: roster.states(name, "") for name in request.values}
    for name, value in request.values.items():
        complaints += _check_owners(name, request.target, states[name], roster)
        known = next(iter(states[name].values()))
        try:
            common[name] = known.tunable.check(value, first=known.first, force=request.force)
        except ConfigError as error:
            complaints.append(str(error))
            continue
        for owner in states[name]:
            if fits(owner, request.target):
                wanted.setdefault(owner, {})[name] = common[name]
    if complaints:
        raise ConfigError("; ".join(complaints))
    return make_plan(request.target, common, wanted, states)


def make_plan(
    target: str,
    common: Mapping[str, KnobValue],
    wanted: Mapping[str, Mapping[str, KnobValue]],
    states: Mapping[str, Mapping[str, KnobState]],
    own: Mapping[str, Mapping[str, KnobValue]] | None = None,
) -> ChangePlan:
    """`wanted`: owner -> its new values; `states`: knob -> owner -> its state there."""
    tunables = {name: next(iter(owners.values())).tunable for name, owners in states.items()}
    moves = tuple(
        KnobMove(
            name=name,
            owner=owner,
            old=latest(states[name][owner]),
            new=value,
            boundary=tunables[name].boundary,
        )
        for owner, values in wanted.items()
        for name, value in values.items()
        if latest(states[name][owner]) != value
    )
    return ChangePlan(
        target=target,
        common=common,
        values=wanted,
        moves=moves,
        first={name: next(iter(owners.values())).first for name, owners in states.items()},
        numbered=frozenset(name for name, tunable in tunables.items() if tunable.boundary in NUMBERED),
        shared=frozenset(name for name, tunable in tunables.items() if tunable.owner in MANY),
        own=own or {},
    )


def _check_shape(request: ChangeRequest) -> None:
    if not request.values:
        raise ConfigError("nothing to change", remedy="name a knob and its value, like lr=1e-6")
    if len(request.values) > MAX_KNOBS:
        raise ConfigError(f"{len(request.values)} knobs in one change", remedy=f"at most {MAX_KNOBS}")
    if not math.isfinite(request.for_s) or request.for_s < 0 or request.for_steps < 0 or request.not_before < 0:
        raise ConfigError("a time or a number of steps below 0", remedy="give for how long, like 50steps or 10m")
    if request.for_s and request.for_steps:
        raise ConfigError("both seconds and steps are given", remedy="say one of both")


def _check_owners(name: str, target: str, states: Mapping[str, KnobState], roster: OwnerStates) -> list[str]:
    """Is there an owner, and can every owner be asked?"""
    silent = [f"{actor} ({why})" for actor, why in roster.silent.items() if fits(actor, target)]
    if not states:
        known = {state.tunable.name for sheet in roster.sheets for state in sheet.knobs if fits(sheet.owner, target)}
        where = f" at {target}" if target else ""
        unsaid = f"; no answer from {', '.join(silent)}" if silent else ""
        return [f"there is no knob {name!r}{where}; {suggest(name, known)}{unsaid}"]
    role = next(iter(states.values())).tunable.owner
    concerned = [
        f"{actor} ({why})"
        for actor, why in roster.silent.items()
        if fits(actor, target) and role in ("process", actor.partition("/")[0])
    ]
    if not concerned:
        return []
    return [f"{name}: no answer from {', '.join(concerned)}, and all owners change it or none; name others as target"]


def _check_expected(request: ChangeRequest, roster: OwnerStates, target: str) -> list[str]:
    complaints: list[str] = []
    for name, expected in request.expect.items():
        states = roster.states(name, target)
        if not states:
            complaints.append(f"there is no knob {name!r} to compare")
        for owner, state in states.items():
            if latest(state) != expected or isinstance(latest(state), bool) != isinstance(expected, bool):
                complaints.append(f"{name} is {latest(state)} at {owner}, not {expected} as expected")
                break
    return complaints
