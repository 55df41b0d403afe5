"""The newest checkpoints turn out to be damaged when they are loaded, their sizes as they were: the run goes on from
the oldest one that `trainer.keep_last` kept, with its own ledger, and trains every prompt once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.harness.run_job import events
from tests.survival.checkpoint_room import CheckpointRoom
from tests.survival.gang_run import gang_run
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


@pytest.mark.parametrize("keep_last", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_a_killed_run_goes_on_from_the_oldest_that_was_kept(lives: Lives, keep_last: int):
    lives.overrides = (*lives.overrides, f"trainer.keep_last={keep_last}")
    lives.begin()
    lives.until_version(2 * keep_last + 3)
    lives.kill()
    assert lives.run_dir is not None
    whole, *damaged = whole_ones(lives.run_dir)[-keep_last:]
    for checkpoint in damaged:
        damage(checkpoint)
    lives.resume()
    assert lives.wait() == 0, lives.said[-1]
    life = RunOrigin.load(lives.run_dir).lives[-1]
    assert (life.began_at, life.ledger) == (version_of(whole), "its own ledger")
    told = "\n".join(event["text"] for event in events(lives.run_dir, "checkpoint-passed-over"))
    assert all(checkpoint.name in told for checkpoint in damaged)
    found = consumed(lives.run_dir)
    assert found.draws == dict.fromkeys(range(NUM_PROMPTS), 1), "the multiset of an undisturbed run"
    assert found.steps == dict.fromkeys(range(NUM_PROMPTS // BATCH), BATCH)
    assert found.net == {}
    assert audit_ledger(lives.run_dir / "ledger.sqlite").problems == ()


def test_so_does_a_gang_that_is_started_again(tmp_path: Path):
    with gang_run(tmp_path, "trainer.checkpoint_every=1", "trainer.keep_last=3") as run:
        run.until_version(5)
        os.kill(run.rank(0), signal.SIGSTOP)  # it writes no other one meanwhile
        whole, *damaged = whole_ones(run.run_dir)[-3:]
        for checkpoint in damaged:
            damage(checkpoint)
        os.kill(run.rank(1), signal.SIGKILL)
        run.end()
        run.prove()
        assert run.told("trainer-goes-back") == [f"to version {version_of(whole)}, from {whole}"]
        told = "\n".join(run.told("checkpoint-passed-over"))
        assert all(checkpoint.name in told for checkpoint in damaged)


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
