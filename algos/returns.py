"""Sums over the future: discounted returns and generalised advantage estimation, on unpadded samples.

Knows token-level rewards and values. Must not know what they mean. Time counts the tokens that the model generated:
masked tokens (tool replies) are skipped, they neither discount nor receive.
Library: scipy.signal.lfilter and torchaudio.functional.lfilter do the same scan, one on the CPU only, the other in a
package of 100 MB; torch's associative_scan is a prototype. The scan here is a few matrix products per 128 tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .segments import Segments

CHUNK = 128


def discounted_sums(x_SL: Tensor, factor: float) -> Tensor:
    """[S, L]: y_t = sum over s >= t of factor^(s - t) x_s along the last axis; `factor` in [0, 1].

    Inside a chunk of 128 one product with the matrix of powers, between chunks a carry: L / 128 steps, not L.
    """
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


def discounted_returns(rewards_T: Tensor, segments: Segments, gamma: float) -> Tensor:
    """Float [T]: return from each unmasked token to the end of its sample; 0 at masked tokens."""
    return segments.flat_T(discounted_sums(segments.padded_SL(rewards_T), gamma))


def gae(
    rewards_T: Tensor, values_T: Tensor, segments: Segments, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(advantages, returns), float [T] each, 0 at masked tokens, detached.

    delta_t = reward_t + gamma V_{t+1} - V_t with V = 0 behind the last token;
    A_t = sum (gamma lam)^(s - t) delta_s; G_t = A_t + V_t. GAE, arXiv 1506.02438, eq. 16.
    """
    rewards_SL = segments.padded_SL(rewards_T.detach())
    values_SL = segments.padded_SL(values_T.detach().to(rewards_T.dtype))
    behind_S1 = values_SL.new_zeros((values_SL.shape[0], min(1, values_SL.shape[1])))
    next_SL = torch.cat([values_SL[:, 1:], behind_S1], dim=1)
    advantages_SL = discounted_sums(rewards_SL + gamma * next_SL - values_SL, gamma * lam)
    return segments.flat_T(advantages_SL), segments.flat_T(advantages_SL + values_SL)
