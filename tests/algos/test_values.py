"""The critic's loss and its metrics against loops over single numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from myxa.algos.losses import value_loss, value_metrics, value_sums


def draw(seed: int, num: int = 40) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    return tuple(torch.tensor(rng.normal(size=num), dtype=torch.float64) for _ in range(3))  # type: ignore[return-value]


@pytest.mark.parametrize("clip", [0.0, 0.2, 1.0])
def test_the_loss_and_its_gradient_are_those_of_a_loop(clip: float) -> None:
    values, old, returns = draw(1)
    values.requires_grad_()
    losses, clipped = value_loss(values, old, returns, clip)
    losses.sum().backward()
    assert values.grad is not None
    for i in range(len(values)):
        v, o, g = (float(row.detach()[i]) for row in (values, old, returns))
        plain, gradient = (v - g) ** 2, 2 * (v - g)
        loss, is_clipped = plain, False
        if clip:
            bounded = (o + min(max(v - o, -clip), clip) - g) ** 2
            if bounded > plain:
                loss, gradient, is_clipped = bounded, 0.0, True
        assert float(losses.detach()[i]) == pytest.approx(loss, abs=1e-12)
        assert bool(clipped[i]) == is_clipped
        assert float(values.grad[i]) == pytest.approx(gradient, abs=1e-12)
    assert bool(clipped.any()) == bool(clip)


def test_the_variance_that_is_explained_is_numpys_and_adds_up_over_parts() -> None:
    values, returns, _ = draw(2)
    returns = returns + values + 3.0
    parts = [
        value_sums(values[:7], returns[:7]),
        value_sums(values[7:], returns[7:]),
        value_sums(values[:0], values[:0]),
    ]
    found = value_metrics({name: sum(float(part[name]) for part in parts) for name in parts[0]})
    right = 1 - np.var((returns - values).numpy()) / np.var(returns.numpy())
    assert found == {"value_mean": pytest.approx(values.mean()), "explained_variance": pytest.approx(right)}


@pytest.mark.parametrize("num", [0, 1, 5])
def test_where_returns_are_all_alike_nothing_is_explained(num: int) -> None:
    sums = value_sums(torch.arange(float(num)), torch.full((num,), 2.0))
    assert value_metrics({name: float(total) for name, total in sums.items()})["explained_variance"] == 0.0
