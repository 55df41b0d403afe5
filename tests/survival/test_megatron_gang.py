"""Megatron's ranks come back as one gang too: they hold shards of one model, so nobody can go on with half of them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from tests.harness.waiting import wait_until
from tests.survival.lives import BATCH, Lives, gang_run

pytestmark = pytest.mark.timeout(400)


def overrides(layout: str) -> tuple[str, ...]:
    return 'roles.trainer.kind="megatron"', layout, "trainer.checkpoint_every=2", "trainer.keep_last=3"


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


def disturb(run: Lives, rank: int, what: signal.Signals) -> None:
    """Once the second checkpoint is there; everything but the ranks goes on as it is."""
    run.until_version(4)
    engines, ranks = run.engines(), run.ranks()
    at = time.time()
    os.kill(run.rank(rank), what)
    wait_until(lambda: len(run.ranks()) == 2 and run.ranks().isdisjoint(ranks), "two new ranks")
    assert run.engines() == engines
    print(f"recovered in {run.recovery_s(at):.1f} s")


@pytest.mark.parametrize(
    ("layout", "rank"),
    [
        ("megatron.pp=2", 1),
        pytest.param("megatron.pp=2", 0, marks=pytest.mark.soak),
        pytest.param("megatron.tp=2", 0, marks=pytest.mark.soak),
        pytest.param("megatron.tp=2", 1, marks=pytest.mark.soak),
        pytest.param("megatron.distributed_optimizer=true", 1, marks=pytest.mark.soak),  # two replicas
    ],
)
def test_a_rank_is_killed(tmp_path: Path, layout: str, rank: int) -> None:
    """Of a pipeline, rank 0 leads and holds the first stage; the loss is made on rank 1; engines get the whole model."""
    num_steps = 9
    more = ("async.max_staleness=0", "trainer.async_save=true", "algo.entropy_coef=0.01", "trainer.export_at_end=true")
    with gang_run(tmp_path, *overrides(layout), *more, num_prompts=num_steps * BATCH) as run:
        run.until_version(1)
        run.check_sockets()
        disturb(run, rank, signal.SIGKILL)
        assert run.wait() == 0
        run.prove()
        (back,) = run.told("trainer-goes-back")
        start = int(back.split()[2].rstrip(","))
        assert start >= 2, "a checkpoint of shards that all were there"
        last = run.steps()[start - num_steps :]
        assert [point["step"] for point in last] == list(range(start + 1, num_steps + 1))
        steps = [point["values"] for point in last]
        assert max(s["train/logprob_diff_abs_max"] for s in steps) < 2e-5, "engine and trainer disagree"
        assert all(s["train/grad_norm"] > 0 for s in steps if s["reward/std"] > 0)
        assert [s["train/num_updates"] for s in steps] == list(range(start + 1, num_steps + 1))
        assert len({s["train/logprob"] for s in steps}) == len(steps), "the weights change"
        assert (run.run_dir / "export" / "model.safetensors").exists()
        newest = run.run_dir / "checkpoints" / f"version_{num_steps:08d}"
        assert (newest / "manifest.json").exists() and list(newest.glob("*.distcp"))


@pytest.mark.soak
def test_a_rank_stands_still_in_a_collective(tmp_path: Path) -> None:
    """Its mate waits for its half of a layer."""
    with gang_run(tmp_path, *overrides("megatron.tp=2")) as run:
        disturb(run, 1, signal.SIGSTOP)
        assert run.wait() == 0
        run.prove()
        assert any("gave no sign of life" in text for text in run.told("actor-hung"))
