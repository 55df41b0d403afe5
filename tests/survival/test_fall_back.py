"""How far back training may fall: the buffer keeps samples for the checkpoints that `trainer.keep_last` keeps."""

from __future__ import annotations

from pathlib import Path

from tests.survival.checkpoint_room import CheckpointRoom


def whole_ones(run_dir: Path) -> list[Path]:
    """Checkpoints by version, also one that its writer was stopped before it had told the run of."""
    return sorted(path.parent for path in run_dir.glob("checkpoints/version_*/manifest.json"))


def version_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("version_"))


async def test_the_buffer_is_told_how_far_back_training_may_fall(tmp_path: Path):
    room = CheckpointRoom(tmp_path, every=1, keep_last=3)
    for version in range(1, 6):
        await room.checkpoints.save(version)
    assert room.buffer.durables == [1, 2, 3, 4, 5]
    assert room.buffer.oldest == [1, 1, 1, 2, 3]
    room.checkpoints.keep_last = 1
    await room.checkpoints.save(6)
    assert room.buffer.oldest[-1] == 6


async def test_one_that_stays_for_ever_keeps_no_samples(tmp_path: Path):
    """It has a ledger of its own; else the ledger would grow for ever too."""
    room = CheckpointRoom(tmp_path, every=1, keep_last=2, keep_every=3)
    for version in range(1, 8):
        await room.checkpoints.save(version)
    assert [version_of(path) for path in whole_ones(tmp_path)] == [3, 6, 7]
    assert room.buffer.oldest[-1] == 6
