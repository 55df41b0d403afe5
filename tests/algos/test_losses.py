"""Per-token losses against explicit loops, and their gradients against finite differences."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

from myxa.algos.losses import cispo_loss, opsm_keep, ppo_clip_loss, reinforce_loss, sft_loss
from myxa.algos.segments import Segments
from myxa.core.errors import ConfigError

# Every corner: ratio below, inside, above the clip, and far above the dual clip, with both signs of the advantage.
RATIOS = [0.5, 0.9, 1.0, 1.1, 1.25, 1.6, 9.0] * 2
ADVANTAGES = [1.3] * 7 + [-0.7] * 7


def f64(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ppo_by_hand(r: float, a: float, low: float, high: float, dual: float) -> float:
    if a >= 0:
        return -min(r, 1 + high) * a
    reached = max(r, 1 - low)
    if dual:
        reached = min(reached, dual)
    return reached * -a


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28), (0.0003, 0.0004)])
@pytest.mark.parametrize("dual", [0.0, 1.5, 3.0])
def test_ppo_clip_values(low, high, dual):
    got = ppo_clip_loss(f64(RATIOS), f64(ADVANTAGES), low, high, dual)
    want = [ppo_by_hand(r, a, low, high, dual) for r, a in zip(RATIOS, ADVANTAGES, strict=True)]
    assert got.loss_T.tolist() == pytest.approx(want, rel=1e-12)
    for t, (r, a) in enumerate(zip(RATIOS, ADVANTAGES, strict=True)):
        assert bool(got.clipped_T[t]) == (r > 1 + high if a > 0 else r < 1 - low)
        assert bool(got.dual_clipped_T[t]) == (dual > 0 and a < 0 and max(r, 1 - low) > dual)


def test_clip_higher_lets_good_tokens_go_further_than_bad_ones():
    between = f64([1.25])
    assert not bool(ppo_clip_loss(between, f64([1.0]), 0.2, 0.28).clipped_T)
    assert bool(ppo_clip_loss(between, f64([1.0]), 0.2, 0.2).clipped_T)


@pytest.mark.parametrize("dual", [0.0, 3.0])
def test_ppo_gradient_matches_finite_differences(dual):
    ratio = f64(RATIOS).requires_grad_()
    assert gradcheck(lambda r: ppo_clip_loss(r, f64(ADVANTAGES), 0.2, 0.28, dual).loss_T, (ratio,))


@pytest.mark.parametrize("dual", [0.5, 1.0])
def test_dual_clip_below_one_is_an_error(dual):
    with pytest.raises(ConfigError, match="dual_clip"):
        ppo_clip_loss(f64([1.0]), f64([1.0]), 0.2, 0.2, dual)


def test_cispo_value_and_gradient():
    logprobs = f64([-0.1 * (t + 1) for t in range(14)]).requires_grad_()
    got = cispo_loss(logprobs, f64(RATIOS), f64(ADVANTAGES), 0.3, 0.4)
    weights = [min(max(r, 0.7), 1.4) for r in RATIOS]
    want = [-w * a * -0.1 * (t + 1) for t, (w, a) in enumerate(zip(weights, ADVANTAGES, strict=True))]
    assert got.loss_T.tolist() == pytest.approx(want, rel=1e-12)
    assert got.clipped_T.tolist() == [not 0.7 <= r <= 1.4 for r in RATIOS]
    got.loss_T.sum().backward()
    assert logprobs.grad is not None  # every token, clipped or not, keeps its gradient
    assert logprobs.grad.tolist() == pytest.approx([-w * a for w, a in zip(weights, ADVANTAGES, strict=True)])


def test_cispo_without_lower_bound():
    got = cispo_loss(f64([-1.0]), f64([1e-9]), f64([1.0]), 5.0, 4.0)
    assert not bool(got.clipped_T)
    assert float(got.loss_T) == pytest.approx(1e-9)


def test_reinforce_weights_but_never_clips():
    logprobs = f64([-1.0] * 14).requires_grad_()
    ratio = f64(RATIOS).requires_grad_()
    got = reinforce_loss(logprobs, ratio, f64(ADVANTAGES))
    got.loss_T.sum().backward()
    assert logprobs.grad is not None
    assert ratio.grad is None
    assert logprobs.grad.tolist() == pytest.approx([-r * a for r, a in zip(RATIOS, ADVANTAGES, strict=True)])
    assert not bool(got.clipped_T.any())


def test_sft_is_the_negative_log_likelihood():
    assert sft_loss(f64([-0.5, -2.0])).loss_T.tolist() == [0.5, 2.0]


def test_opsm_drops_only_bad_samples_that_are_far_away():
    live, old = [-1.0, -2.0, -1.0, -3.0, -9.0], [-0.5, -0.5, -0.5, -0.5, -0.1]
    mask, owner, advantages = [1, 1, 1, 1, 0], [0, 0, 1, 2, 1], [-1.0, -1.0, -1.0, 2.0, -1.0]
    order = sorted(range(5), key=lambda t: owner[t])
    live, old, mask, owner, advantages = ([x[t] for t in order] for x in (live, old, mask, owner, advantages))
    segments = Segments.of(torch.tensor(mask), torch.tensor(owner), 3)
    got = opsm_keep(f64(live), f64(old), f64(advantages), segments, 0.8).tolist()
    for t in range(5):
        own = [s for s in range(5) if owner[s] == owner[t] and mask[s]]
        drift = sum(old[s] - live[s] for s in own) / len(own)
        assert got[t] == (not (advantages[t] < 0 and drift > 0.8))
    assert not all(got)
    assert any(got)
