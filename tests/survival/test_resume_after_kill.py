"""Everything is killed (SIGKILL) in mid-run, and `myxa resume` goes on: each prompt is trained on once, as if nothing
had been; samples that were half done go on with the tokens that they had; it takes seconds."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.harness.run_job import events, metrics
from tests.survival.lives import BATCH, NUM_PROMPTS, Consumed, Lives, consumed, make_lives

from myxa.actors.coordinator.audit import verify_audit
from myxa.launch.run_lineage.origin import RunOrigin

pytestmark = pytest.mark.timeout(400)
NUM_KILLS = 2


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[Lives]:
    changes = (f"rollout.max_groups={BATCH}", 'algo.kind="ppo"', "critic.enabled=true")
    made = make_lives(tmp_path, *changes, patience_s=0.5)  # so that no kill comes after the end
    try:
        yield made
    finally:
        made.end()


def as_if_nothing_had_been(found: Consumed) -> None:
    assert found.draws == dict.fromkeys(range(NUM_PROMPTS), 1)
    assert found.steps == dict.fromkeys(range(NUM_PROMPTS // BATCH), BATCH)
    assert found.net == {}


def test_a_run_killed_as_a_whole_again_and_again_trains_each_prompt_once(lives: Lives):
    seed = random.randrange(sys.maxsize)
    print(f"seed {seed}")
    dice = random.Random(seed)
    lives.begin()
    lives.until_version(3)  # before its first checkpoint there is nothing to go on from
    for number in range(NUM_KILLS):
        assert lives.after(dice.uniform(0.0, 0.3)), "killed in mid-run"
        lives.kill(launcher_only=number % 2 == 1)
        before = lives.version()
        lives.resume()
        lives.until_life(number + 2)
        if number % 2 == 0:  # the other lives end while they start
            lives.until_version(before + 1)
    assert lives.wait() == 0
    assert lives.run_dir is not None
    as_if_nothing_had_been(consumed(lives.run_dir))
    assert len(RunOrigin.load(lives.run_dir).lives) == NUM_KILLS + 1
    values = [point["values"] for point in metrics(lives.run_dir) if "train/loss" in point["values"]]
    assert all("train/explained_variance" in one for one in values), "the critic came along"
    told = [event["text"] for event in events(lives.run_dir, "resumed")]
    assert told, "what a life goes on from is told"
    assert all("its own ledger" in text for text in told)
    assert verify_audit(lives.run_dir / "audit.jsonl").complaint == ""
