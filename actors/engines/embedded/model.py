"""The forward pass of a dense decoder over a flat list of tokens; its attention is an argument.

One layer loop serves decoding (one token of every running row) and prefill (whole prompts, packed without padding).
`score` runs one whole sequence through it and returns the log-probs of given tokens. The trainer has its own
implementation of the same mathematics; a test keeps the two, and transformers, within 1e-5.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from ....core.samples import F32, I32
from ...models.model_config import ModelConfig
from ...models.rotary import rotary_angles, rotary_gain
from .attention import Attention
from .tensors import as_tensor
from .weights import DecoderWeights, LayerWeights


class Decoder:
    """The mathematics; weights come with every call, so a new version is just another argument."""

    def __init__(self, config: ModelConfig, context_length: int) -> None:
        self._config = config
        angles = rotary_angles(config, torch.arange(context_length))
        self._turns = torch.polar(torch.full_like(angles, rotary_gain(config)), angles)[:, None]
        """Rotations as complex numbers, [context, 1, D / 2] (arXiv 2104.09864, equation 12)."""

    def forward(
        self,
        weights: DecoderWeights,
        ids: Tensor,
        positions: Tensor,
        attention: Attention,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Logits float32 [N, vocabulary] of tokens `ids` int64 [N], or of the rows `wanted` int64 [M] only."""
        return self.logits(weights, self.hidden(weights, ids, positions, attention, wanted))

    def hidden(
        self,
        weights: DecoderWeights,
        ids: Tensor,
        positions: Tensor,
        attention: Attention,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """What the last layer says of them, [N, hidden] or [M, hidden]."""
        x = weights.embedding[ids]
        turns = self._turns[positions]
        for number, layer in enumerate(weights.layers):
            attended = self._attended(number, layer, x, turns, attention)
            if wanted is not None and number == len(weights.layers) - 1:
                x, attended = x[wanted], attended[wanted]  # the other rows are not used from here on
            x = torch.addmm(x, attended, layer.out.t())
            gate, up = linear(self._normed(x, layer.post_norm), layer.gate_up).chunk(2, dim=-1)
            x = torch.addmm(x, silu(gate).mul_(up), layer.down.t())
        return x

    def logits(self, weights: DecoderWeights, hidden: Tensor) -> Tensor:
        """Of the next token, float32 [N, vocabulary], for rows of `hidden`."""
        return linear(self._normed(hidden, weights.norm), weights.head).float()

    def _attended(self, number: int, layer: LayerWeights, x: Tensor, turns: Tensor, attention: Attention) -> Tensor:
        config = self._config
        qkv = linear(self._normed(x, layer.input_norm), layer.qkv, layer.qkv_bias)
        heads = qkv.view(x.shape[0], -1, config.head_dim)
        num_turned = config.num_heads + config.num_kv_heads
        turned = heads[:, :num_turned]
        if layer.qk_norm is not None:
            turned = self._normed(turned, layer.qk_norm)
        turned = _rotate(turned, turns)
        return attention.attend(
            number, turned[:, : config.num_heads], turned[:, config.num_heads :], heads[:, num_turned:]
        )

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm over the last dimension (arXiv 1910.07467, equation 4).

        Written out: torch's own `rms_norm` takes ten times as long on a CPU once there are thousands of rows.
        """
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self._config.rms_norm_eps)
        return (wide * scale).to(x.dtype).mul_(weight)


def _rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turn the pairs (2i, 2i + 1) of the last dimension by complex multiplication; bfloat16 goes through float32."""
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


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
        logprobs = decoder.logits(weights, hidden[part]).log_softmax(dim=-1)
        found[part] = logprobs.gather(-1, targets[part, None])[:, 0].numpy()
    return found
