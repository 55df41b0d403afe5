"""The policy: a dense Qwen3 decoder over packed tokens, with the parameter names of HuggingFace.

Knows weights and index tensors (`layout.py`), not samples, losses or ranks. `state_dict()` keys are the names in the
HuggingFace folder, so loading and exporting rename nothing. Qwen2 (bias on q, k, v; no norm of q and k) and Llama
(neither) are the same decoder with parts left out.

Parameters are float32 masters; every matrix product runs in the compute type, which the embedding's output carries
through the layers (`weight.to(x.dtype)` is free when they agree, and when FSDP has cast the weight already).

Library considered: transformers' own modules. Not used: seconds of import, padded batches, no shared prompts; it
judges this file in the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from ....core.errors import TrainError
from ...models.hf_folder import open_weights
from ...models.model_config import ModelConfig
from ...models.rotary import rotary_angles, rotary_gain
from ..packed_attention import attend, with_plans
from ..vocab_scores import TokenScores, fused, score_tokens
from .layout import Layout
from .tensors import from_bytes, recomputed

if TYPE_CHECKING:
    from ..adapters import TorchAdapters


class Linear(nn.Module):
    """`x @ weight.T (+ bias)` in the type of x."""

    def __init__(self, num_in: int, num_out: int, *, has_bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_out, num_in))
        self.bias = nn.Parameter(torch.empty(num_out)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return functional.linear(x, self.weight.to(x.dtype), bias)


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension (arXiv 1910.07467, equation 4)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Embedding(nn.Module):
    """Rows of a table, in the compute type."""

    def __init__(self, num_rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, width))

    def forward(self, ids_T: Tensor, dtype: torch.dtype) -> Tensor:
        return functional.embedding(ids_T, self.weight).to(dtype)


class _PadRows(Function):
    """Packed [T, ...] -> slots [S, ...]. Each token has one slot, so the gradient is a gather too and no scatter-add.
    What reaches padding slots is dropped: it is zero, because no real token attends to them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index_S: Tensor, slots_T: Tensor) -> Tensor:
        ctx.save_for_backward(slots_T)
        return x.index_select(0, index_S)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (slots_T,) = ctx.saved_tensors
        return grads[0].index_select(0, slots_T), None, None


class _UnpadRows(Function):
    """Slots [S, ...] -> packed [T, ...]. The gradient of padding slots is zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        return x.index_select(0, layout.slots_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _to_slots(grads[0], ctx.layout.index_S, ctx.layout.is_token_S), None


@fused
def _to_slots(x_Th: Tensor, index_S: Tensor, is_token_S: Tensor) -> Tensor:
    return torch.where(is_token_S.unsqueeze(1), x_Th.index_select(0, index_S), 0.0)


class _PickRows(Function):
    """Some rows, none of them twice: the gradient is a copy and no scatter-add."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.num_rows = x.shape[0]
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        (grad,) = grads
        return grad.new_zeros(ctx.num_rows, *grad.shape[1:]).index_copy_(0, rows, grad), None


def pick_rows(x: Tensor, rows: Tensor) -> Tensor:
    """`x[rows]`, differentiable; `rows` holds no number twice."""
    return cast(Tensor, cast(Any, _PickRows).apply(x, rows))


