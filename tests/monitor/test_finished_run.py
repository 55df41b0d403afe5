"""A finished run by the command a user types: every prompt is accounted for, every actor books at least 95 % of its time
to something better than "other", and all sinks heard it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.harness.run_job import BATCH, audit, events, make_job, metrics

from myxa.core.activity import ACTIVITY_KINDS
from myxa.launch.views.numbers import short
from myxa.launch.views.run_files import SampleQuery, read_samples
from myxa.launch.views.why import START, without_start

LEAST = 0.95
NUM_STEPS = 8
ROLES = {"coordinator", "buffer", "trainer/0", "trainer/1", "rollout/0", "rollout/1", "monitor"}
FAR_SINKS = [name for name in ("wandb", "mlflow") if find_spec(name)]


@dataclass
class Finished:
    """What a run left."""

    folder: Path
    said: str
    """On the terminal."""

    def time_points(self) -> Iterator[tuple[str, float, dict[str, float]]]:
        """(actor, wall time, kind or "kind/name" -> cumulative seconds)."""
        for point in metrics(self.folder):
            seconds = {k.removeprefix("time/"): v for k, v in point["values"].items() if k.startswith("time/")}
            if seconds:
                yield point["source"], point["wall_s"], seconds

    def totals(self) -> dict[str, dict[str, float]]:
        """What each actor had booked when it was heard last."""
        return {source: seconds for source, _, seconds in self.time_points()}

    def check_times(self, actors: set[str]) -> None:
        """Nearly all is accounted for, and what is booked between the first and the last word of an actor is the time
        that went by between them: nothing is lost and nothing booked twice."""
        found = self.totals()
        assert actors <= set(found), found.keys()
        for actor, seconds in found.items():
            whole = booked(seconds)
            shares = without_start({kind: value / whole for kind, value in seconds.items()})
            assert shares.get("other", 0.0) <= 1 - LEAST, (actor, seconds)
        heard: dict[str, list[tuple[float, float]]] = {}
        for source, wall_s, seconds in self.time_points():
            heard.setdefault(source, []).append((wall_s, booked(seconds)))
        for source, points in heard.items():
            (first_wall_s, first_s), (last_wall_s, last_s) = points[0], points[-1]
            assert last_s - first_s == pytest.approx(last_wall_s - first_wall_s, rel=0.02, abs=0.1), source


def booked(seconds: dict[str, float]) -> float:
    return sum(seconds.get(kind, 0.0) for kind in ACTIVITY_KINDS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Two ranks, two engines, several rewards and evaluations, checkpoints, comparison with the engines, all far sinks: by
    an interpreter of its own. The libraries' own folders are the job's, and nothing of this machine's settings reaches
    them."""
    job = make_job(tmp_path_factory.mktemp("whole"))
    (job.folder / "mine.py").write_text("def reward(completion):\n    return 0.25\n")
    sets = {
        "cut": {"path": "data/heldout.jsonl", "max_new_tokens": 1, "temperature": 0.0},
        "own": {"path": "data/heldout.jsonl", "reward": "mine.py:reward", "num_samples": 3, "pass_reward": 0.25},
    }
    command = job.command(
        *(f"eval.sets.{name}.{key}={json.dumps(value)}" for name, one in sets.items() for key, value in one.items()),
        f"run.num_steps={NUM_STEPS}", "roles.trainer.count=2", "roles.rollout.count=2", "eval.every=4",
        "eval.num_prompts=6", "trainer.checkpoint_every=4", "reward.functions.exact.weight=1.0",
        "reward.functions.format.weight=0.5", "rollout.deterministic=true", 'rollout.stop=["never said"]',
        f"monitor.sinks={FAR_SINKS}".replace("'", '"'),
        *(['monitor.options.wandb={project="sorting"}'] if "wandb" in FAR_SINKS else []),
    )  # fmt: skip
    folder = str(job.folder)
    own = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "MLFLOW_"))}
    env = {**own, "HOME": folder, "TMPDIR": folder}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=folder, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return Finished(job.run_dir(), done.stdout)


@pytest.mark.timeout(300)
def test_a_run_ends_with_every_prompt_accounted_for(whole: Finished) -> None:
    run_dir = whole.folder
    facts = audit(run_dir)
    assert len(facts.trained) == len(set(facts.trained)) == NUM_STEPS * BATCH, "each group is trained exactly once"
    assert set(facts.states) <= {"TRAINED", "DURABLE", "READY", "DISPATCHED", "REQUEUED", "DROPPED"}, facts.states
    points = [point["values"] for point in metrics(run_dir)]
    lags = [values["lag/max"] for values in points if "lag/max" in values]
    assert len(lags) == NUM_STEPS and max(lags) <= 2
    parts = [values for values in points if "reward/part/exact/mean" in values]
    assert len(parts) == NUM_STEPS, "what each function says is told of every step"
    sums = [v["reward/part/exact/mean"] + 0.5 * v["reward/part/format/mean"] for v in parts]
    assert [v["reward/mean"] for v in parts] == pytest.approx(sums)
    rewards = [values["reward/raw_mean"] for values in points if "reward/raw_mean" in values]
    assert f"reward: {short(rewards[0])} -> {short(rewards[-1])}\n" in whole.said, "of all steps"
    found = {key: value for values in points for key, value in values.items() if "eval/" in key}
    assert (found["eval/cut/response_length"], found["eval/cut/truncated_ratio"]) == (1.0, 1.0)
    assert (found["eval/own/reward"], found["eval/own/pass_at_1"], found["eval/own/pass_at_2"]) == (0.25, 1.0, 1.0)
    assert found["eval/reward"] == pytest.approx((found["eval/cut/reward"] + 0.25) / 2)
    kept = [group["step"] for group in read_samples(run_dir, SampleQuery(), 1000) if group["outcome"] == "kept"]
    assert set(kept) == set(range(1, NUM_STEPS + 1)), "answers of every step can be read"
    held_out = read_samples(run_dir, SampleQuery(held_out=True), 1000)
    assert {group["eval_set"] for group in held_out} == {"cut", "own"}
    assert {one["reward"] for group in held_out if group["eval_set"] == "own" for one in group["answers"]} == {0.25}
    assert (run_dir / "report.html").stat().st_size > 10_000
    assert (run_dir / "export" / "model.safetensors").exists() and (run_dir / "trace.json").exists()


@pytest.mark.timeout(300)
def test_the_time_of_every_actor_is_accounted_for(whole: Finished) -> None:
    whole.check_times(ROLES)
    found = whole.totals()
    for actor in ("trainer/0", "trainer/1", "rollout/0", "rollout/1"):
        assert found[actor]["compute"] > 0, actor
        assert sum(value for name, value in found[actor].items() if name.startswith(START)) > 0, actor
    assert any(name.startswith("compute/train") for name in found["trainer/0"])
    assert set(found) == ROLES


@pytest.mark.timeout(300)
@pytest.mark.skipif(len(FAR_SINKS) < 2, reason="wandb or mlflow-skinny is not installed")
def test_wandb_and_mlflow_hear_of_the_run(whole: Finished) -> None:
    assert not events(whole.folder, "sink-disabled")
    for kind in ("wandb-opened", "mlflow-opened"):
        assert len(events(whole.folder, kind)) == 1, kind
    assert len(list(whole.folder.glob("wandb/offline-run-*/*.wandb"))) == 1
    (losses,) = whole.folder.glob("mlruns/*/*/metrics/train/loss")
    assert {int(line.split(" ")[2]) for line in losses.read_text().splitlines()} == set(range(1, NUM_STEPS + 1))
