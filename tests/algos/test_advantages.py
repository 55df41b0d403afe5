"""Token advantages, discounted scans, GAE and whitening against explicit loops."""

from __future__ import annotations

import statistics
from typing import get_args

import pytest
import torch
from tests.algos.conftest import options

from myxa.algos.advantages import CHUNK, discounted_sums, gae, less_kl, token_advantages, whiten
from myxa.algos.objective import needs_whitening
from myxa.algos.ratios import Segments
from myxa.core.config.learning import AlgoKind

# Sample 1 has no token.
OWNER = [0, 0, 0, 2, 2, 2]
SAMPLES = 4
KL = [0.1, -0.2, 0.3, 0.05, 0.0, 0.4]
VALUES = [0.5, 0.1, -0.4, 0.2, 0.3, 0.6]
SCALARS = [1.5, 2.5, -0.5, 8.0]


def segments() -> Segments:
    return Segments(torch.tensor(OWNER), SAMPLES)


def f64(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def trained(sample: int) -> list[int]:
    return [t for t, o in enumerate(OWNER) if o == sample]


def token_rewards(kl_coef: float) -> list[float]:
    rewards = [-kl_coef * k for k in KL]
    for sample in range(SAMPLES):
        if trained(sample):
            rewards[trained(sample)[-1]] += SCALARS[sample]
    return rewards


@pytest.mark.parametrize("kind", ["grpo", "gspo", "cispo", "dr_grpo", "rloo", "sft"])
def test_sample_advantage_is_given_to_every_trained_token(kind):
    got = token_advantages(kind, f64(SCALARS), segments())
    assert got.tolist() == [SCALARS[o] for o in OWNER]


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
@pytest.mark.parametrize("kl_coef", [0.0, 0.7])
def test_reinforce_pp_returns(gamma, kl_coef):
    got = token_advantages("reinforce_pp", f64(SCALARS), segments(), kl_T=f64(KL), kl_coef=kl_coef, gamma=gamma)
    want = [0.0] * len(OWNER)
    for sample in range(SAMPLES):
        for position, t in enumerate(trained(sample)):
            for ahead, s in enumerate(trained(sample)[position:]):
                want[t] += gamma**ahead * token_rewards(kl_coef)[s]
    assert got.tolist() == pytest.approx(want, abs=1e-12)


def test_reinforce_pp_baseline_subtracts_kl_per_token():
    got = token_advantages("reinforce_pp_baseline", f64(SCALARS), segments(), kl_T=f64(KL), kl_coef=0.5)
    want = [SCALARS[o] - 0.5 * k for o, k in zip(OWNER, KL, strict=True)]
    assert got.tolist() == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.95, 0.8), (1.0, 0.0)])
def test_ppo_gae(gamma, lam):
    got = token_advantages(
        "ppo", f64(SCALARS), segments(), kl_T=f64(KL), kl_coef=0.3, gamma=gamma, lam=lam, values_T=f64(VALUES)
    )
    want = [0.0] * len(OWNER)
    for sample in range(SAMPLES):
        carried = 0.0
        value_ahead = 0.0
        for t in reversed(trained(sample)):
            delta = token_rewards(0.3)[t] + gamma * value_ahead - VALUES[t]
            carried = delta + gamma * lam * carried
            want[t] = carried
            value_ahead = VALUES[t]
    assert got.tolist() == pytest.approx(want, abs=1e-12)


def test_gae_returns_are_advantages_plus_values():
    rewards, values = f64(token_rewards(0.0)), f64(VALUES)
    advantages, returns = gae(rewards, values, segments(), 0.9, 0.7)
    want = [a + v for a, v in zip(advantages.tolist(), VALUES, strict=True)]
    assert returns.tolist() == pytest.approx(want, abs=1e-12)


def test_ppo_without_critic_is_the_discounted_return():
    with_zero = token_advantages("ppo", f64(SCALARS), segments(), gamma=0.9, values_T=f64([0.0] * len(OWNER)))
    without = token_advantages("ppo", f64(SCALARS), segments(), gamma=0.9)
    assert without.tolist() == with_zero.tolist()


