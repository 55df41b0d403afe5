"""The coordinator dies in the middle of a change of knobs (SIGKILL, real processes): the change is made everywhere or
nowhere, that is told, the audit log goes on without a fork, and what was decided can be taken back and goes back in time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable
from pathlib import Path

import pytest
from tests.knobs.coordinator_room import until
from tests.survival.coordinator_anew import Anew, open_anew

from myxa.actors.coordinator.audit import read_audit, verify_audit
from myxa.core.errors import CallError
from myxa.core.knobs import ChangeReply, Operator

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(170)]

WHO = Operator(user="tester", via="test")
NEW = {"lr": 2e-3, "eta": 4, "room": 3}
OLD = {"lr": 1e-3, "eta": 1, "room": 8}


async def _all_have(room: Anew, wanted: dict[str, object]) -> None:
    for name, value in wanted.items():
        async with asyncio.timeout(30):
            while await room.everywhere(name) != {value}:
                await asyncio.sleep(0.1)


async def _steps_on(room: Anew, count: int = 5) -> None:
    first = max(room.trainer.steps)
    await until(lambda: max(room.trainer.steps) > first + count, "more steps")


async def _outcome(change: Awaitable[ChangeReply]) -> ChangeReply | None:
    """None: the coordinator died under it."""
    try:
        return await change
    except CallError:
        return None


def _check_chain(room: Anew) -> None:
    verdict = verify_audit(room.audit)
    assert not verdict.complaint, verdict


async def test_a_change_that_was_decided_is_made_by_the_next_incarnation(tmp_path: Path) -> None:
    async with open_anew(tmp_path) as room:
        await room.kill()
        await room.begin("coordinator.knobs_decided:kill:1")
        await until(lambda: "coordinator-attached" in room.said, "attached")
        assert await _outcome(room.change(**NEW)) is None
        await room.dead()
        assert (await _values(room, "rollout/0"))["room"] == 8, "nobody has heard of it"
        await room.again()
        await _all_have(room, NEW)
        await _steps_on(room)
        done = [record for record in read_audit(room.audit) if record.result == "done"]
        assert [record.epoch for record in done] == [1]
        in_force = [version for version, values in room.trainer.steps.items() if values["lr"] == NEW["lr"]]
        assert min(in_force) == done[0].at, "not before, and not after, the number that was decided"
        assert sorted(room.trainer.steps) == list(range(max(room.trainer.steps) + 1)), "no step twice, none left out"
        assert room.trainer.num_starts == 1, "the leader was let go once"
        reply = await room.ref.undo(WHO, "", 0)
        assert not reply.refused and reply.epoch == 2
        await _all_have(room, OLD)
        _check_chain(room)


async def test_a_change_that_was_not_decided_is_void_and_holds_nobody_up(tmp_path: Path) -> None:
    async with open_anew(tmp_path) as room:
        await room.start("rollout/2", "late-vote")
        change = asyncio.ensure_future(_outcome(room.change(**NEW)))
        await until(lambda: room.trainer.knob_owner.holds("step", 1 << 30), "the trainer holds the change")
        await until(room.uses_file("rollout/2").with_suffix(".asked").exists, "the one that votes late was asked")
        await room.kill()
        assert await change is None
        await room.again()
        await _steps_on(room)
        assert not room.trainer.knob_owner.holds("step", 1 << 30)
        assert "knob-void: change 1 (set lr = 0.002, eta = 4, room = 3) was not decided" in room.said
        await _all_have(room, OLD)
        assert not [record for record in read_audit(room.audit) if record.result == "done"]
        reply = await room.change(**NEW)
        assert reply.epoch == 2, "a number that owners have heard is not used again"
        await _all_have(room, NEW)
        _check_chain(room)


async def test_changes_for_a_time_go_back_although_the_coordinator_that_made_them_is_gone(tmp_path: Path) -> None:
    async with open_anew(tmp_path) as room:
        assert not (await room.change(room=3, for_s=8.0)).refused
        steps = await room.change(lr=2e-3, for_steps=150)
        assert not steps.refused
        await room.kill()
        await room.again()
        table = await room.ref.knob_table()
        assert table.reverts["lr"] == f"at version {steps.at + 150}"
        await _all_have(room, {"room": 8})
        await until(lambda: max(room.trainer.steps) > steps.at + 155, "the way back")
        used = [version for version, values in room.trainer.steps.items() if values["lr"] == 2e-3]
        assert (min(used), max(used)) == (steps.at, steps.at + 149)
        assert [r.verb for r in read_audit(room.audit) if r.result == "done"].count("expire") == 2
        _check_chain(room)


@pytest.mark.soak
async def test_killed_at_random_moments_owners_agree_and_the_audit_log_says_on_what(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    lot = random.Random(seed)
    async with open_anew(tmp_path) as room:
        value = 8
        for number in range(3):
            wanted = 20 + number
            change = asyncio.ensure_future(_outcome(room.change(room=wanted, lr=1e-3 + 1e-5 * wanted)))
            await asyncio.sleep(lot.random() * 0.08)
            await room.kill()
            reply = await change
            await room.again()
            values = await room.everywhere("room")
            if reply is None:
                done = [r for r in read_audit(room.audit) if r.result == "done"]
                value = int(str(dict(done[-1].arguments["values"])["room"])) if done else value  # type: ignore[call-overload]
            elif not reply.refused:
                value = wanted
            assert values == {value}, f"change {number}: {reply}"
            await _steps_on(room)
        assert sorted(room.trainer.steps) == list(range(max(room.trainer.steps) + 1))
        assert room.trainer.num_starts == 1
        _check_chain(room)


async def _values(room: Anew, owner: str) -> dict[str, object]:
    """What an owner says itself: there is no coordinator to ask."""
    from myxa.actors.contracts import RolloutContract

    sheet = await room.node.ref(RolloutContract, owner).knobs()
    return {state.tunable.name: state.value for state in sheet.knobs}
