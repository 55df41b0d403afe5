"""Rules that all known families share: embedding and head, attention without norms, the norms before each half."""

from __future__ import annotations

from ..weight_cut import columns, gate_and_up, heads, vocabulary
from .rule import Rule

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
