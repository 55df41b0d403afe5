"""Mistakes in what a run file says to Megatron. A run of it: tests/survival/test_megatron_gang.py."""

from __future__ import annotations

import pytest
from tests.harness.run_job import Job

from myxa.launch.cli import main

MEGATRON = ('roles.trainer.kind="megatron"', "roles.trainer.count=2", "megatron.pp=2")


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
