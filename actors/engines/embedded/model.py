"""A dense decoder: its weights, filled from HuggingFace-named bytes, and its forward pass over a flat list of tokens.

One layer loop serves decoding (one token of every running row) and prefill (whole prompts, packed without padding); its
attention is an argument. The trainer has its own implementation of the same mathematics; a test keeps the two, and
transformers, within 1e-5. Differences to the folder's layout of weights, none of which changes the mathematics:

* q, k, v are one matrix, gate and up are one matrix: fewer, larger products;
* rows of q and k are reordered so that the two halves of a rotary pair are neighbours: a rotation is then one complex
  multiplication. Scores are dot products of q and k, so a common reordering changes nothing;
* the attention scale 1/sqrt(head_dim) is inside q (its norm weight, or its matrix where q is not normalised).

In the list running rows come first, then whole prompts. A prompt attends to itself, a running row to its own past in
the key-value cache.

The cache has one slot per sequence, and rows 0..n-1 are always dense: when a sequence ends, the last row moves into its
place. Attention then reads a view of the first n slots, without page table or gather. The price is one copy of a row
per finished sequence and memory for the longest context per slot; pages begin to pay past contexts of about a thousand
tokens, which is not what a CPU engine is for. Library considered: transformers' paged cache (continuous batching),
measured 2-5 times slower than this on a CPU.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from ....core.errors import EngineError
from ....core.protocols import NamedArray
from ...models.hf_folder import FLOATS
from ...models.model_config import EMBEDDING, HEAD, ModelConfig
from ...models.rotary import rotary_angles, rotary_gain
from .tensors import Allocate, Index, as_tensor, plain_zeros


class SlotCache:
    """[layers, 2, slots * kv heads, context, head_dim]; index 1 is 0 for keys and 1 for values."""

    def __init__(
        self,
        config: ModelConfig,
        num_slots: int,
        context_length: int,
        dtype: torch.dtype,
        allocate: Allocate | None = None,
    ) -> None:
        """`allocate` None: of the system, which backs pages when they are first written."""
        self._num_heads = config.num_kv_heads
        self.context_length = context_length
        shape = (config.num_layers, 2, num_slots * config.num_kv_heads, context_length, config.head_dim)
        self._data = _lazy_zeros(shape, dtype) if allocate is None else allocate([(shape, dtype)])[0]
        self._flat = self._data.view(config.num_layers, 2, -1, config.head_dim)
        self._head_offsets = np.arange(config.num_kv_heads) * context_length

    def places(self, rows: Index, positions: Index) -> Tensor:
        """Where to write tokens at (rows, positions): int64 [N * kv heads], for `write`."""
        base = rows * (self._num_heads * self.context_length) + positions
        return as_tensor((base[:, None] + self._head_offsets).reshape(-1))

    def write(self, layer: int, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values, [N, kv heads, head_dim] each."""
        flat = self._flat[layer]
        flat[0].index_copy_(0, places, keys.reshape(-1, keys.shape[-1]))
        flat[1].index_copy_(0, places, values.reshape(-1, values.shape[-1]))

    def read(self, layer: int, num_rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first rows as views, [num_rows * kv heads, length, head_dim] each."""
        both = self._data[layer, :, : num_rows * self._num_heads, :length]
        return both[0], both[1]

    def read_rows(self, layer: int, rows: Index, length: int) -> tuple[Tensor, Tensor]:
        """The same of any rows [n], which may repeat: views where they follow one another, copies otherwise."""
        heads, first = self._num_heads, int(rows[0])
        if np.array_equal(rows, np.arange(first, first + len(rows))):
            both = self._data[layer, :, first * heads : (first + len(rows)) * heads, :length]
            return both[0], both[1]
        copied = torch.empty(2, len(rows), heads, length, self._data.shape[-1], dtype=self._data.dtype)
        starts = np.flatnonzero(np.diff(rows, prepend=-1)).tolist()
        for start, end in zip(starts, [*starts[1:], len(rows)], strict=True):  # tokens of one prompt side by side
            row = int(rows[start])
            copied[:, start:end] = self._data[layer, :, row * heads : (row + 1) * heads, :length].unsqueeze(1)
        both = copied.flatten(1, 2)
        return both[0], both[1]

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a row to another, in all layers."""
        heads = self._num_heads
        target_head, source_head = target * heads, source * heads
        self._data[:, :, target_head : target_head + heads, :length] = self._data[
            :, :, source_head : source_head + heads, :length
        ]

    def clear_row(self, row: int) -> None:
        """Zero a row: masked places are multiplied by zero probability, which does not silence NaN."""
        self._data[:, :, row * self._num_heads : (row + 1) * self._num_heads] = 0


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeroed pages of the system, which are backed when first written: memory grows with use. Numpy's own zeros would
    ask for huge pages, of which the first few tokens of each sequence touch all."""
    kind = np.dtype(np.float32 if dtype == torch.float32 else np.uint16)
    nbytes = math.prod(shape) * kind.itemsize
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"Unable to allocate {nbytes / 2**30:.3g} GiB for keys and values ({error})") from error
    values = np.frombuffer(pages, dtype=kind).reshape(shape)
    return as_tensor(values) if dtype == torch.float32 else as_tensor(values).view(dtype)


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
    """[B, G, length] x [B, length, D] -> [B, G, D]. With one or two queries per head this is bound by reading the
    values, and numpy's einsum reads them almost twice as fast as MKL's batched product of a row vector and a matrix
    (measured on Zen 4: 12 against 6 GB/s); it knows neither threads nor bfloat16."""
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
        self._blocks = [(len(list(equal)), length) for length, equal in groupby(lengths)]

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
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


class TileAttention:
    """A tile of tokens, each of any row at any position: for products whose result must not depend on the neighbours. A
    token looks at as many keys as its own position asks for, rounded up, and every product is computed for the whole
    tile: shapes, and with them the order of additions, follow from nothing else."""

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
        self._cache.write(layer, self._places, keys, values)
        tile, num_heads, head_dim = queries.shape
        out = torch.empty(tile, num_heads * head_dim, dtype=queries.dtype)
        grouped = queries.reshape(tile * keys.shape[1], -1, head_dim).transpose(1, 2)
        for length, bias, members in self._parts:
            past_keys, past_values = self._cache.read_rows(layer, self._rows, length)
            scores = torch.bmm(past_keys, grouped).transpose(1, 2).add(bias)
            attended = torch.bmm(scores.softmax(dim=-1), past_values).view(tile, -1)
            out[members] = attended[members]
        return out


def padded_lengths(positions: Index) -> Index:
    """Keys that tokens at these positions look at: the next of 64, 128, 256, ..."""
    doublings = np.ceil(np.log2(np.maximum((positions + 1) / SHORTEST_PAST, 1)))
    return SHORTEST_PAST << doublings.astype(np.int64)


@dataclass(frozen=True, slots=True)
class MixedAttention:
    """Two attentions side by side: the first `num_first` tokens by one, the rest by the other."""

    first: Attention
    rest: Attention
    num_first: int

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        cut = self.num_first
        return torch.cat(
            [
                self.first.attend(layer, queries[:cut], keys[:cut], values[:cut]),
                self.rest.attend(layer, queries[cut:], keys[cut:], values[cut:]),
            ]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. Matrices are [out, in]."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None = None
    qk_norm: Tensor | None = None
    """[q heads + kv heads, head_dim], q's part scaled."""
    out: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


class DecoderWeights:
    """One complete set of weights. `load` overwrites it in place, so that two sets can take turns."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, allocate: Allocate = plain_zeros) -> None:
        """`allocate` is called once, for all of them."""
        self.config = config
        self.dtype = dtype
        table = (config.vocab_size, config.hidden_size)
        layer = _layer_shapes(config)
        shapes = [table, (config.hidden_size,), *([] if config.tie_word_embeddings else [table])]
        shapes += [*layer.values()] * config.num_layers
        tensors = iter(allocate([(shape, dtype) for shape in shapes]))
        self.embedding, self.norm = next(tensors), next(tensors)
        self.head = self.embedding if config.tie_word_embeddings else next(tensors)
        self.layers = tuple(LayerWeights(**{name: next(tensors) for name in layer}) for _ in range(config.num_layers))

    def load(self, tensors: Mapping[str, NamedArray], place: str) -> None:
        """Copy all weights; the bytes in `tensors` are not needed afterwards. Raises EngineError naming the tensor and
        `place` when one is missing or has the wrong shape or type; the set is then half old, half new and must not be
        served."""
        source = _Source(self.config, tensors, place)
        half = self.config.head_dim // 2
        scale = 1.0 / math.sqrt(self.config.head_dim)
        num_q = self.config.num_heads * self.config.head_dim
        num_k = self.config.num_kv_heads * self.config.head_dim
        source.copy(EMBEDDING, self.embedding)
        source.copy("model.norm.weight", self.norm)
        if self.head is not self.embedding:
            source.copy(HEAD, self.head)
        for number, layer in enumerate(self.layers):
            prefix = f"model.layers.{number}."
            attention, inner = prefix + "self_attn.", self.config.intermediate_size
            source.copy(prefix + "input_layernorm.weight", layer.input_norm)
            source.copy(prefix + "post_attention_layernorm.weight", layer.post_norm)
            for kind, target in (("weight", layer.qkv), ("bias", layer.qkv_bias)):
                if target is not None:
                    source.copy_pairs(f"{attention}q_proj.{kind}", target[:num_q], half)
                    source.copy_pairs(f"{attention}k_proj.{kind}", target[num_q : num_q + num_k], half)
                    source.copy(f"{attention}v_proj.{kind}", target[num_q + num_k :])
            if layer.qk_norm is not None:
                source.copy_pairs(attention + "q_norm.weight", layer.qk_norm[: self.config.num_heads], half)
                source.copy_pairs(attention + "k_norm.weight", layer.qk_norm[self.config.num_heads :], half)
                layer.qk_norm[: self.config.num_heads] *= scale
            else:
                layer.qkv[:num_q] *= scale
                if layer.qkv_bias is not None:
                    layer.qkv_bias[:num_q] *= scale
            source.copy(attention + "o_proj.weight", layer.out)
            source.copy(prefix + "mlp.gate_proj.weight", layer.gate_up[:inner])
            source.copy(prefix + "mlp.up_proj.weight", layer.gate_up[inner:])
            source.copy(prefix + "mlp.down_proj.weight", layer.down)


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of one layer, by the names of LayerWeights, without what it has not."""
    num_heads = config.num_heads + 2 * config.num_kv_heads
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"input_norm": (hidden,), "qkv": (num_heads * head_dim, hidden)}
    shapes |= {"qkv_bias": (num_heads * head_dim,)} if config.attention_bias else {}
    shapes |= {"qk_norm": (config.num_heads + config.num_kv_heads, head_dim)} if config.has_qk_norm else {}
    shapes |= {"out": (hidden, config.num_heads * head_dim), "post_norm": (hidden,)}
    return shapes | {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}


