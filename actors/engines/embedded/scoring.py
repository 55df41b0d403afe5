"""Log-probs of tokens that are given instead of drawn: one forward pass over a whole sequence, and nothing is kept.

Knows the decoder. Must not know slots, threads or who asks.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ....core.samples import F32, I32
from .arrays import as_tensor
from .model import Decoder
from .weights import DecoderWeights

LOGITS_AT_ONCE = 1 << 24
"""Numbers: 64 MiB of logits."""


class _OwnAttention:
    """Causal attention inside one sequence."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """As `attention.Attention`; keys and values are forgotten."""
        q, k, v = (x.transpose(0, 1)[None] for x in (queries, keys, values))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)


def score(decoder: Decoder, weights: DecoderWeights, ids: I32, first: int) -> F32:
    """Log-probs, float32 [T - first], of tokens `first` to the last of `ids`, each given those before it, at
    temperature 1; `first` is above 0."""
    if first >= len(ids):
        return np.zeros(0, dtype=np.float32)
    fed = as_tensor(ids[:-1].astype(np.int64))
    targets = as_tensor(ids[first:].astype(np.int64))
    rows = torch.arange(first - 1, len(ids) - 1)
    hidden = decoder.hidden(weights, fed, torch.arange(len(fed)), _OwnAttention(), rows)
    count = max(1, LOGITS_AT_ONCE // weights.head.shape[0])
    found = np.empty(len(rows), dtype=np.float32)
    for start in range(0, len(rows), count):
        part = slice(start, start + count)
        told = decoder.logits(weights, hidden[part]).log_softmax(dim=-1)
        found[part] = told.gather(-1, targets[part, None])[:, 0].numpy()
    return found
