"""A rollout actor that is killed, or stands still: its groups go on elsewhere with the tokens that the buffer was told of.

Real processes: the run's own, long answers, two engines. Proved by the ledger alone: a group that was unfinished in the
dead actor's hands is finished later, by somebody else, and begins with exactly the tokens that were saved before the
death; the log-probs and version stamps of those tokens are the saved ones too. Measured and printed: how old the newest
saved tokens were, and how long until another actor had the groups.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from pathlib import Path

import numpy as np
import pytest
from tests.harness.run_job import Job, audit, events, make_job, worker_pids
from tests.harness.waiting import wait_until

from myxa.actors.ledger.states import decode_group, decode_partial
from myxa.core.samples import Sample

pytestmark = pytest.mark.timeout(240)
LONG = (
    "run.num_steps=1000000", "roles.rollout.count=2", "rollout.max_new_tokens=900", "rollout.num_samples=2",
    "rollout.max_groups=3", "rollout.save_partials_s=0.5", "algo.batch_size=2", "async.max_staleness=8",
)  # fmt: skip
ENOUGH = 60
"""Tokens of a group that were saved before its actor is killed."""


def query(run_dir: Path, sql: str, *values: object) -> list[tuple[object, ...]]:
    with sqlite3.connect(f"file:{run_dir / 'ledger.sqlite'}?mode=ro", uri=True) as db:
        found = db.execute(sql, values).fetchall()
    db.close()
    return found


def saved(run_dir: Path, rollout: str) -> dict[int, tuple[Sample, ...]]:
    """Group -> unfinished samples, of groups in that actor's hands."""
    rows = query(
        run_dir,
        "SELECT g.group_id, p.data FROM groups g JOIN payloads p USING (group_id) "
        "WHERE g.state = 'DISPATCHED' AND g.rollout = ? AND NOT p.is_whole",
        rollout,
    )
    return {int(str(group_id)): decode_partial(int(str(group_id)), bytes(data)) for group_id, data in rows}  # type: ignore[arg-type]


def num_tokens(samples: tuple[Sample, ...]) -> int:
    return sum(int(sample.response_ids.size) for sample in samples)


def finished(run_dir: Path, group_id: int) -> tuple[Sample, ...] | None:
    rows = query(run_dir, "SELECT data FROM payloads WHERE group_id = ? AND is_whole", group_id)
    return decode_group(group_id, bytes(rows[0][0])).samples if rows else None  # type: ignore[arg-type]


def begins_with(whole: Sample, part: Sample) -> bool:
    length = part.response_ids.size
    return all(
        np.array_equal(getattr(whole, name)[:length], getattr(part, name))
        for name in ("response_ids", "logprobs", "versions", "loss_mask")
    )


@pytest.mark.parametrize("how", ["SIGKILL", pytest.param("SIGSTOP", marks=pytest.mark.soak)])
def test_the_groups_of_a_dead_engine_go_on_with_the_tokens_they_had(tmp_path: Path, how: str) -> None:
    job: Job = make_job(tmp_path)
    process = job.start(*LONG)
    try:
        wait_until(lambda: process.poll() is not None or any((tmp_path / "runs").glob("*/ledger.sqlite")), "a ledger")
        assert process.poll() is None, process.communicate()[0]
        run_dir = job.run_dir()
        wait_until(lambda: query(run_dir, "SELECT 1 FROM sqlite_master WHERE name = 'payloads'"), "the ledger's tables")
        wait_until(
            lambda: any(num_tokens(partial) >= ENOUGH for partial in saved(run_dir, "rollout/0").values()),
            "saved tokens of rollout/0",
        )
        (pid,) = worker_pids(process.pid, "rollout/0")
        os.kill(pid, signal.Signals[how])
        struck_s = time.time()
        before = {group_id: part for group_id, part in saved(run_dir, "rollout/0").items() if num_tokens(part)}
        print(f"{how}: {len(before)} groups had {[num_tokens(part) for part in before.values()]} tokens saved")
        wait_until(
            lambda: all(finished(run_dir, group_id) is not None for group_id in before),
            "all of them are finished",
            timeout_s=120,
        )
        for group_id, parts in before.items():
            whole = {sample.index: sample for sample in finished(run_dir, group_id) or ()}
            for part in parts:
                assert begins_with(whole[part.index], part), f"group {group_id} did not go on from what was saved"
        marks = ", ".join("?" * len(before))
        again = query(
            run_dir,
            f"SELECT MIN(wall_s), MAX(detail) FROM transitions WHERE group_id IN ({marks}) AND to_state = 'DISPATCHED' "
            "AND attempt > 1",
            *before,
        )
        print(f"the first was in other hands ({again[0][1]}) after {float(str(again[0][0])) - struck_s:.1f} s")
        assert events(run_dir, "group-dropped") == []
    finally:
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=90)
        print(said[-2000:])
    trained = audit(job.run_dir()).trained
    assert len(trained) == len(set(trained)), "no group was trained twice"
