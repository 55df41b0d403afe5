"""Mistakes that others made with the objective of asynchronous RL; each is a test with the mistake's name."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from tests.algos.conftest import options

from myxa.algos.objective import (
    Normaliser,
    mismatch_sums,
    needs_proximal,
    objective_config,
    policy_objective,
)
from myxa.core.config.learning import AlgoConfig, resolve_correction
from myxa.core.errors import TrainError

CORRECTED = ("behaviour", "decoupled", "tis", "icepop", "mis")
ALL_LOSSES = ("ppo", "gspo", "cispo", "reinforce", "sapo")


def normaliser_of(draw) -> Normaliser:
    return Normaliser(draw.num_tokens, draw.num_present, 50.0)


def run(draw, config, **batch_options):
    """(result, gradient of the live log-probs)."""
    result = policy_objective(draw.batch(**batch_options), config, normaliser_of(draw))
    result.loss.backward()
    grad = draw.leaves["live"].grad
    assert grad is not None
    return result, grad


# --- the cut of a batch must not matter


@pytest.mark.parametrize("loss", [*ALL_LOSSES, "sft"])
@pytest.mark.parametrize(
    ("reduction", "cut"),
    [("token", [[0], [1], [2], [3], [4]]), ("rollout", [[3], [4, 0], [1, 2]]), ("constant", [[3], [0, 1, 2, 4]])],
)
def test_loss_gradient_and_metrics_do_not_depend_on_the_cut_into_microbatches(draw, loss, reduction, cut):
    """Uneven lengths, a sample without tokens alone in its micro-batch, an empty micro-batch at the end."""
    config = options(
        kind="sft" if loss == "sft" else "grpo", loss=loss, correction="mis", mis_level="sequence", minibatches=2,
        kl_coef=0.2, entropy_coef=0.03, reduction=reduction,
    )  # fmt: skip
    whole = draw(51)
    want, want_grad = run(whole, config)
    loss_sum, sums, grad = 0.0, dict.fromkeys(want.sums, 0.0), torch.zeros_like(want_grad)
    for samples in [*cut, []]:
        part = whole.part(samples)
        result = policy_objective(part.batch(), config, normaliser_of(whole))
        result.loss.backward()
        part_grad = part.leaves["live"].grad
        assert part_grad is not None
        loss_sum += result.loss.item()
        sums = {name: sums[name] + float(value) for name, value in result.sums.items()}
        at = [t for s in samples for t, owner in enumerate(whole.owner) if owner == s]
        grad[at] = part_grad
    assert loss_sum == pytest.approx(want.loss.item(), abs=1e-12)
    assert torch.allclose(grad, want_grad, rtol=0, atol=1e-14)
    assert sums == pytest.approx({name: float(value) for name, value in want.sums.items()}, abs=1e-10)


@pytest.mark.parametrize("loss", [*ALL_LOSSES, "sft"])
@pytest.mark.parametrize("reduction", ["token", "rollout", "constant"])
def test_an_empty_micro_batch_gives_a_zero_loss_and_can_be_trained_on(draw, loss, reduction):
    nothing, grad = run(draw(55).part([]), options(loss=loss, correction="decoupled", reduction=reduction))
    assert (nothing.loss.item(), grad.shape) == (0.0, (0,))
    assert all(float(v) == 0 for v in nothing.sums.values())


# --- which policy is which


@pytest.mark.parametrize("loss", ALL_LOSSES)
@pytest.mark.parametrize("correction", ["none", "behaviour", "decoupled", "tis", "icepop", "mis"])
def test_on_policy_ratio_and_weight_are_exactly_one_and_kl_exactly_zero(draw, loss, correction):
    """In float32: no tolerance, since equal numbers have difference 0."""
    some = draw(61)
    live = torch.tensor(some.live, dtype=torch.float32).tolist()
    some = replace(some, live=live, behaviour=live, proximal=live, reference=live)
    config = options(loss=loss, correction=correction, minibatches=2, kl_coef=0.5)
    result, grad = run(some, config, dtype=torch.float32)
    count = float(some.num_tokens)
    sums = {name: float(value) for name, value in result.sums.items()}
    assert sums["ratio"] == count
    assert sums["weight"] == count
    zero = ("approx_kl", "approx_kl_k3", "kl", "clip_fraction", "weight_cut_fraction", "removed_fraction")
    mismatch = ("mismatch_diff_abs", "mismatch_k1", "mismatch_k3", "mismatch_chi2", "logprob_diff_abs")
    assert [sums[name] for name in zero + mismatch] == [0.0] * 11
    assert float(result.parts["kl_loss"]) == 0.0
    if loss != "gspo":  # all of them are then the plain policy gradient
        want = [-a / count for a in some.advantages]
        assert grad.tolist() == pytest.approx(want, rel=1e-5)


def test_several_minibatches_without_proximal_would_kill_the_clip_so_they_are_refused(draw):
    some = draw(65)
    for correction in ("decoupled", "tis", "icepop", "mis"):
        config = options(correction=correction, minibatches=2)
        with pytest.raises(TrainError, match="proximal"):
            policy_objective(some.batch(leave_out=["proximal_T"]), config, normaliser_of(some))


def test_behaviour_log_probs_receive_no_gradient(draw):
    some = draw(68)
    batch = some.batch()
    for tensor in (batch.behaviour_T, batch.proximal_T, batch.reference_T, batch.advantages_T):
        assert tensor is not None
        tensor.requires_grad_()
    config = options(correction="decoupled", minibatches=2, kl_coef=0.1)
    policy_objective(batch, config, normaliser_of(some)).loss.backward()
    for tensor in (batch.behaviour_T, batch.proximal_T, batch.reference_T, batch.advantages_T):
        assert tensor is not None
        assert tensor.grad is None


# --- optional fields


@pytest.mark.parametrize(
    ("config", "missing"),
    [(options(kl_coef=0.1), "reference_T"), (options(entropy_coef=0.1), "entropy_T")],
)
def test_a_term_without_its_tensor_is_an_error_and_not_left_out(draw, config, missing):
    some = draw(72)
    with pytest.raises(TrainError, match=missing.removesuffix("_T")):
        policy_objective(some.batch(leave_out=[missing]), config, normaliser_of(some))


def test_optional_tensors_are_optional(draw):
    some = draw(73)
    result, _ = run(some, options(), leave_out=["proximal_T", "reference_T", "entropy_T"])
    assert "kl" not in result.sums
    assert "entropy" not in result.sums


# --- numbers


def test_half_precision_log_probs_are_widened(draw):
    some = draw(75)
    result, grad = run(some, options(correction="behaviour", kl_coef=0.1), dtype=torch.bfloat16)
    assert result.loss.dtype == torch.float32
    assert grad.dtype == torch.bfloat16
    assert bool(torch.isfinite(grad).all())


@pytest.mark.parametrize(
    ("loss", "correction"),
    [*itertools.product(ALL_LOSSES, CORRECTED), ("dppo_tv", "behaviour"), ("dppo_kl", "behaviour")],
)
def test_absurd_log_probs_never_give_nan(draw, loss, correction):
    """A token whose probability changed by e^300 is a broken engine, but it must not poison the weights."""
    some = draw(76, lengths=(3, 2))
    some = replace(
        some, live=[-300.0, 1e-3, -1.0, -1e-4, -80.0], behaviour=[-1e-3, -300.0, -1.0, -90.0, -1e-4],
        proximal=[-150.0, -150.0, -1.0, -1e-4, -1.0], reference=[-1e-4, -300.0, -1.0, -1.0, -200.0],
    )  # fmt: skip
    config = options(loss=loss, correction=correction, minibatches=2, kl_coef=0.1, mis_level="sequence")
    result, grad = run(some, config, dtype=torch.float32)
    assert math.isfinite(result.loss.item())
    assert bool(torch.isfinite(grad).all())
    assert all(math.isfinite(float(value)) for value in result.sums.values())


def test_metrics_carry_no_graph(draw):
    result, _ = run(draw(77), options(kl_coef=0.1, entropy_coef=0.1))
    assert not any(value.requires_grad for value in (*result.sums.values(), *result.parts.values()))


def test_sums_of_the_mismatch_are_those_of_a_loop():
    train, behaviour = [-1.0, -0.5, -2.0, -0.3, -4.0, -1.5], [-0.9, -0.6, -2.2, 0.0, -3.5, -1.4]
    ratios = [math.exp(t) / math.exp(b) for t, b in zip(train, behaviour, strict=True)]
    gaps = [t - b for t, b in zip(train, behaviour, strict=True)]
    rows = (torch.tensor(row, dtype=torch.float64) for row in (train, behaviour))
    assert {name: float(value) for name, value in mismatch_sums(*rows).items()} == pytest.approx(
        {
            "mismatch_diff_abs": sum(map(abs, gaps)),
            "mismatch_k1": -sum(gaps),
            "mismatch_k3": sum(q - 1 - x for q, x in zip(ratios, gaps, strict=True)),
            "mismatch_chi2": sum(q**2 - 1 for q in ratios),
        }
    )


def test_reported_metrics_are_token_means_by_definition(draw):
    some = draw(78)
    result, _ = run(some, options(correction="behaviour"))
    kept = range(len(some.live))
    gap = [some.behaviour[t] - some.live[t] for t in kept]
    assert float(result.sums["approx_kl"]) == pytest.approx(sum(gap))
    assert float(result.sums["approx_kl_k3"]) == pytest.approx(sum(math.exp(-g) - 1 + g for g in gap))
    assert float(result.sums["logprob"]) == pytest.approx(sum(some.live[t] for t in kept))
    assert float(result.sums["advantage"]) == pytest.approx(sum(some.advantages[t] for t in kept))
    diff = [abs(some.proximal[t] - some.behaviour[t]) for t in kept]
    assert float(result.sums["logprob_diff_abs"]) == pytest.approx(sum(diff))


# --- options


def test_auto_correction_depends_on_the_number_of_minibatches():
    assert resolve_correction("auto", 1, "ppo") == "behaviour"
    assert resolve_correction("auto", 2, "ppo") == "decoupled"
    assert resolve_correction("auto", 2, "dppo_kl") == "behaviour"
    assert resolve_correction("none", 4, "ppo") == "none"
    assert options(minibatches=1).correction == "behaviour"
    assert options(minibatches=4).correction == "decoupled"
    assert objective_config(AlgoConfig(), 7).minibatches == 7
    assert options(kind="sft", minibatches=4).correction == "none"


def test_what_the_trainer_must_compute():
    assert not needs_proximal(options(correction="decoupled", minibatches=1))
    assert needs_proximal(options(correction="decoupled", minibatches=2))
    assert not needs_proximal(options(correction="behaviour", minibatches=2))
    assert needs_proximal(options(correction="mis", mis_normalise=True))
    assert not options().uses_reference
    assert options(kl_coef=0.1).uses_reference
    assert options(kind="ppo", kl_coef=0.1, kl_in="reward").uses_reference