class _Source:
    """Named bytes, checked against the config, handed out as tensors."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, NamedArray], place: str) -> None:
        self._shapes = config.tensor_shapes()
        self._tensors = tensors
        self._place = place

    def _take(self, name: str) -> Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise EngineError(
                f"{self._place}: weight {name} is missing ({len(self._tensors)} weights came)",
                remedy="trainer and engine must use the same model folder",
            )
        spec, shape = tensor.spec, self._shapes[name]
        dtype: torch.dtype | None = getattr(torch, spec.dtype) if spec.dtype in FLOATS else None
        if dtype is None or spec.shape != shape or tensor.data.nbytes != dtype.itemsize * math.prod(shape):
            raise EngineError(
                f"{self._place}: weight {name} came as {spec.dtype}{list(spec.shape)} in {tensor.data.nbytes} bytes, "
                f"the engine needs a float type {list(shape)}",
                remedy="trainer and engine must use the same model folder",
            )
        # torch complains of read-only buffers, which mapped files and received frames are; so the bytes are copied.
        copied = torch.empty(shape, dtype=dtype)
        copied.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(tensor.data, dtype=np.uint8)
        return copied

    def copy(self, name: str, target: Tensor) -> None:
        target.copy_(self._take(name))

    def copy_pairs(self, name: str, target: Tensor, half: int) -> None:
        """Copy with index (s, i) of each head's first dimension moved to (i, s): pairs become neighbours."""
        source = self._take(name)
        num_heads = source.shape[0] // (2 * half)
        inner_dims = source.shape[1:]
        pairs = source.view(num_heads, 2, half, *inner_dims).transpose(1, 2)
        target.view(-1, half, 2, *inner_dims).copy_(pairs)  # a norm weight, one for all heads, is broadcast


