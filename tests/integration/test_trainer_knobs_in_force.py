"""The trainer's live knobs: each is used by the step, or the publication, that it was decided for, and by no other."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from tests.integration.trainer_room import Conductor, Room, trainer_room

from myxa.actors.models.tiny import make_tiny_model
from myxa.core.knobs import KnobValue, LiveKnob, LiveKnobs

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, "0p5m", seed=3)
    return folder


# -- values


async def finished(room: Room) -> None:
    async with asyncio.timeout(60):
        await room.conductor.finished.wait()


async def test_a_learning_rate_is_used_from_its_step_on_and_says_so(model: Path, tmp_path: Path) -> None:
    async with trainer_room(model, tmp_path) as room:
        room.data.allow(2)
        await room.conductor.steps(2)
        at = await room.conductor.change(1, lr=5e-4, weight_decay=0.1)
        assert at == 2, "the trainer waits for the batch of step 2"
        room.data.allow(4)
        steps = await room.conductor.steps(4)
        assert [s["train/lr"] for s in steps] == pytest.approx([1e-3, 1e-3, 5e-4, 5e-4])
        assert [s["knobs/epoch"] for s in steps] == [0, 0, 1, 1]
        assert "knob/lr" not in steps[1]
        assert (steps[2]["knob/lr"], steps[2]["knob/weight_decay"]) == (5e-4, 0.1)


async def test_steps_after_the_end_of_a_schedule_are_told_once(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """That they learn nothing; not where the schedule ends above 0, and again when it has ended once more."""
    async with trainer_room(model, tmp_path, optimizer={"schedule": "linear", "decay_steps": 2}) as room:
        for limit, decay_steps in ((4, 5), (6, 6)):
            room.data.allow(limit)
            await room.conductor.steps(limit)
            await room.conductor.change(limit, decay_steps=decay_steps)
        room.data.allow(7)
        rates = [step["train/lr"] for step in await room.conductor.steps(7)]
    assert [step for step in range(7) if not rates[step]] == [2, 3, 5, 6]
    said = [record.message.partition(":")[0::2] for record in caplog.records if "learning-rate" in record.message]
    assert [text[:22] for _, text in said] == [" from step 2 on nothin", " from step 5 on nothin"]


async def test_a_step_waits_for_the_coordinator_that_decides_what_it_uses(model: Path, tmp_path: Path) -> None:
    class Deciding(Conductor):
        may_answer = asyncio.Event()

        async def knobs_in_force(self, after: int, number: int) -> LiveKnobs:
            if number >= 0:
                await self.may_answer.wait()
            return await super().knobs_in_force(after, number)

    conductor = Deciding()
    async with trainer_room(model, tmp_path, conductor=conductor) as room:
        room.data.allow(2)
        await asyncio.sleep(1.0)
        assert not conductor.reports, "a step must not be made with a value that may be another one"
        assert await conductor.change(1, lr=2e-3) == 1, "the number that it asked for is not given any more"
        conductor.may_answer.set()
        steps = await conductor.steps(2)
        assert [s["train/lr"] for s in steps] == pytest.approx([1e-3, 2e-3])


REFUSED: list[tuple[dict[str, KnobValue], str]] = [
    ({"lr": 0.0}, "lr = 0.0: must be above 0"),
    ({"lr": 1.0}, "more than 10 times"),
    ({"mis_low": 3.0}, "mis_low: must be below mis_high = 2"),
    ({"mis_high": 0.4}, "mis_low: must be below mis_high = 0.4"),
    ({"kl_coef": 0.1}, "needs a reference model"),
    ({"dual_clip": 0.5}, "must be 0 (off) or greater than 1"),
    ({"clip_low": 1.5}, "must be at most 1"),
    ({"minibatches": 3}, "does not divide batch_size = 4"),
    ({"decay_steps": 2}, "must be above warmup_steps = 5"),
    ({"lr": 2e-3, "mis_low": 3.0}, "mis_low: must be below mis_high"),
]


async def test_what_cannot_be_is_refused_with_its_reason_and_fails_no_step(model: Path, tmp_path: Path) -> None:
    async with trainer_room(model, tmp_path, optimizer={"warmup_steps": 5}) as room:
        for epoch, (values, why) in enumerate(REFUSED, 1):
            assert why in await room.conductor.refused(epoch, **values)
        room.data.allow(1)
        (step,) = await room.conductor.steps(1)
        assert step["train/lr"] == pytest.approx(1e-3 / 5), "not even the good half of a bad change"
        assert step["knobs/epoch"] == 0


async def test_values_are_judged_together_with_those_that_wait_for_their_step(model: Path, tmp_path: Path) -> None:
    async with trainer_room(model, tmp_path) as room:
        await room.conductor.change(1, mis_high=5.0)
        assert await room.conductor.change(2, mis_low=3.0) == 0
        room.data.allow(1)
        (step,) = await room.conductor.steps(1)
        assert (step["knob/mis_low"], step["knob/mis_high"], step["knobs/epoch"]) == (3.0, 5.0, 2)
        await room.conductor.refused(3, mis_high=2.0)


# -- checkpoints


def lr_since(epoch: int, at: int, value: float) -> LiveKnobs:
    knob = LiveKnob(name="lr", value=value, first=1e-3, epoch=epoch, at=at)
    return LiveKnobs(epoch=epoch, knobs=(knob,))


@pytest.mark.parametrize(("asks", "is_async"), [("on request", True), ("at the end", False)])
async def test_a_checkpoint_while_the_run_is_paused_and_one_with_older_knobs_is_written_again(
    model: Path, tmp_path: Path, asks: str, is_async: bool
) -> None:
    run, then = tmp_path / "run", lr_since(4, 2, 5e-4)
    async with trainer_room(model, run, checkpoints={"async_save": is_async, "checkpoint_every": 2}) as room:
        trainer = room.conductor.trainer
        room.conductor.live = lr_since(3, 1, 2e-3)
        room.data.allow(2)
        await room.conductor.steps(2)
        room.data.blocked_by = "paused"
        room.data.ring()
        folder = await trainer.checkpoint_at_boundary(export=False)
        assert folder == str(run / "checkpoints" / "version_00000002")
        assert room.data.durables == [2]
        assert await trainer.checkpoint_at_boundary(export=False) == folder, "there already"
        assert "paused" in room.data.claims and room.trainer._meter.kind == "paused"
        room.conductor.live = then
        if asks == "on request":
            assert await trainer.checkpoint_at_boundary(export=False) == folder
            export = Path(await trainer.checkpoint_at_boundary(export=True))
            assert (export / "model.safetensors").is_file() and export.is_relative_to(run)
            room.data.allow(3)
            await room.conductor.steps(3)
        else:
            await trainer.stop_leader("enough")
            await finished(room)
        assert [p.name for p in (run / "checkpoints").iterdir()] == ["version_00000002"], "in its place"
    async with trainer_room(model, tmp_path / "again", resume=folder) as room:
        assert (room.conductor.given, room.conductor.resumed) == ([2], then)


async def test_how_often_checkpoints_are_written_and_how_many_stay(model: Path, tmp_path: Path) -> None:
    async with trainer_room(model, tmp_path, num_steps=7) as room:
        room.data.allow(2)
        await room.conductor.steps(2)
        assert await room.conductor.change(1, checkpoint_every=2, keep_last=1) == 2
        room.data.allow(7)
        await finished(room)
        assert room.data.durables == [4, 6, 7]
        assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["version_00000007"]
        with pytest.raises(Exception, match="nothing is written on request any more: all 7 steps done"):
            await room.conductor.trainer.checkpoint_at_boundary(export=False)


async def test_the_end_can_be_moved_while_the_last_step_is_made_and_not_later(model: Path, tmp_path: Path) -> None:
    """Version 2 is not taken for the last one. The step that ends the run then is one like any other."""
    async with trainer_room(model, tmp_path, num_steps=2) as room:
        assert "never end" in await room.conductor.refused(1, num_steps=0)
        await room.conductor.change(2, weights_every=10)

        async def when_trained(step: int) -> None:
            if step == 1:
                assert "the trainer makes version 3 next" in await room.conductor.refused(3, num_steps=2)
                assert await room.conductor.change(4, num_steps=4) == 2

        room.data.when_trained = when_trained
        room.data.allow(9)
        await finished(room)
        assert [r.version for r in room.conductor.reports] == [1, 2, 3, 4]
        assert room.conductor.given == [0, 4], "version 2 was not published as the last one"
        assert "the last step is made" in await room.conductor.refused(5, num_steps=9), "never accepted and ignored"


async def test_a_run_that_had_ended_goes_on_when_its_end_was_moved(model: Path, tmp_path: Path) -> None:
    async with trainer_room(model, tmp_path / "run", num_steps=1, checkpoints={"checkpoint_every": 1}) as room:
        room.data.allow(1)
        await finished(room)
        [folder] = (tmp_path / "run" / "checkpoints").iterdir()
    again = tmp_path / "again"
    async with trainer_room(model, again, num_steps=1, resume=str(folder), restored={"num_steps": 2}) as room:
        room.data.allow(9)
        await finished(room)
        assert [r.version for r in room.conductor.reports] == [2]


# -- weights


async def test_engines_are_given_every_third_version_the_last_one_and_one_they_cannot_do_without(
    model: Path, tmp_path: Path
) -> None:
    async with trainer_room(model, tmp_path, num_steps=10) as room:
        room.data.allow(1)
        await room.conductor.steps(1)
        assert await room.conductor.change(1, weights_every=3) == 2
        room.data.allow(6)
        await room.conductor.steps(6)
        assert room.conductor.given == [0, 1, 4]
        await asyncio.sleep(3.0)  # longer than a claim is held
        assert room.conductor.given == [0, 1, 4], "groups are under way: a batch will come"
        room.data.under_way = 0
        await room.conductor.until(lambda: 6 in room.conductor.given, "version 6, without which no group may start")
        room.data.allow(10)
        await finished(room)
        assert room.conductor.given == [0, 1, 4, 6, 9, 10]


async def test_a_run_that_is_stopped_ends_with_its_newest_version_in_the_engines(model: Path, tmp_path: Path) -> None:
    async with trainer_room(model, tmp_path) as room:
        await room.conductor.change(1, weights_every=5)
        room.data.allow(2)
        await room.conductor.steps(2)
        await room.conductor.trainer.stop_leader("enough")
        await finished(room)
        assert room.conductor.given == [0, 2]


# -- time


async def test_all_time_of_the_leader_has_a_name(model: Path, tmp_path: Path) -> None:
    async with trainer_room(model, tmp_path, checkpoints={"checkpoint_every": 5}) as room:
        room.data.allow(20)
        await room.conductor.steps(20)
        named, totals = room.trainer._meter.named_totals(), room.trainer._meter.totals()
        other = totals["other"] - sum(s for name, s in named.items() if name.startswith("other/start"))
        assert other <= 0.05 * (sum(totals.values()) - totals["other"] + other)
        for name in ("compute/train", "compute/plan", "wait-data/ranks", "wait-data/tell buffer", "wait-data/claim",
                     "wait-weights/tell coordinator", "compute/publish", "compute/checkpoint"):  # fmt: skip
            assert name in named, sorted(named)
