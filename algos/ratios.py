"""Importance ratios, and the weights that correct for tokens sampled by another policy than the one trained.

Three policies, never to be confused: *behaviour* produced the token (engine's log-prob, never overwritten),
*proximal* (`train`) is the trainer's policy at the start of the step, *live* is being changed now.

    ratio    live / old          carries the gradient, is clipped by the loss
    q        train / behaviour   a constant weight on the loss: staleness and engine mismatch

A weight of 0 keeps the token in KL and entropy terms; leaving the loss (`keep_T` False) removes it there too.
Denominators of means never change by either. All results are detached unless said otherwise.

`Segments` says which token belongs to which sample: sums and means per sample without padding. T = loss tokens of a
micro-batch, all samples one after another; S = samples. torch.nested lacks the scans needed here.

`kl_terms` estimates KL(live policy || reference) from log-probs of sampled tokens. Source: J. Schulman, "Approximating
KL divergence" (2020), k1, k2, k3; the ratio-weighted variant is the unbiased estimate of DeepSeek-V3.2 (arXiv
2512.02556, section on scaling GRPO).

    x = live - reference
    k1 = x                      unbiased value; as a loss its gradient has mean 0
    k2 = x^2 / 2                biased value
    k3 = exp(-x) - 1 + x        unbiased value, never negative

As a loss, E[grad k] on the policy's own tokens is grad KL(live || reference) for k2; for k3 it is grad KL(reference ||
live). Weighted by live / behaviour, k1 and k3 have the right value and gradient whatever policy the tokens are from. As
a constant factor of grad log pi (rewards, advantages) only k1 gives grad KL. `AlgoConfig` refuses the other cases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from ..core.config.learning import KlKind


@dataclass(frozen=True, slots=True)
class Segments:
    """Owner of every loss token. A sample may have no token."""

    sample_T: Tensor
    """int64 [T], each in [0, num_samples), never decreasing."""
    num_samples: int

    def sum_S(self, x_T: Tensor) -> Tensor:
        """[S]: sum per sample; 0 for one without tokens. Differentiable."""
        zero_S = torch.zeros(self.num_samples, dtype=x_T.dtype, device=x_T.device)
        return zero_S.index_add(0, self.sample_T, x_T)

    def count_S(self) -> Tensor:
        """int64 [S]: tokens per sample."""
        return self.sum_S(torch.ones_like(self.sample_T))

    def mean_S(self, x_T: Tensor) -> Tensor:
        """[S]: mean per sample; 0 for one without tokens. Differentiable."""
        return self.sum_S(x_T) / self.count_S().clamp(min=1)

    def spread_T(self, x_S: Tensor) -> Tensor:
        """[T]: every token gets its sample's value."""
        return x_S[self.sample_T]

    def last_T(self) -> Tensor:
        """Bool [T]: True at the last token of each sample."""
        behind_T = torch.cat([self.sample_T[1:], self.sample_T.new_full((min(1, len(self.sample_T)),), -1)])
        return self.sample_T != behind_T

    def padded_SL(self, x_T: Tensor) -> Tensor:
        """[S, L]: each sample's tokens from the left, zeros behind; L = longest count."""
        columns_T, longest = self._columns()
        padded_SL = torch.zeros((self.num_samples, longest), dtype=x_T.dtype, device=x_T.device)
        padded_SL[self.sample_T, columns_T] = x_T
        return padded_SL

    def flat_T(self, x_SL: Tensor) -> Tensor:
        """[T]: undoes `padded_SL`."""
        return x_SL[self.sample_T, self._columns()[0]]

    def _columns(self) -> tuple[Tensor, int]:
        """Column in the padded form of each token, and the number of columns."""
        count_S = self.count_S()
        begin_S = count_S.cumsum(0) - count_S
        place_T = torch.arange(len(self.sample_T), device=self.sample_T.device)
        return place_T - begin_S[self.sample_T], int(count_S.max()) if self.num_samples else 0


MAX_EXPONENT = 20.0
"""Exponents are bounded before `exp`, so that no ratio of two log-probs can overflow; e^20 is 5e8."""


def kl_terms(kind: KlKind, live_T: Tensor, reference_T: Tensor, ratio_T: Tensor | None = None) -> Tensor:
    """Per-token KL estimate, float [T] in nats, differentiable in `live_T` (and `ratio_T`). `ratio_T` (live / sampling
    policy, with gradient) makes it the unbiased variant: the estimate is multiplied by the ratio."""
    x_T = live_T - reference_T.detach()
    if kind == "k1":
        k_T = x_T
    elif kind == "k2":
        k_T = x_T.square() / 2
    else:
        k_T = torch.exp((-x_T).clamp(max=MAX_EXPONENT)) - 1 + x_T
    return k_T if ratio_T is None else ratio_T * k_T


