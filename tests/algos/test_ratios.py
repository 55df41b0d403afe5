"""Importance ratios and correction weights against explicit loops."""

from __future__ import annotations

import math

import pytest
import torch

from myxa.algos import ratios
from myxa.algos.segments import Segments
from myxa.core.errors import ConfigError

TRAIN = [-1.0, -0.5, -2.0, -0.3, -4.0, -1.5, -0.9]
BEHAVIOUR = [-0.2, -0.6, -2.0, -1.9, -0.5, -1.4, -0.8]
MASK = [1, 1, 1, 0, 1, 0, 0]
OWNER = [0, 0, 1, 1, 1, 2, 2]  # sample 2 is fully masked


def segments() -> Segments:
    return Segments.of(torch.tensor(MASK), torch.tensor(OWNER), 3)


def f64(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def q_by_hand(level: str) -> list[float]:
    out = []
    for t, owner in enumerate(OWNER):
        own = [s for s, o in enumerate(OWNER) if o == owner and MASK[s]]
        product = 1.0
        for s in own:
            product *= math.exp(TRAIN[s]) / math.exp(BEHAVIOUR[s])
        if level == "token":
            out.append(math.exp(TRAIN[t]) / math.exp(BEHAVIOUR[t]) if MASK[t] else 1.0)
        elif level == "sequence":
            out.append(product)
        else:
            out.append(product ** (1 / max(len(own), 1)))
    return out


def log_q(level: ratios.Level) -> torch.Tensor:
    return ratios.log_weight(f64(TRAIN), f64(BEHAVIOUR), segments(), level)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_weights_at_each_level(level):
    assert torch.exp(log_q(level)).tolist() == pytest.approx(q_by_hand(level), rel=1e-12)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_tis_truncates(level):
    weights = ratios.tis_weights(log_q(level), cap=1.05, floor=0.2)
    want = [min(max(q, 0.2), 1.05) for q in q_by_hand(level)]
    assert weights.weight_T.tolist() == pytest.approx(want, rel=1e-12)
    assert weights.cut_T.tolist() == [q > 1.05 or q < 0.2 for q in q_by_hand(level)]
    assert bool(weights.keep_T.all())


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_icepop_zeroes_outside_its_band_and_keeps_the_token(level):
    weights = ratios.icepop_weights(log_q(level), 0.5, 1.05)
    want = [q if 0.5 <= q <= 1.05 else 0.0 for q in q_by_hand(level)]
    assert weights.weight_T.tolist() == pytest.approx(want, rel=1e-12)
    assert bool(weights.keep_T.all())
    assert any(w == 0 for w in want)
    assert any(w > 0 for w in want)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_mis_modes(level):
    q = q_by_hand(level)
    truncate = ratios.mis_weights(log_q(level), "truncate", 0.5, 1.02)
    clip = ratios.mis_weights(log_q(level), "clip", 0.5, 1.02)
    mask = ratios.mis_weights(log_q(level), "mask", 0.5, 1.02)
    assert truncate.weight_T.tolist() == pytest.approx([min(x, 1.02) for x in q], rel=1e-12)
    assert clip.weight_T.tolist() == pytest.approx([min(max(x, 0.5), 1.02) for x in q], rel=1e-12)
    assert mask.weight_T.tolist() == pytest.approx(q, rel=1e-12)
    assert mask.keep_T.tolist() == [0.5 <= x <= 1.02 for x in q]
    assert bool(truncate.keep_T.all())
    assert bool(clip.keep_T.all())


def test_rejection_and_veto():
    inside = ratios.rejection(log_q("geometric"), 0.5, 1.5).tolist()
    assert inside == [0.5 <= x <= 1.5 for x in q_by_hand("geometric")]
    kept = ratios.veto(f64(TRAIN), f64(BEHAVIOUR), segments(), 0.1)
    assert kept.tolist() == [True, True, False, False, False, True, True]  # token 4: q = e^-3.5 = 0.03


def test_veto_ignores_masked_tokens():
    train, behaviour = f64([-1.0, -30.0]), f64([-1.0, -0.1])
    one = Segments.of(torch.tensor([1, 0]), torch.tensor([0, 0]), 1)
    assert ratios.veto(train, behaviour, one, 1e-4).tolist() == [True, True]


def test_batch_normalisation_divides_by_the_mean_of_unmasked_weights():
    token = ratios.weight_sums(torch.exp(log_q("token")), segments(), "token")
    kept = [q for q, m in zip(q_by_hand("token"), MASK, strict=True) if m]
    assert token.tolist() == pytest.approx([sum(kept), len(kept)], rel=1e-12)
    sequence = ratios.weight_sums(torch.exp(log_q("sequence")), segments(), "sequence")
    q = q_by_hand("sequence")
    assert sequence.tolist() == pytest.approx([q[0] + q[2], 2], rel=1e-12)  # the masked sample does not count
    mean = float(token[0] / token[1])
    weights = ratios.normalise(ratios.tis_weights(log_q("token"), 100.0), mean)
    after = [w for w, m in zip(weights.weight_T.tolist(), MASK, strict=True) if m]
    assert sum(after) / len(after) == pytest.approx(1.0, rel=1e-12)


def test_batch_normalisation_of_nothing_or_geometric():
    zero = ratios.normalise(ratios.icepop_weights(torch.full((2,), 5.0), 0.5, 2.0), 0.0)
    assert zero.weight_T.tolist() == [0.0, 0.0]
    with pytest.raises(ConfigError, match="geometric"):
        ratios.weight_sums(torch.ones(7), segments(), "geometric")


def test_ratio_on_policy_is_exactly_one():
    live = torch.tensor(TRAIN, requires_grad=True)
    assert ratios.ratio(live, live).tolist() == [1.0] * 7
    assert ratios.sequence_ratio(live, live, segments()).tolist() == [1.0] * 7


def test_only_the_live_policy_gets_a_gradient():
    live, old = torch.tensor(TRAIN, requires_grad=True), torch.tensor(BEHAVIOUR, requires_grad=True)
    (ratios.ratio(live, old).sum() + ratios.sequence_ratio(live, old, segments()).sum()).backward()
    assert live.grad is not None
    assert old.grad is None


def test_sequence_ratio_is_the_geometric_mean_and_one_for_a_masked_sample():
    got = ratios.sequence_ratio(f64(TRAIN), f64(BEHAVIOUR), segments())
    assert got.tolist() == pytest.approx(q_by_hand("geometric"), rel=1e-12)
    assert got.tolist()[5:] == [1.0, 1.0]


def test_extreme_log_probs_do_not_overflow():
    live = torch.tensor([-1e-3, -300.0], requires_grad=True)
    got = ratios.ratio(live, torch.tensor([-300.0, -1e-3]))
    got.sum().backward()
    assert bool(torch.isfinite(got).all())
    assert live.grad is not None
    assert bool(torch.isfinite(live.grad).all())


def test_weights_carry_no_gradient():
    train = torch.tensor(TRAIN, requires_grad=True)
    logs = ratios.log_weight(train, torch.tensor(BEHAVIOUR), segments(), "sequence")
    assert not ratios.tis_weights(logs, 2.0).weight_T.requires_grad


def test_unknown_level_and_mode_are_errors():
    with pytest.raises(ConfigError, match="paragraph"):
        ratios.log_weight(f64(TRAIN), f64(BEHAVIOUR), segments(), "paragraph")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="soften"):
        ratios.mis_weights(log_q("token"), "soften", 0.5, 2.0)  # pyright: ignore[reportArgumentType]
