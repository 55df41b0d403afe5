"""The demo's task trained by Megatron: the same run file but for `kind` and the layout."""

from __future__ import annotations

import pytest
from tests.harness.run_job import Job, audit, metrics

from myxa.launch.cli import main

pytestmark = pytest.mark.timeout(300)

MEGATRON = ('roles.trainer.kind="megatron"', "roles.trainer.count=2", "megatron.pp=2")


def test_a_pipeline_of_two_ranks_trains_and_publishes(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 leads and holds the first stage; the loss is made on rank 1; engines get the whole model."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(job.folder))
    code, said, run_dir = job.run(
        *MEGATRON, "run.num_steps=4", "async.max_staleness=0", "trainer.checkpoint_every=2",
        "trainer.async_save=true", "algo.entropy_coef=0.01", timeout_s=240,
    )  # fmt: skip
    assert code == 0, said
    assert len(set(audit(run_dir).trained)) == 4 * 4
    steps = [p["values"] for p in metrics(run_dir) if "train/loss" in p["values"]]
    assert len(steps) == 4
    assert max(s["train/logprob_diff_abs_max"] for s in steps) < 2e-5, "engine and trainer disagree"
    assert all(s["train/grad_norm"] > 0 for s in steps if s["reward/std"] > 0)
    assert [s["train/num_updates"] for s in steps] == [1, 2, 3, 4]
    assert len({s["train/logprob"] for s in steps}) == 4, "the weights change"
    assert (run_dir / "export" / "model.safetensors").exists()
    newest = run_dir / "checkpoints" / "version_00000004"
    assert (newest / "manifest.json").exists()
    assert list(newest.glob("*.distcp"))


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("megatron.tp=2", ("roles.trainer.count", "gives 2 ranks, which tp * pp * cp = 4 does not divide")),
        (
            "megatron.ddp.overlap_grad_reduc=true",
            ("megatron.ddp.overlap_grad_reduc", 'did you mean "overlap_grad_reduce"?'),
        ),
        ("megatron.optimizer.lr=0.1", ("megatron.optimizer.lr", "set optimizer.lr")),
        ("megatron.model.attention_softmax_in_fp33=true", ('did you mean "attention_softmax_in_fp32"?',)),
        ('trainer.strategy="fsdp"', ("trainer.strategy", "megatron.distributed_optimizer")),
        ("megatron.offload_optimizer=0.5", ("megatron.offload_optimizer", "bfloat16")),
        ('roles.trainer.kind="torch"', ("roles.trainer.kind", "[megatron]")),
    ],
)
def test_mistakes_in_the_table_are_told_before_anything_starts(
    job: Job, capsys: pytest.CaptureFixture[str], override: str, wanted: tuple[str, ...]
) -> None:
    flags = [part for item in (*MEGATRON, override) for part in ("--set", item)]
    assert main(["up", str(job.folder / "run.toml"), *flags]) == 2
    said = capsys.readouterr()
    for text in wanted:
        assert text in said.out + said.err
    assert not (job.folder / "runs").exists()
