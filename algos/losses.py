"""Loss of every token, before weights and means: plain functions from tensors to tensors.

Every function returns its loss per token, so that one reducer (in `objective.py`) serves them all and no algorithm
has its own denominator. Notation: A advantage, r ratio live/old, V value, G return. Shapes: [T] throughout.
A critic's loss is here too; its targets are the returns of `advantages.gae`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from .ratios import Segments

Divergence = Literal["tv", "kl"]


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A per-token loss and where its bounds acted."""

    loss_T: Tensor
    """float [T], differentiable."""
    clipped_T: Tensor
    """bool [T]: the clip changed the loss (or the weight, for CISPO), or the trust region masked the token (DPPO)."""
    dual_clipped_T: Tensor
    """bool [T]: the dual clip changed the loss."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Further numbers per token, [T] each; their means become metrics."""

    @classmethod
    def unbounded(cls, loss_T: Tensor) -> TokenLoss:
        """Nothing acted."""
        nowhere_T = torch.zeros_like(loss_T, dtype=torch.bool)
        return cls(loss_T, nowhere_T, nowhere_T)


def ppo_clip_loss(
    ratio_T: Tensor, advantages_T: Tensor, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> TokenLoss:
    """max(-r A, -clip(r, 1 - low, 1 + high) A); with dual clip c > 1 and A < 0: min of that and -c A.

    PPO, arXiv 1707.06347, eq. 7; asymmetric bounds ("clip-higher"): DAPO, arXiv 2503.14476, eq. 10; dual clip:
    arXiv 1912.09729, eq. 5. With `ratios.sequence_ratio` it is GSPO, arXiv 2507.18071, eq. 5. `dual_clip` 0 = off;
    otherwise it exceeds 1.
    """
    plain_T = -ratio_T * advantages_T
    bounded_T = -ratio_T.clamp(1 - clip_low, 1 + clip_high) * advantages_T
    loss_T = torch.maximum(plain_T, bounded_T)
    clipped_T = bounded_T > plain_T
    dual_clipped_T = torch.zeros_like(clipped_T)
    if dual_clip:
        ceiling_T = -dual_clip * advantages_T
        dual_clipped_T = (advantages_T < 0) & (loss_T > ceiling_T)
        loss_T = torch.where(dual_clipped_T, ceiling_T, loss_T)
    return TokenLoss(loss_T, clipped_T, dual_clipped_T)


def cispo_loss(
    logprobs_T: Tensor, ratio_T: Tensor, advantages_T: Tensor, clip_low: float, clip_high: float
) -> TokenLoss:
    """-sg(clip(r, 1 - low, 1 + high)) A logp: the weight is clipped, every token keeps its gradient. CISPO, MiniMax-M1,
    arXiv 2506.13585, eq. 4. Usual bounds: low >= 1 (none), high about 4."""
    fixed_T = ratio_T.detach()
    bounded_T = fixed_T.clamp(max(1 - clip_low, 0.0), 1 + clip_high)
    loss_T = -bounded_T * advantages_T * logprobs_T
    clipped_T = bounded_T != fixed_T
    return TokenLoss(loss_T, clipped_T, torch.zeros_like(clipped_T))


def dppo_loss(
    ratio_T: Tensor,
    live_T: Tensor,
    behaviour_T: Tensor,
    advantages_T: Tensor,
    divergence: Divergence,
    bound_low: float,
    bound_high: float,
) -> TokenLoss:
    """-M r A with r = live/behaviour. M is 0 where the update would move a token further out of the trust region: the
    divergence D exceeds its bound, and the probability p has left that of the sampling policy q on the side that A
    pushes to. `bound_high` is for A > 0, `bound_low` for A < 0.

        tv   D = |p - q|
        kl   D = q log(q / p) + (1 - q) log((1 - q) / (1 - p))

    DPPO, arXiv 2602.04879, its two binary divergences: of the sampled token against all others.
    """
    log_p_T, log_q_T = live_T.detach(), behaviour_T.detach()
    p_T, q_T = log_p_T.exp().clamp(max=1), log_q_T.exp().clamp(max=1)  # rounding may put a certain token's above 1
    if divergence == "tv":
        divergence_T = (p_T - q_T).abs()
    else:
        least = torch.finfo(p_T.dtype).tiny
        other_T = torch.log1p(-q_T).clamp(min=math.log(least)) - torch.log1p(-p_T).clamp(min=math.log(least))
        divergence_T = q_T * (log_q_T - log_p_T) + (1 - q_T) * other_T
    is_up_T = advantages_T > 0
    is_leaving_T = torch.where(is_up_T, p_T > q_T, (p_T < q_T) & (advantages_T < 0))
    bound_T = torch.where(is_up_T, p_T.new_tensor(bound_high), p_T.new_tensor(bound_low))
    masked_T = is_leaving_T & (divergence_T > bound_T)
    loss_T = torch.where(masked_T, 0.0, -ratio_T * advantages_T)
    return TokenLoss(loss_T, masked_T, torch.zeros_like(masked_T))


def sapo_loss(ratio_T: Tensor, advantages_T: Tensor, tau_pos: float, tau_neg: float) -> TokenLoss:
    """-(4 / tau) sigmoid(tau (r - 1)) A; tau is `tau_pos` where A > 0, else `tau_neg`. At r = 1 its gradient is that of
    -r A; away from it the gradient fades, on both sides. Nothing is clipped. SAPO, arXiv 2511.20347; its
    temperatures: 1 and 1.05."""
    tau_T = torch.where(advantages_T > 0, ratio_T.new_tensor(tau_pos), ratio_T.new_tensor(tau_neg))
    return TokenLoss.unbounded(-torch.sigmoid(tau_T * (ratio_T - 1)) * (4 / tau_T) * advantages_T)


def reinforce_loss(logprobs_T: Tensor, ratio_T: Tensor, advantages_T: Tensor) -> TokenLoss:
    """-sg(r) A logp, nothing clipped. With r = 1 this is REINFORCE (Williams 1992), else its off-policy form."""
    return TokenLoss.unbounded(-ratio_T.detach() * advantages_T * logprobs_T)


def sft_loss(logprobs_T: Tensor) -> TokenLoss:
    """-logp: cross entropy of the demonstration's tokens. Advantages have no part in it."""
    return TokenLoss.unbounded(-logprobs_T)


@dataclass(frozen=True, slots=True)
class PairTerms:
    """Of P pairs: (better answer, worse one) of each, float [P, 2]."""

    loss_P: Tensor
    """float [P], differentiable."""
    rewards_P2: Tensor
    """Implicit rewards, by which accuracy and margin are counted."""


def pair_loss(
    name: str,
    live_P2: Tensor,
    reference_P2: Tensor | None,
    lengths_P2: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    margin: float | Tensor = 0.0,
    center: float = 0.0,
) -> PairTerms:
    """Loss of pairs from the sums of log-probs of their answers (`live_P2`, with gradient; `reference_P2`, None for
    simpo and orpo) and their numbers of tokens, or from their scores r (`live_P2`). With h = (live - reference) of the
    better answer less that of the worse one, m = mean log-prob per token, s = log sigmoid, e = label_smoothing:

        dpo      -(1 - e) s(beta h) - e s(-beta h)                     arXiv 2305.18290, eq. 7; e: its authors' cDPO
        ipo      (h - 1 / (2 beta))^2, h of means per token            arXiv 2310.12036, eq. 17; means as in TRL
        hinge    max(0, 1 - beta h)                                    SLiC, arXiv 2305.10425; RSO, arXiv 2309.06657
        simpo    as dpo with beta (m_better - m_worse) - margin        arXiv 2405.14734, eq. 6
        orpo     -m_better - beta s(log odds of exp m, of both)        arXiv 2403.07691, eq. 6
        bradley_terry
                 -s(r_better - r_worse - margin) + center (r_better + r_worse)^2
                                                                       arXiv 2203.02155, eq. 1; the rest as in TRL
    """
    if name == "bradley_terry":
        loss_P = -functional.logsigmoid(live_P2[:, 0] - live_P2[:, 1] - margin) + center * live_P2.sum(1).square()
        return PairTerms(loss_P, live_P2.detach())
    means_P2 = live_P2 / lengths_P2
    if name == "orpo":
        odds_P2 = means_P2 - torch.log1p(-means_P2.exp().clamp(max=1 - torch.finfo(means_P2.dtype).eps))
        compared_P = functional.logsigmoid(odds_P2[:, 0] - odds_P2[:, 1])
        return PairTerms(-means_P2[:, 0] - beta * compared_P, beta * means_P2.detach())
    if name == "simpo" or reference_P2 is None:
        gain_P2 = means_P2
    else:
        gain_P2 = live_P2 - reference_P2
        gain_P2 = gain_P2 / lengths_P2 if name == "ipo" else gain_P2
    h_P = gain_P2[:, 0] - gain_P2[:, 1]
    if name == "ipo":
        loss_P = (h_P - 1 / (2 * beta)).square()
    elif name == "hinge":
        loss_P = torch.relu(1 - beta * h_P)
    else:
        x_P = beta * h_P - margin
        loss_P = -(1 - label_smoothing) * functional.logsigmoid(x_P) - label_smoothing * functional.logsigmoid(-x_P)
    return PairTerms(loss_P, beta * gain_P2.detach())


def opsm_keep(live_T: Tensor, behaviour_T: Tensor, advantages_T: Tensor, segments: Segments, delta: float) -> Tensor:
    """Bool [T]: off-policy sequence masking; False where A < 0 and the sample's mean of (behaviour - live) exceeds
    `delta`.

    DeepSeek-V3.2, arXiv 2512.02556: the old policy is the one that the inference engine sampled from, so that staleness
    and the engine's mismatch both count. Only samples that the live policy has already left behind are dropped.
    """
    drift_S = segments.mean_S(behaviour_T.detach() - live_T.detach())
    return ~((advantages_T < 0) & (segments.spread_T(drift_S) > delta))


def value_loss(values_T: Tensor, old_T: Tensor, returns_T: Tensor, value_clip: float) -> tuple[Tensor, Tensor]:
    """Loss, and where the bound decides it and the token has no gradient, [T] each.

    max((V - G)^2, (old + clamp(V - old, -c, c) - G)^2); `value_clip` c = 0: (V - G)^2. The square of PPO's objective
    (arXiv 1707.06347, eq. 9) with the bound of its authors' implementation: what would go further than c from the value
    before the update, towards the return or past it, is not pulled any more.
    """
    plain_T = (values_T - returns_T).square()
    if value_clip == 0:
        return plain_T, torch.zeros_like(plain_T, dtype=torch.bool)
    moved_T = (values_T - old_T).detach()
    is_beyond_T = moved_T.abs() > value_clip
    at_bound_T = (old_T + moved_T.clamp(-value_clip, value_clip) - returns_T).square()
    is_clipped_T = is_beyond_T & (at_bound_T > plain_T.detach())
    return torch.where(is_clipped_T, at_bound_T, plain_T), is_clipped_T


def value_sums(values_T: Tensor, returns_T: Tensor) -> dict[str, Tensor]:
    """0-dim float64 sums over tokens, additive over micro-batches and ranks, of which `value_metrics` are made."""
    values_T, returns_T = values_T.detach().double(), returns_T.detach().double()
    gap_T = returns_T - values_T
    count = torch.tensor(float(len(values_T)), dtype=torch.float64, device=values_T.device)
    return {
        "count": count,
        "values": values_T.sum(),
        "returns": returns_T.sum(),
        "returns_squared": returns_T.square().sum(),
        "gaps": gap_T.sum(),
        "gaps_squared": gap_T.square().sum(),
    }


def value_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """`value_mean`, and `explained_variance` = 1 - var(G - V) / var(G): 1 for a perfect critic, 0 for a constant one
    and where all returns are alike, below 0 for one that is worse than a constant."""
    count = max(1.0, sums["count"])
    variance = _variance(sums["returns"], sums["returns_squared"], count)
    unexplained = _variance(sums["gaps"], sums["gaps_squared"], count)
    explained = 1.0 - unexplained / variance if variance > 0 else 0.0
    return {"value_mean": sums["values"] / count, "explained_variance": explained}


def _variance(total: float, squares: float, count: float) -> float:
    return max(0.0, squares / count - (total / count) ** 2)
