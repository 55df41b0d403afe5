"""A dense decoder: its weights, filled from HuggingFace-named bytes, and its forward pass over a flat list of tokens.

One layer loop serves decoding (one token of every running row) and prefill (whole prompts, packed without padding); its
attention is an argument. The trainer has its own implementation of the same mathematics; a test keeps the two, and
transformers, within 1e-5. Differences to the folder's layout of weights, none of which changes the mathematics:

* q, k, v are one matrix, gate and up are one matrix: fewer, larger products;
* rows of q and k are reordered so that the two halves of a rotary pair are neighbours: a rotation is then one complex
  multiplication. Scores are dot products of q and k, so a common reordering changes nothing;
* the attention scale 1/sqrt(head_dim) is inside q (its norm weight, or its matrix where q is not normalised).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from ....core.errors import EngineError
from ....core.protocols import NamedArray
from ...models.hf_folder import FLOATS
from ...models.model_config import ModelConfig
from ...models.rotary import rotary_angles, rotary_gain
from .attention import Attention
from .tensors import Allocate, plain_zeros


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Matrices are [out, in]."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
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
        shapes = [table, (config.hidden_size,), *([] if config.tie_word_embeddings else [table])]
        shapes += [shape for _ in range(config.num_layers) for shape in _layer_shapes(config)]
        tensors = iter(allocate([(shape, dtype) for shape in shapes]))
        self.embedding, self.norm = next(tensors), next(tensors)
        self.head = self.embedding if config.tie_word_embeddings else next(tensors)
        self.layers = tuple(_layer(config, tensors) for _ in range(config.num_layers))

    def load(self, tensors: Mapping[str, NamedArray], place: str) -> None:
        """Copy all weights; the bytes in `tensors` are not needed afterwards. Raises EngineError naming the tensor and
        `place` when one is missing or has the wrong shape or type; the set is then half old, half new and must not be
        served."""
        source = _Source(self.config, tensors, place)
        half = self.config.head_dim // 2
        scale = 1.0 / math.sqrt(self.config.head_dim)
        num_q = self.config.num_heads * self.config.head_dim
        num_k = self.config.num_kv_heads * self.config.head_dim
        source.copy("model.embed_tokens.weight", self.embedding)
        source.copy("model.norm.weight", self.norm)
        if self.head is not self.embedding:
            source.copy("lm_head.weight", self.head)
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


def _layer_shapes(config: ModelConfig) -> list[tuple[int, ...]]:
    """Of one layer, in the order in which `_layer` takes them."""
    num_heads = config.num_heads + 2 * config.num_kv_heads
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    shapes: list[tuple[int, ...]] = [(hidden,), (num_heads * head_dim, hidden)]
    shapes += [(num_heads * head_dim,)] if config.attention_bias else []
    shapes += [(config.num_heads + config.num_kv_heads, head_dim)] if config.has_qk_norm else []
    return [*shapes, (hidden, config.num_heads * head_dim), (hidden,), (2 * inner, hidden), (hidden, inner)]


def _layer(config: ModelConfig, tensors: Iterator[Tensor]) -> LayerWeights:
    return LayerWeights(
        input_norm=next(tensors),
        qkv=next(tensors),
        qkv_bias=next(tensors) if config.attention_bias else None,
        qk_norm=next(tensors) if config.has_qk_norm else None,
        out=next(tensors),
        post_norm=next(tensors),
        gate_up=next(tensors),
        down=next(tensors),
    )


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
        whole = torch.empty(shape, dtype=dtype)
        whole.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(tensor.data, dtype=np.uint8)
        return whole

    def copy(self, name: str, target: Tensor) -> None:
        target.copy_(self._take(name))

    def copy_pairs(self, name: str, target: Tensor, half: int) -> None:
        """Copy with index (s, i) of each head's first dimension moved to (i, s): pairs become neighbours."""
        source = self._take(name)
        num_heads = source.shape[0] // (2 * half)
        rest = source.shape[1:]
        pairs = source.view(num_heads, 2, half, *rest).transpose(1, 2)
        target.view(-1, half, 2, *rest).copy_(pairs)  # a norm weight, one for all heads, is broadcast


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
        """RMSNorm over the last dimension (arXiv 1910.07467, equation 4). Written out: torch's own `rms_norm` takes ten
        times as long on a CPU once there are thousands of rows."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self._config.rms_norm_eps)
        return (wide * scale).to(x.dtype).mul_(weight)


def _rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turn the pairs (2i, 2i + 1) of the last dimension by complex multiplication; bfloat16 goes through float32."""
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)
