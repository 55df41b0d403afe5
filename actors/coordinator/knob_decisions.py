"""What a request for a change means, and what was decided about the knobs during the run. Sans-IO.

One rule gives the value of a knob: that of the newest change that came to its number and was not ended (taken back, or
for a time that is over); without one, the run file's. All owners of a knob have the same, also those that join later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from ...core.errors import ConfigError
from ...core.knobs import (
    NUMBERED,
    PROCESS,
    AuditRecord,
    ChangeRequest,
    Decision,
    KnobMove,
    KnobSheet,
    KnobState,
    KnobValue,
    LiveKnob,
    LiveKnobs,
    Operator,
    Tunable,
)
from ...core.suggestion import suggest
from ..knobs.owner import PAUSE_AT


@dataclass(frozen=True, slots=True)
class OwnerStates:
    """The owners and their knobs."""

    sheets: Sequence[KnobSheet]
    silent: Mapping[str, str]
    """Owners that did not say: why."""

    def states(self, name: str) -> dict[str, KnobState]:
        """Owner -> that knob."""
        return {sheet.owner: state for sheet in self.sheets for state in sheet.knobs if state.tunable.name == name}


@dataclass(frozen=True, slots=True)
class ChangeDraft:
    """A change that may be decided."""

    decision: Decision
    values: Mapping[str, Mapping[str, KnobValue]]
    """Owner that is there -> what it gets."""
    moves: tuple[KnobMove, ...]
    tunables: Mapping[str, Tunable]
    file_values: Mapping[str, KnobValue]
    """Key of the run file -> what it would say, of all that differs from it."""

    def judges(self) -> dict[str, dict[str, KnobValue]]:
        """Owner that is to be asked -> what it gets."""
        return {
            owner: dict(values)
            for owner, values in self.values.items()
            if any(self.tunables[name].is_judged for name in values)
        }

    def earliest(self, roster: OwnerStates, version: int) -> int:
        """First boundary that no owner of its knobs has passed; 0 where none has numbers. `version`: the run's."""
        boundaries = {self.tunables[name].boundary for name in self.decision.numbered}
        passed = [
            number
            for sheet in roster.sheets
            if sheet.owner in self.values
            for boundary, number in sheet.passed.items()
            if boundary in boundaries
        ]
        return max(version, *(number + 1 for number in passed), 0) if boundaries else 0


def draft_change(request: ChangeRequest, roster: OwnerStates, decisions: Decisions) -> ChangeDraft:
    """Raises ConfigError with every reason to refuse it."""
    if not request.values:
        raise ConfigError("nothing to change", remedy="name a knob and its value, like lr=1e-6")
    if request.for_s and request.for_steps:
        raise ConfigError("both seconds and steps are given", remedy="say one of both")
    complaints: list[str] = []
    values: dict[str, KnobValue | None] = {}
    states: dict[str, dict[str, KnobState]] = {}
    for name, value in request.values.items():
        states[name] = roster.states(name)
        complaints += _check_owners(name, states[name], roster)
        for state in states[name].values():
            try:
                values[name] = state.tunable.check(value, first=state.first, force=request.force)
            except ConfigError as error:
                complaints.append(str(error))
                break
    complaints += _check_expected(request, roster, decisions)
    if complaints:
        raise ConfigError("; ".join(complaints))
    decision = Decision(
        launch=decisions.launch,
        values=values,
        first={name: next(iter(owners.values())).first for name, owners in states.items()},
        numbered=_numbered(states),
        for_steps=request.for_steps,
        for_s=request.for_s,
    )
    return _draft(decision, states, decisions, roster)


def _draft(
    decision: Decision, states: Mapping[str, Mapping[str, KnobState]], decisions: Decisions, roster: OwnerStates
) -> ChangeDraft:
    """What it would change: what every owner has by all decisions with it, beside what it has now."""
    after = decisions.with_one(decision)
    values: dict[str, dict[str, KnobValue]] = {}
    moves: list[KnobMove] = []
    for name, owners in states.items():
        for owner, state in owners.items():
            old, new = decisions.latest(name, state.first), after.latest(name, state.first)
            values.setdefault(owner, {})[name] = new
            if new != old:
                moves.append(KnobMove(name=name, owner=owner, old=old, new=new, boundary=state.tunable.boundary))
    tunables = {name: next(iter(owners.values())).tunable for name, owners in states.items()}
    file_values = {
        state.tunable.key: value
        for sheet in roster.sheets
        for state in sheet.knobs
        if state.tunable.key and (value := after.latest(state.tunable.name, state.first)) != state.first
    }
    return ChangeDraft(decision, values, tuple(moves), tunables, file_values)


