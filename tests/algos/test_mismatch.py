"""Mismatch and lag figures against explicit loops."""

from __future__ import annotations

import math

import pytest
import torch

from myxa.algos.objective import mismatch_sums

TRAIN = [-1.0, -0.5, -2.0, -0.3, -4.0, -1.5]
BEHAVIOUR = [-0.9, -0.6, -2.2, 0.0, -3.5, -1.4]


def f64(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_token_sums():
    kept = list(zip(TRAIN, BEHAVIOUR, strict=True))
    got = {name: float(value) for name, value in mismatch_sums(f64(TRAIN), f64(BEHAVIOUR)).items()}
    assert got == pytest.approx(
        {
            "mismatch_diff_abs": sum(abs(t - b) for t, b in kept),
            "mismatch_k1": sum(b - t for t, b in kept),
            "mismatch_k3": sum(math.exp(t) / math.exp(b) - 1 - (t - b) for t, b in kept),
            "mismatch_chi2": sum((math.exp(t) / math.exp(b)) ** 2 - 1 for t, b in kept),
        }
    )


def test_equal_log_probs_give_exact_zeros():
    same = torch.tensor(TRAIN, dtype=torch.float32)
    assert {float(value) for value in mismatch_sums(same, same.clone()).values()} == {0.0}


def test_k1_cancels_where_the_absolute_figure_does_not():
    """A signed check passes although every token is wrong; slime's CI test is of that kind."""
    got = mismatch_sums(f64([-1.0, -2.0]), f64([-1.5, -1.5]))
    assert (float(got["mismatch_k1"]), float(got["mismatch_diff_abs"])) == (0.0, 1.0)
    assert got["mismatch_k3"] > 0.2
