"""A rollout of several samples is kept whole: its actor is killed twice, and no sample is lost, doubled or parted."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from tests.harness.ledger_audit import audit_ledger
from tests.harness.run_job import make_job, newest_step, worker_pids
from tests.harness.waiting import wait_until

from myxa.actors.ledger.file import decode_group

pytestmark = pytest.mark.timeout(240)

EXAMPLE = Path(__file__).parents[2] / "examples" / "sub_agents" / "sub_agents.py"


def check_whole_rollouts(ledger: Path) -> int:
    """Of the finished groups that the ledger holds; returns their number."""
    with closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as db:
        rows = db.execute("SELECT group_id, data FROM payloads WHERE is_whole").fetchall()
    for group_id, data in rows:
        group = decode_group(group_id, data)
        names = Counter((sample.index, sample.branch) for sample in group.samples)
        assert names == Counter((index, branch) for index in range(4) for branch in range(3))
        assert len(group.rollout_rewards()) == 4
        assert all(sample.loss_mask.any() and sample.finish != "abort" for sample in group.samples)
    return len(rows)


def test_rollouts_of_several_samples_outlive_their_actor(tmp_path: Path) -> None:
    job, num_groups = make_job(tmp_path), 0
    process = job.start(
        "run.num_steps=10", "roles.rollout.count=2", f'rollout.workflow="{EXAMPLE}:planner"', "rollout.max_turns=2",
        "rollout.save_partials_s=0.2", 'reward.fn="exact"',
    )  # fmt: skip
    try:
        for done in (2, 5):
            wait_until(lambda done=done: process.poll() is not None or newest_step(job) >= done, f"step {done}")
            assert process.poll() is None, process.communicate()[0]
            wait_until(lambda: worker_pids(process.pid, "rollout/0"), "the actor, or its next life")
            os.kill(worker_pids(process.pid, "rollout/0")[0], signal.SIGKILL)
            num_groups += check_whole_rollouts(job.run_dir() / "ledger.sqlite")
        text, _ = process.communicate(timeout=150)
        assert process.returncode == 0, text
    finally:
        process.terminate()
    found = audit_ledger(job.run_dir() / "ledger.sqlite")
    assert found.problems == ()
    assert set(found.trained.values()) == {1}
    assert num_groups > 0
