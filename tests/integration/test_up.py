"""The whole loop by the command a user types."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from tests.harness.own_segments import own_segments
from tests.harness.run_job import Job, audit, is_alive, metrics
from tests.harness.waiting import wait_until

from myxa.launch.views.numbers import short
from myxa.launch.views.run_files import SampleQuery, read_samples

pytestmark = pytest.mark.timeout(180)


def test_a_run_ends_with_every_prompt_accounted_for(job: Job) -> None:
    rewards = ("reward.functions.exact.weight=1.0", "reward.functions.format.weight=0.5")
    (job.folder / "mine.py").write_text("def reward(completion):\n    return 0.25\n")
    sets = {
        "cut": {"path": "data/heldout.jsonl", "max_new_tokens": 1, "temperature": 0.0},
        "own": {"path": "data/heldout.jsonl", "reward": "mine.py:reward", "num_samples": 3, "pass_reward": 0.25},
    }
    told = [f"eval.sets.{name}.{key}={json.dumps(value)}" for name, one in sets.items() for key, value in one.items()]
    more = ("eval.num_prompts=16", "rollout.deterministic=true", 'rollout.stop=["never said"]')
    command = job.command(*told, *rewards, *more)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=job.folder)
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = job.run_dir()
    facts = audit(run_dir)
    assert len(facts.trained) == len(set(facts.trained)) == 5 * 4, "each group is trained exactly once"
    assert set(facts.states) <= {"TRAINED", "DURABLE", "READY", "DISPATCHED", "REQUEUED", "DROPPED"}, facts.states
    lags = [p["values"]["lag/max"] for p in metrics(run_dir) if "lag/max" in p["values"]]
    assert len(lags) == 5 and max(lags) <= 2
    parts = [p["values"] for p in metrics(run_dir) if "reward/part/exact/mean" in p["values"]]
    assert len(parts) == 5, "what each function says is told of every step"
    sums = [v["reward/part/exact/mean"] + 0.5 * v["reward/part/format/mean"] for v in parts]
    assert [v["reward/mean"] for v in parts] == pytest.approx(sums)
    assert [p["values"]["eval/reward"] for p in metrics(run_dir) if "eval/reward" in p["values"]]
    rewards = [p["values"]["reward/raw_mean"] for p in metrics(run_dir) if "reward/raw_mean" in p["values"]]
    assert f"reward: {short(rewards[0])} -> {short(rewards[-1])}   o held-out: " in done.stdout, (
        "of all steps, the last too"
    )
    found = {key: value for point in metrics(run_dir) for key, value in point["values"].items() if "eval/" in key}
    assert (found["eval/cut/response_length"], found["eval/cut/truncated_ratio"]) == (1.0, 1.0)
    assert (found["eval/own/reward"], found["eval/own/pass_at_1"], found["eval/own/pass_at_2"]) == (0.25, 1.0, 1.0)
    assert found["eval/reward"] == pytest.approx((found["eval/cut/reward"] + 0.25) / 2)
    kept = [group["step"] for group in read_samples(run_dir, SampleQuery(), 1000) if group["outcome"] == "kept"]
    assert set(kept) == {1, 2, 3, 4, 5}, "answers of every step can be read"
    held_out = read_samples(run_dir, SampleQuery(held_out=True), 1000)
    assert {group["eval_set"] for group in held_out} == {"cut", "own"}
    assert {answer["reward"] for group in held_out if group["eval_set"] == "own" for answer in group["answers"]} == {
        0.25
    }
    assert (run_dir / "report.html").stat().st_size > 10_000
    assert (run_dir / "export" / "model.safetensors").exists()
    assert (run_dir / "trace.json").exists()


def test_a_closed_terminal_ends_the_run_and_leaves_nothing(job: Job) -> None:
    segments = own_segments()
    process = job.start("run.num_steps=100000")
    try:
        wait_until(lambda: _steps(job) >= 2, "the second step")
        pids = [p.pid for p in process.below()]
        sockets = [
            c.laddr for p in pids for c in psutil.Process(p).net_connections("unix") if str(c.laddr).startswith("/")
        ]
        for _ in range(2):  # as kernel and shell do when a terminal is closed: no wish to end at once
            process.send_signal(signal.SIGHUP)
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 129, said
    assert list((job.run_dir() / "checkpoints").iterdir()), "it ended in good order"
    assert not is_alive(pids)
    assert not [s for s in sockets if os.path.exists(str(s))]
    assert own_segments() <= segments
    assert len(audit(job.run_dir()).trained) == len(set(audit(job.run_dir()).trained))


def _steps(job: Job) -> int:
    try:
        return sum("reward/mean" in p["values"] for p in metrics(job.run_dir()))
    except (OSError, ValueError):
        return 0


def test_a_resumed_run_goes_on_where_the_checkpoint_was(job: Job) -> None:
    """From a checkpoint that was written beside training, and from one that training waited for."""
    code, said, first = job.run("run.num_steps=4", "trainer.checkpoint_every=2", "trainer.async_save=true")
    assert code == 0, said
    assert written_beside(first) == [2, 4]
    assert checkpoints(first) == ["version_00000002", "version_00000004"]
    second = resumed(job, first, "second", 5, 6)
    assert written_beside(second) == []
    assert checkpoints(second)[-1] == "version_00000006"


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def written_beside(run_dir: Path) -> list[int]:
    """Steps that tell of a checkpoint written while training went on."""
    return [p["step"] for p in metrics(run_dir) if "checkpoint/async_s" in p["values"]]


def resumed(job: Job, before: Path, name: str, *wanted: int) -> Path:
    """The run that makes these steps, from the last checkpoint of the one before."""
    code, said, run_dir = job.run(
        f"run.num_steps={wanted[-1]}", f'trainer.resume="{before}"', f'run.name="{name}"', "trainer.checkpoint_every=2"
    )
    assert code == 0, said
    assert [p["step"] for p in metrics(run_dir) if "reward/mean" in p["values"]] == list(wanted)
    trained = audit(run_dir).trained
    assert len(trained) == len(set(trained)) == wanted[-1] * 4, "the ledger goes on, and no group is trained twice"
    return run_dir
