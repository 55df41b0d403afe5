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
from tests.harness.own_segments import SHARED, own_segments
from tests.survival.gang_run import gang_run

pytestmark = pytest.mark.timeout(300)


def test_a_copy_in_memory_costs_a_step_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """There is no checkpoint, and nothing of the copies is left when the run has ended."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    before = own_segments()
    with gang_run(tmp_path, "trainer.standby_every=1") as run:
        run.until_version(4)
        run.check_sockets()
        (folder,) = (SHARED / name for name in own_segments() - before)
        assert folder.stat().st_mode & 0o777 == 0o700
        os.kill(run.rank(0), signal.SIGSTOP)
        made, kept = run.versions()[-1], sorted(path.name for path in folder.glob("version_*"))
        at = time.time()
        os.kill(run.rank(1), signal.SIGKILL)
        print(f"recovered in {run.recovery_s(at):.1f} s")
        run.end()
        run.prove()
        (back,) = run.told("trainer-goes-back")
        version = int(back.split()[2].rstrip(","))
        assert version >= made - 1
        assert f"version_{version:08d}" in kept
        assert 1 <= len(kept) <= 2
        assert run.versions().count(version) <= 1, (
            "what is known is not trained again; its metrics may die with its rank"
        )
    assert own_segments() <= before


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
        run.end()
        run.prove()
