"""The network is gone between an actor and all others: for a short time no process is lost; for a long time another one
takes over. Real runs of two ranks and two engines; the ledger proves that every prompt is trained once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.survival.under_chaos import chaos_job, check_lossless, run_under

GANG = ("roles.trainer.count=2", "trainer.checkpoint_every=2")


@pytest.mark.timeout(200)
def test_a_short_partition_costs_no_process(tmp_path: Path):
    cuts = (
        "buffer.put:cut=1:3", "rollout.put@rollout/1:cut=1", "coordinator.version_made:cut=1:2", "trainer.claim:cut=1",
    )  # fmt: skip
    run = run_under(chaos_job(tmp_path, reward_s=0.2), cuts, *GANG, num_steps=10, rest_s=1.2)
    check_lossless(run, cuts)
    assert run.said("actor-restarted", "trainer-restarted") == []
    assert run.audit().num_rewound == 0, "nothing was undone"


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("point", ["rollout.put@rollout/1", "trainer.claim", "coordinator.version_made", "buffer.put"])
def test_an_actor_that_is_away_for_long_is_replaced(tmp_path: Path, point: str):
    """Its process lives on without a network; its launcher ends it."""
    cuts = (f"{point}:cut=20:2",)
    run = run_under(chaos_job(tmp_path, reward_s=0.8), cuts, *GANG, "rollout.max_groups=1", num_steps=14)
    check_lossless(run, cuts)
    (lost,) = run.strikes
    assert not Path(f"/proc/{lost.pid}").exists()
