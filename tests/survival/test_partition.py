"""A network that is gone between an actor and the others: short, nobody is the worse for it; long, another takes over.

Real runs of two ranks and two engines. Proved by the ledger: every prompt is trained exactly once.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from tests.harness.commands import run as run_command
from tests.harness.run_job import worker_pids
from tests.harness.waiting import wait_until
from tests.survival.gang_run import GangRun, gang_run

pytestmark = pytest.mark.timeout(300)
REPLACED = ("rollout.max_groups=1",)
SLOW_RUN = ("run.chaos=true", "trainer.checkpoint_every=2", "rollout.max_groups=4")


def chaos(run: GangRun, *words: str) -> Any:
    done = run_command("chaos", *words, "--run", str(run.run_dir), "--json", folder=run.job.folder, timeout_s=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def everybody(run: GangRun) -> dict[str, list[int]]:
    names = ("buffer", "coordinator", "monitor", "trainer/0", "trainer/1", "rollout/0", "rollout/1")
    return {name: worker_pids(run.launcher.pid, name) for name in names}


def test_a_hiccup_of_the_network_costs_nobody_his_process(tmp_path: Path):
    with gang_run(tmp_path, *SLOW_RUN, patience_s=1.2) as run:
        run.until_version(2)
        before = everybody(run)
        for target, others in (("rollout/1", "buffer"), ("trainer/0", "buffer"), ("coordinator", "launcher")):
            assert chaos(run, "partition", target, "--from", others, "--for", "2s")["actors"] == [target]
        assert chaos(run, "partition", "rollout/0", "--for", "1.5s")["others"] == []
        at = time.time()
        time.sleep(2.5)
        print(f"went on after {run.recovery_s(at):.1f} s")
        assert everybody(run) == before
        run.end()
        assert run.prove() == 0, "nothing was undone"


@pytest.mark.soak
@pytest.mark.parametrize("target", ["rollout/1", "trainer/1", "coordinator", "buffer"])
def test_who_is_away_for_long_is_replaced(tmp_path: Path, target: str):
    """Its process lives on without a network; its launcher ends it, and the next one does its work, as soon as the
    machine has a network again: the cut is of the place, not of the process."""
    with gang_run(tmp_path, *SLOW_RUN, *REPLACED, patience_s=0.8) as run:
        run.until_version(2)
        (lost,) = worker_pids(run.launcher.pid, target)
        assert chaos(run, "partition", target, "--for", "20s")["actors"] == [target]
        at = time.time()
        wait_until(lambda: not os.path.exists(f"/proc/{lost}"), f"the end of {target}'s first process")
        print(f"{target} was given up after {time.time() - at:.1f} s")
        wait_until(lambda: worker_pids(run.launcher.pid, target) not in ([], [lost]), f"the next {target}")
        run.end()
        run.prove()
