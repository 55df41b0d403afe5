"""The coordinator dies in the middle of a change of knobs (SIGKILL, real processes): one that was not decided is none (the
kill matrix has it die after the decision), the audit log goes on without a fork, and what was decided can be taken back and goes back in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path

import pytest
from tests.harness.waiting import until
from tests.knobs.coordinator_room import Room, Trainer, open_room

from myxa.actors.coordinator.audit import read_audit, verify_audit
from myxa.actors.knobs.owner import Knob
from myxa.actors.trainer.knobs import LEADER_TUNABLES
from myxa.core.config import RunConfig
from myxa.core.errors import CallError
from myxa.core.knobs import ChangeReply, KnobValue, Operator

pytestmark = [pytest.mark.timeout(170)]

WHO = Operator(user="tester", via="test")
NEW = {"lr": 2e-3, "eta": 4, "room": 3}
OLD = {"lr": 1e-3, "eta": 1, "room": 8}


async def _all_have(room: Room, wanted: dict[str, object]) -> None:
    for name, value in wanted.items():
        async with asyncio.timeout(30):
            while await room.everywhere(name) != {value}:
                await asyncio.sleep(0.1)


async def _steps_on(room: Room, count: int = 5) -> None:
    first = max(room.trainer.steps, default=-1)
    await until(lambda: max(room.trainer.steps, default=-1) > first + count, "more steps")


async def _outcome(change: Awaitable[ChangeReply]) -> ChangeReply | None:
    """None: the coordinator died under it."""
    try:
        return await change
    except CallError:
        return None


def _check_chain(room: Room) -> None:
    verdict = verify_audit(room.audit)
    assert not verdict.complaint, verdict


async def test_a_change_that_was_not_decided_is_none_and_one_that_was_is_made(tmp_path: Path) -> None:
    async with open_room(tmp_path, is_apart=True) as room:
        await asyncio.gather(*(room.start(name) for name in ("buffer", "rollout/0", "rollout/1")))
        await room.start("rollout/2", "judges-late")
        change = asyncio.ensure_future(_outcome(room.change(**NEW)))
        await until(room.uses_file("rollout/2").with_suffix(".asked").exists, "the one that judges late was asked")
        stood_at = max(room.trainer.steps)
        await asyncio.sleep(0.5)
        assert max(room.trainer.steps) <= stood_at + 1, "no step is made that the change may be meant for"
        await room.kill()
        assert await change is None
        await room.again()
        await _steps_on(room)
        await _all_have(room, OLD)
        assert not [record for record in read_audit(room.audit) if record.result == "done"]
        reply = await room.change(**NEW)
        assert reply.epoch == 1
        await _all_have(room, NEW)
        undone = await room.ref.undo(WHO, "", 0)
        assert not undone.refused and undone.epoch == 2
        await _all_have(room, OLD)
        await _changes_for_a_time_end_although_their_coordinator_is_gone(room)
        await _a_trainer_that_falls_back_takes_its_coordinator_along_even_if_that_was_killed(room)
        _check_chain(room)


FILE = {"run": {"name": "room", "num_steps": 5000}, "model": {"path": "/m"}, "data": {"train": "/d.jsonl"}}


async def test_a_change_for_a_step_that_the_run_does_not_come_to_is_made_with_a_warning(tmp_path: Path) -> None:
    async with open_room(tmp_path, file=RunConfig.model_validate(FILE)) as room:
        last = await room.change(lr=2e-3, not_before=4999, dry_run=True)
        assert (last.at, last.warnings) == (4999, ())
        late = await room.change(lr=2e-3, not_before=5000)
        assert (late.epoch, late.warnings) == (1, ("the run ends with step 5000: it does not come to 5000",))


async def test_a_run_that_is_made_longer_than_its_schedule_says_so(tmp_path: Path) -> None:
    file = RunConfig.model_validate({**FILE, "optimizer": {"schedule": "cosine"}})
    tunable = next(one for one in LEADER_TUNABLES if one.name == "num_steps")
    async with open_room(tmp_path, file=file) as room:
        end = dict[str, KnobValue](num_steps=5000)
        room.trainer.knob_owner.add([Knob(tunable, lambda: end["num_steps"], lambda value: None)])
        late = await room.change(num_steps=6000, dry_run=True)
        assert late.warnings == ("the learning rate is 0 from update 5000 of 6000 on: set decay_steps too",)
        assert not (await room.change(num_steps=4000, dry_run=True)).warnings


async def _changes_for_a_time_end_although_their_coordinator_is_gone(room: Room) -> None:
    assert not (await room.change(room=3, for_s=4.0)).refused
    steps = await room.change(lr=2e-3, for_steps=40)
    assert not steps.refused
    await room.kill()
    await room.again()
    assert (await room.ref.knob_table()).reverts["lr"] == f"at version {steps.at + 40}"
    await _all_have(room, {"room": 8})
    await until(lambda: max(room.trainer.steps) > steps.at + 45, "the way back")
    used = [version for version, values in room.trainer.steps.items() if values["lr"] == 2e-3 and version >= steps.at]
    assert (min(used), max(used)) == (steps.at, steps.at + 39)
    assert [r.verb for r in read_audit(room.audit) if r.result == "done"].count("expire") == 2


async def _thrown_back(room: Room, version: int) -> Trainer:
    """Another trainer takes the place of the first one, from an older version."""
    await room.node.stop("trainer/0", "it died")
    await until(lambda: "trainer/0" not in room.node.peers("trainer/"), "its end")
    room.trainer = trainer = Trainer(None, version)
    await room.node.start(trainer, "trainer/0")
    return trainer


async def _a_trainer_that_falls_back_takes_its_coordinator_along_even_if_that_was_killed(room: Room) -> None:
    changed = await room.change(lr=2e-3)
    await until(lambda: max(room.trainer.steps) > changed.at + 3, "the change in force")
    come_to = max(room.trainer.steps)
    later = await room.change(clip=0.3, not_before=come_to + 40)
    assert later.at == come_to + 40
    trainer = await _thrown_back(room, changed.at - 1)
    await until(lambda: bool(trainer.steps), "its first step")
    assert "trainer-restarted" in room.said
    assert (await room.ref.status()).version < come_to
    await room.kill()
    trainer = await _thrown_back(room, changed.at - 1)
    await room.again()
    await until(lambda: max(trainer.steps, default=-1) > later.at, "the later change")
    assert min(trainer.steps) == changed.at - 1
    assert trainer.num_starts == 1
    assert {values["lr"] for values in trainer.steps.values()} == {2e-3}, "from its first step on"
    assert min(version for version, values in trainer.steps.items() if values["clip"] == 0.3) == later.at
