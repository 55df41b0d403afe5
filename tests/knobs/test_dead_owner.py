"""Owners die in the middle of a change (SIGKILL, real processes): all of it everywhere or none of it, and both are told."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.harness.waiting import until
from tests.knobs.coordinator_room import open_room

from myxa.actors.coordinator.audit import read_audit, verify_audit
from myxa.core.knobs import KnobValue

pytestmark = [pytest.mark.timeout(170)]

NEW: dict[str, KnobValue] = {"lr": 2e-3, "eta": 4, "room": 3}
OLD: dict[str, KnobValue] = {"lr": 1e-3, "eta": 1, "room": 8}
OWNED = {"buffer": "eta", "rollout/0": "room", "rollout/1": "room", "trainer/0": "lr"}


async def test_owners_that_die_in_the_middle_of_a_change(tmp_path: Path) -> None:
    """When it is asked; then one before it uses what was decided, and another right after."""
    async with open_room(tmp_path) as room:

        async def hold(wanted: dict[str, KnobValue]) -> None:
            for owner, knob in OWNED.items():
                assert (await room.values(owner))[knob] == wanted[knob], owner

        plan = {"buffer": "when-judging", "rollout/0": "", "rollout/1": "after-use"}
        await asyncio.gather(*(room.start(name, point) for name, point in plan.items()))
        refused = await room.change(**NEW, reason="all at once")
        assert not refused.epoch and "buffer" in refused.refused
        await room.ended("buffer")
        await room.start("buffer", "before-use")
        await hold(OLD)
        assert {use["eta"] for use in room.uses("buffer")} == {OLD["eta"]}

        first_lives = {name: {use["pid"] for use in room.uses(name)} for name in ("buffer", "rollout/1")}
        made = await room.change(**NEW, reason="once more")
        assert made.epoch, made
        for name in first_lives:
            assert name in " ".join(made.warnings)
            await room.ended(name)
        await asyncio.gather(*(room.start(name) for name in first_lives))
        await until(lambda: max(room.trainer.steps, default=-1) >= made.at, "the boundary")
        await hold(NEW)
        for name, pids in first_lives.items():
            second = [use for use in room.uses(name) if use["pid"] not in pids]
            assert second and all(use[OWNED[name]] == NEW[OWNED[name]] for use in second), "from its first work on"
        for number, values in room.trainer.steps.items():
            assert values["lr"] == (NEW if number >= made.at else OLD)["lr"], number

        after = await room.change(lr=3e-3, room=5)
        assert after.epoch > made.epoch and not after.warnings
        assert (await room.values("rollout/1"))["room"] == 5
        assert [r.result for r in read_audit(room.audit) if r.verb == "set"] == ["refused", "done", "done"]
        assert verify_audit(room.audit).complaint == ""
