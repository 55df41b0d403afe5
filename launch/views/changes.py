"""What operators and rules changed in a run, by its audit log: text, and the step at which each change took effect.
Pure."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from ...core.knobs import AuditRecord, KnobMove, KnobValue

_MAX_MOVES = 4
_MAX_TEXT = 300


class RunChange(NamedTuple):
    """A record of the audit log, and where it is on a plot."""

    record: AuditRecord
    step: int
    """Weight version trained from when it came into force; right of it a plot has it. -1: not known."""

    @property
    def what(self) -> str:
        """As `lr 0.001 -> 0.0005`, or the verb and what it was about."""
        return moves_text(self.record.moves) or f"{self.record.verb} {asked_text(self.record.arguments)}".strip()

    @property
    def who(self) -> str:
        return self.record.who.user or self.record.who.via

    @property
    def result(self) -> str:
        is_idle = self.record.verb == "scale" and '"joining":[],"leaving":[]' in self.record.detail.replace(" ", "")
        return "nothing to do" if is_idle else self.record.result

    @property
    def is_done(self) -> bool:
        return self.result == "done"


def changes_of(records: Iterable[AuditRecord], steps: Sequence[tuple[float, int]] = ()) -> list[RunChange]:
    """In order of the log. `steps`: (when reported, step): the launcher, which notes verbs, knows no step."""
    times, changes = [wall_s for wall_s, _ in steps], list[RunChange]()
    for record in records:
        step = max(record.at, record.version) if record.moves else record.version or -1
        if step < 0 and steps:
            index = bisect_right(times, record.wall_s)
            step = steps[index - 1][1] if index else 0
        changes.append(RunChange(record, step))
    return changes


@dataclass(frozen=True, slots=True)
class EventRow:
    """One line of events.jsonl."""

    wall_s: float
    source: str
    kind: str
    text: str


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
    corners = [(low, first)]
    for change in changes:
        new = next((move.new for move in change.record.moves if move.name == name), None)
        if change.is_done and change.step >= 0 and isinstance(new, int | float):
            at = min(max(float(change.step), corners[-1][0]), high)
            corners += [(at, corners[-1][1]), (at, float(new))]
    return [*corners, (high, corners[-1][1])]


def clock_text(wall_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(wall_s))


def _cut(value: object, limit: int = _MAX_TEXT) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