Level = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "clip", "mask"]
ReduceSums = Callable[[Tensor], Tensor]
"""Adds a small float64 vector over all ranks and returns the sum (all-reduce); identity on one rank."""


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """What a correction does to each token."""

    weight_T: Tensor
    """float [T], >= 0, detached: factor on the policy loss."""
    keep_T: Tensor
    """bool [T]: False where the token leaves policy, KL and entropy terms."""
    cut_T: Tensor
    """bool [T]: True where the weight was bounded, zeroed or the token removed; for metrics."""
    removed_by: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """bool [T] per rule that may remove whole tokens or samples: where it did; for metrics."""


def ratio(live_T: Tensor, old_T: Tensor) -> Tensor:
    """Live / old per token, [T], gradient through `live_T`. The exponent is bounded to +-20 (no gradient beyond)."""
    return torch.exp((live_T - old_T.detach()).clamp(-MAX_EXPONENT, MAX_EXPONENT))


def sequence_ratio(live_T: Tensor, old_T: Tensor, segments: Segments) -> Tensor:
    """Geometric mean of live / old over a sample's tokens, [T], differentiable. GSPO, arXiv 2507.18071, eq. 7."""
    mean_S = segments.mean_S(live_T - old_T.detach())
    return torch.exp(segments.spread_T(mean_S).clamp(-MAX_EXPONENT, MAX_EXPONENT))


def log_weight(train_T: Tensor, behaviour_T: Tensor, segments: Segments, level: Level) -> Tensor:
    """Log q at `level`, spread to tokens, bounded to +-20; [T], detached."""
    log_q_T = (train_T - behaviour_T).detach()
    if level == "sequence":
        log_q_T = segments.spread_T(segments.sum_S(log_q_T))
    elif level == "geometric":
        log_q_T = segments.spread_T(segments.mean_S(log_q_T))
    return log_q_T.clamp(-MAX_EXPONENT, MAX_EXPONENT)


def unit_weights(like_T: Tensor) -> TokenWeights:
    whole_T = torch.ones_like(like_T, dtype=torch.bool)
    return TokenWeights(torch.ones_like(like_T), whole_T, ~whole_T)


def tis_weights(log_q_T: Tensor, cap: float, floor: float = 0.0) -> TokenWeights:
    """W = clamp(q, floor, cap): truncated importance sampling, Yao et al. 2025."""
    q_T = torch.exp(log_q_T)
    return TokenWeights(q_T.clamp(floor, cap), torch.ones_like(q_T, dtype=torch.bool), (q_T > cap) | (q_T < floor))


def icepop_weights(log_q_T: Tensor, low: float, high: float) -> TokenWeights:
    """W = q inside [low, high], else 0: Ring-1T, arXiv 2510.18855. The token stays in the other terms."""
    q_T = torch.exp(log_q_T)
    outside_T = outside(q_T, low, high)
    return TokenWeights(q_T.masked_fill(outside_T, 0), torch.ones_like(outside_T), outside_T)


def mis_weights(log_q_T: Tensor, mode: Mode, low: float, high: float) -> TokenWeights:
    """Masked importance sampling, Liu et al. 2025, of weights that `log_weight` brought to their level. truncate:
    min(w, high); clip: clamp(w, low, high); mask: w, but tokens outside [low, high] leave the loss."""
    w_T = torch.exp(log_q_T)
    whole_T = torch.ones_like(w_T, dtype=torch.bool)
    if mode == "truncate":
        return TokenWeights(w_T.clamp(max=high), whole_T, w_T > high)
    outside_T = outside(w_T, low, high)
    if mode == "clip":
        return TokenWeights(w_T.clamp(low, high), whole_T, outside_T)
    return TokenWeights(w_T, ~outside_T, outside_T)


def veto(train_T: Tensor, behaviour_T: Tensor, segments: Segments, threshold: float) -> Tensor:
    """Bool [T]: False for all tokens of a sample that holds any token with q < `threshold`."""
    log_q_T = log_weight(train_T, behaviour_T, segments, "token")
    hit_T = torch.exp(log_q_T) < threshold
    return segments.spread_T(segments.sum_S(hit_T.long())) == 0


def weight_sums(weight_T: Tensor, segments: Segments, level: Level) -> Tensor:
    """float64 [2]: (sum of weights, their count) over tokens, or over samples that have any. Add them over
    micro-batches and ranks; their quotient is the mean by which `normalise` divides. A mean taken inside one
    micro-batch would make the loss depend on how the batch was cut."""
    wide_T = weight_T.double()
    if level == "token":
        return torch.stack([wide_T.sum(), torch.ones_like(wide_T).sum()])
    return torch.stack([segments.mean_S(wide_T).sum(), (segments.count_S() > 0).sum().double()])


def normalise(weights: TokenWeights, mean: float | Tensor) -> TokenWeights:
    """Weights divided by their global mean (see `weight_sums`); a mean of 0 leaves them as they are (all are 0)."""
    mean_0 = torch.as_tensor(mean, dtype=weights.weight_T.dtype, device=weights.weight_T.device)
    safe_0 = torch.where(mean_0 > 0, mean_0, torch.ones_like(mean_0))
    return replace(weights, weight_T=weights.weight_T / safe_0)


def outside(x_T: Tensor, low: float, high: float) -> Tensor:
    """Bool [T]."""
    return (x_T < low) | (x_T > high)