def _numbered(states: Mapping[str, Mapping[str, KnobState]]) -> tuple[str, ...]:
    return tuple(
        name for name, owners in states.items() if any(s.tunable.boundary in NUMBERED for s in owners.values())
    )


def _check_owners(name: str, states: Mapping[str, KnobState], roster: OwnerStates) -> list[str]:
    silent = {actor: f"{actor} ({why})" for actor, why in roster.silent.items()}
    if not states:
        names = {state.tunable.name for sheet in roster.sheets for state in sheet.knobs}
        more = f"; no answer from {', '.join(silent.values())}" if silent else ""
        return [f"there is no knob {name!r}; {suggest(name, names)}{more}"]
    role = next(iter(states.values())).tunable.owner
    owners = [text for actor, text in silent.items() if role in (PROCESS, actor.partition("/")[0])]
    return [f"{name}: no answer from {', '.join(owners)}, and all owners change it or none"] if owners else []


def _check_expected(request: ChangeRequest, roster: OwnerStates, decisions: Decisions) -> list[str]:
    complaints: list[str] = []
    for name, expected in request.expect.items():
        states = roster.states(name)
        if not states:
            complaints.append(f"there is no knob {name!r} to compare")
        for state in list(states.values())[:1]:
            now = decisions.latest(name, state.first)
            if now != expected or isinstance(now, bool) != isinstance(expected, bool):
                complaints.append(f"{name} is {now}, not {expected} as expected")
    return complaints


RESTORE = "restore"
"""Verb of the changes that bring a checkpoint's values into force: no person made them in this run."""
NEVER = 1 << 62
"""A number after all others."""


@dataclass(slots=True)
class _DecidedValue:
    """A value that was decided, and what became of it since."""

    knob: LiveKnob
    record: AuditRecord
    decision: Decision
    """The record's."""
    at: int
    """As it was decided, or the version to which the trainer went back; 0 for a knob without numbers."""
    ended: int = NEVER
    """Number from which on it is not in force any more."""

    @property
    def stands(self) -> bool:
        """Whether the value still comes from this change, unless a later one set it again."""
        return self.knob.value is not None and self.ended == NEVER

    @property
    def is_for_a_time(self) -> bool:
        return bool(self.stands and (self.decision.for_steps or self.decision.for_s))


@dataclass(frozen=True, slots=True)
class Due:
    """Knobs of a change for a time that go back together."""

    epoch: int
    names: frozenset[str]
    at: int = 0
    """Number at which they go back; 0: as soon as possible."""


