"""Layouts that do not fit are refused by key; cuts of a weight cover it exactly, whatever the ranks."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from myxa.actors.backends.megatron.families import (
    EXPERTS as EXPERT_RULES,
)
from myxa.actors.backends.megatron.families import (
    FAMILIES,
    MODEL,
    CutRequest,
    columns,
    gate_and_up,
    heads,
    layer_rules,
    vocabulary,
)
from myxa.actors.backends.megatron.layout import ParallelLayout
from myxa.actors.models.model_config import MODEL_TYPES, ModelConfig, parse_model_config
from myxa.core.errors import ConfigError, ModelError

SOURCE: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 6, "num_attention_heads": 12,
    "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 10}


CORRECTED: dict[str, Any] = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 10, "n_shared_experts": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    "use_qk_norm": True,
}  # fmt: skip
EXTRA: dict[str, dict[str, Any]] = {
    "qwen3_moe": EXPERTS,
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 14},
    "glm4_moe": CORRECTED,
    "deepseek_v3": CORRECTED
    | {
        "num_key_value_heads": 12,
        "q_lora_rank": 30,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 5,
    },
    "mistral": {"sliding_window": None},
}


def config_of(model_type: str = "qwen3", **changes: Any) -> ModelConfig:
    extra = EXTRA.get(model_type, {})
    return parse_model_config({"model_type": model_type} | SOURCE | extra | changes, "here")


@pytest.mark.parametrize(
    ("layout", "model_type", "text"),
    [
        ({"tp": 5}, "qwen3", "megatron.tp = 5: does not divide the model's num_attention_heads = 12"),
        ({"tp": 3}, "qwen3", "megatron.tp = 3: does not divide the model's num_key_value_heads = 4"),
        ({"ep": 4}, "qwen3_moe", "megatron.ep = 4: does not divide the model's num_experts = 6"),
        ({"etp": 3}, "qwen3_moe", "megatron.etp = 3: does not divide the model's moe_intermediate_size = 10"),
        ({"ep": 2}, "llama", "megatron.ep = 2: but a llama model has no experts"),
        ({"tp": 4}, "qwen2_moe", "megatron.tp = 4: does not divide the model's shared experts, 14 wide"),
        ({"tp": 4}, "deepseek_v3", "megatron.tp = 4: does not divide the model's q_lora_rank = 30"),
        ({"pp": 4}, "glm4", "megatron.pp = 4: times vpp = 1 does not divide the model's 6 layers"),
        ({"pp": 3, "vpp": 4}, "qwen2", "megatron.pp = 3: times vpp = 4 does not divide"),
    ],
)
def test_layouts_that_do_not_fit_the_model(layout: dict[str, Any], model_type: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ParallelLayout(**layout).check_model(config_of(model_type))
    assert text in str(caught.value)
    assert caught.value.remedy


FIRST, LAST, BY_TEXT = (
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout",
)  # fmt: skip
COUNTED = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}


@pytest.mark.parametrize(
    ("layout", "placed", "stages"),
    [
        ({"pp": 3}, {}, "001122"),
        ({"pp": 3, "vpp": 2}, {}, "012012"),
        ({"pp": 3}, {FIRST: 2, LAST: 2}, "001122"),
        ({"pp": 3}, {FIRST: 4}, "000012"),
        ({"pp": 2}, {LAST: 1}, "000001"),
        ({"pp": 2, "vpp": 2}, {FIRST: 4}, "001001"),
        ({"pp": 4}, COUNTED, "011223"),
        ({"pp": 2, "vpp": 2}, COUNTED, "011001"),
        ({"pp": 2}, {BY_TEXT: "Etttt|tt,L"}, "000011"),
        ({"pp": 4}, {BY_TEXT: "E|(t*2|)*2ttL"}, "112233"),
        ({"pp": 2, "vpp": 2}, {BY_TEXT: "Et|t|ttt|tL"}, "010001"),
        ({"pp": 2}, {BY_TEXT: [["embedding"], ["decoder"] * 6 + ["loss"]]}, "111111"),
    ],
)
def test_layers_are_placed_as_megatron_core_places_them(layout: dict[str, Any], placed: dict[str, Any], stages: str):
    """`pp` ranks in the order of the model's six layers; checked against megatron-core itself where it cuts."""
    cut = ParallelLayout(**layout)
    assert "".join(map(str, cut.stages(6, placed))) == stages
    cut.check_model(config_of(), placed)
    if isinstance(text := placed.get(BY_TEXT), str):
        rows = pytest.importorskip(
            "megatron.core.transformer.pipeline_parallel_layer_layout"
        ).PipelineParallelLayerLayout.parse_str_to_list(text)
        counts = [sum(kind.name == "decoder" for kind in row) for row in rows]
        assert [place % cut.pp for place, count in enumerate(counts) for _ in range(count)] == cut.stages(6, placed)