class SelfAttention(nn.Module):
    """Grouped-query attention inside the blocks of a layout."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, bias = config.hidden_size, config.attention_bias
        self.head_dim = config.head_dim
        self.num_groups = config.num_heads // config.num_kv_heads
        self.q_proj = Linear(width, config.num_heads * config.head_dim, has_bias=bias)
        self.k_proj = Linear(width, config.num_kv_heads * config.head_dim, has_bias=bias)
        self.v_proj = Linear(width, config.num_kv_heads * config.head_dim, has_bias=bias)
        self.o_proj = Linear(config.num_heads * config.head_dim, width)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.has_qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.has_qk_norm else nn.Identity()

    def project(self, x_Th: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, heads, head_dim], keys and values [T, kv heads, head_dim], rotated."""
        q_THD = self.q_proj(x_Th).unflatten(-1, (-1, self.head_dim))
        k_TKD = self.k_proj(x_Th).unflatten(-1, (-1, self.head_dim))
        v_TKD = self.v_proj(x_Th).unflatten(-1, (-1, self.head_dim))
        return rotate(self.q_norm(q_THD), rope), rotate(self.k_norm(k_TKD), rope), v_TKD

    def attended(self, slotted: tuple[Tensor, ...], layout: Layout, rows_N: Tensor | None) -> Tensor:
        """[T, heads * head_dim], or [N, ...] for the rows asked for. Of queries, keys and values in slots."""
        outputs: list[Tensor] = []
        start = 0
        for block in layout.blocks:
            end = start + block.num_slots
            q, k, v = (x[start:end] for x in slotted)
            if block.packed is not None:
                out_SHD = attend(q, k, v, block.packed, block.packed, self.head_dim**-0.5)
            else:
                shape = (block.num_rows, block.row_len, -1, self.head_dim)
                q, k, v = (x.view(shape).transpose(1, 2) for x in (q, k, v))
                out_SHD = self._attend(q, k, v, block.mask_nLL).transpose(1, 2).flatten(0, 1)
            outputs.append(out_SHD.flatten(1))
            start = end
        out_SI = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        if rows_N is not None:
            return pick_rows(out_SI, rows_N if layout.is_in_order else layout.slots_T[rows_N])
        return out_SI if layout.is_in_order else cast(Tensor, cast(Any, _UnpadRows).apply(out_SI, layout))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask_nLL: Tensor | None) -> Tensor:
        """Attention inside one rectangle: [n, heads, L, head_dim] from k and v [n, kv heads, L, head_dim]."""
        if mask_nLL is None:  # on CUDA one of few shapes, or in float32
            with with_plans() if q.is_cuda else nullcontext():
                return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.num_groups > 1)
        if q.is_cuda and self.num_groups > 1:
            # CUDA's kernel for masks knows no groups; without this torch would write out all of [n, heads, L, L].
            k, v = (x.repeat_interleave(self.num_groups, dim=1) for x in (k, v))
        is_grouped = k.shape[1] != q.shape[1]
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask_nLL, enable_gqa=is_grouped)


def rotate(x_THD: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions, first half paired with second half as HuggingFace does (arXiv 2104.09864, equation 34)."""
    cos_T1D, signed_sin_T1D = rope
    first, second = x_THD.chunk(2, dim=-1)
    return x_THD * cos_T1D + torch.cat([second, first], dim=-1) * signed_sin_T1D


class MLP(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))` (arXiv 2002.05202, equation 6)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Attention and MLP, each with its norm in front and its residual around."""

    def __init__(self, config: ModelConfig, *, recomputes: bool) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.self_attn = SelfAttention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x_Th: Tensor, rope: tuple[Tensor, Tensor], layout: Layout, rows_N: Tensor | None = None
    ) -> Tensor:
        """[T, hidden] -> [T, hidden]; with `rows_N` the result holds these rows only."""
        if self.recomputes and torch.is_grad_enabled():  # inside the module, so that FSDP's hooks stay outside
            return recomputed(self._compute, x_Th, rope, layout, rows_N)
        return self._compute(x_Th, rope, layout, rows_N)

    def _compute(self, x: Tensor, rope: tuple[Tensor, Tensor], layout: Layout, rows_N: Tensor | None) -> Tensor:
        slots = None if layout.is_in_order else (layout.index_S, layout.slots_T)
        slotted = _before_attention(x, self, rope, slots)
        attended = self.self_attn.attended(slotted, layout, rows_N)
        return _after_attention(x if rows_N is None else pick_rows(x, rows_N), self, attended)


@fused
def _before_attention(
    x_Th: Tensor, layer: DecoderLayer, rope: tuple[Tensor, Tensor], slots: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, ...]:
    """Queries, keys and values in slots (`Layout.index_S` and `slots_T`; None: tokens lie there as they are)."""
    heads = layer.self_attn.project(layer.input_layernorm(x_Th), rope)
    return heads if slots is None else tuple(cast(Tensor, cast(Any, _PadRows).apply(x, *slots)) for x in heads)


@fused
def _after_attention(x: Tensor, layer: DecoderLayer, attended: Tensor) -> Tensor:
    x = x + layer.self_attn.o_proj(attended)
    return x + layer.mlp(layer.post_attention_layernorm(x))


class DecoderStack(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, config: ModelConfig, *, recomputes: bool) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, recomputes=recomputes) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, layout: Layout, rope: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
        """Normalised hidden states [N, hidden] of the tokens that predict something."""
        x = self.embed_tokens(layout.token_ids_T, dtype)
        if torch.is_grad_enabled():  # of a frozen table too: a first layer unlike the others would be compiled twice
            x.requires_grad_()
        last = len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            x = layer(x, rope, layout, layout.rows_N if number == last else None)
        return self.norm(x)


