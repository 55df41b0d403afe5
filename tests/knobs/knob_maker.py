"""Owners with a few knobs, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from myxa.actors.knobs.owner import Knob, KnobOwner
from myxa.core.activity import TelemetryBuffer
from myxa.core.knobs import KnobValue, KnobVerdict, Tunable

TUNABLES: dict[str, Tunable] = {
    tunable.name: tunable
    for tunable in (
        Tunable(name="lr", kind="float", boundary="step", owner="trainer", help="", low=0, is_low_open=True,
                guard_factor=10.0, key="optimizer.lr"),
        Tunable(name="clip", kind="float", boundary="step", owner="trainer", help="", low=0, high=1),
        Tunable(name="filter", kind="choice", boundary="now", owner="buffer", help="", choices=("a", "b")),
        Tunable(name="eta", kind="int", boundary="request", owner="buffer", help="", low=0, high=64, is_judged=True),
        Tunable(name="room", kind="int", boundary="now", owner="rollout", help="", low=1, is_judged=True),
        Tunable(name="level", kind="text", boundary="now", owner="process", help=""),
    )
}  # fmt: skip
FIRST: dict[str, KnobValue] = {"lr": 1e-3, "clip": 0.2, "filter": "a", "eta": 1, "room": 8, "level": "INFO"}


@dataclass
class Desk:
    """One owner and what it uses."""

    owner: KnobOwner
    values: dict[str, KnobValue]
    uses: list[tuple[str, KnobValue]] = field(default_factory=list[Any])


class Superstitious(KnobOwner):
    """Refuses what only it knows to be wrong."""

    def judge(self, values: Mapping[str, KnobValue], at: int) -> KnobVerdict:
        return KnobVerdict(refusal="unlucky" if 13 in values.values() else "")


def make_desk(name: str, *names: str, telemetry: TelemetryBuffer | None = None, **first: KnobValue) -> Desk:
    """An owner called `name` with these knobs."""
    values = {name: first.get(name, FIRST[name]) for name in names}
    desk: Desk

    def knob(name: str) -> Knob:
        def use(value: KnobValue) -> None:
            values[name] = value
            desk.uses.append((name, value))

        return Knob(TUNABLES[name], lambda: values[name], use)

    owner = Superstitious(name, (), telemetry)
    desk = Desk(owner, values)
    owner.add(knob(name) for name in names)
    return desk
