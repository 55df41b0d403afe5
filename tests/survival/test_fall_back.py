"""The newest checkpoints turn out to be damaged when they are loaded, their sizes as they were: the run goes on from
the oldest one that `trainer.keep_last` kept, with its own ledger, and trains every prompt once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.harness.run_job import events
from tests.survival.checkpoint_room import CheckpointRoom
from tests.survival.lives import BATCH, NUM_PROMPTS, Lives, consumed, make_lives

from myxa.actors.ledger.audit import audit_ledger
from myxa.launch.run_lineage.origin import RunOrigin

pytestmark = pytest.mark.timeout(300)


def whole_ones(run_dir: Path) -> list[Path]:
    """Checkpoints by version, also one that its writer was stopped before it had told the run of."""
    return sorted(path.parent for path in run_dir.glob("checkpoints/version_*/manifest.json"))


def damage(checkpoint: Path) -> None:
    """Some bytes of a tensor, as a failing disk would; nothing but a digest tells."""
    path = checkpoint / "rank-00000.safetensors"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        before = file.read(8)
        file.seek(-8, os.SEEK_CUR)
        file.write(bytes(byte ^ 0xFF for byte in before))


def version_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("version_"))


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[Lives]:
    made = make_lives(tmp_path, f"rollout.max_groups={BATCH}", patience_s=0.5)
    try:
        yield made
    finally:
        made.end()


def test_a_killed_run_whose_files_are_damaged_continues_from_the_oldest_checkpoint_that_was_kept(lives: Lives):
    keep_last = 3
    lives.overrides = (*lives.overrides, f"trainer.keep_last={keep_last}")
    lives.begin()
    lives.until_version(2 * keep_last + 3)
    lives.kill()
    assert lives.run_dir is not None
    whole, *damaged = whole_ones(lives.run_dir)[-keep_last:]
    for checkpoint in damaged:
        damage(checkpoint)
    config = lives.run_dir / "config.toml"
    before = config.read_text()
    config.write_text(before[: len(before) // 2])
    (lives.run_dir / "origin.json").unlink()
    lives.resume()
    assert lives.wait() == 0, lives.said[-1]
    for what in ("config.toml is cut off", "origin.json is missing"):
        assert f"{what}: its copy in version_" in lives.said[-1]
    settings = [[line for line in text.splitlines() if "resume" not in line] for text in (before, config.read_text())]
    assert settings[0] == settings[1]
    life = RunOrigin.load(lives.run_dir).lives[-1]
    assert (life.began_at, life.ledger) == (version_of(whole), "its own ledger")
    told = "\n".join(event["text"] for event in events(lives.run_dir, "checkpoint-passed-over"))
    assert all(checkpoint.name in told for checkpoint in damaged)
    found = consumed(lives.run_dir)
    assert found.draws == dict.fromkeys(range(NUM_PROMPTS), 1), "the multiset of an undisturbed run"
    assert found.steps == dict.fromkeys(range(NUM_PROMPTS // BATCH), BATCH)
    assert found.net == {}
    assert audit_ledger(lives.run_dir / "ledger.sqlite").problems == ()


@pytest.mark.asyncio
async def test_the_buffer_is_told_how_far_back_training_may_fall(tmp_path: Path):
    room = CheckpointRoom(tmp_path, every=1, keep_last=3)
    for version in range(1, 6):
        await room.checkpoints.save(version)
    assert room.buffer.durables == [1, 2, 3, 4, 5]
    assert room.buffer.oldest == [1, 1, 1, 2, 3]
    room.checkpoints.keep_last = 1
    await room.checkpoints.save(6)
    assert room.buffer.oldest[-1] == 6


@pytest.mark.asyncio
async def test_one_that_stays_for_ever_keeps_no_samples(tmp_path: Path):
    """It has a ledger of its own; else the ledger would grow for ever too."""
    room = CheckpointRoom(tmp_path, every=1, keep_last=2, keep_every=3)
    for version in range(1, 8):
        await room.checkpoints.save(version)
    assert [version_of(path) for path in whole_ones(tmp_path)] == [3, 6, 7]
    assert room.buffer.oldest[-1] == 6