class Decisions:
    """See the module's head."""

    def __init__(self, launch: str) -> None:
        self.launch = launch
        self.epoch = 0
        """Of the newest change that was decided."""
        self._entries: list[_DecidedValue] = []
        """One for each knob of a change, by changes."""

    def replay(self, records: Iterable[AuditRecord]) -> None:
        """As an earlier incarnation of the coordinator wrote them."""
        for record in records:
            if record.decision is not None and record.decision.launch == self.launch:
                self.add(record)

    def add(self, record: AuditRecord) -> None:
        decision = record.decision
        assert decision is not None
        if record.verb == "rewind":
            # What was in force stays so, at once, and what was still to come keeps its number.
            for entry in self._entries:
                entry.at = _back(entry.at, record.at, record.version)
                entry.ended = _back(entry.ended, record.at, record.version)
            return
        self._take(record, decision)

    def with_one(self, decision: Decision) -> Decisions:
        after = Decisions(self.launch)
        after._entries = [replace(entry) for entry in self._entries]
        epoch, who = self.epoch + 1, Operator()
        record = AuditRecord(number=0, wall_s=0.0, verb="set", who=who, arguments={}, result="", epoch=epoch)
        after._take(record, decision)
        return after

    def _take(self, record: AuditRecord, decision: Decision) -> None:
        epoch = record.epoch
        self.epoch = max(self.epoch, epoch)
        at = dict.fromkeys(decision.numbered, record.at)
        knobs = [
            LiveKnob(name, value, decision.first[name], epoch, at.get(name, 0))
            for name, value in decision.values.items()
        ]
        for knob in knobs:
            for entry in self._entries:
                is_over = entry.knob.epoch == decision.undoes or entry.is_for_a_time
                if entry.knob.name == knob.name and entry.stands and is_over:
                    entry.ended = knob.at
        self._entries += [_DecidedValue(knob, record, decision, knob.at) for knob in knobs]

    def continue_from(self, epoch: int) -> None:
        self.epoch = max(self.epoch, epoch)

    def has_due(self, old_version: int, version: int) -> bool:
        """Whether a numbered value came into force between these versions."""
        return any(old_version < entry.at <= version for entry in self._entries)

    def latest(self, name: str, default: KnobValue) -> KnobValue:
        """Decided last for a knob, in force or not."""
        entry = self._holder(name, NEVER - 1)
        return default if entry is None or entry.knob.value is None else entry.knob.value

    def why(self, name: str) -> str:
        """The reason of the change that gave a knob its value, or who made it; empty for the run file's value."""
        entry = self._holder(name, NEVER - 1)
        if entry is None:
            return ""
        operator = entry.record.who
        return entry.record.reason or f"by {operator.user or operator.via or 'an operator'}"

    def news(self, after: int) -> LiveKnobs:
        """After epoch `after`: of each knob that was decided since, all values from now on."""
        names = sorted({entry.knob.name for entry in self._entries if entry.knob.epoch > after})
        return LiveKnobs(epoch=self.epoch, knobs=tuple(value for name in names for value in self._course(name)))

    def live(self, version: int, now_s: float) -> LiveKnobs:
        """For a checkpoint: of each knob the value in force, and those whose number is still to come; after them what
        is for a time, with the time that is left. `now_s`: wall clock."""
        lasting = Decisions(self.launch)
        lasting._entries = [entry for entry in self._entries if not entry.is_for_a_time]
        names = sorted({entry.knob.name for entry in self._entries} - {PAUSE_AT.name})
        knobs = [knob for name in names for knob in lasting._from(name, version)]
        for entry, kind, end in self._ends():
            if entry.knob.name == PAUSE_AT.name:
                continue
            at = max(entry.at, version) if kind == "number" or entry.knob.name in entry.decision.numbered else 0
            remaining = end - {"s": now_s, "version": version, "number": at}[kind]
            time = {"for_s": remaining} if kind == "s" else {"for_steps": int(remaining)}
            knobs += [msgspec.structs.replace(entry.knob, at=at, **time)] if remaining > 0 else []
        return LiveKnobs(epoch=self.epoch, knobs=tuple(knobs))

    def _from(self, name: str, version: int) -> Iterator[LiveKnob]:
        """The values of a knob from `version` on, but for the run file's before the first of others."""
        course = list(self._course(name))
        is_changed = False
        for knob in (*[knob for knob in course if knob.at <= version][-1:], *(k for k in course if k.at > version)):
            is_changed = is_changed or knob.value is not None
            if is_changed:
                yield msgspec.structs.replace(knob, value=knob.first if knob.value is None else knob.value)

    def _course(self, name: str) -> Iterator[LiveKnob]:
        """The values of a knob, by the numbers from which on they are in force."""
        entries = [entry for entry in self._entries if entry.knob.name == name]
        before: tuple[int, KnobValue | None] | None = None
        for number in sorted({entry.at for entry in entries}):
            epoch = max(entry.knob.epoch for entry in entries if entry.at <= number)
            holder = self._holder(name, number)
            value = None if holder is None else holder.knob.value
            if before != (epoch, value):
                source = (holder or entries[0]).knob
                yield msgspec.structs.replace(source, value=value, epoch=epoch, at=number)
            before = epoch, value

    def _holder(self, name: str, number: int) -> _DecidedValue | None:
        for entry in reversed(self._entries):
            if entry.knob.value is not None and entry.at <= number < entry.ended and entry.knob.name == name:
                return entry
        return None

    def draft_undo(self, epoch: int, roster: OwnerStates, names: frozenset[str] = frozenset()) -> ChangeDraft:
        """What takes a change back: the newest (0), or `epoch`; `names`: only these knobs. Raises ConfigError."""
        undone = self._change(epoch)
        if undone[0].record.verb == RESTORE and not names:
            raise ConfigError(f"change {epoch} restored a checkpoint's values", remedy="set the values instead")
        standing = [entry for entry in undone if entry.stands and (not names or entry.knob.name in names)]
        epoch = undone[0].knob.epoch
        if not standing:
            raise ConfigError(f"change {epoch} was taken back before", remedy="`myxa history` lists the changes")
        first = {entry.knob.name: entry.knob.first for entry in standing}
        for later in self._entries:
            knob = later.knob
            if knob.epoch > epoch and knob.name in first and later.stands:
                raise ConfigError(
                    f"{knob.name} was changed again by change {knob.epoch}",
                    remedy=f"undo change {knob.epoch} first, or set the values",
                )
        states = {name: roster.states(name) for name in sorted(first)}
        if missing := [name for name in states if not states[name]]:
            raise ConfigError(
                f"no owner of {', '.join(missing)} answers", remedy=f"silent are: {', '.join(roster.silent) or 'none'}"
            )
        decision = Decision(
            launch=self.launch, values=dict.fromkeys(states), first=first, numbered=_numbered(states), undoes=epoch
        )
        return _draft(decision, states, self, roster)

    def _change(self, epoch: int) -> list[_DecidedValue]:
        """The knobs of a change that can be taken back; 0: the newest. Raises ConfigError."""
        change_epoch = epoch or max(
            (entry.knob.epoch for entry in self._entries if entry.stands and entry.record.verb == "set"), default=0
        )
        if not change_epoch:
            raise ConfigError("there is no change to take back", remedy="`myxa history` lists the changes")
        change = [entry for entry in self._entries if entry.knob.epoch == change_epoch]
        if not change:
            raise ConfigError(f"there is no change {epoch} in this run", remedy="`myxa history` lists the changes")
        if undoes := change[0].decision.undoes:
            raise ConfigError(f"change {epoch} took change {undoes} back", remedy="set the values again instead")
        return change

    def _ends(self) -> Iterator[tuple[_DecidedValue, str, float]]:
        """Of changes for a time: what counts their end ("s" wall clock, "number" of the boundary, "version"), where."""
        for entry in self._entries:
            record, decision = entry.record, entry.decision
            if not entry.is_for_a_time:
                continue
            if decision.for_s:
                yield entry, "s", record.wall_s + decision.for_s
            elif entry.knob.name in decision.numbered:
                yield entry, "number", record.at + decision.for_steps
            else:
                yield entry, "version", record.version + decision.for_steps

    def due(self, version: int, now_s: float, number: int = -1) -> list[Due]:
        """What is to go back now, of which numbered values for `number`, before that is passed. `now_s`: wall clock."""
        reached, due = {"s": now_s, "version": version, "number": number}, dict[tuple[int, int], set[str]]()
        for entry, kind, end in self._ends():
            if end <= reached[kind]:
                due.setdefault((entry.knob.epoch, number if kind == "number" else 0), set()).add(entry.knob.name)
        return [Due(epoch, frozenset(names), at) for (epoch, at), names in due.items()]

    def next_s(self) -> float | None:
        """When the next one by time is due, wall clock."""
        return min((end for _, kind, end in self._ends() if kind == "s"), default=None)

    def reverts(self, now_s: float) -> dict[str, str]:
        """Knob -> when it goes back by itself, in words."""
        return {
            entry.knob.name: f"in {max(end - now_s, 0):.0f} s" if kind == "s" else f"at version {end:.0f}"
            for entry, kind, end in self._ends()
        }


def _back(at: int, old_version: int, version: int) -> int:
    return min(at, version) if at <= old_version else at
