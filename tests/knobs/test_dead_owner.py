"""An owner dies in the middle of a change (SIGKILL, real processes): all of it everywhere, or none of it, and told."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.harness.waiting import until
from tests.knobs.coordinator_room import WHO, open_room

from myxa.actors.coordinator.audit import read_audit, verify_audit

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(170)]

OWNERS = ("buffer", "rollout/0", "rollout/1")
NEW = {"lr": 2e-3, "eta": 4, "room": 3, "level": "DEBUG"}
OLD = {"lr": 1e-3, "eta": 1, "room": 8, "level": "INFO"}


@pytest.mark.parametrize(
    ("victim", "point"),
    [
        ("buffer", "before-vote"),
        ("buffer", "before-use"),
        ("rollout/1", "after-use"),
        pytest.param("buffer", "after-use", marks=pytest.mark.soak),
        pytest.param("rollout/1", "before-vote", marks=pytest.mark.soak),
        pytest.param("rollout/1", "before-use", marks=pytest.mark.soak),
    ],
)
async def test_a_change_with_an_owner_that_dies_in_it(tmp_path: Path, victim: str, point: str) -> None:
    async with open_room(tmp_path) as room:
        for name in OWNERS:
            await room.start(name, point if name == victim else "")
        knobs = {name: value for name, value in NEW.items() if name != "level"}
        reply = await room.change(**knobs, reason="all at once")
        await room.ended(victim)
        first_life = {use["pid"] for use in room.uses(victim)}
        await room.start(victim)
        is_made = point != "before-vote"

        # Told: in the answer and in the audit log.
        assert bool(reply.epoch) is is_made, reply
        assert victim in (" ".join(reply.warnings) if is_made else reply.refused)
        [record] = [r for r in read_audit(room.audit) if r.verb == "set"]
        assert record.result == ("done" if is_made else "refused")
        assert verify_audit(room.audit).complaint == ""

        # Everywhere or nowhere; the new incarnation from its very first work on.
        wanted = NEW if is_made else OLD
        for owner, names in {
            "buffer": ["eta"],
            "rollout/0": ["room"],
            "rollout/1": ["room"],
            "trainer/0": ["lr"],
        }.items():
            if is_made and owner == "trainer/0":
                await until(lambda: max(room.trainer.steps) >= reply.at, "the boundary")
            values = await room.values(owner)
            assert {name: values[name] for name in names} == {name: wanted[name] for name in names}, owner
        second_life = [use for use in room.uses(victim) if use["pid"] not in first_life]
        assert second_life
        for use in second_life:
            assert all(use[name] == wanted[name] for name in ("eta", "room") if name in use)

        # And the trainer at the number that was decided, not a step earlier or later.
        for number, values in room.trainer.steps.items():
            assert values["lr"] == (NEW["lr"] if is_made and number >= reply.at else OLD["lr"]), number

        # The next change goes through.
        after = await room.change(lr=3e-3, room=5)
        assert after.epoch > reply.epoch
        assert not after.warnings
        assert (await room.values(victim)).get("room", 5) == 5


async def test_an_owner_that_comes_later_gets_what_is_in_force_before_its_first_work(tmp_path: Path) -> None:
    async with open_room(tmp_path) as room:
        await room.start("rollout/0")
        await room.change(room=3)
        await room.change(level="DEBUG", target="rollout/0")
        await room.change(room=4, target="rollout")
        await room.start("rollout/1")
        assert {(use["room"], use["level"]) for use in room.uses("rollout/1")} == {(4, "INFO")}
        await room.change(room=6, target="rollout/1")
        room.children["rollout/1"].kill()
        await room.ended("rollout/1")
        await room.start("rollout/1")
        assert room.uses("rollout/1")[-1]["room"] == 6
        await room.ref.undo(WHO, "", 0)
        assert ((await room.values("rollout/0"))["room"], (await room.values("rollout/1"))["room"]) == (4, 4)
