"""Engines come and go under load in a real run: 2 -> 4 -> 1 -> 2, one is restarted; no prompt is lost or trained twice."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
import torch  # noqa: F401  # what its import opens and starts is not the actor's doing
from tests.harness.run_job import Job, audit, events, metrics
from tests.harness.waiting import wait_until

from myxa.launch.control.client import ControlClient

pytestmark = pytest.mark.timeout(300)

BATCH = 4


def step_of(job: Job) -> int:
    try:
        return max((point["step"] for point in metrics(job.run_dir()) if "lag/max" in point["values"]), default=0)
    except (OSError, ValueError):
        return 0


def ledger(run_dir: Path, question: str) -> list[tuple]:
    with sqlite3.connect(f"file:{run_dir / 'ledger.sqlite'}?mode=ro", uri=True) as db:
        rows = db.execute(question).fetchall()
    db.close()
    return rows


def test_engines_come_and_go_under_load(job: Job) -> None:
    process = job.start("roles.rollout.count=2", "run.num_steps=100000", "rollout.max_new_tokens=24", *job.paced(8))
    try:
        wait_until(lambda: step_of(job) >= 3, "the third step")
        client = ControlClient.of(job.run_dir())

        def scale(count: int) -> None:
            done = client.ask("scale", 150, role="rollout", count=count, wait_s=120)
            assert done["is_done"], done

        def goes_on(num: int = 5) -> None:
            before = step_of(job)
            wait_until(lambda: step_of(job) >= before + num, f"{num} more steps")

        scale(4)
        wait_until(lambda: len(events(job.run_dir(), "engine-joined")) >= 4, "the new engines to be adopted")
        goes_on()
        scale(1)
        goes_on()
        assert client.ask("restart", 150, target="rollout/0", wait_s=120)["is_done"]
        goes_on()
        scale(2)
        goes_on()
        client.ask("down")
        said, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, said
    run_dir = job.run_dir()
    trained = audit(run_dir).trained
    assert len(trained) == len(set(trained)) == step_of(job) * BATCH, "every batch once"
    groups = [row[0] for row in ledger(run_dir, "SELECT group_id FROM groups ORDER BY group_id")]
    assert groups == list(range(len(groups))), "every prompt that was drawn is in the ledger"
    assert set(audit(run_dir).states) <= {"TRAINED", "DURABLE", "READY", "DISPATCHED", "REQUEUED", "DRAWN"}
    worked = {row[0] for row in ledger(run_dir, "SELECT DISTINCT rollout FROM groups WHERE rollout != ''")}
    assert worked, "groups say who made them"
    launcher = (run_dir / "logs/launcher.0.log").read_text()
    assert "ended with" not in launcher, "no end was taken for a failure"
    for name in ("rollout/3", "rollout/2", "rollout/1"):
        assert f"{name} has left the run" in launcher
    assert {event["text"].split()[0].rstrip(":") for event in events(run_dir, "engine-left")} >= {
        "rollout/1", "rollout/2", "rollout/3",
    }  # fmt: skip
    until_over = [event["text"] for event in events(run_dir, "engine-gone")]
    assert not [text for text in until_over if not text.endswith("it was closed")], "nobody was missed"
