"""The trainer is started anew in mid-run and goes on from an older version: the coordinator goes back with it.

Proved, with the real coordinator in a process of its own: the leader is let go at once from that version, values in force
stay in force, values that are still to come keep their numbers, and a coordinator that died meanwhile is told the same.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.knobs.coordinator_room import until
from tests.survival.coordinator_anew import Anew, SteadyTrainer, open_anew

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(170)]


async def _thrown_back(room: Anew, version: int) -> SteadyTrainer:
    """Another trainer takes the place of the first one, from an older version."""
    await room.node.stop("trainer/0", "it died")
    await until(lambda: "trainer/0" not in room.node.peers("trainer/"), "its end")
    room.trainer = trainer = SteadyTrainer(None, version)
    trainer.version = version
    await room.node.start(trainer, "trainer/0")
    return trainer


async def test_values_in_force_stay_and_values_to_come_keep_their_numbers(tmp_path: Path) -> None:
    async with open_anew(tmp_path) as room:
        changed = await room.change(lr=2e-3)
        await until(lambda: max(room.trainer.steps) > changed.at + 3, "the change in force")
        come_to = max(room.trainer.steps)
        later = await room.change(clip=0.3, not_before=come_to + 200)
        assert later.at == come_to + 200
        back_to = changed.at - 1
        trainer = await _thrown_back(room, back_to)
        await until(lambda: bool(trainer.steps), "its first step")
        assert "trainer-restarted" in room.said
        assert (await room.ref.status()).version < come_to
        await until(lambda: max(trainer.steps) > later.at, "the later change")
        assert min(trainer.steps) == back_to
        assert {values["lr"] for values in trainer.steps.values()} == {2e-3}, "from its first step on"
        used = [version for version, values in trainer.steps.items() if values["clip"] == 0.3]
        assert min(used) == later.at
        assert trainer.num_starts == 1


async def test_both_may_be_away_at_the_same_time(tmp_path: Path) -> None:
    async with open_anew(tmp_path) as room:
        changed = await room.change(lr=2e-3)
        await until(lambda: max(room.trainer.steps) > changed.at + 3, "the change in force")
        await room.kill()
        trainer = await _thrown_back(room, 1)
        await room.again()
        await until(lambda: len(trainer.steps) > 5, "steps")
        assert min(trainer.steps) == 1
        assert trainer.num_starts == 1
        assert "trainer-restarted" in room.said
        assert {values["lr"] for values in trainer.steps.values()} == {2e-3}
