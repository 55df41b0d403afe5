"""From one advantage per sample to one per token: broadcasting, KL in the reward, discounting, GAE, whitening.

Samples are unpadded. Time counts the tokens that the model generated: others (tool replies) are not here, so they
neither discount nor receive. The scan is a few matrix products per 128 tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .ratios import ReduceSums, Segments

CHUNK = 128


def discounted_sums(x_SL: Tensor, factor: float) -> Tensor:
    """[S, L]: y_t = sum over s >= t of factor^(s - t) x_s along the last axis; `factor` in [0, 1]. Inside a chunk of
    128 one product with the matrix of powers, between chunks a carry: L / 128 steps, not L."""
    if factor == 1.0:
        return x_SL.flip(-1).cumsum(-1).flip(-1)
    out_SL = torch.zeros_like(x_SL)
    carry_S = x_SL.new_zeros(x_SL.shape[0])
    for stop in range(x_SL.shape[1], 0, -CHUNK):
        start = max(stop - CHUNK, 0)
        step_C = torch.arange(stop - start, device=x_SL.device, dtype=x_SL.dtype)
        ahead_CC = step_C[None, :] - step_C[:, None]
        powers_CC = torch.where(ahead_CC >= 0, factor ** ahead_CC.clamp(min=0), 0.0).to(x_SL.dtype)
        tail_C = (factor ** (stop - start - step_C)).to(x_SL.dtype)
        block_SC = x_SL[:, start:stop] @ powers_CC.T + carry_S[:, None] * tail_C[None, :]
        out_SL[:, start:stop] = block_SC
        carry_S = block_SC[:, 0]
    return out_SL


def gae(
    rewards_T: Tensor, values_T: Tensor, segments: Segments, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(advantages, returns), float [T] each, detached. delta_t = reward_t + gamma V_{t+1} - V_t
    with V = 0 behind the last token; A_t = sum (gamma lam)^(s - t) delta_s; G_t = A_t + V_t. GAE, arXiv 1506.02438, eq.
    16."""
    rewards_SL = segments.padded_SL(rewards_T.detach())
    values_SL = segments.padded_SL(values_T.detach().to(rewards_T.dtype))
    behind_S1 = values_SL.new_zeros((values_SL.shape[0], min(1, values_SL.shape[1])))
    next_SL = torch.cat([values_SL[:, 1:], behind_S1], dim=1)
    advantages_SL = discounted_sums(rewards_SL + gamma * next_SL - values_SL, gamma * lam)
    return segments.flat_T(advantages_SL), segments.flat_T(advantages_SL + values_SL)


WHITEN_EPS = 1e-8


def token_advantages(
    kind: str,
    advantages_S: Tensor,
    segments: Segments,
    *,
    kl_T: Tensor | None = None,
    kl_coef: float = 0.0,
    gamma: float = 1.0,
    lam: float = 1.0,
    values_T: Tensor | None = None,
    turn_rewards_T: Tensor | None = None,
) -> Tensor:
    """Float [T]: advantage of every token before whitening, detached.

    `advantages_S` is `group_advantages` of the kind, float [S]. `kl_T` [T] (needed iff `kl_coef` > 0) is a KL
    estimate towards the reference on log-probs without gradient.

        others                 A_t = a
        reinforce_pp_baseline  A_t = a - kl_coef k_t                                     arXiv 2501.03262, section 3
        reinforce_pp           rho_t = -kl_coef k_t, plus R at the last token; A_t = sum gamma^(s-t) rho_s
                               (`turn_rewards_T`: what turns earned beside R, at their last tokens)
        ppo                    the same rho; GAE with `values_T` (0 when there is no critic)
    """
    scalar_T = segments.spread_T(advantages_S.detach())
    penalty_T = -kl_coef * kl_T.detach() if kl_coef and kl_T is not None else torch.zeros_like(scalar_T)
    if kind not in ("reinforce_pp", "ppo"):
        return scalar_T + penalty_T
    rewards_T = penalty_T + torch.where(segments.last_T(), scalar_T, 0.0)
    if turn_rewards_T is not None:
        rewards_T = rewards_T + turn_rewards_T.detach()
    if kind == "reinforce_pp":
        return segments.flat_T(discounted_sums(segments.padded_SL(rewards_T), gamma))
    values = torch.zeros_like(rewards_T) if values_T is None else values_T
    return gae(rewards_T, values, segments, gamma, lam)[0]


def less_kl(advantages_T: Tensor, kl_T: Tensor, kl_coef: float) -> Tensor:
    """Float [T]: A_t - kl_coef k_t, for every kind. With k1 and a
    teacher as reference the second term is the policy gradient of the reverse KL per token, log-ratio by log-ratio
    (on-policy distillation, arXiv 2306.13649 with the reverse KL; the discount is 0)."""
    return advantages_T - kl_coef * kl_T.detach()


def whiten(advantages_T: Tensor, mask_T: Tensor, reduce_sums: ReduceSums | None = None) -> Tensor:
    """(A - mean) / sqrt(var + 1e-8) over all unmasked tokens of all ranks, unbiased variance; 0 at masked tokens.

    `reduce_sums` adds a float64 [3] vector (sum, sum of squares, count) over ranks; None: this rank is alone. Every
    rank must call, also one without tokens (its tensors are [0]). Nothing to whiten (no token at all, or a single
    one) gives zeros, never NaN.
    """
    mask_T = mask_T.bool()
    wide_T = torch.where(mask_T, advantages_T.detach().double(), 0.0)
    sums_3 = torch.stack([wide_T.sum(), wide_T.square().sum(), mask_T.sum().double()])
    if reduce_sums is not None:
        sums_3 = reduce_sums(sums_3)
    count = sums_3[2].clamp(min=1)
    mean = sums_3[0] / count
    variance = (sums_3[1] / count - mean.square()).clamp(min=0) * count / (count - 1).clamp(min=1)
    white_T = torch.where(mask_T, (wide_T - mean) * torch.rsqrt(variance + WHITEN_EPS), 0.0)
    return white_T.to(advantages_T.dtype)
