"""What operators and rules changed in a run, by its audit log: text, and the step at which each change took effect.
Pure."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from ...core.knobs import AuditRecord, KnobMove, KnobValue

_MAX_MOVES = 4
_MAX_TEXT = 300


@dataclass(frozen=True, slots=True)
class RunChange:
    """One line of what was changed."""

    number: int
    """From 1; the plots name changes by it."""
    wall_s: float
    step: int
    """Weight version that was trained from when it came into force; what is right of it on a plot has it."""
    what: str
    """"lr 0.001 -> 0.0005", or the verb and what it was about."""
    who: str
    reason: str
    result: str
    detail: str
    values: dict[str, KnobValue]

    @property
    def is_done(self) -> bool:
        return self.result == "done"


def changes_of(records: Sequence[AuditRecord]) -> list[RunChange]:
    """One change a record, in order of the log, numbered by the log."""
    return [_of_record(record) for record in records]


def _of_record(record: AuditRecord) -> RunChange:
    # The launcher starts processes and knows no version: `placed` finds the step by the clock.
    step = max(record.at, record.version) if record.moves else record.version or -1
    return RunChange(
        number=record.number,
        wall_s=record.wall_s,
        step=step,
        what=moves_text(record.moves) or f"{record.verb} {asked_text(record.arguments)}".strip(),
        who=record.who.user or record.who.via,
        reason=_cut(record.reason),
        result=record.result,
        detail=_cut(record.detail),
        values={move.name: move.new for move in record.moves},
    )


@dataclass(frozen=True, slots=True)
class EventRow:
    """One line of events.jsonl."""

    wall_s: float
    source: str
    kind: str
    text: str


def placed(changes: Iterable[RunChange], steps: Sequence[tuple[float, int]]) -> list[RunChange]:
    """The changes, those of unknown step at the step of their time. `steps`: (when it was reported, step), by time."""
    times = [wall_s for wall_s, _ in steps]
    found: list[RunChange] = []
    for change in changes:
        if change.step < 0 and steps:
            index = bisect_right(times, change.wall_s)
            change = replace(change, step=max((step for _, step in steps[max(0, index - 1) : index]), default=0))
        found.append(change)
    return found


def moves_text(moves: Sequence[KnobMove]) -> str:
    counts: dict[tuple[str, str, str], int] = {}
    for move in moves:
        key = (move.name, value_text(move.old), value_text(move.new))
        counts[key] = counts.get(key, 0) + 1
    texts = [f"{name} {old} -> {new}{f' ({num} owners)' * (num > 1)}" for (name, old, new), num in counts.items()]
    more = f" and {len(texts) - _MAX_MOVES} more" if len(texts) > _MAX_MOVES else ""
    return ", ".join(texts[:_MAX_MOVES]) + more


def value_text(value: KnobValue | object) -> str:
    """A knob's value as people write it: true, 0.0005, pace."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    return _cut(value, 60)


def asked_text(arguments: dict[str, object]) -> str:
    """What was asked for: `target=rollout/1 count=4`; empty arguments are left out."""
    facts: dict[str, object] = {}
    for name, value in arguments.items():
        if name == "values" and isinstance(value, dict):
            facts |= cast("dict[str, object]", value)
        elif name != "reason" and value not in (None, "", 0, False, {}, []):
            facts[name] = value
    return _cut(" ".join(f"{name}={value_text(value)}" for name, value in facts.items()))


def stairs(changes: Sequence[RunChange], name: str, first: float, low: float, high: float) -> list[tuple[float, float]]:
    """(step, value) of a knob over the steps from `low` to `high`, with a corner before and after each change of it."""
    found = [(low, first)]
    for change in changes:
        new = change.values.get(name)
        if change.is_done and change.step >= 0 and isinstance(new, int | float):
            at = min(max(float(change.step), found[-1][0]), high)
            found += [(at, found[-1][1]), (at, float(new))]
    return [*found, (high, found[-1][1])]


def clock_text(wall_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(wall_s))


def _cut(value: object, limit: int = _MAX_TEXT) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
