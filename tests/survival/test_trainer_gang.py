"""A trainer rank that dies or stands still costs time and nothing else: the gang comes back as one, engines go on.

Proved on real runs of two ranks (gloo) and two engines: every prompt is trained exactly once in the lineage that the
run ends with, no engine is started anew, and the time to the next step is told.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from tests.harness.waiting import wait_until
from tests.survival.lives import gang_run

pytestmark = pytest.mark.timeout(300)


def test_with_a_checkpoint_each_step_a_death_costs_a_step_and_each_prompt_is_trained_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with gang_run(tmp_path, "trainer.checkpoint_every=1", "roles.buffer.max_restarts=1", patience_s=1.5) as run:
        run.until_version(3)
        run.check_sockets()
        os.kill(run.rank(0), signal.SIGSTOP)
        made = run.version()
        at = time.time()
        os.kill(run.rank(1), signal.SIGKILL)
        wait_until(lambda: bool(run.told("trainer-goes-back")), "the gang's next attempt")
        print(f"recovered in {run.recovery_s(time.time()) + time.time() - at:.1f} s")
        assert run.wait() == 0
        run.prove()
        (back,) = run.told("trainer-goes-back")
        version = int(back.split()[2].rstrip(","))
        assert version >= made - 1
        made_again = [step["step"] for step in run.steps()].count(version)
        assert made_again <= 1, "what is known is not trained again; its metrics may die with its rank"


@pytest.mark.soak
def test_the_trainer_dies_where_it_shares_its_device_in_turns(tmp_path: Path):
    with gang_run(
        tmp_path, "roles.trainer.count=1", "roles.rollout.count=1", 'memory.share="switch"', "memory.capacity_mb=9",
        "memory.switch_s=40", "engine.context_length=64", "engine.max_running=4", "trainer.checkpoint_every=2",
    ) as run:  # fmt: skip
        run.until_version(5)
        engines = run.engines()
        at = time.time()
        os.kill(run.rank(0), signal.SIGKILL)
        print(f"recovered in {run.recovery_s(at):.1f} s")
        assert run.engines() == engines
        assert run.wait() == 0
        run.prove()
