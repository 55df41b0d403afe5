"""All processes of a run die at the same moment, at labelled points of its life and at random, and `myxa resume` goes
on: in the end every prompt was trained once, and going on costs seconds."""

from __future__ import annotations

import contextlib
import random
import sqlite3
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.harness.ledger_audit import audit_ledger
from tests.harness.nemesis import Plan, struck
from tests.harness.waiting import wait_until
from tests.survival.lives import Lives, check_each_once, make_lives

from myxa.launch.demo.run import write_rows

AT = (
    "buffer.put:stop:20", "trainer.trained:stop:1", "trainer.checkpoint_write:stop:1", "trainer.manifest_commit:stop:1",
    "buffer.durable:stop:1",
)  # fmt: skip
"""Where one process stands still while all of them are killed."""
RESUMED_S = 10.0
"""Promised from `myxa resume` to the first step, beyond loading the model, which here is nothing."""
NUM_KILLS = 100
NUM_PROMPTS = 4000


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[Lives]:
    made = make_lives(tmp_path)
    try:
        yield made
    finally:
        made.end()


def problems(lives: Lives) -> tuple[str, ...]:
    return audit_ledger(lives.run_dir / "ledger.sqlite").problems


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_everything_dies_at_labelled_points(lives: Lives):
    marks = lives.job.folder / "strikes"
    lives.env = Plan(AT, str(marks), rest_s=2).variable()
    lives.begin()
    for number in range(len(AT)):
        until_struck(lives, number + 1)
        lives.kill(launcher_only=number % 2 == 1)
        assert problems(lives) == ()
        lives.resume()
    assert lives.wait() == 0
    assert [strike.text for strike in struck(lives.job.folder / "strikes")] == list(AT)
    check_each_once(lives.run_dir)


def until_struck(lives: Lives, count: int) -> None:
    def is_so() -> bool:
        assert lives.launcher.poll() is None, lives.launcher.communicate()[0][-3000:]
        return len(struck(lives.job.folder / "strikes")) >= count

    wait_until(is_so, AT[count - 1])


@pytest.mark.soak
@pytest.mark.timeout(5400)
def test_everything_dies_a_hundred_times(tmp_path: Path):
    seed = random.randrange(sys.maxsize)
    print(f"seed {seed}")
    dice = random.Random(seed)
    lives = make_lives(tmp_path, num_prompts=NUM_PROMPTS)
    write_rows(tmp_path / "data" / "prompts.jsonl", NUM_PROMPTS, seed=1)
    costs: list[float] = []
    try:
        lives.begin()
        lives.until_version(3)
        for number in range(NUM_KILLS):
            # Every third time the next life is killed while it starts.
            assert lives.after(dice.uniform(0.0, 4.0) if number % 3 == 0 else 0.0), "the data is too short"
            lives.kill(launcher_only=number % 2 == 1)
            assert problems(lives) == ()
            before, began = steps_trained(lives), time.monotonic()
            lives.resume()
            if number % 3:
                wait_until(lambda before=before: has_gone_on(lives, before), "a step of the new life", timeout_s=120)
                costs.append(time.monotonic() - began)
        assert lives.wait(timeout_s=3000) == 0
        check_each_once(lives.run_dir, NUM_PROMPTS)
    finally:
        lives.end()
    costs.sort()
    print(f"resume to the first new step: median {costs[len(costs) // 2]:.1f} s, longest {costs[-1]:.1f} s")
    assert costs[len(costs) // 2] < 2 * RESUMED_S


def has_gone_on(lives: Lives, before: int) -> bool:
    assert lives.launcher.poll() is None, f"it ended; is the data too short? {lives.launcher.communicate()[0][-3000:]}"
    return steps_trained(lives) > before


def steps_trained(lives: Lives) -> int:
    """Transitions to TRAINED, also those that were undone since."""
    path = lives.run_dir / "ledger.sqlite"
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        return int(db.execute("SELECT COUNT(*) FROM transitions WHERE to_state = 'TRAINED'").fetchone()[0])
