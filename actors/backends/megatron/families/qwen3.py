"""Qwen3: the queries and keys of each head are normalised; some models have experts."""

from __future__ import annotations

from ..weight_cut import columns, gate_and_up
from .decoder import ATTENTION, HEAD_NORMS, MLP, MODEL, NORMS
from .rule import Family, Rule

QWEN3 = Family(model=MODEL, layer=(*NORMS, *ATTENTION, *HEAD_NORMS, *MLP))
QWEN3_MOE = Family(
    model=MODEL,
    layer=(*QWEN3.layer, Rule("mlp.router.weight", ("mlp.gate.weight",))),
    expert=(
        Rule("mlp.experts.w1", ("gate_proj.weight", "up_proj.weight"), gate_and_up),
        Rule("mlp.experts.w2", ("down_proj.weight",), columns),
    ),
)
