"""What an owner of knobs does with what was decided, in and out of turn, and at its boundaries."""

from __future__ import annotations

from typing import Any

import pytest
from tests.harness.decider import news
from tests.harness.manual_clock import ManualClock
from tests.knobs.knob_maker import TUNABLES, make_desk

from myxa.actors.knobs.owner import Knob, KnobOwner
from myxa.core.activity import TelemetryBuffer
from myxa.core.errors import ConfigError
from myxa.core.knobs import KnobValue, LiveKnobs

BAD: list[tuple[str, Any, str]] = [
    ("lr", 0.0, "above 0"),
    ("lr", float("nan"), "finite"),
    ("lr", True, "a number"),
    ("lr", "fast", "a number"),
    ("lr", 0.5, "--force"),
    ("clip", 1.5, "up to 1"),
    ("eta", 1.5, "a whole number"),
    ("filter", "c", "one of a, b"),
    ("level", 4, "must be text"),
]


@pytest.mark.parametrize(("name", "value", "word"), BAD)
def test_a_bad_value_is_refused_with_its_reason(name: str, value: Any, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        TUNABLES[name].check(value, first=1e-3)


def test_the_guard_is_lifted_by_force_alone() -> None:
    assert TUNABLES["lr"].check(0.5, first=1e-3, force=True) == 0.5
    with pytest.raises(ConfigError, match="above 0"):
        TUNABLES["lr"].check(-1.0, first=1e-3, force=True)


def test_a_numbered_value_waits_for_its_number() -> None:
    owner = (desk := make_desk("trainer/0", "lr")).owner
    owner.reach("step", 4)
    owner.take(news(1, 7, lr=1e-4))
    assert (owner.sheet().knobs[0].pending, owner.sheet().passed) == (1e-4, {"step": 4})
    for number in (5, 6):
        assert owner.use_due("step", number) == {}
        assert (desk.values["lr"], owner.epoch) == (1e-3, 0)
    assert owner.use_due("weights", 7) == {}, "another boundary"
    assert owner.use_due("step", 8) == {"lr": 1e-4}
    assert (owner.epoch, owner.sheet().knobs[0].pending) == (1, None)


def test_a_newer_value_replaces_those_that_wait() -> None:
    owner = (desk := make_desk("trainer/0", "lr", "clip")).owner
    owner.take(LiveKnobs(epoch=2, knobs=(*news(1, 9, lr=2e-3).knobs, *news(2, 12, lr=3e-3).knobs)))
    owner.take(news(3, 5, lr=4e-3))
    owner.take(news(1, 4, lr=9.0))  # it comes late
    assert owner.use_due("step", 20) == {"lr": 4e-3}
    assert (desk.uses, owner.epoch) == ([("lr", 4e-3)], 3)
    owner.take(news(4, 0, lr=None))
    assert owner.use_due("step", 21) == {"lr": 1e-3}, "the run file's again"


def test_what_comes_into_force_is_told_once() -> None:
    telemetry = TelemetryBuffer("trainer/0", ManualClock())
    owner = make_desk("trainer/0", "lr", "level", telemetry=telemetry).owner
    both = LiveKnobs(epoch=4, knobs=(*news(4, 9, lr=1e-4).knobs, *news(4, level="DEBUG").knobs))
    owner.take(both)
    owner.take(both)
    [event] = telemetry.drain().events
    assert (event.kind, event.data["name"], event.data["new"], event.data["at"]) == (
        "knob-in-force", "level", "DEBUG", 0,
    )  # fmt: skip
    assert owner.epoch == 0, "part of the change is still to come"


def test_a_value_that_cannot_be_used_is_not_counted_as_known() -> None:
    values: list[KnobValue] = [8]

    def use(value: KnobValue) -> None:
        if value == 13:
            raise ValueError("unlucky")
        values.append(value)

    owner = KnobOwner("rollout/0", [Knob(TUNABLES["room"], lambda: values[-1], use)])
    with pytest.raises(ValueError, match="unlucky"):
        owner.take(news(1, room=13))
    assert owner.heard == 0, "it asks for it again"
    owner.take(news(2, room=2))
    assert (values[-1], owner.heard) == (2, 2)
