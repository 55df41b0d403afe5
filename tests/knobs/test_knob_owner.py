"""What an owner of knobs does with prepare, commit and abort, in and out of turn, and at its boundaries."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.knobs.knob_maker import make_desk

from myxa.core.activity import TelemetryBuffer
from myxa.core.clock import ManualClock, SystemClock
from myxa.core.errors import BadRequest, DeadlineExceeded
from myxa.core.knobs import KnobChange, KnobCommit


def change(epoch: int, force: bool = False, **values: object) -> KnobChange:
    return KnobChange(epoch=epoch, values=values, force=force)  # pyright: ignore[reportArgumentType]


def commit(epoch: int, at: int = 0, **values: object) -> KnobCommit:
    return KnobCommit(epoch=epoch, at=at, values=values)  # pyright: ignore[reportArgumentType]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"lr": 0.0}, "above 0"),
    ({"lr": float("nan")}, "finite"),
    ({"lr": True}, "a number"),
    ({"lr": "fast"}, "a number"),
    ({"lr": 0.5}, "--force"),
    ({"clip": 1.5}, "up to 1"),
    ({"clip": 13}, "up to 1"),
    ({"clipp": 0.1}, 'did you mean "clip"?'),
]


def test_a_bad_value_is_refused_with_its_reason_and_changes_nothing() -> None:
    desk = make_desk("trainer/0", "lr", "clip")
    for epoch, (values, word) in enumerate(BAD, start=1):
        vote = desk.owner.prepare(change(epoch, **values))
        assert (vote.accepted, word in vote.reason) == (False, True), vote
        assert not desk.owner.holds("step", 100)
    assert desk.uses == []
    assert desk.owner.prepare(change(9, force=True, lr=0.5)).accepted
    vote = make_desk("rollout/0", "room", "level").owner.prepare(change(1, room=13, level=4))
    assert "unlucky" in vote.reason and "level = 4: must be text" in vote.reason, "every reason, the owner's own too"


async def test_a_numbered_value_waits_for_its_number() -> None:
    desk = make_desk("trainer/0", "lr")
    desk.number = 4
    assert desk.owner.prepare(change(1, lr=1e-4)).earliest == 5
    desk.owner.commit(commit(1, 7, lr=1e-4))
    assert desk.owner.sheet().knobs[0].pending == 1e-4
    for number in (5, 6):
        assert await desk.owner.pass_boundary("step", number, 1) == {}
        assert (desk.values["lr"], desk.owner.epoch) == (1e-3, 0)
    assert await desk.owner.pass_boundary("batch", 7, 1) == {}, "another boundary"
    assert await desk.owner.pass_boundary("step", 7, 1) == {"lr": 1e-4}
    assert desk.owner.epoch == 1
    assert desk.owner.sheet().knobs[0].pending is None


async def test_an_undecided_change_holds_the_owner_before_its_number_only() -> None:
    desk = make_desk("trainer/0", "lr", clock=SystemClock())
    await desk.owner.pass_boundary("step", 3, 1)
    assert desk.owner.prepare(change(1, lr=1e-4)).earliest == 4
    await desk.owner.pass_boundary("step", 3, 0.01)  # passed before: no wait
    passing = asyncio.ensure_future(desk.owner.pass_boundary("step", 4, 5))
    await asyncio.sleep(0.02)
    assert not passing.done()
    desk.owner.commit(commit(1, 4, lr=1e-4))
    assert await passing == {"lr": 1e-4}


async def test_a_coordinator_that_never_decides_is_named_at_the_deadline() -> None:
    desk = make_desk("buffer", "filter", clock=SystemClock())
    desk.owner.prepare(change(1, filter="b"))
    with pytest.raises(DeadlineExceeded, match="coordinator did not decide change 1 .* buffer may not pass batch 0"):
        await desk.owner.pass_boundary("batch", 0, 0.05)


def test_a_commit_that_no_vote_would_have_accepted_changes_nothing_at_all() -> None:
    desk = make_desk("rollout/0", "room", "level")
    with pytest.raises(BadRequest, match="room"):
        desk.owner.commit(commit(1, level="DEBUG", room=0))
    assert desk.uses == []


def test_what_comes_into_force_is_told() -> None:
    clock = ManualClock()
    telemetry = TelemetryBuffer("trainer/0", clock)
    desk = make_desk("trainer/0", "lr", "level", clock=clock, telemetry=telemetry)
    desk.owner.commit(commit(4, 9, lr=1e-4, level="DEBUG"))
    [event] = telemetry.drain().events
    assert (event.kind, event.data["name"], event.data["new"], event.data["at"]) == (
        "knob-in-force", "level", "DEBUG", 0,
    )  # fmt: skip
    assert desk.owner.epoch == 0, "part of the change is still to come"
