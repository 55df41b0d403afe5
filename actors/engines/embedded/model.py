"""The forward pass of a dense decoder over a flat list of tokens; what they attend to is handed in.

One layer loop serves decoding (one token of every running row) and prefill (whole prompts, packed without padding).
The trainer has its own implementation of the same mathematics; a test keeps the two, and transformers, within 1e-5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from ...models.model_config import ModelConfig
from .arrays import Index, as_tensor
from .kv import SlotCache
from .weights import DecoderWeights, LayerWeights

MAX_EINSUM_QUERIES = 2


class Attention(Protocol):
    """What the tokens of one forward pass attend to."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Store keys and values [N, kv heads, D]; [N, heads, D] queries (already scaled) -> [N, heads * D]."""
        ...


class Decoder:
    """The mathematics; weights come with every call, so a new version is just another argument."""

    def __init__(self, config: ModelConfig, context_length: int) -> None:
        self._config = config
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
        inverse = 1.0 / config.rope_theta**exponents
        angles = torch.outer(torch.arange(context_length).float(), inverse)
        self._turns = torch.polar(torch.ones_like(angles), angles)[:, None]
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
        x = weights.embedding[ids]
        turns = self._turns[positions]
        for number, layer in enumerate(weights.layers):
            attended = self._attended(number, layer, x, turns, attention)
            if wanted is not None and number == len(weights.layers) - 1:
                x, attended = x[wanted], attended[wanted]  # from here on nobody looks at the others
            x = torch.addmm(x, attended, layer.out.t())
            gate, up = linear(self._normed(x, layer.post_norm), layer.gate_up).chunk(2, dim=-1)
            x = torch.addmm(x, silu(gate).mul_(up), layer.down.t())
        return linear(self._normed(x, weights.norm), weights.head).float()

    def _attended(self, number: int, layer: LayerWeights, x: Tensor, turns: Tensor, attention: Attention) -> Tensor:
        config = self._config
        qkv = linear(self._normed(x, layer.input_norm), layer.qkv, layer.qkv_bias)
        heads = qkv.view(x.shape[0], -1, config.head_dim)
        num_turned = config.num_heads + config.num_kv_heads
        turned = heads[:, :num_turned]
        if layer.qk_norm is not None:
            turned = rms_norm(turned, (config.head_dim,), None, config.rms_norm_eps) * layer.qk_norm
        turned = _rotate(turned, turns)
        return attention.attend(
            number, turned[:, : config.num_heads], turned[:, config.num_heads :], heads[:, num_turned:]
        )

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight.shape, weight, self._config.rms_norm_eps)


def _rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turn the pairs (2i, 2i + 1) of the last dimension by complex multiplication; bfloat16 goes through float32."""
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


class DecodeAttention:
    """Each of the first n rows adds one token and attends to its own past."""

    def __init__(self, cache: SlotCache, positions: Index, dtype: torch.dtype, num_kv_heads: int) -> None:
        num_rows = len(positions)
        self._cache = cache
        self._num_rows = num_rows
        self._length = int(positions.max()) + 1
        self._places = cache.places(np.arange(num_rows), positions)
        past = torch.arange(self._length) <= as_tensor(positions)[:, None]
        bias = torch.zeros(num_rows, self._length, dtype=dtype).masked_fill_(past.logical_not_(), float("-inf"))
        self._bias = bias.repeat_interleave(num_kv_heads, dim=0)[:, None]
        """[n * kv heads, 1, length]"""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Scores and weighted sums over views of the cache; reading it is most of a step's time at any batch."""
        self._cache.write(layer, self._places, keys, values)
        past_keys, past_values = self._cache.read(layer, self._num_rows, self._length)
        grouped = queries.reshape(past_keys.shape[0], -1, queries.shape[-1])
        # Keys on the left: one matrix-vector product per head, which reads them faster than the other way round.
        scores = torch.bmm(past_keys, grouped.transpose(1, 2)).transpose(1, 2).add_(self._bias)
        return _weighted_sums(scores.softmax(dim=-1), past_values).view(self._num_rows, -1)


def _weighted_sums(weights: Tensor, values: Tensor) -> Tensor:
    """[B, G, length] x [B, length, D] -> [B, G, D].

    With one or two queries per head this is bound by reading the values, and numpy's einsum reads them almost twice as
    fast as MKL's batched product of a row vector and a matrix (measured on Zen 4: 12 against 6 GB/s); it knows neither
    threads nor bfloat16.
    """
    num_queries = weights.shape[1]
    if num_queries > MAX_EINSUM_QUERIES or values.dtype != torch.float32 or torch.get_num_threads() > 1:
        return torch.bmm(weights, values)
    out = np.empty((*weights.shape[:2], values.shape[-1]), dtype=np.float32)
    for query in range(num_queries):
        np.einsum("bt,btd->bd", weights[:, query].numpy(), values.numpy(), out=out[:, query])
    return as_tensor(out)


class PrefillAttention:
    """Whole prompts, packed one after another, prompts of equal length side by side."""

    def __init__(self, cache: SlotCache, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Prompt j has `lengths[j]` tokens and goes to slot `rows[j]`; lengths must be sorted."""
        self._cache = cache
        self.positions: Index = np.concatenate([np.arange(n) for n in lengths])
        self._places = cache.places(np.repeat(np.asarray(rows), lengths), self.positions)
        self._blocks = _equal_runs(lengths)

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Causal attention inside each prompt."""
        self._cache.write(layer, self._places, keys, values)
        out = torch.empty(queries.shape, dtype=queries.dtype)
        start = 0
        for count, length in self._blocks:
            end = start + count * length
            q, k, v = (x[start:end].view(count, length, *x.shape[1:]).transpose(1, 2) for x in (queries, keys, values))
            block = scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0, enable_gqa=True)
            out[start:end].view(count, length, *out.shape[1:]).copy_(block.transpose(1, 2))
            start = end
        return out.flatten(1)


def _equal_runs(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Sorted lengths as (how many, length)."""
    runs: list[tuple[int, int]] = []
    for length in lengths:
        if runs and runs[-1][1] == length:
            runs[-1] = (runs[-1][0] + 1, length)
        else:
            runs.append((1, length))
    return runs
