"""GLM-4 (dense): gate and up projection in one tensor, and norms after attention and MLP too."""

from __future__ import annotations

from ..weight_cut import columns, gate_and_up
from .decoder import ATTENTION, ATTENTION_BIAS, MODEL, NORMS
from .rule import Family, Rule

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
