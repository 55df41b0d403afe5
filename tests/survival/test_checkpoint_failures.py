"""A checkpoint that could not be written is told to whom it concerns, is never taken for one that is there, and costs
no more than another attempt: training goes on meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.survival.checkpoint_room import CheckpointRoom, checkpoint_options, refused

from myxa.actors.checkpoints.folder import RUN_FILE, read_run_part
from myxa.actors.trainer import checkpoints as module
from myxa.core.errors import CallError, DeadlineExceeded, LedgerError, MyxaError, TrainError
from myxa.core.knobs import LiveKnobs
from myxa.core.timeouts import TIMEOUTS

both_ways = pytest.mark.parametrize("is_async", [False, True])


def failing_once(monkeypatch: pytest.MonkeyPatch, name: str, error: Exception) -> None:
    real, errors = getattr(module, name), [error]

    def step(*args: Any) -> None:
        if errors:
            raise errors.pop()
        real(*args)

    monkeypatch.setattr(module, name, step)


# -- what somebody asks for


@both_ways
async def test_one_without_its_run_part_is_not_reported_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_async: bool
):
    room = CheckpointRoom(tmp_path, async_save=is_async)
    failing_once(monkeypatch, "write_run_part", TrainError("cannot write run.json: no space left on device"))
    with pytest.raises(TrainError, match="no space left"):
        await room.ask(3)
    assert room.buffer.durables == []
    folder = Path(await room.ask(3))
    assert read_run_part(folder).version == 3
    assert room.buffer.durables == [3]
    num_calls = len(room.rank.called)
    assert Path(await room.ask(3)) == folder
    assert len(room.rank.called) == num_calls, "nothing has changed since: there is nothing to write"


async def test_one_that_lost_its_place_to_an_attempt_that_failed_is_written_again(tmp_path: Path):
    room = CheckpointRoom(tmp_path)
    folder = Path(await room.ask(3))
    room.coordinator.live = LiveKnobs(epoch=1)
    room.rank.failing["finish_checkpoint"] = [refused()]
    with pytest.raises(TrainError):
        await room.ask(3)
    assert not (folder / RUN_FILE).exists()
    room.coordinator.live = LiveKnobs()
    await room.ask(3)
    assert (folder / RUN_FILE).exists()
    assert room.buffer.durables == [3, 3]


async def test_what_failed_by_schedule_is_not_told_to_who_asks_for_another(tmp_path: Path):
    room = CheckpointRoom(tmp_path, async_save=True, checkpoint_every=2)
    room.rank.failing["checkpoint_written"] = [refused()]
    await room.checkpoints.save_by_schedule(2)
    folder = Path(await room.ask(3))
    assert (folder / RUN_FILE).exists()
    (told,) = room.told("checkpoint-failed")
    assert "trainer/1 could not write a checkpoint: no space left" in told
    assert room.buffer.durables == [3]


# -- by schedule


FAILURES: dict[str, Any] = {
    "a rank's disk is full": lambda room: room.rank.failing.update({"checkpoint_written": [refused()]}),
    "the buffer does not come back": lambda room: room.buffer.failing.append(CallError("buffer did not answer")),
    "no room for the ledger": lambda room: room.buffer.failing.append(LedgerError("database or disk is full")),
    "the coordinator does not come back": lambda room: room.coordinator.failing.append(CallError("no answer")),
}


@both_ways
@pytest.mark.parametrize("failure", FAILURES)
async def test_one_by_schedule_that_fails_is_told_and_tried_again_after_a_while(
    tmp_path: Path, failure: str, is_async: bool
):
    room = CheckpointRoom(tmp_path, checkpoint_every=4, async_save=is_async)
    FAILURES[failure](room)

    async def step(version: int) -> None:
        await room.checkpoints.at_boundary(version)
        if room.checkpoints.is_due(version):
            await room.checkpoints.save_by_schedule(version)
        await room.files_are_written()
        room.clock.advance(TIMEOUTS.trainer.first_repeat_s)

    for version in range(1, 8):
        await step(version)
    (told,) = room.told("checkpoint-failed")
    assert "attempt 1;" in told
    written = max((tmp_path / "checkpoints").iterdir())
    assert room.buffer.durables == [int(written.name.removeprefix("version_"))]
    assert read_run_part(written).version in (5, 6)
    assert not room.checkpoints.is_due(7), "the schedule holds again"
    assert room.checkpoints.is_due(8)


@both_ways
async def test_a_disk_that_stays_full_costs_an_attempt_now_and_then_and_no_step(tmp_path: Path, is_async: bool):
    room = CheckpointRoom(tmp_path, checkpoint_every=1, async_save=is_async)
    room.checkpoints.continue_from(40)
    room.rank.failing["finish_checkpoint"] = [refused() for _ in range(99)]

    async def steps(first: int, number: int) -> list[str]:
        for version in range(first, first + number):
            await room.checkpoints.at_boundary(version)
            if room.checkpoints.is_due(version):
                await room.checkpoints.save_by_schedule(version)
            await room.files_are_written()
            room.clock.advance(0.01)
        return room.told("checkpoint-failed")

    version, pause_s, attempts = 41, TIMEOUTS.trainer.first_repeat_s, 8
    for attempt in range(1, attempts + 1):
        (told,) = await steps(version, 10)
        assert f"attempt {attempt};" in told
        assert f"follows in {pause_s:g} s" in told
        assert f"not covered by a checkpoint: {version + is_async - 40}, since version 40" in told
        version += 10
        room.clock.advance(pause_s)
        pause_s = min(2 * pause_s, TIMEOUTS.trainer.longest_repeat_s)
    room.rank.failing.clear()
    assert await steps(version, 3) == []
    assert room.buffer.durables, "once there is room again"
    await room.checkpoints.settle()


async def test_a_rank_that_does_not_answer_is_not_waited_for_again(tmp_path: Path):
    room = CheckpointRoom(tmp_path, checkpoint_every=1)
    silent = DeadlineExceeded("no answer within 1800 s")
    room.rank.failing["begin_checkpoint"] = [silent]
    with pytest.raises(TrainError, match="trainer/1 could not begin a checkpoint: no answer"):
        await room.checkpoints.save_by_schedule(1)


# -- what is left on the disk


async def test_what_a_failed_attempt_left_is_gone_at_once(tmp_path: Path):
    """It may have filled the disk, which the ledger needs until the next attempt."""
    room = CheckpointRoom(tmp_path, checkpoint_every=1, keep_last=100)
    room.rank.failing["checkpoint_written"] = [refused()]
    room.buffer.failing = [MyxaError("the disk is full")]
    holder = tmp_path / "checkpoints"
    for version in (1, 2):
        await room.checkpoints.save_by_schedule(version)
        assert list(holder.iterdir()) == []
    await room.checkpoints.save_by_schedule(3)
    assert [path.name for path in holder.iterdir()] == ["version_00000003"]


@pytest.mark.parametrize("name", ["take_away", "sweep"])
async def test_an_old_one_that_cannot_be_deleted_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
):
    def refuse(path: Path, *_: object) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(module, name, refuse)
    room = CheckpointRoom(tmp_path, checkpoint_every=1, keep_last=1)
    for version in (1, 2, 3):
        await room.checkpoints.save(version)
    assert room.buffer.durables == [1, 2, 3]
    assert "could not" in caplog.text
    assert "Operation not permitted" in caplog.text
    monkeypatch.undo()
    await room.checkpoints.save(4)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["version_00000004"]


# -- how far back training may fall


async def test_the_buffer_keeps_samples_for_the_checkpoints_that_are_kept(tmp_path: Path):
    """Not for one that stays for ever: it has a ledger of its own; else the ledger would grow for ever too."""
    room = CheckpointRoom(tmp_path, checkpoint_every=1, keep_last=3, keep_every=3)
    for version in range(1, 8):
        await room.checkpoints.save(version)
    assert room.buffer.durables == [1, 2, 3, 4, 5, 6, 7]
    assert room.buffer.oldest == [1, 1, 1, 2, 3, 4, 5]
    room.checkpoints.options = checkpoint_options(tmp_path, checkpoint_every=1, keep_last=1, keep_every=3)
    await room.checkpoints.save(8)
    assert room.buffer.oldest[-1] == 8
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "version_00000003", "version_00000006", "version_00000008",
    ]  # fmt: skip
