"""A real run that tells W&B, MLflow and an OpenTelemetry collector at once; the run file and the environment choose."""

from __future__ import annotations

import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.harness.commands import run
from tests.harness.run_job import Job, events, make_job
from tests.monitor.otlp_receiver import receiver


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return make_job(tmp_path)


def environment(folder: Path, endpoint: str) -> dict[str, str]:
    """The libraries' own folders are the job's, and nothing of this machine's settings reaches them."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "MLFLOW_", "OTEL_"))}
    return {**own, "HOME": str(folder), "TMPDIR": str(folder), "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}


@pytest.mark.timeout(300)
def test_all_three_hear_of_the_run(job: Job) -> None:
    if find_spec("wandb") is None or find_spec("mlflow") is None:
        pytest.skip("wandb or mlflow-skinny is not installed")
    with receiver() as got:
        command = job.command(
            "run.num_steps=30", 'monitor.sinks=["wandb", "mlflow"]', 'monitor.options.wandb={project="sorting"}'
        )
        done = subprocess.run(
            [*command, "--quiet"],
            capture_output=True,
            text=True,
            timeout=240,
            cwd=job.folder,
            env=environment(job.folder, got.url),
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    run_dir = job.run_dir()
    assert not events(run_dir, "sink-disabled")
    for kind in ("wandb-opened", "mlflow-opened", "otlp-opened"):
        assert len(events(run_dir, kind)) == 1, kind
    assert len(list(run_dir.glob("wandb/offline-run-*/*.wandb"))) == 1
    losses = list(run_dir.glob("mlruns/*/*/metrics/train/loss"))
    assert len(losses) == 1
    steps = {int(line.split(" ")[2]) for line in losses[0].read_text().splitlines()}
    assert steps == set(range(1, 31))
    assert got.metrics["myxa.train.loss"]["trainer/0"]
    assert set(got.metrics["myxa.time.compute"]) >= {"trainer/0", "rollout/0", "buffer", "coordinator"}
    by_trace: dict[bytes, set[str]] = {}
    for span in got.spans:
        by_trace.setdefault(span.trace_id, set()).add(span.name)
    whole = [names for names in by_trace.values() if names >= {"dispatch", "generate", "reward", "claim", "train"}]
    assert len(whole) > 10
    assert any({name.split(" ")[0] for name in names} == {"publish", "adopt"} for names in by_trace.values())


@pytest.mark.timeout(120)
def test_a_wrong_option_ends_the_start_with_exit_status_2(job: Job) -> None:
    words = job.words('monitor.sinks=["wandb"]', 'monitor.options.wandb={projct="x"}')
    done = run(*words, folder=job.folder)
    assert done.returncode == 2, done.stdout + done.stderr
    assert 'did you mean "project"?' in done.stdout + done.stderr
