"""Finished runs: every actor books at least 95 % of its time to something better than "other", and all sinks heard it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.harness.commands import run as run_command
from tests.harness.run_job import events, make_job, metrics
from tests.monitor.otlp_receiver import Received, receiver

from myxa.core.activity import ACTIVITY_KINDS
from myxa.launch.views.why import START, without_start

LEAST = 0.95
NUM_STEPS = 12
ROLES = {"coordinator", "buffer", "trainer/0", "trainer/1", "rollout/0", "rollout/1", "monitor"}
FAR_SINKS = [name for name in ("wandb", "mlflow") if find_spec(name)]


@dataclass
class Finished:
    """What a run left, and what the collector got of it."""

    folder: Path
    collector: Received

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


def finished(folder: Path, *overrides: str) -> Finished:
    """The libraries' own folders are the job's, and nothing of this machine's settings reaches them."""
    job = make_job(folder)
    own = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "MLFLOW_", "OTEL_"))}
    with receiver() as got:
        env = {**own, "HOME": str(folder), "TMPDIR": str(folder), "OTEL_EXPORTER_OTLP_ENDPOINT": got.url}
        done = run_command(*job.words(*overrides), "--quiet", folder=folder, timeout_s=240, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
    return Finished(job.run_dir(), got)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Two ranks, two engines, evaluation, checkpoints, comparison with the engines, all far sinks."""
    return finished(
        tmp_path_factory.mktemp("whole"),
        f"run.num_steps={NUM_STEPS}",
        "roles.trainer.count=2",
        "roles.rollout.count=2",
        "eval.data=data/heldout.jsonl",
        "eval.every=6",
        "eval.num_prompts=8",
        "trainer.checkpoint_every=6",
        "guard.every=6",
        f"monitor.sinks={FAR_SINKS}".replace("'", '"'),
        *(['monitor.options.wandb={project="sorting"}'] if "wandb" in FAR_SINKS else []),
    )


@pytest.mark.timeout(300)
def test_the_time_of_every_actor_is_accounted_for(whole: Finished) -> None:
    whole.check_times(ROLES)
    found = whole.totals()
    for actor in ("trainer/0", "trainer/1", "rollout/0", "rollout/1"):
        assert found[actor]["compute"] > 0, actor
        assert sum(value for name, value in found[actor].items() if name.startswith(START)) > 0, actor
    assert any(name.startswith("compute/train") for name in found["trainer/0"])
    assert set(found) - ROLES, "the launcher tells its time too"


@pytest.mark.timeout(300)
@pytest.mark.skipif(len(FAR_SINKS) < 2, reason="wandb or mlflow-skinny is not installed")
def test_wandb_and_mlflow_hear_of_the_run(whole: Finished) -> None:
    assert not events(whole.folder, "sink-disabled")
    for kind in ("wandb-opened", "mlflow-opened", "otlp-opened"):
        assert len(events(whole.folder, kind)) == 1, kind
    assert len(list(whole.folder.glob("wandb/offline-run-*/*.wandb"))) == 1
    (losses,) = whole.folder.glob("mlruns/*/*/metrics/train/loss")
    assert {int(line.split(" ")[2]) for line in losses.read_text().splitlines()} == set(range(1, NUM_STEPS + 1))


@pytest.mark.timeout(300)
def test_the_environment_alone_sends_a_run_to_a_collector(whole: Finished) -> None:
    got = whole.collector
    assert got.metrics["myxa.train.loss"]["trainer/0"]
    assert set(got.metrics["myxa.time.compute"]) >= {"trainer/0", "rollout/0", "buffer", "coordinator"}
    by_trace: dict[bytes, set[str]] = {}
    for span in got.spans:
        by_trace.setdefault(span.trace_id, set()).add(span.name)
    lives = [names for names in by_trace.values() if names >= {"dispatch", "generate", "reward", "claim", "train"}]
    assert len(lives) > 10
    assert any({name.split(" ")[0] for name in names} == {"publish", "adopt"} for names in by_trace.values())
