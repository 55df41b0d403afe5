"""What the tokens of one forward pass attend to: their own prompt, or the past of their row in the cache.

Tokens come as one flat list, running rows first, then whole prompts packed one behind the other; nothing is padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .arrays import Index, as_tensor
from .kv import SlotCache

MAX_EINSUM_QUERIES = 2
SHORTEST_PAST = 64
"""Keys that a token of a tile looks at, at least: a power of two times so many, whole vectors on every CPU."""


class Attention(Protocol):
    """What the tokens of one forward pass attend to."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Store keys and values [N, kv heads, D]; [N, heads, D] queries (already scaled) -> [N, heads * D]."""
        ...


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


class TileAttention:
    """A tile of tokens, each of any row at any position: for products whose result must not depend on the neighbours.

    A token looks at as many keys as its own position asks for, rounded up, and every product is computed for the whole
    tile: shapes, and with them the order of additions, follow from nothing else.
    """

    def __init__(self, cache: SlotCache, rows: Index, positions: Index, dtype: torch.dtype, num_kv_heads: int) -> None:
        """`rows` and `positions`, int64 [tile]; a pair may be there twice, with the same token."""
        self._cache, self._rows = cache, rows
        self._places = cache.places(rows, positions)
        lengths = np.minimum(padded_lengths(positions), cache.context_length)
        self._parts: list[tuple[int, Tensor, Tensor]] = []
        """(keys, bias [tile * kv heads, 1, keys], which tokens look at so many)."""
        for length in np.unique(lengths).tolist():
            past = torch.arange(length) <= as_tensor(positions)[:, None]
            bias = torch.zeros(len(rows), length, dtype=dtype).masked_fill_(past.logical_not_(), float("-inf"))
            members = as_tensor(np.flatnonzero(lengths == length))
            self._parts.append((length, bias.repeat_interleave(num_kv_heads, dim=0)[:, None], members))

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """As `Attention`."""
        self._cache.write(layer, self._places, keys, values)
        tile, num_heads, head_dim = queries.shape
        out = torch.empty(tile, num_heads * head_dim, dtype=queries.dtype)
        grouped = queries.reshape(tile * keys.shape[1], -1, head_dim).transpose(1, 2)
        for length, bias, members in self._parts:
            past_keys, past_values = self._cache.read_rows(layer, self._rows, length)
            scores = torch.bmm(past_keys, grouped).transpose(1, 2).add(bias)
            found = torch.bmm(scores.softmax(dim=-1), past_values).view(tile, -1)
            out[members] = found[members]
        return out


def padded_lengths(positions: Index) -> Index:
    """Keys that tokens at these positions look at: the next of 64, 128, 256, ..."""
    doublings = np.ceil(np.log2(np.maximum((positions + 1) / SHORTEST_PAST, 1)))
    return SHORTEST_PAST << doublings.astype(np.int64)


class MixedAttention:
    """Two attentions side by side: the first `num_first` tokens by one, the rest by the other."""

    def __init__(self, first: Attention, rest: Attention, *, num_first: int) -> None:
        self._first = first
        self._rest = rest
        self._num_first = num_first

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Each part by its own attention."""
        cut = self._num_first
        return torch.cat(
            [
                self._first.attend(layer, queries[:cut], keys[:cut], values[:cut]),
                self._rest.attend(layer, queries[cut:], keys[cut:], values[cut:]),
            ]
        )
