"""KL options by exact expectation over a small softmax: not the same formula again, but what its gradient does."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from tests.algos.conftest import options
from tests.harness.scripts import loaded

from myxa.algos.ratios import kl_terms
from myxa.core.config import AlgoConfig

CORRECTIONS = ("none", "behaviour", "decoupled", "tis", "icepop", "mis")


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return loaded("bench/kl_exact.py")


@pytest.mark.parametrize("place", ["loss", "reward", "advantage"])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("unbiased", [False, True])
def test_b_f1_an_option_is_accepted_if_and_only_if_its_gradient_is_that_of_the_kl(bench, place, kind, unbiased):
    if place != "loss" and unbiased:
        assert not bench.is_accepted(place, kind, unbiased)
        return
    error = bench.relative_error(place, kind, unbiased, 0.6, num_draws=2)
    assert bench.is_accepted(place, kind, unbiased) == (error <= 1e-6), error


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_b_f3_unbiased_kl_of_stale_tokens_is_exact_under_every_correction(bench, correction, kind):
    assert bench.relative_error("loss", kind, True, 0.6, correction, num_draws=2) <= 1e-6


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_b_f3_the_value_of_the_unbiased_estimate_is_the_kl(bench, kind):
    live_A, reference_A, drawn_A = (torch.randn(3, dtype=torch.float64).log_softmax(0) for _ in range(3))
    per_arm_A = kl_terms(kind, live_A, reference_A, (live_A - drawn_A).exp())
    assert float((drawn_A.exp() * per_arm_A).sum()) == pytest.approx(float(bench.kl(live_A, reference_A)), abs=1e-12)


@pytest.mark.parametrize(
    ("place", "unbiased", "kind"),
    [("loss", False, "k2"), ("loss", True, "k3"), ("reward", False, "k1"), ("advantage", False, "k1")],
)
def test_b_f1_auto_is_the_estimator_of_the_place(place, unbiased, kind):
    algo = AlgoConfig(kind="reinforce_pp", kl_coef=0.1, kl_in=place, kl_unbiased=unbiased)
    assert algo.kl_estimator == kind
    left_out = AlgoConfig(kind="reinforce_pp", kl_coef=0.1, kl_in=place)
    assert (left_out.kl_estimator, left_out.kl_unbiased) == (("k3", True) if place == "loss" else ("k1", False))


@pytest.mark.parametrize(("kind", "unbiased"), [("k1", True), ("k2", False), ("k3", True)])
def test_b_f1_the_weight_follows_the_estimator_in_the_loss(kind, unbiased):
    assert AlgoConfig(kl_coef=0.1, kl_kind=kind).kl_unbiased == unbiased


@pytest.mark.parametrize(
    ("kind", "loss", "bounds"),
    [("grpo", "gspo", (3e-4, 4e-4)), ("grpo", "cispo", (1.0, 4.0)), ("gspo", "ppo", (0.2, 0.2)),
     ("dapo", "ppo", (0.2, 0.28)), ("gspo", "gspo", (3e-4, 4e-4))],
)  # fmt: skip
def test_b_f2_clip_bounds_follow_the_loss_that_is_used(kind, loss, bounds):
    algo = AlgoConfig(kind=kind, loss=loss)
    assert (algo.clip_low, algo.clip_high) == bounds


@pytest.mark.parametrize("place", ["loss", "reward", "advantage"])
def test_b_f1_a_regularised_bandit_reaches_its_optimum(bench, place):
    """Reward 1 on one of three arms, coefficient 0.5: pi is proportional to ref exp(R / 0.5), for a uniform ref."""
    rewards_A = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    reference_A = torch.zeros(3, dtype=torch.float64)
    logits_A = reference_A.clone()
    algo = AlgoConfig(kind="reinforce_pp", kl_coef=0.5, kl_in=place)
    config = options(
        kind="reinforce_pp", loss="reinforce", kl_coef=0.5, kl_in=place, kl_kind=algo.kl_estimator,
        kl_unbiased=algo.kl_unbiased,
    )  # fmt: skip
    for _ in range(50):
        logits_A = logits_A - 3 * bench.objective_gradient(logits_A, reference_A, config, rewards_A=rewards_A)
    want_A = (rewards_A / 0.5).softmax(0)
    assert logits_A.softmax(0).tolist() == pytest.approx(want_A.tolist(), abs=1e-6)


def test_b_f1_a_student_reaches_its_teacher(bench):
    teacher_A = torch.linspace(-1, 1, 6, dtype=torch.float64)
    logits_A = torch.zeros(6, dtype=torch.float64)
    algo = AlgoConfig(kl_coef=1.0, kl_in="advantage")
    config = options(loss="reinforce", kl_coef=1.0, kl_in="advantage", kl_kind=algo.kl_estimator)
    before = float(bench.kl(logits_A, teacher_A))
    for _ in range(50):
        logits_A = logits_A - 3 * bench.objective_gradient(logits_A, teacher_A, config)
    assert float(bench.kl(logits_A, teacher_A)) < 1e-6 * before


def test_b_f2_distillation_keeps_groups_of_equal_reward():
    assert AlgoConfig(kl_in="advantage", kl_coef=1.0).group_filter == "none"
    assert AlgoConfig(kl_in="advantage", kl_coef=1.0, group_filter="zero_variance").group_filter == "zero_variance"
