"""Model families of the Megatron trainer: `model_type` of a config.json -> which HuggingFace tensors make which
parameter.

A family is a table of rules: one row per Megatron parameter. The rows that all known families share come first; a new
family is a new table, and its name in `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ....core.errors import ModelError
from .weight_cut import Cut, columns, gate_and_up, heads, vocabulary, whole


@dataclass(frozen=True, slots=True)
class Rule:
    """A Megatron parameter and the HuggingFace tensors that it is made of, both named from their layer on."""

    parameter: str
    names: tuple[str, ...]
    cut: Cut = whole


@dataclass(frozen=True, slots=True)
class Family:
    """All rules of a family. Rules of parameters that a model does not have (Transformer Engine's) do no harm."""

    model: tuple[Rule, ...]
    """Parameters outside of layers."""
    layer: tuple[Rule, ...]
    """Parameters of a layer."""
    expert: tuple[Rule, ...] = ()
    """Parameters of a layer that hold all its experts, one behind the other; names are those of one expert."""


HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"

MODEL = (
    Rule("embedding.word_embeddings.weight", (EMBEDDING,), vocabulary),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Rule("output_layer.weight", (HEAD,), vocabulary),
)
ATTENTION = (
    Rule("self_attention.linear_qkv.weight", tuple(f"self_attn.{x}_proj.weight" for x in "qkv"), heads),
    Rule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), columns),
)
ATTENTION_BIAS = (Rule("self_attention.linear_qkv.bias", tuple(f"self_attn.{x}_proj.bias" for x in "qkv"), heads),)
HEAD_NORMS = (
    Rule("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",)),
    Rule("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",)),
)
NORMS = (
    Rule("input_layernorm.weight", ("input_layernorm.weight",)),
    Rule("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",)),
    # Transformer Engine keeps a norm in the linear that follows it.
    Rule("self_attention.linear_qkv.layer_norm_weight", ("input_layernorm.weight",)),
    Rule("mlp.linear_fc1.layer_norm_weight", ("post_attention_layernorm.weight",)),
)
MLP = (
    Rule("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), gate_and_up),
    Rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), columns),
)


LLAMA = Family(model=MODEL, layer=(*NORMS, *ATTENTION, *MLP))


QWEN2 = Family(model=MODEL, layer=(*NORMS, *ATTENTION, *ATTENTION_BIAS, *MLP))


QWEN3 = Family(model=MODEL, layer=(*NORMS, *ATTENTION, *HEAD_NORMS, *MLP))
QWEN3_MOE = Family(
    model=MODEL,
    layer=(*QWEN3.layer, Rule("mlp.router.weight", ("mlp.gate.weight",))),
    expert=(
        Rule("mlp.experts.w1", ("gate_proj.weight", "up_proj.weight"), gate_and_up),
        Rule("mlp.experts.w2", ("down_proj.weight",), columns),
    ),
)


GLM4 = Family(
    model=MODEL,
    layer=(
        *NORMS,
        *ATTENTION,
        *ATTENTION_BIAS,
        Rule("self_attention.linear_proj.post_norm.weight", ("post_self_attn_layernorm.weight",)),
        Rule("mlp.linear_fc1.weight", ("mlp.gate_up_proj.weight",), gate_and_up),
        Rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), columns),
        Rule("mlp.linear_fc2.post_norm.weight", ("post_mlp_layernorm.weight",)),
    ),
)


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3, "qwen3_moe": QWEN3_MOE, "glm4": GLM4}
)


def family_of(model_type: str) -> Family:
    """The rules of a family. Raises ModelError for one that has none."""
    family = FAMILIES.get(model_type)
    if family is None:
        raise ModelError(
            f"the Megatron trainer has no weight table for models of type {model_type}",
            remedy=f"use one of {', '.join(FAMILIES)}, or add a table under backends/megatron/families",
        )
    return family
