"""Importance ratios, and the weights that correct for tokens sampled by another policy than the one trained.

Three policies, never to be confused: *behaviour* produced the token (engine's log-prob, never overwritten),
*proximal* (`train`) is the trainer's policy at the start of the step, *live* is being changed now.

    ratio    live / old          carries the gradient, is clipped by the loss
    q        train / behaviour   a constant weight on the loss: staleness and engine mismatch

    tis      w = clamp(q, floor, cap)             Yao et al. 2025, truncated importance sampling
    icepop   w = q inside [low, high], else 0     Ring-1T, arXiv 2510.18855
    mis      at level token q_t, sequence prod q, geometric (prod q)^(1/n):
             truncate min(w, high); clip clamp(w, low, high); mask: w, but tokens outside [low, high] leave the loss
    reject   tokens (samples) whose weight lies outside [low, high] leave the loss
    veto     samples with any token of q < threshold leave the loss
             Liu et al. 2025, masked importance sampling
    normalise  w / mean(w), at level token or sequence

A weight of 0 keeps the token in KL and entropy terms; leaving the loss (`keep_T` False) removes it there too.
Denominators of means never change by either. All results are detached unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from .kl import MAX_EXPONENT
from .segments import Segments

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
    """Geometric mean of live / old over each sample's tokens, spread to its tokens, [T], differentiable. GSPO,
    arXiv 2507.18071, eq. 7."""
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
    """Truncated importance sampling; `cap` and `floor` are ratios."""
    q_T = torch.exp(log_q_T)
    return TokenWeights(q_T.clamp(floor, cap), torch.ones_like(q_T, dtype=torch.bool), (q_T > cap) | (q_T < floor))


def icepop_weights(log_q_T: Tensor, low: float, high: float) -> TokenWeights:
    """Zero weight (so zero gradient) outside [low, high]; the token stays in the other terms."""
    q_T = torch.exp(log_q_T)
    outside_T = _outside(q_T, low, high)
    return TokenWeights(q_T.masked_fill(outside_T, 0), torch.ones_like(outside_T), outside_T)


def mis_weights(log_q_T: Tensor, mode: Mode, low: float, high: float) -> TokenWeights:
    """Masked importance sampling of weights that `log_weight` brought to their level."""
    w_T = torch.exp(log_q_T)
    whole_T = torch.ones_like(w_T, dtype=torch.bool)
    if mode == "truncate":
        return TokenWeights(w_T.clamp(max=high), whole_T, w_T > high)
    outside_T = _outside(w_T, low, high)
    if mode == "clip":
        return TokenWeights(w_T.clamp(low, high), whole_T, outside_T)
    return TokenWeights(w_T, ~outside_T, outside_T)


def rejection(log_q_T: Tensor, low: float, high: float) -> Tensor:
    """Bool [T]: True where the (token's or sample's) weight lies inside [low, high] and stays."""
    return ~_outside(torch.exp(log_q_T), low, high)


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


def _outside(x_T: Tensor, low: float, high: float) -> Tensor:
    return (x_T < low) | (x_T > high)
