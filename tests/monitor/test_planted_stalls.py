"""Four stalls planted in real runs: `why` names each, and what to turn."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from tests.harness.run_job import Job, make_job
from tests.monitor.live_run import live

from myxa.launch.control.client import ControlClient

WINDOW_S = 6.0
LOOKS = 3
DEADLINE_S = 90.0

SLOW_REWARD = """
import time

def reward(completion):
    time.sleep(0.4)
    return float(len(set(completion.text)))
"""


def named(client: ControlClient, bound: str) -> dict[str, Any]:
    """The answer, once the same bottleneck was named in each of several looks a second apart, start-up left behind.
    Fails with everything that was said meanwhile."""
    said: list[str] = []
    in_a_row = 0
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        time.sleep(1.0)
        answer = client.ask("why", window_s=WINDOW_S)
        said.append(f"{answer['bound']}: {answer['sentence']}")
        in_a_row = in_a_row + 1 if answer["bound"] == bound else 0
        if in_a_row == LOOKS:
            print("\n".join(said))
            return answer
    raise AssertionError("\n".join([f"{bound} was not named:", *said, str(client.ask("why", window_s=WINDOW_S))]))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return make_job(tmp_path)


def with_parts() -> dict[str, str]:
    """The environment of a run that finds the slowed parts."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}


@pytest.mark.timeout(420)
def test_a_slow_reward_function(job: Job) -> None:
    (job.folder / "slow.py").write_text(SLOW_REWARD)
    with live(job, "reward.fn=slow.py:reward") as client:
        answer = named(client, "reward")
        assert answer["shares"]["rollout/0"]["wait-data"] > 0.4
        assert (answer["knob"], answer["key"], answer["command"]) == ("", "reward.workers", "")
        assert "for rewards" in client.ask("why", target="rollout/0", window_s=WINDOW_S)["sentence"]


@pytest.mark.timeout(420)
def test_a_slow_trainer(job: Job) -> None:
    with live(job, program="slowed_parts:slow_trainer", env=with_parts()) as client:
        answer = named(client, "training")
        assert answer["shares"]["trainer/0"]["compute"] > 0.6
        assert answer["knob"] == "max_tokens_per_microbatch"
        told = client.ask("why", target="rollout", window_s=WINDOW_S)["sentence"]
        assert "waits for the trainer to catch up" in told


@pytest.mark.timeout(420)
def test_weights_that_take_long_to_arrive(job: Job) -> None:
    with live(job, "guard.every=0", program="slowed_parts:slow_weights", env=with_parts()) as client:
        answer = named(client, "weights")
        assert answer["shares"]["rollout/0"]["wait-weights"] > 0.4
        assert answer["command"] in {"myxa set max_staleness=2", "myxa set weights_every=2"}


@pytest.mark.timeout(420)
def test_concurrency_that_is_too_small(job: Job) -> None:
    with live(job, "rollout.max_groups=1", "rollout.max_new_tokens=96", "guard.every=0") as client:
        answer = named(client, "concurrency")
        assert (answer["knob"], answer["old"]) == ("concurrency", 1)
        assert 2 <= answer["new"] <= 4
        assert answer["command"] == f"myxa set concurrency={answer['new']}"
        told = client.ask("why", target="rollout/0", window_s=WINDOW_S)["sentence"]
        assert "with as many groups as its concurrency allows" in told