class Decoder:
    """The mathematics; weights come with every call, so a new version is just another argument."""

    def __init__(self, config: ModelConfig, context_length: int) -> None:
        self._config = config
        angles = rotary_angles(config, torch.arange(context_length))
        self._turns = torch.polar(torch.full_like(angles, rotary_gain(config)), angles)[:, None]
        """Rotations as complex numbers, [context, 1, D / 2] (arXiv 2104.09864, equation 12)."""

    def hidden(
        self,
        weights: DecoderWeights,
        ids: Tensor,
        positions: Tensor,
        attention: Attention,
        selected: Tensor | None = None,
    ) -> Tensor:
        """What the last layer says of tokens `ids` int64 [N], or of the rows `selected` int64 [M] only: [N, hidden] or
        [M, hidden]."""
        x = weights.embedding[ids]
        turns = self._turns[positions]
        for number, layer in enumerate(weights.layers):
            attended = self._attended(number, layer, x, turns, attention)
            if selected is not None and number == len(weights.layers) - 1:
                x, attended = x[selected], attended[selected]  # the other rows are not used from here on
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
        """RMSNorm over the last dimension (arXiv 1910.07467, equation 4). Written out: torch's own `rms_norm` takes ten
        times as long on a CPU once there are thousands of rows."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self._config.rms_norm_eps)
        return (wide * scale).to(x.dtype).mul_(weight)


def _rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turn the pairs (2i, 2i + 1) of the last dimension by complex multiplication; bfloat16 goes through float32."""
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)