@pytest.mark.parametrize("kind", ["grpo", "reinforce_pp", "reinforce_pp_baseline", "ppo"])
def test_nothing_gives_nothing(kind):
    nothing = Segments(torch.zeros(0, dtype=torch.int64), 0)
    assert token_advantages(kind, torch.zeros(0), nothing, gamma=0.5).shape == (0,)


@pytest.mark.parametrize("kind", ["grpo", "rloo", "reinforce_pp"])
def test_kl_in_the_advantage_is_each_tokens_own_whatever_the_kind(kind):
    plain = token_advantages(kind, f64(SCALARS), segments())
    got = less_kl(plain, f64(KL), 0.5)
    want = [a - 0.5 * k for a, k in zip(plain.tolist(), KL, strict=True)]
    assert got.tolist() == pytest.approx(want)


@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 17])
@pytest.mark.parametrize("factor", [0.0, 0.5, 0.99, 1.0])
def test_chunked_scan_equals_the_loop(length, factor):
    x = torch.randn(3, length, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
    want = torch.zeros_like(x)
    for row in range(3):
        carried = 0.0
        for t in range(length - 1, -1, -1):
            carried = float(x[row, t]) + factor * carried
            want[row, t] = carried
    assert torch.allclose(discounted_sums(x, factor), want, rtol=0, atol=1e-10)
    assert torch.allclose(discounted_sums(x.float(), factor), want.float(), rtol=1e-4, atol=1e-4)


def test_whitening_equals_the_statistics_of_the_trained_tokens():
    values = [0.5, -1.0, 99.0, 2.0, 0.25, 99.0]
    mask = [1, 1, 0, 1, 1, 0]
    kept = [v for v, m in zip(values, mask, strict=True) if m]
    mean, spread = statistics.fmean(kept), (statistics.variance(kept) + 1e-8) ** 0.5
    got = whiten(f64(values), torch.tensor(mask))
    want = [(v - mean) / spread if m else 0.0 for v, m in zip(values, mask, strict=True)]
    assert got.tolist() == pytest.approx(want, abs=1e-12)


def test_whitening_over_ranks_equals_whitening_of_everything():
    gen = torch.Generator().manual_seed(3)
    values = torch.randn(40, generator=gen) * 5 + 100
    mask = torch.rand(40, generator=gen) > 0.3
    whole = whiten(values, mask)
    cuts = [slice(0, 7), slice(7, 7), slice(7, 30), slice(30, 40)]  # the second rank holds nothing
    seen: list[torch.Tensor] = []

    def gather(sums: torch.Tensor) -> torch.Tensor:
        seen.append(sums)
        return sums

    for cut in cuts:
        whiten(values[cut], mask[cut], gather)
    total = torch.stack(seen).sum(0)
    parts = [whiten(values[cut], mask[cut], lambda _: total) for cut in cuts]
    assert torch.allclose(torch.cat(parts), whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("values", "mask", "want"), [
    *(([0.1] * 3, mask, [0.0] * 3) for mask in ([0, 0, 0], [0, 1, 0], [1, 1, 1])), ([], [], []),
    ([1.0, float("nan"), 3.0], [1, 0, 1], [-(0.5**0.5), 0.0, 0.5**0.5]),  # what stands at masked tokens is ignored
    ([10000.0, 10001.0, 10002.0], [1, 1, 1], [-1.0, 0.0, 1.0]),  # a large offset, in single precision
])  # fmt: skip
def test_whitening_is_finite_whatever_the_values(values, mask, want):
    assert whiten(torch.tensor(values), torch.tensor(mask)).tolist() == pytest.approx(want, abs=1e-3)


def test_kinds_without_a_group_baseline_are_whitened_unless_that_is_off():
    kinds = get_args(AlgoKind)
    whitened = ["ppo", "reinforce_pp", "reinforce_pp_baseline"]
    assert [k for k in kinds if needs_whitening(options(kind=k))] == whitened
    assert not any(needs_whitening(options(kind=k, whiten=False)) for k in kinds)
