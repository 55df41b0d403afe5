"""A whole step on two real gloo processes gives the gradient and the metrics of one process with everything."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).with_name("gloo_rank.py")


def load_program():
    spec = importlib.util.spec_from_file_location("gloo_rank", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_ranks(folder: Path, world: int) -> dict[str, torch.Tensor]:
    out = folder / "out.pt"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(world), str(folder / "store"), str(out)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        for number, process in enumerate(ranks):
            output, _ = process.communicate(timeout=100)
            assert process.returncode == 0, f"rank {number}:\n{output}"
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return torch.load(out, weights_only=True)


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert set(got) == set(want)
    for name, value in want.items():
        assert torch.allclose(got[name], value, rtol=0, atol=1e-10), name


def test_two_processes_equal_one(tmp_path):
    whole = load_program().train_step(0, 1, 1000)  # one micro-batch for each mini-batch
    assert float(whole["gradient"].abs().sum()) > 0.01
    assert_same(run_ranks(tmp_path, 2), whole)


@pytest.mark.parametrize("max_tokens", [1, 9, 20])
def test_the_token_limit_of_a_microbatch_does_not_change_the_step(max_tokens):
    program = load_program()
    assert_same(program.train_step(0, 1, max_tokens), program.train_step(0, 1, 1000))
