"""Causal self-attention over packed sequences of unequal length, for megatron-core's layer specs.

Works without Transformer Engine and flash-attn (`packed_attention`). Rotary positions (RoFormer,
https://arxiv.org/abs/2104.09864, eq. 34, on the first `rotary_dim` channels of a head) are applied here as well, before
keys travel: tables once per micro-batch, one elementwise operation per layer.

Context parallelism: rank r of n holds chunks r and 2n-1-r of every sequence's 2n chunks ("zigzag": equal work for all
under a causal mask). Keys and values are all-gathered, their gradients reduce-scattered (Llama 3 report,
https://arxiv.org/abs/2407.21783, section 3.3.2).

Libraries considered: megatron-core's DotProductAttention refuses packed sequences and context parallelism; its
TEDotProductAttention needs Transformer Engine. Its RotaryEmbedding brings lengths of packed sequences to the host in
every layer and cuts (since 0.19 also rotates) sequence by sequence: thousands of launches for many short samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from ...models.model_config import ModelConfig
from ...models.rotary import rotary_angles, rotary_gain
from ..packed_attention import PackedRows, attend
from ..torch_backend.tensors import from_array, integers
from ..vocab_scores import fused
from . import mcore
from .batch import LENGTHS, zigzag


@dataclass(frozen=True, slots=True)
class Rotary:
    """Which channels of a head are rotated, how fast, and in which pairs."""

    config: ModelConfig

    def tables(self, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, 1, dim] of integer positions; computed in float32, as HuggingFace does."""
        angles, gain = rotary_angles(self.config, positions_T), rotary_gain(self.config)
        is_interleaved = self.config.is_rope_interleaved
        angles = angles.repeat_interleave(2, dim=-1) if is_interleaved else torch.cat([angles, angles], dim=-1)
        return (angles.cos() * gain)[:, None].to(dtype), (angles.sin() * gain)[:, None].to(dtype)

    def rotate(self, x_Thd: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Heads [T, heads, head_dim] with their leading channels rotated; same shape and dtype."""
        return _rotated_alone(x_Thd, *tables, self.config.rotary_dim, self.config.is_rope_interleaved)


def _rotated(x_Thd: Tensor, cos: Tensor, sin: Tensor, dim: int, is_interleaved: bool) -> Tensor:
    turning, still = x_Thd[..., :dim], x_Thd[..., dim:]
    if is_interleaved:
        quarter = torch.stack([-turning[..., 1::2], turning[..., 0::2]], dim=-1).flatten(-2)
    else:
        first, second = turning.chunk(2, dim=-1)
        quarter = torch.cat([-second, first], dim=-1)
    turned = turning * cos + quarter * sin
    return torch.cat([turned, still], dim=-1) if still.shape[-1] else turned


_rotated_alone = fused(_rotated)


_PLAN = "myxa_plan"
"""Attribute of a micro-batch's PackedSeqParams under which its plan is kept for all layers of a stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """What one rank attends to in one micro-batch, shared by all layers; see `attend`."""

    queries: PackedRows
    keys: PackedRows
    key_rows: Tensor | None
    """Rows of the gathered keys [cp * T] that make the key segments; None without context parallelism."""
    tables: tuple[Tensor, Tensor]
    """Rotary cosines and sines of this rank's tokens."""


def plan_attention(
    lengths: Sequence[int], rotary: Rotary, dtype: torch.dtype, device: torch.device, cp_size: int, cp_rank: int
) -> AttentionPlan:
    num_chunks = 2 * cp_size if cp_size > 1 else 1
    own_tokens = from_array(zigzag(lengths, num_chunks, cp_rank))
    positions = torch.cat([torch.arange(length) for length in lengths])
    tables = rotary.tables(positions[own_tokens].to(device), dtype)
    if cp_size == 1:
        sequences = PackedRows.of(lengths, device)
        return AttentionPlan(queries=sequences, keys=sequences, key_rows=None, tables=tables)
    # where[t]: row of token t in the gathered keys, which lie rank by rank in each rank's own order
    gathered = from_array(np.concatenate([zigzag(lengths, num_chunks, rank) for rank in range(cp_size)]))
    row_of_token = torch.empty_like(gathered)
    row_of_token[gathered] = torch.arange(len(gathered))
    queries: list[int] = []
    keys: list[int] = []
    rows: list[Tensor] = []
    start = 0
    for length in lengths:
        chunk = length // num_chunks  # they are padded so that it divides
        for number in (cp_rank, num_chunks - 1 - cp_rank):
            queries.append(chunk)
            keys.append((number + 1) * chunk)
            rows.append(row_of_token[start : start + keys[-1]])
        start += length
    return AttentionPlan(
        queries=PackedRows.of(queries, device), keys=PackedRows.of(keys, device),
        key_rows=torch.cat(rows).to(device), tables=tables,
    )  # fmt: skip


class _GatherRows(torch.autograd.Function):
    """[T, ...] of every rank -> [n * T, ...]; backward adds up what all ranks say of each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
        cast(Any, dist).all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        group: dist.ProcessGroup = ctx.group
        out = grad.new_empty((grad.shape[0] // group.size(), *grad.shape[1:]))
        cast(Any, dist).reduce_scatter_tensor(out, grad.contiguous(), group=group)
        return out, None


class VarlenAttention(nn.Module):
    """Core attention of one layer. Queries [T, heads, d] and keys [T, groups, d], rotated, and values [T, groups, e] ->
    [T, heads * e]."""

    rotary: Rotary

    @classmethod
    def of(cls, config: ModelConfig) -> type[VarlenAttention]:
        """megatron-core builds it by calls that differ from version to version; all take a class."""
        return type(cls.__name__, (cls,), {"rotary": Rotary(config)})

    def __init__(
        self,
        config: Any,
        layer_number: int = 1,
        attn_mask_type: Any = None,
        *,
        pg_collection: Any = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        group = getattr(pg_collection, "cp", None)
        self._cp: dist.ProcessGroup = group if group is not None else mcore.read_grid().cp
        self._scale = float(softmax_scale or config.kv_channels**-0.5)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attended values; `attention_mask` is not read, the mask is always causal within a sequence."""
        return self._attend(query, key, value, self.plan_of(packed_seq_params, query))

    def plan_of(self, packed: Any, like: Tensor) -> AttentionPlan:
        plan = cast("AttentionPlan | None", getattr(packed, _PLAN, None))
        if plan is None:
            padded = packed.cu_seqlens_q_padded
            cu_seqlens: Tensor = padded if padded is not None else packed.cu_seqlens_q
            lengths = getattr(packed, LENGTHS, None) or integers(cu_seqlens.diff())
            with torch.inference_mode(mode=False):  # a pass with gradients may use it after one without
                plan = plan_attention(lengths, self.rotary, like.dtype, like.device, self._cp.size(), self._cp.rank())
            setattr(packed, _PLAN, plan)
        return plan

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
        if plan.key_rows is not None:
            both = cast(Tensor, cast(Any, _GatherRows).apply(torch.cat([k, v], dim=-1), self._cp))
            both, width = both.index_select(0, plan.key_rows), k.shape[-1]
            k, v = both[..., :width], both[..., width:]
        out = attend(q, k, v, plan.queries, plan.keys, self._scale)
        return out.reshape(out.shape[0], -1)


class MegatronRMSNorm(nn.RMSNorm):
    """torch's norm with what megatron-core's wrapper of it refuses: sequence parallelism, and weights in the
    model's number type."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        device = None if config.use_cpu_initialization else mcore.default_device()
        cast(Any, super()).__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        cast(Any, self.weight).sequence_parallel = config.sequence_parallel


class HeadNorm(MegatronRMSNorm):
    """Of queries or keys. Called, it gives its weight, for `_heads` to apply: only a module that is called has its
    parameters gathered before (`overlap_param_gather`)."""

    def forward(self, x: Tensor) -> Tensor:
        del x
        return self.weight


SelfAttention: Any = mcore.module("transformer.attention").SelfAttention


class PackedSelfAttention(SelfAttention):
    """megatron-core's, where all that lies between the projection and core attention is one function: heads are cut
    out, normalised and rotated."""

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)  # pyright: ignore[reportUnknownMemberType]
        attention, model = cast(Any, self), cast(Any, self).core_attention.rotary.config
        groups, width = int(attention.num_query_groups_per_partition), int(attention.hidden_size_per_attention_head)
        # What a module holds is compiled in; numbers that come with a call are not.
        self.cut = (groups, int(attention.num_attention_heads_per_partition) // groups * width, width)
        self.turn = (model.rotary_dim, model.is_rope_interleaved)
        self.eps = float(config.layernorm_epsilon)

    def forward(self, *args: Any, packed_seq_params: Any = None, **options: Any) -> Any:
        """As megatron-core's."""
        base: Any = super()
        self._sequences = packed_seq_params
        try:
            return base.forward(*args, packed_seq_params=packed_seq_params, **options)
        finally:
            self._sequences = None  # no micro-batch stays on the device

    def get_query_key_value_tensors(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Of hidden states [T, 1, hidden]: queries [T, 1, heads, d], keys and values [T, 1, groups, d]."""
        attention = cast(Any, self)
        mixed = cast(Tensor, attention.linear_qkv(hidden_states)[0])
        norms = (attention.q_layernorm, attention.k_layernorm)  # or parts that do nothing
        weights = tuple(norm(mixed) if isinstance(norm, HeadNorm) else None for norm in norms)
        return _heads(mixed, self, weights, attention.core_attention.plan_of(self._sequences, mixed).tables)


@fused
def _heads(
    mixed_T1w: Tensor,
    layer: PackedSelfAttention,
    weights: tuple[Tensor | None, ...],
    tables: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    groups, query_width, width = layer.cut
    by_group = cast(Any, mixed_T1w).unflatten(-1, (groups, query_width + 2 * width))
    parts = cast("tuple[Tensor, ...]", by_group.split([query_width, width, width], dim=-1))
    q, k = parts[0].reshape(*mixed_T1w.shape[:2], -1, width), parts[1]
    turned: list[Tensor] = []
    for x, weight in zip((q, k), weights, strict=True):
        normed = x if weight is None else rms_norm(x, (width,), weight, layer.eps)
        turned.append(_rotated(normed.squeeze(1), *tables, *layer.turn).unsqueeze(1))
    return turned[0], turned[1], parts[2]


_mappings = mcore.module("tensor_parallel.mappings")
MLASelfAttention: Any = mcore.latent_attention.MLASelfAttention


class LatentAttention(MLASelfAttention):
    """MLA (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1) with our rotary positions. megatron-core's own
    rotates sequence by sequence, and where the latent's projection is cut over ranks it leaves the other ranks' heads
    out of the gradient of the rotated key, which all heads share. Norms of the latents have `rms_norm_eps`, as in
    SGLang, vLLM and megatron-core; DeepSeek's code and transformers always take 1e-6, and Moonlight's folder says 1e-5.
    """

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)  # pyright: ignore[reportUnknownMemberType]
        if cast(Any, self).recompute_up_proj:
            raise ValueError("recompute_modules names mla_up_proj, which needs Transformer Engine")
        eps = config.layernorm_epsilon
        if config.q_lora_rank is not None:
            self.q_layernorm = MegatronRMSNorm(config, config.q_lora_rank, eps=eps)
        self.kv_layernorm = MegatronRMSNorm(config, config.kv_lora_rank, eps=eps)

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, _: Any, __: Any, packed_seq_params: Any, **___: Any
    ) -> tuple[Tensor, ...]:
        """Of hidden states [T, 1, hidden]: queries and keys [T, heads, d], values [T, heads, e], and the latents."""
        config, module = self.config, cast(Any, self)
        to_q = module.linear_q_proj if config.q_lora_rank is None else module.linear_q_up_proj
        into_q_T1r = hidden_states
        if config.q_lora_rank is not None:
            into_q_T1r = self.q_layernorm(_scatter(_gather(module.linear_q_down_proj(hidden_states)[0]), config))
        both_T1r = _gather(module.linear_kv_down_proj(hidden_states)[0])
        latent_T1r = self.kv_layernorm(_scatter(both_T1r[..., : config.kv_lora_rank], config))
        turning_T1r = both_T1r[..., config.kv_lora_rank :]
        turning_T1r = _mappings.copy_to_tensor_model_parallel_region(turning_T1r)  # adds up what all heads say of it
        heads, still = module.num_attention_heads_per_partition, config.qk_head_dim
        q_Thd = cast(Tensor, to_q(into_q_T1r)[0]).view(-1, heads, still + config.qk_pos_emb_head_dim)
        kv_The = cast(Tensor, module.linear_kv_up_proj(latent_T1r)[0]).view(-1, heads, still + config.v_head_dim)
        tables = module.core_attention.plan_of(packed_seq_params, q_Thd).tables
        rotate = module.core_attention.rotary.rotate
        q_Thd = torch.cat([q_Thd[..., :still], rotate(q_Thd[..., still:], tables)], dim=-1)
        k_Thd = torch.cat([kv_The[..., :still], rotate(turning_T1r, tables).expand(-1, heads, -1)], dim=-1)
        return q_Thd, k_Thd, kv_The[..., still:], into_q_T1r, latent_T1r


def _gather(part: Tensor) -> Tensor:
    """Of each rank its columns -> all columns on every rank; their gradients must be the same on all."""
    return cast(Tensor, _mappings.gather_from_tensor_model_parallel_region(part))


def _scatter(x: Tensor, config: Any) -> Tensor:
    """Under sequence parallelism this rank's share of the tokens, which the next projection gathers again."""
    return cast(Tensor, _mappings.scatter_to_sequence_parallel_region(x)) if config.sequence_parallel else x
