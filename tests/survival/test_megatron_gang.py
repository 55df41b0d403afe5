"""Megatron's ranks come back as one gang too: they hold shards of one model, so nobody can go on with half of them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from tests.harness.waiting import wait_until
from tests.survival.gang_run import BATCH, GangRun, gang_run

pytestmark = pytest.mark.timeout(400)


def overrides(layout: str) -> tuple[str, ...]:
    return 'roles.trainer.kind="megatron"', layout, "trainer.checkpoint_every=2", "trainer.keep_last=3"


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


def disturb(run: GangRun, rank: int, what: signal.Signals) -> None:
    """Once the second checkpoint is there; everything but the ranks goes on as it is."""
    run.until_version(4)
    engines, ranks = run.engines(), run.ranks()
    at = time.time()
    os.kill(run.rank(rank), what)
    print(f"recovered in {run.recovery_s(at):.1f} s")
    assert run.engines() == engines
    wait_until(lambda: len(run.ranks()) == 2 and run.ranks().isdisjoint(ranks), "two new ranks")


@pytest.mark.parametrize(
    ("layout", "rank"),
    [
        ("megatron.tp=2", 1),
        pytest.param("megatron.tp=2", 0, marks=pytest.mark.soak),
        pytest.param("megatron.pp=2", 0, marks=pytest.mark.soak),
        pytest.param("megatron.pp=2", 1, marks=pytest.mark.soak),
        pytest.param("megatron.distributed_optimizer=true", 1, marks=pytest.mark.soak),  # two replicas
    ],
)
def test_a_rank_is_killed(tmp_path: Path, layout: str, rank: int) -> None:
    num_steps = 9
    with gang_run(tmp_path, *overrides(layout), num_prompts=num_steps * BATCH) as run:
        run.until_version(1)
        run.check_sockets()
        disturb(run, rank, signal.SIGKILL)
        run.end()
        run.prove()
        (back,) = run.told("trainer-goes-back")
        start = int(back.split()[2].rstrip(","))
        assert start >= 2, "a checkpoint of shards that all were there"
        assert run.versions()[start - num_steps :] == list(range(start + 1, num_steps + 1))


@pytest.mark.soak
def test_a_rank_stands_still_in_a_collective(tmp_path: Path) -> None:
    """Its mate waits for its half of a layer."""
    with gang_run(tmp_path, *overrides("megatron.tp=2")) as run:
        disturb(run, 1, signal.SIGSTOP)
        run.end()
        run.prove()
        assert any("gave no sign of life" in text for text in run.told("actor-hung"))
