"""Log-probability and entropy of chosen tokens from hidden states, in float32, without keeping all logits.

With temperature tau: `z = h @ W.T / tau`, `lp = z[y] - logsumexp(z)`, `H = -sum_v p_v log p_v`. Engines sample from
softmax(z / tau), so the trainer must divide too. Logits of a chunk of rows are made, used and forgotten; backward
makes them again, so memory is one chunk, not [M, vocabulary].

Library considered: Liger's fused linear cross entropy. Not used: it fixes the loss to cross entropy, whereas policy
losses need the log-probs themselves, and it needs Triton.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .tensors import recomputed

CHUNK_LOGITS = 1 << 26
"""Most logits alive at a time (256 MiB of float32)."""


class TokenScores(NamedTuple):
    """What the policy says of M chosen tokens. A tuple, so that gradient hooks of DDP and FSDP see its tensors."""

    logprobs_M: Tensor
    """float32 [M], nats"""
    entropy_M: Tensor
    """float32 [M], nats: entropy of the whole distribution the token was drawn from; detached unless asked for."""


def score_tokens(
    hidden_Mh: Tensor, head_Vh: Tensor, targets_M: Tensor, temperature: float, *, needs_entropy_grad: bool = False
) -> TokenScores:
    """Score `targets_M` (int64 [M]) under softmax(hidden_Mh @ head_Vh.T / temperature)."""
    num_rows, vocab_size = hidden_Mh.shape[0], head_Vh.shape[0]
    chunk = max(1, CHUNK_LOGITS // vocab_size)
    if num_rows <= chunk:
        return TokenScores(*_score_rows(hidden_Mh, head_Vh, targets_M, temperature, needs_entropy_grad))
    parts: list[tuple[Tensor, Tensor]] = []
    for start in range(0, num_rows, chunk):
        rows = slice(start, start + chunk)
        arguments = (hidden_Mh[rows], head_Vh, targets_M[rows], temperature, needs_entropy_grad)
        parts.append(recomputed(_score_rows, *arguments) if torch.is_grad_enabled() else _score_rows(*arguments))
    return TokenScores(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))


def _score_rows(
    hidden_Mh: Tensor, head_Vh: Tensor, targets_M: Tensor, temperature: float, needs_entropy_grad: bool
) -> tuple[Tensor, Tensor]:
    logits_MV = functional.linear(hidden_Mh, head_Vh).float()
    if temperature != 1.0:
        logits_MV = logits_MV / temperature
    all_MV = logits_MV.log_softmax(dim=-1)
    logprobs_M = -functional.nll_loss(all_MV, targets_M, reduction="none")
    with torch.set_grad_enabled(needs_entropy_grad and torch.is_grad_enabled()):
        entropy_M = -(all_MV.exp() * all_MV).sum(dim=-1)
    return logprobs_M, entropy_M
