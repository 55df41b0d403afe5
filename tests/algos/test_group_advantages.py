"""Group baselines against explicit loops; uneven groups, lone samples and equal rewards are the point."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myxa.algos.baselines import BASELINES, group_advantages

COMPARING = ("grpo", "gspo", "cispo", "dr_grpo", "rloo", "reinforce_pp_baseline")
REWARDS = [1.0, 0.0, 0.5, 2.0, 1.0, -1.0, 3.0, 0.25, 0.25, 7.0]
GROUPS = [4, 4, 9, 4, 9, 9, 9, 2, 2, 11]  # sizes 3, 4, 2, 1, not in order


def by_hand(kind: str, rewards: list[float], groups: list[int], normalise: str) -> list[float]:
    out = []
    for i, reward in enumerate(rewards):
        mates = [r for r, g in zip(rewards, groups, strict=True) if g == groups[i]]
        others = list(mates)
        others.remove(reward)
        if kind == "rloo":
            out.append(reward - statistics.fmean(others) if others else 0.0)
        elif kind in ("grpo", "dapo", "gspo", "cispo"):
            judged = {"group": mates, "batch": rewards}.get(normalise, [])
            spread = statistics.stdev(judged) if len(judged) > 1 else 0.0
            out.append((reward - statistics.fmean(mates)) / (1.0 if normalise == "none" else spread + 1e-6))
        elif kind in ("dr_grpo", "reinforce_pp_baseline", "reward"):
            out.append(reward - statistics.fmean(mates))
        elif kind == "sft":
            out.append(1.0)
        elif kind == "dpo":
            out.append(float(np.sign(reward - statistics.fmean(mates))))
        else:
            out.append(reward)
    return out


@pytest.mark.parametrize("kind", sorted(BASELINES))
@pytest.mark.parametrize("normalise", ["group", "batch", "none"])
def test_uneven_groups_are_normalised_by_id(kind, normalise):
    got = group_advantages(kind, REWARDS, GROUPS, normalise=normalise)
    assert got.dtype == np.float32
    assert got.shape == (10,)
    assert got.tolist() == pytest.approx(by_hand(kind, REWARDS, GROUPS, normalise), rel=1e-5, abs=1e-6)


def test_every_algorithm_of_the_run_file_has_a_baseline():
    from typing import get_args

    from myxa.core.config.learning import AlgoKind

    assert set(BASELINES) == set(get_args(AlgoKind))


@pytest.mark.parametrize("kind", COMPARING)
@pytest.mark.parametrize("value", [0.1, 0.3, 1 / 3, 1e8, -0.7, 0.0])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_equal_rewards_give_exactly_zero_and_no_amplified_rounding(kind, value, size):
    got = group_advantages(kind, np.full(size, value), [5] * size)
    assert got.tolist() == [0.0] * size


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-5, 5, width=32), st.integers(0, 4)), min_size=1, max_size=30),
    st.sampled_from(COMPARING),
    st.randoms(use_true_random=False),
)
def test_order_of_samples_does_not_matter_and_groups_sum_to_zero(rows, kind, random):
    order = list(range(len(rows)))
    random.shuffle(order)
    rewards, groups = [r for r, _ in rows], [g for _, g in rows]
    plain = group_advantages(kind, rewards, groups)
    shuffled = group_advantages(kind, [rewards[i] for i in order], [groups[i] for i in order])
    assert np.allclose(plain[order], shuffled, rtol=1e-4, atol=1e-5)
    assert bool(np.isfinite(plain).all())
    for group in set(groups):
        members = plain[[i for i, g in enumerate(groups) if g == group]]
        assert abs(float(members.sum())) <= 1e-4 * (1 + float(np.abs(members).sum()))


def test_nothing_is_nothing():
    assert group_advantages("grpo", [], []).shape == (0,)