class PolicyModel(nn.Module):
    """What a replica needs of a model. `forward` gives the `TokenScores` of a layout's loss tokens."""

    adapters: TorchAdapters | None = None
    """Where they are trained in place of the weights."""

    def __init__(self, dtype: torch.dtype) -> None:
        """`dtype`: of matrix products; parameters are float32 masters."""
        super().__init__()
        self.dtype = dtype

    @property
    def body(self) -> nn.Module:
        """Whose parameters `named_parameters` are, by name."""
        return self

    @property
    def layers(self) -> nn.ModuleList:
        raise NotImplementedError

    def exact_parts(self) -> tuple[nn.Module, ...]:
        """Modules that compute in float32 whatever the rest computes in."""
        return ()

    def for_folder(self, gather: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """HuggingFace name and detached tensor of every weight, in the order of `ModelConfig.tensor_shapes`. `gather`
        makes one of a parameter, which may be a shard."""
        raise NotImplementedError

    def served(self, name: str, tensor: Tensor, gather: Callable[[Tensor], Tensor]) -> Tensor:
        """A parameter, put together from all ranks' parts, with what its adapter adds. Collective if it is sharded."""
        weight = gather(tensor.detach())
        return weight if self.adapters is None else self.adapters.merged(name, weight, gather)


class PackedModel(PolicyModel):
    """A decoder over packed tokens; what is read off its hidden states is for subclasses to say."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype = torch.float32, recomputes: bool = False) -> None:
        super().__init__(dtype)
        self.model = DecoderStack(config, recomputes=recomputes)
        self._config = config

    def hidden_Mh(self, layout: Layout) -> Tensor:
        """[M, hidden]: what each loss token is predicted from, the state before it."""
        hidden_Nh = self.model(layout, self._rope(layout.positions_T), self.dtype)
        return hidden_Nh.index_select(0, layout.row_of_M)

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.layers

    def for_folder(self, gather: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
        parameters = dict(self.named_parameters())
        for name in self._config.tensor_shapes():
            yield name, self.served(name, parameters[name], gather)

    def _rope(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines, and sines with the sign of the first half turned: [T, 1, head_dim] each."""
        angles, gain = rotary_angles(self._config, positions_T), rotary_gain(self._config)
        cos, sin = angles.cos() * gain, angles.sin() * gain
        return (
            torch.cat([cos, cos], dim=-1)[:, None].to(self.dtype),
            torch.cat([-sin, sin], dim=-1)[:, None].to(self.dtype),
        )


class CausalLM(PackedModel):
    """The language model. `forward` gives log-probs and entropies of a layout's loss tokens."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype = torch.float32,
        recomputes: bool = False,
        keeps_logits: bool = False,
    ) -> None:
        """`keeps_logits`: there is memory for what a GPU need not compute twice; see `score_rows`."""
        super().__init__(config, dtype=dtype, recomputes=recomputes)
        self._keeps_logits = keeps_logits
        self.lm_head = None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size)

    def forward(self, layout: Layout, needs_entropy_grad: bool = False) -> TokenScores:
        """Log-probs and entropies of the loss tokens, float32 [M] each, at the temperature they were drawn at."""
        head = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        hidden_Mh = self.hidden_Mh(layout)
        return score_tokens(
            hidden_Mh,
            head.to(self.dtype),
            layout.targets_M,
            layout.temperature,
            kept_MK=layout.kept_MK,
            needs_entropy_grad=needs_entropy_grad,
            keeps_logits=self._keeps_logits and hidden_Mh.is_cuda,
        )


def linear_cost(config: ModelConfig, device: torch.device) -> float:
    """Number of attended tokens whose attention costs what the matrix products of one token cost in a layer. By
    operations; on CUDA a quarter of that, since products use the tensor cores better than masked attention does (0.6B
    on an H200, 200 prompt and 400 answer tokens: sharing by operations alone was 15% slower than not sharing)."""
    share = 0.25 if device.type == "cuda" else 1.0
    attention = config.hidden_size * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
    products = attention + 3 * config.hidden_size * config.intermediate_size
    return share * products / (2 * config.num_heads * config.head_dim)


def load_weights(module: CausalLM, folder: str, config: ModelConfig) -> None:
    """Copy the weights of a HuggingFace folder into the float32 masters. Raises ModelError if they do not fit."""
    parameters = dict(module.named_parameters())
    with torch.no_grad(), open_weights(folder, config) as tensors:
        for name in config.tensor_shapes():
            parameters.pop(name).copy_(from_bytes(tensors[name]))
    if parameters:
        raise TrainError(f"no weights for {', '.join(sorted(parameters))}", remedy="a bug: config and module disagree")
