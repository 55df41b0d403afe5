"""Slurm's SIGTERM reaches every process of a job's step, engines' servers too."""

from __future__ import annotations

import signal
from contextlib import suppress

import psutil
import pytest
from tests.harness.commands import Command
from tests.harness.fake_sglang import stand_in_environment
from tests.harness.ledger_audit import audit_ledger
from tests.harness.run_job import Job, events
from tests.harness.waiting import wait_until

from myxa.actors.checkpoints.folder import list_checkpoints

pytestmark = pytest.mark.timeout(300)


def test_a_run_all_of_whose_processes_get_sigterm_ends_well_and_can_be_resumed(job: Job) -> None:
    words = job.words('roles.rollout.kind="sglang"', "run.num_steps=400", "roles.rollout.count=2", *job.paced(2.0))
    run = Command(words, job.folder, env=stand_in_environment())
    try:
        wait_until(lambda: job.has("config.toml"), "a run directory")
        run_dir = job.run_dir()
        wait_until(lambda: len(events(run_dir, "weights-adopted")) > 4, "engines at work")
        children = psutil.Process(run.pid).children(recursive=True)
        run.send_signal(signal.SIGTERM)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            for process in children:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
    finally:
        text, _ = run.communicate(timeout=120)
    assert run.returncode == 0, text
    assert not [line for line in text.splitlines() if line.startswith("warning: ") and "checkpoint_every" not in line]
    assert {event["text"].partition(": ")[2] for event in events(run_dir, "engine-gone")} == {"it was closed"}
    (checkpoint,) = list_checkpoints(run_dir / "checkpoints")
    assert audit_ledger(run_dir / "ledger.sqlite").problems == ()
    more = ("resume", str(run_dir), "--set", f"run.num_steps={checkpoint.version + 1}")
    again = Command(list(more), job.folder, env=stand_in_environment())
    text, _ = again.communicate(timeout=120)
    assert again.returncode == 0, text
    assert audit_ledger(run_dir / "ledger.sqlite").problems == ()