@pytest.mark.parametrize(
    "placed",
    [
        {FIRST: 3}, {FIRST: 7, LAST: -1}, {FIRST: "4"}, {BY_TEXT: "Et|t|tL"}, {BY_TEXT: "Ett|tttt"}, {BY_TEXT: "?"},
        {BY_TEXT: "t*99999999|t|t"}, {BY_TEXT: 5}, {BY_TEXT: "E|((t|t)*9999)*9999"},
    ],
)  # fmt: skip
def test_a_placement_that_loses_layers_is_refused_by_its_key(placed: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"megatron.model.{next(iter(placed))}: does not place the model's 6 layers"):
        ParallelLayout(pp=3).check_model(config_of(), placed)


def test_data_parallel_degree_is_what_is_left() -> None:
    assert ParallelLayout(tp=2, pp=2, cp=2).dp(32) == 4
    assert ParallelLayout(ep=4, etp=2, pp=2).dp(32) == 16
    with pytest.raises(ConfigError, match=r"tp \* pp \* cp = 8 does not divide the 12 rank"):
        ParallelLayout(tp=2, pp=2, cp=2).dp(12)
    with pytest.raises(ConfigError, match=r"etp \* ep \* pp = 8 does not divide the 4 rank"):
        ParallelLayout(ep=8).dp(4)


def test_packed_sequences_divide_over_context_and_sequence_parallel_ranks() -> None:
    assert ParallelLayout(tp=2).sequence_multiple == 1
    assert ParallelLayout(cp=4).sequence_multiple == 8
    assert ParallelLayout(tp=2, cp=2, sequence_parallel=True).sequence_multiple == 8


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([1, 2, 4]), st.integers(1, 40))
def test_the_parts_of_all_ranks_cover_each_tensor_once(size: int, rows: int) -> None:
    config = config_of()
    shapes = {
        "table": (rows, 3),
        "wide": (rows, 8 * size),
        "gate": (4 * size, 3),
        "up": (4 * size, 3),
        "both": (8 * size, 3),
        "q": (96, 3),
        "k": (32, 3),
        "v": (32,),
    }
    for cut, names in (
        (vocabulary, ("table",)),
        (columns, ("wide",)),
        (gate_and_up, ("gate", "up")),
        (gate_and_up, ("both",)),
        (heads, ("q", "k", "v")),
    ):
        count = {name: np.zeros(shapes[name], int) for name in names}
        for rank in range(size):
            for piece in cut(CutRequest(names, shapes, config, rank, size)):
                target = count[piece.name][slice(*piece.rows)]
                target[(slice(None), slice(*piece.columns)) if piece.columns else ...] += 1
        for name in names:
            assert (count[name] == 1).all(), (cut, name)


def test_every_known_family_has_rules_and_others_are_refused() -> None:
    assert set(FAMILIES) == set(MODEL_TYPES)
    with pytest.raises(ModelError, match="no weight table for models of type gpt2"):
        layer_rules("gpt2")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_rules_name_every_weight_of_the_folder(model_type: str) -> None:
    """Every name in a folder is made by a rule; a weight that no rule names would never be loaded or sent."""
    config = config_of(model_type)
    made = {name for rule in MODEL for name in rule.names}
    for layer in range(config.num_layers):
        made |= {f"model.layers.{layer}.{name}" for rule in layer_rules(model_type) for name in rule.names}
        for expert in range(config.num_experts):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}."
            made |= {prefix + name for rule in EXPERT_RULES for name in rule.names}
    assert set(config.tensor_shapes()) <= made
    assert not config.foreign


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_rotation_keeps_lengths_and_depends_on_distance_alone(is_interleaved: bool) -> None:
    torch.manual_seed(5)
    config = parse_model_config(SOURCE | {"model_type": "qwen3"}, "x")
    with warnings.catch_warnings(action="ignore"):  # of megatron-core's import
        from myxa.actors.backends.megatron.attention import Rotary
    rotary = Rotary(replace(config, rope_theta=100.0, rotary_dim=6, is_rope_interleaved=is_interleaved))
    query, key = torch.randn(1, 1, 8).double(), torch.randn(1, 1, 8).double()

    def at(x: torch.Tensor, position: int) -> torch.Tensor:
        return rotary.rotate(x, rotary.tables(torch.tensor([position]), torch.float64))

    assert torch.allclose(at(query, 9).norm(), query.norm())
    assert torch.equal(at(query, 9)[..., 6:], query[..., 6:]), "channels behind the rotated ones pass unchanged"
    assert torch.allclose((at(query, 9) * at(key, 4)).sum(), (at(query, 5) * at(key, 0)).sum(), atol=1e-6)
    assert not torch.allclose((at(query, 9) * at(key, 4)).sum(), (at(query, 9) * at(key, 3)).sum(), atol=1e-3)
