"""A process of a real run that stands still is named, with the reason; what happens then is its role's policy."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
from tests.harness.run_job import Job, audit, events, metrics, worker_pids
from tests.harness.waiting import wait_until

pytestmark = [pytest.mark.timeout(180), pytest.mark.soak]
"""A minute of waiting; the short forms are in tests/transport/test_who_is_alive.py and tests/launch."""

TOLD_S = 15.0
SLACK_S = 10.0
"""Of a machine that runs other things as well."""


def _steps(job: Job) -> int:
    try:
        return sum("reward/mean" in point["values"] for point in metrics(job.run_dir()))
    except (OSError, ValueError):
        return 0


def _told(job: Job, kind: str, name: str) -> list[dict[str, Any]]:
    return [event for event in events(job.run_dir(), kind) if event["source"] == name]


def test_stopped_processes_are_named_then_go_on_or_are_replaced_as_their_role_says(job: Job) -> None:
    """Two rollout actors and the trainer: one rollout is stopped for good, the trainer is let go on."""
    flags = (
        "run.num_steps=100000",
        "roles.rollout.count=2",
        'roles.rollout.when_hung="kill"',
        'roles.trainer.when_hung="wait"',
    )
    process = job.start(*flags)
    try:
        wait_until(lambda: _steps(job) >= 2, "the second step")
        (engine,) = worker_pids(process.pid, "rollout/1")
        (trainer,) = worker_pids(process.pid, "trainer/0")
        stopped_at = time.monotonic()
        for pid in (engine, trainer):
            os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: bool(_told(job, "actor-hung", "rollout/1")), "word that rollout/1 hangs", TOLD_S + SLACK_S)
        wait_until(lambda: bool(_told(job, "actor-hung", "trainer/0")), "word that trainer/0 hangs", TOLD_S + SLACK_S)
        assert time.monotonic() - stopped_at > 5, "not at the first silence"
        os.kill(trainer, signal.SIGCONT)
        wait_until(lambda: bool(_told(job, "actor-recovered", "trainer/0")), "the recovery of trainer/0", SLACK_S)
        before = _steps(job)
        wait_until(lambda: worker_pids(process.pid, "rollout/1") not in ([], [engine]), "another rollout/1", 30)
        wait_until(lambda: len(_told(job, "engine-joined", "coordinator")) >= 3, "its return to work", 30)
        wait_until(lambda: _steps(job) > before, "another step", 30)
        assert worker_pids(process.pid, "trainer/0") == [trainer], "the trainer's policy is to wait"
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, said
    (hung,) = _told(job, "actor-hung", "rollout/1")
    assert "rollout/1 (epoch 1): its event loop gave no sign of life for 1" in hung["text"]
    assert _told(job, "actor-suspect", "rollout/1")[0]["wall_s"] < hung["wall_s"]
    assert not _told(job, "actor-hung", "rollout/0"), "the others were well"
    assert "rollout/1" in said and "gave no sign of life" in said, "the person at the screen is told"
    assert "rollout/1" in (job.run_dir() / "report.html").read_text()
    trained = audit(job.run_dir()).trained
    assert len(trained) == len(set(trained)), "no group was trained twice"
