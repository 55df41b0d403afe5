"""A whole run whose environment workers, and whose rollout actor, are killed: nothing survives, is lost or doubled."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest
from tests.harness.commands import Command
from tests.harness.ledger_audit import audit_ledger
from tests.harness.run_job import make_job, newest_step, worker_pids
from tests.harness.waiting import wait_until

from myxa.actors.ledger.file import decode_group

pytestmark = pytest.mark.timeout(280)

GAMES = Path(__file__).with_name("games.py")


def environment_pids(actor: int) -> list[int]:
    """Of the workers; each is the child of its subreaper, which has the same command line."""
    found: list[int] = []
    with suppress(psutil.NoSuchProcess):
        for one in psutil.Process(actor).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if ":myxa.actors.environments.worker" in one.cmdline() and one.ppid() != actor:
                    found.append(one.pid)
    return found


def working(run: Command) -> tuple[int, list[int]]:
    """The actor, or its next life, and its workers; none where the run has ended."""
    found: list[tuple[int, list[int]]] = []

    def is_there() -> bool:
        found[:] = [(pid, environment_pids(pid)) for pid in worker_pids(run.pid, "rollout/0")[:1]]
        return run.poll() is not None or any(workers for _, workers in found)

    wait_until(is_there, "the actor and its workers")
    return found[0] if found else (0, [])


def check_groups(ledger: Path) -> int:
    """Of the finished groups that the ledger holds; returns their number."""
    with closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as db:
        rows = db.execute("SELECT group_id, data FROM payloads WHERE is_whole").fetchall()
    for group_id, data in rows:
        group = decode_group(group_id, data)
        assert [one.index for one in group.samples] == sorted({one.index for one in group.samples})
        assert len(group.samples) + group.num_masked == 4
        assert all(one.num_turns == 3 and one.loss_mask.any() for one in group.samples)
    return len(rows)


def test_a_run_outlives_its_environments_workers_and_their_actor(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    dice, job, num_groups, seen = random.Random(seed), make_job(tmp_path), 0, set[int]()
    (tmp_path / "environments.toml").write_text(
        f'[environments.count]\nkind = "gym"\nid = "{GAMES}:Count"\nconcurrency = 4\n'
        f'env = {{ GAMES_LOG = "{tmp_path / "log"}", GAMES_PACE_S = "0.05" }}\n'
    )
    process = job.start(
        "run.num_steps=5", 'rollout.workflow="environment"', "rollout.max_turns=4", "rollout.workers=2",
        "rollout.save_partials_s=0.2", 'reward.fn="workflow"', "rollout.max_retries=50",
        more=(str(tmp_path / "environments.toml"),),
    )  # fmt: skip
    try:
        for done in range(1, 4):
            wait_until(lambda done=done: process.poll() is not None or newest_step(job) >= done, f"step {done}")
            assert process.poll() is None, process.communicate()[0]
            actor, workers = working(process)
            seen.update(workers)
            if done == 2:
                os.kill(actor, signal.SIGKILL)
                wait_until(lambda workers=workers: not any(map(psutil.pid_exists, workers)), "no worker survives")
            elif workers:
                with suppress(ProcessLookupError):
                    os.kill(dice.choice(workers), signal.SIGKILL)
            num_groups += check_groups(job.run_dir() / "ledger.sqlite")
        text, _ = process.communicate(timeout=150)
        assert process.returncode == 0, text
    finally:
        process.terminate()
    found = audit_ledger(job.run_dir() / "ledger.sqlite")
    assert found.problems == ()
    assert set(found.trained.values()) == {1}
    assert num_groups > 0 and len(seen) > 2
    wait_until(lambda: not any(map(psutil.pid_exists, seen)), "no worker survives the run")
    replays = [line.split() for line in (tmp_path / "log").read_text().splitlines() if line.startswith("reset")]
    assert {is_replay for _, _, attempt, is_replay, _ in replays if attempt != "0"} == {"True"}
