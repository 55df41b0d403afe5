"""A critic's loss, and how well it tells returns.

Knows values and returns per token. Must not know models, or how advantages came about (`returns.py`: GAE, arXiv
1506.02438, whose returns are the targets here).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """Per token."""

    loss_T: Tensor
    """float [T], differentiable."""
    is_clipped_T: Tensor
    """bool [T]: the bound decides, and the token has no gradient."""


def value_loss(values_T: Tensor, old_T: Tensor, returns_T: Tensor, value_clip: float) -> ValueLoss:
    """max((V - G)^2, (old + clamp(V - old, -c, c) - G)^2) per token, float [T] each; `value_clip` c = 0: (V - G)^2.

    The square of PPO's objective (arXiv 1707.06347, eq. 9) with the bound of its authors' implementation: what would
    go further than c from the value before the update, towards the return or past it, is not pulled any more.
    """
    plain_T = (values_T - returns_T).square()
    if value_clip == 0:
        return ValueLoss(plain_T, torch.zeros_like(plain_T, dtype=torch.bool))
    moved_T = (values_T - old_T).detach()
    is_beyond_T = moved_T.abs() > value_clip
    at_bound_T = (old_T + moved_T.clamp(-value_clip, value_clip) - returns_T).square()
    is_clipped_T = is_beyond_T & (at_bound_T > plain_T.detach())
    return ValueLoss(torch.where(is_clipped_T, at_bound_T, plain_T), is_clipped_T)


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
    left = _variance(sums["gaps"], sums["gaps_squared"], count)
    return {
        "value_mean": sums["values"] / count,
        "explained_variance": 1.0 - left / variance if variance > 0 else 0.0,
    }


def _variance(total: float, squares: float, count: float) -> float:
    return max(0.0, squares / count - (total / count) ** 2)
