"""KL estimators against their definitions, written token by token with `math`."""

from __future__ import annotations

import math

import pytest
import torch
from torch.autograd import gradcheck

from myxa.algos.kl import kl_terms
from myxa.core.errors import ConfigError

LIVE = [-0.1, -2.0, -0.7, -3.5, -1.0]
REFERENCE = [-0.4, -1.5, -0.7, -0.2, -6.0]


def by_hand(kind: str, live: float, reference: float, ratio: float = 1.0) -> float:
    if kind == "k1":
        return ratio * (live - reference)
    if kind == "k2":
        return ratio * (live - reference) ** 2 / 2
    return ratio * (math.exp(reference) / math.exp(live) - 1 - math.log(math.exp(reference) / math.exp(live)))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("unbiased", [False, True])
def test_values_match_the_definition(kind, unbiased):
    old = [x + 0.3 * i for i, x in enumerate(LIVE)]
    live = torch.tensor(LIVE, dtype=torch.float64)
    reference = torch.tensor(REFERENCE, dtype=torch.float64)
    ratio = torch.exp(live - torch.tensor(old, dtype=torch.float64)) if unbiased else None
    got = kl_terms(kind, live, reference, ratio)
    want = [
        by_hand(kind, x, y, math.exp(x) / math.exp(o) if unbiased else 1.0)
        for x, y, o in zip(LIVE, REFERENCE, old, strict=True)
    ]
    assert got.tolist() == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_gradients_match_finite_differences_also_through_the_ratio(kind):
    reference = torch.tensor(REFERENCE, dtype=torch.float64)
    old = torch.tensor([-0.3, -1.0, -0.9, -3.0, -1.2], dtype=torch.float64)
    live = torch.tensor(LIVE, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: kl_terms(kind, x, reference), (live,))
    assert gradcheck(lambda x: kl_terms(kind, x, reference, torch.exp(x - old)), (live,))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_equal_policies_have_kl_exactly_zero(kind):
    live = torch.tensor(LIVE, dtype=torch.float32)
    assert kl_terms(kind, live, live.clone()).tolist() == [0.0] * len(LIVE)


def test_k3_is_never_negative():
    live = torch.linspace(-15, -0.01, 200, dtype=torch.float64)
    assert float(kl_terms("k3", live, torch.full_like(live, -5.0)).min()) >= 0


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_impossible_tokens_stay_finite(kind):
    live = torch.tensor([-1e4, -1e-6], requires_grad=True)
    k = kl_terms(kind, live, torch.tensor([-1e-6, -1e4]))
    k.sum().backward()
    assert bool(torch.isfinite(k).all())
    assert live.grad is not None
    assert bool(torch.isfinite(live.grad).all())


def test_reference_gets_no_gradient():
    live = torch.tensor(LIVE, requires_grad=True)
    reference = torch.tensor(REFERENCE, requires_grad=True)
    kl_terms("k3", live, reference).sum().backward()
    assert reference.grad is None


def test_unknown_estimator_is_an_error():
    with pytest.raises(ConfigError, match="k4"):
        kl_terms("k4", torch.zeros(1), torch.zeros(1))  # pyright: ignore[reportArgumentType]
