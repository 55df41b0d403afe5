"""Model folders: what is written loads in transformers, what is broken is refused by name."""

from __future__ import annotations

import errno
import json
import mmap
import os
import resource
import stat
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.models.deepseek import DEEPSEEK_V3, FP8, KIMI_K2, MOONLIGHT, YARN

from myxa.actors.models.fp8 import Fp8Format
from myxa.actors.models.hf_folder import (
    check_second_model,
    check_values,
    copy_tokenizer,
    open_weights,
    read_config,
    read_eos_token_ids,
    write_folder,
)
from myxa.actors.models.model_config import ModelConfig, parse_model_config
from myxa.actors.models.safetensors_file import open_safetensors, write_safetensors
from myxa.actors.models.tiny import PRESETS, init_weights, make_tiny_model, tiny_config
from myxa.actors.models.tokenizer import load_tokenizer
from myxa.core.errors import ConfigError, ModelError
from myxa.core.messages import TensorSpec
from myxa.core.protocols import NamedArray


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_tiny_model(path, "0p5m", seed=5)
    return path


def arrays(folder: Path, config: ModelConfig) -> dict[str, bytes]:
    with open_weights(folder, config) as tensors:
        return {name: bytes(tensor.data) for name, tensor in tensors.items()}


def edit(path: Path, **changes: object) -> None:
    value = json.loads(path.read_text())
    value.update(changes)
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not ...}))


# -- round trips ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_presets_have_the_size_in_their_name(preset: str):
    millions = float(preset.replace("m", "").replace("p", "."))
    assert tiny_config(preset).num_parameters / 1e6 == pytest.approx(millions, rel=0.12)


def test_the_same_seed_writes_the_same_bytes(folder: Path, tmp_path: Path):
    config = make_tiny_model(tmp_path, "0p5m", seed=5)
    assert arrays(tmp_path, config) == arrays(folder, config)
    make_tiny_model(tmp_path, "0p5m", seed=6)
    assert arrays(tmp_path, config) != arrays(folder, config)


def test_files_are_readable_by_another_users_server(folder: Path):
    assert stat.S_IMODE((folder / "model.safetensors").stat().st_mode) == 0o644
    assert not list(folder.glob("*.partial"))


@pytest.mark.parametrize("max_shard_bytes", [10**9, 200_000])
def test_a_written_folder_reads_back_equal(folder: Path, tmp_path: Path, max_shard_bytes: int):
    config = read_config(folder)
    weights = init_weights(config, 9)
    write_folder(tmp_path, config.source, weights, tokenizer_from=folder, max_shard_bytes=max_shard_bytes)
    assert arrays(tmp_path, read_config(tmp_path)) == {w.spec.name: bytes(w.data) for w in weights}
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_bytes < 10**9)
    assert (tmp_path / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_a_file_system_that_maps_no_shared_pages_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """FUSE with direct_io, for one."""
    real = mmap.mmap

    def refuse(file: int, size: int, flags: int = mmap.MAP_SHARED, **words: Any) -> mmap.mmap:
        if flags & mmap.MAP_SHARED:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        return real(file, size, flags=flags, **words)

    monkeypatch.setattr(mmap, "mmap", refuse)
    assert arrays(folder, read_config(folder))


def test_a_folder_tells_of_the_mtp_layer_that_it_holds_and_of_no_other(folder: Path, tmp_path: Path):
    config = read_config(folder)
    weights, source = init_weights(config, 9), {**config.source, "num_nextn_predict_layers": 1}
    write_folder(tmp_path / "without", source, weights)
    assert json.loads((tmp_path / "without/config.json").read_text())["num_nextn_predict_layers"] == 0
    name = f"model.layers.{config.num_layers}.enorm.weight"
    layer = msgspec.structs.replace(weights[0], spec=msgspec.structs.replace(weights[0].spec, name=name))
    write_folder(tmp_path / "with", source, [*weights, layer])
    assert json.loads((tmp_path / "with/config.json").read_text())["num_nextn_predict_layers"] == 1


def test_a_sharded_folder_loads_in_transformers(folder: Path, tmp_path: Path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = read_config(folder)
    weights = init_weights(config, 9)
    write_folder(tmp_path, config.source, weights, tokenizer_from=folder, max_shard_bytes=200_000)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = {w.spec.name: w for w in weights}
    for name, value in model.state_dict().items():
        if name in expected:
            assert value.numpy().tobytes() == bytes(expected.pop(name).data), name
    assert not expected
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == config.vocab_size
    assert tokenizer.eos_token_id == read_eos_token_ids(tmp_path)[0]


def test_bfloat16_survives_a_round_trip(tmp_path: Path):
    data = np.arange(12, dtype=np.uint16)
    spec = TensorSpec(name="x", dtype="bfloat16", shape=(3, 4), offset=0, num_bytes=24)
    write_safetensors(tmp_path / "a.safetensors", [NamedArray(spec=spec, data=data.view(np.uint8).data)])
    with open_safetensors(tmp_path / "a.safetensors") as tensors:
        assert bytes(tensors["x"].data) == data.tobytes()
        assert (tensors["x"].spec.dtype, tensors["x"].spec.shape) == ("bfloat16", (3, 4))


# -- configs -------------------------------------------------------------------------------------------------------


def test_rope_theta_is_found_in_either_place():
    source = dict(tiny_config("1m").source)
    outer = {k: v for k, v in source.items() if k != "rope_parameters"} | {"rope_theta": 5e5, "rope_scaling": None}
    inner = {k: v for k, v in source.items() if k != "rope_theta"} | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}
    }
    assert parse_model_config(outer, "x").rope_theta == parse_model_config(inner, "x").rope_theta == 5e5


def test_families_differ_in_bias_and_norms():
    source = {k: v for k, v in tiny_config("1m").source.items() if k != "head_dim"}
    flags = {}
    for kind in ("qwen3", "qwen2", "llama"):
        config = parse_model_config(source | {"model_type": kind}, "x")
        flags[kind] = (config.attention_bias, config.has_qk_norm)
        assert config.head_dim == 64
    assert flags == {"qwen3": (False, True), "qwen2": (True, False), "llama": (False, False)}


EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


CORRECTED = {
    "model_type": "glm4_moe", "n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 8,
    "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5,
    "norm_topk_prob": True, "use_qk_norm": True, "attention_bias": True,
}  # fmt: skip


def test_weights_of_experts_sum_to_one_where_the_family_says_so_by_default():
    for model_type, normalises in (("glm4_moe", True), ("deepseek_v3", True), ("qwen3_moe", False)):
        source = {**DEEPSEEK_V3, "auto_map": None, "model_type": model_type, "norm_topk_prob": None, "num_experts": 8}
        config = parse_model_config({**source, "quantization_config": None}, "x")
        assert (config.normalises_top_experts, config.foreign) == (normalises, "")


def test_glm_4_5_chooses_experts_by_scores_that_are_corrected():
    config = parse_model_config(dict(tiny_config("1m").source) | CORRECTED, "x")
    assert not config.foreign
    assert [config.is_moe_layer(n) for n in range(config.num_layers)] == [False, False, False, True]
    assert (config.rotary_dim, config.head_dim, config.is_rope_interleaved) == (32, 64, False)
    shapes = config.tensor_shapes()
    assert shapes["model.layers.3.mlp.gate.e_score_correction_bias"] == (8,)
    assert shapes["model.layers.3.mlp.shared_experts.down_proj.weight"] == (128, 16)
    assert {"model.layers.0.self_attn.q_proj.bias", "model.layers.0.self_attn.q_norm.weight"} <= shapes.keys()
    plain = parse_model_config(dict(tiny_config("1m").source) | CORRECTED | {"n_shared_experts": 0}, "x")
    assert not [name for name in plain.tensor_shapes() if "shared" in name]


def test_experts_stand_where_the_config_says():
    source = dict(tiny_config("1m").source) | EXPERTS
    config = parse_model_config(source | {"mlp_only_layers": [2]}, "x")
    assert [config.is_moe_layer(n) for n in range(config.num_layers)] == [True, True, False, True]
    assert not config.normalises_top_experts
    every_second = parse_model_config(source | {"decoder_sparse_step": 2, "norm_topk_prob": True}, "x")
    assert every_second.dense_layers == (0, 2)
    assert every_second.normalises_top_experts
    renamed = {k: v for k, v in source.items() if k != "num_experts"} | {"num_local_experts": 4}
    assert parse_model_config(renamed, "x").tensor_shapes() == parse_model_config(source, "x").tensor_shapes()


def test_glm_rotates_half_of_each_head_in_neighbouring_pairs():
    config = parse_model_config(dict(tiny_config("1m").source) | {"model_type": "glm4", "attention_bias": True}, "x")
    assert (config.rotary_dim, config.head_dim, config.is_rope_interleaved) == (32, 64, True)
    assert config.attention_bias
    shapes = config.tensor_shapes()
    assert shapes["model.layers.0.mlp.gate_up_proj.weight"] == (768, 128)
    assert "model.layers.3.post_mlp_layernorm.weight" in shapes


@pytest.mark.parametrize(
    ("source", "num_parameters"),
    [(DEEPSEEK_V3, 671_026_419_200), (KIMI_K2, 1_026_408_232_448), (MOONLIGHT, 15_960_110_208)],
    ids=["DeepSeek-V3", "Kimi-K2", "Moonlight"],
)
def test_models_of_deepseeks_family_have_their_size(source: dict[str, Any], num_parameters: int):
    config = parse_model_config(source, "x")
    config.require_own("the Megatron trainer")
    assert config.num_parameters == num_parameters
    assert config.fp8 == (None if source is MOONLIGHT else Fp8Format((128, 128)))
    assert (config.head_dim, config.rotary_dim, config.is_rope_interleaved) == (192, 64, True)
    assert "model.layers.0.mlp.gate_proj.weight" in config.tensor_shapes()
    assert not {"auto_map", "quantization_config"} & config.source.keys(), "an export is neither"
    again = parse_model_config(config.source, "y")
    assert (again.model_type, again.tensor_shapes()) == ("deepseek_v3", config.tensor_shapes())


LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_who_runs_plain_decoders_only_refuses_the_others_by_name():
    plain = tiny_config("1m")
    plain.require_plain("the engine")
    source = dict(plain.source)
    with pytest.raises(ModelError, match="the engine does not run models of type qwen3_moe"):
        parse_model_config(source | EXPERTS, "x").require_plain("the engine")


def test_a_mixture_of_experts_is_refused_by_the_key_that_names_it(folder: Path, tmp_path: Path):
    make_tiny_model(tmp_path, "0p5m", seed=0)
    edit(tmp_path / "config.json", **EXPERTS)
    for key in ("algo.ref_path", "critic.path"):
        with pytest.raises(ConfigError, match=f"{key} = .*: its model_type is qwen3_moe, that of model.path is"):
            check_second_model(key, str(tmp_path), read_config(folder))


ROPE: list[tuple[Any, str]] = [
    ({"rope_type": "dynamic", "factor": 4.0}, "'dynamic'"),
    ({"type": "longrope", "factor": 4.0}, "'longrope'"),
    ({"rope_type": ["yarn"]}, "rotary"),
    ({"rope_type": "yarn", "factor": -4.0}, "rope_scaling.factor"),
    ({"rope_type": "linear"}, "rope_scaling.factor"),
]
WRONG: list[tuple[dict[str, Any], str]] = [
    *(({"rope_scaling": rope}, named) for rope, named in ROPE),
    ({"model_type": "mamba"}, "model_type"),
    ({"model_type": ...}, "model_type"),
    ({"model_type": "qwen3_vl", "text_config": {"hidden_size": 8}, "hidden_size": ...}, "text_config"),
    ({"hidden_size": "128"}, "hidden_size"),
    ({"hidden_size": 0}, "hidden_size"),
    ({"vocab_size": 1 << 60}, "vocab_size"),
    ({"num_hidden_layers": True}, "num_hidden_layers"),
    ({"num_key_value_heads": 3, "num_attention_heads": 4}, "4 attention heads"),
    ({"head_dim": 63}, "head_dim"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "rope_theta"),
    ({"rope_parameters": "yes"}, "rope_parameters"),
    (
        {"rope_scaling": YARN, "rope_parameters": {"rope_theta": 1e6}, "rope_theta": ...},
        "rope_parameters says rope_theta 1000000.0, but rope_scaling",
    ),
    *(({"rms_norm_eps": value}, "rms_norm_eps") for value in (-1, 0, ...)),  # families have other ones by default
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"use_sliding_window": True}, "use_sliding_window"),
    ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
    ({"attention_bias": True}, "attention_bias"),
    ({"quantization_config": {"bits": 4}}, "quantised"),
    ({"quantization_config": FP8, "model_type": "gpt2"}, "quantised"),
    ({"quantization_config": FP8 | {"weight_block_size": [128, 0]}}, "quantised"),
    (DEEPSEEK_V3 | {"auto_map": {"AutoModel": "modeling_own.DeepseekV3Model"}}, "auto_map"),
    (DEEPSEEK_V3 | {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
    (DEEPSEEK_V3 | {"num_key_value_heads": 64}, "num_key_value_heads 64"),
    (DEEPSEEK_V3 | {"kv_lora_rank": None}, "kv_lora_rank"),
    (EXPERTS | {"num_experts_per_tok": 5}, "num_experts_per_tok"),
    (EXPERTS | {"mlp_only_layers": 3}, "mlp_only_layers"),
    (EXPERTS | {"moe_intermediate_size": ...}, "moe_intermediate_size"),
    (EXPERTS | {"num_experts": 1 << 24, "num_experts_per_tok": 1}, "experts"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    *(({"model_type": "mistral", "sliding_window": window}, "sliding_window") for window in (1, "no", True)),
    ({"model_type": "qwen3_next"}, "flash-linear-attention (module fla)"),
    ({"model_type": "qwen3_5_moe"}, "model_type 'qwen3_5_moe', whose gated delta nets"),
    ({"model_type": "llama", "use_sliding_window": True, "sliding_window": 8}, "use_sliding_window"),
    ({"layer_types": ["sliding_attention"], "sliding_window": 8}, "sliding_attention"),
    (EXPERTS | {"model_type": "qwen2_moe"}, "shared_expert_intermediate_size"),
    *(
        (CORRECTED | {key: value}, key)
        for key, value in (
            ("n_routed_experts", ...),
            ("n_shared_experts", ...),
            ("n_shared_experts", -1),
            ("first_k_dense_replace", ...),
            ("routed_scaling_factor", ...),
            ("routed_scaling_factor", 0),
            ("n_group", 3),
            ("topk_group", 8),
            ("norm_topk_prob", False),
            ("num_experts_per_tok", 1),
            ("num_experts_per_tok", 9),
            ("use_qk_norm", "yes"),
        )
    ),
    (CORRECTED | {"num_experts_per_tok": 8}, "num_experts_per_tok 8 from topk_group 2 of n_group 4"),
    ({"model_type": "glm4", "partial_rotary_factor": 2.0}, "cannot rotate"),
    ({"model_type": "llama", "rope_parameters": LLAMA3}, "rope_scaling.original_max_position_embeddings"),
    ({"eos_token_id": "<|end|>"}, "eos_token_id"),
    ({"eos_token_id": [257, -3]}, "eos_token_id"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
    ({"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnModel"}}, "auto_map"),
    ({"num_hidden_layers": 1 << 24}, "num_hidden_layers"),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
    ({"rope_theta": 10**400, "rope_parameters": None}, "rope_theta"),
    *(
        (EXPERTS | {key: [0.5] * 200_000}, key)
        for key in ("mlp_only_layers", "eos_token_id", "layer_types", "hidden_act", "rope_scaling")
    ),
]


@pytest.mark.parametrize(("changes", "named"), WRONG, ids=[f"{at} {named}" for at, (_, named) in enumerate(WRONG)])
def test_a_config_that_is_wrong_or_not_implemented_is_refused_by_key(changes, named, folder: Path, tmp_path: Path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    edit(tmp_path / "config.json", **changes)
    with pytest.raises(ModelError) as caught:
        read_config(tmp_path).require_own("the trainer")
    assert named in str(caught.value) and str(tmp_path / "config.json") in str(caught.value)
    assert len(str(caught.value)) < 1000, "in few words"
    assert caught.value.remedy


MISTRAL = {"model_type": "mistral"}
SLIDES = {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        (MISTRAL | {"sliding_window": 64}, 64), (MISTRAL | {"sliding_window": None}, 0), (MISTRAL, 0),
        (MISTRAL | {"sliding_window": 1 << 16}, 0), ({"sliding_window": 64, "use_sliding_window": False}, 0),
        (SLIDES | {"sliding_window": 64}, 64), (SLIDES | {"model_type": "qwen2", "sliding_window": 32}, 32),
        ({"model_type": "llama", "sliding_window": 64}, 0),
    ],
)  # fmt: skip
def test_a_window_counts_where_the_family_uses_it_and_a_sample_can_be_longer(changes, window, folder: Path, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    edit(tmp_path / "config.json", **changes)
    if "sliding_window" not in changes:
        edit(tmp_path / "config.json", sliding_window=..., max_position_embeddings=4096)
    config = read_config(tmp_path)
    config.require_own("the trainer")
    assert config.window == window
    if window:
        config.require_window("the trainer", window)
        for length in (0, window + 1):
            with pytest.raises(ModelError, match=f"is {window} tokens.*engine.context_length to {window} or less"):
                config.require_window("the trainer", length)


@pytest.mark.parametrize(
    ("family", "sizes", "length"),
    [
        ("mamba", {}, 2048), ("bloom", {"seq_length": 512}, 512), ("bloom", {}, 2048), ("mpt", {"max_seq_len": 96}, 96),
        ("rwkv", {"context_length": 64}, 64), ("gpt2", {"n_positions": 32}, 32),
    ],
)  # fmt: skip
def test_families_name_their_context_in_many_ways_or_not_at_all(family: str, sizes: dict[str, int], length: int):
    from transformers import AutoConfig

    source = json.loads(AutoConfig.for_model(family, **sizes).to_json_string())
    config = parse_model_config(source, "config.json")
    assert (config.context_length, bool(config.foreign)) == (length, True)


def test_a_missing_folder_or_config_says_what_to_do(tmp_path: Path):
    with pytest.raises(ModelError, match=r"does not exist.*model\.path"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        read_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"holds an adapter, not a model -- .*lora\.path"):
        read_config(tmp_path)
    with pytest.raises(ModelError, match="is no folder"):
        read_config(tmp_path / "adapter_config.json")
    for text in ("{", "[1]", "\xff"):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        with pytest.raises(ModelError, match=r"config\.json"):
            read_config(tmp_path)


# -- weights -------------------------------------------------------------------------------------------------------


def test_a_weight_that_is_missing_or_of_another_shape_is_named(folder: Path, tmp_path: Path):
    config = read_config(folder)
    weights = init_weights(config, 1)
    write_folder(tmp_path, config.source, weights[:-1])
    with pytest.raises(ModelError, match=r"model\.norm\.weight is missing"):
        arrays(tmp_path, config)
    write_folder(tmp_path, config.source, weights)
    edit(tmp_path / "config.json", intermediate_size=385)
    with pytest.raises(ModelError, match=r"gate_proj\.weight has shape \[384, 128\].*demands \[385, 128\]"):
        arrays(tmp_path, read_config(tmp_path))


@pytest.mark.parametrize("writer", ["_orig_mod.model.", "base_model.model.model.", "", "lm_head.weight"])
def test_weights_under_names_that_others_write_are_told_by_them(writer: str, folder: Path, tmp_path: Path):
    """Wrappers, a model without its head, and of two names for one tensor the head's."""
    weights, name = init_weights(read_config(folder), 1), "model.embed_tokens.weight"
    if writer.endswith("weight"):
        found = writer
        weights = [named(w, found) if w.spec.name == name else w for w in weights]
    else:
        found = name.replace("model.", writer)
        weights = [named(w, w.spec.name.replace("model.", writer, 1)) for w in weights]
    write_folder(tmp_path, read_config(folder).source, weights)
    with pytest.raises(ModelError, match=rf"{name} is missing \({found} is there\) -- let transformers"):
        arrays(tmp_path, read_config(tmp_path))


def named(tensor: NamedArray, name: str, **changes: Any) -> NamedArray:
    return NamedArray(spec=msgspec.structs.replace(tensor.spec, name=name, **changes), data=tensor.data)


def test_weights_of_a_layer_that_the_config_does_not_explain_are_named(folder: Path, tmp_path: Path):
    """Biases of another family, adapters that were not merged: they would be left out."""
    config, weights = read_config(folder), init_weights(read_config(folder), 1)
    norm, layers = weights[-1], config.num_layers
    for extra in ("rotary_emb.inv_freq", "self_attn.q_proj.bias", "self_attn.q_proj.lora_A.weight"):
        write_folder(tmp_path, config.source, [*weights, named(norm, f"model.layers.{layers - 1}.{extra}")])
        if extra == "rotary_emb.inv_freq":
            arrays(tmp_path, config)
            continue
        with pytest.raises(
            ModelError, match=rf"weight model\.layers\.{layers - 1}\.{extra} is none of a qwen3 model's"
        ):
            arrays(tmp_path, config)
    behind = named(norm, f"model.layers.{layers}.input_layernorm.weight")  # of a model that was made shorter
    write_folder(tmp_path, config.source, [*weights, behind])
    arrays(tmp_path, config)


def test_a_head_beside_tied_embeddings_must_be_the_embedding(folder: Path, tmp_path: Path):
    config = read_config(folder)
    assert config.tie_word_embeddings
    weights = init_weights(config, 1)
    embedding = next(weight for weight in weights if "embed_tokens" in weight.spec.name)
    write_folder(tmp_path, config.source, [*weights, named(embedding, "lm_head.weight")])
    arrays(tmp_path, config)
    other = NamedArray(spec=named(embedding, "lm_head.weight").spec, data=memoryview(bytes(len(embedding.data))))
    write_folder(tmp_path, config.source, [*weights, other])
    with pytest.raises(ModelError, match=r"tie_word_embeddings is true.*lm_head\.weight differs"):
        arrays(tmp_path, config)
    write_folder(tmp_path, dict(config.source) | {"tie_word_embeddings": False}, weights)
    with pytest.raises(ModelError, match="tie_word_embeddings must be true"):
        arrays(tmp_path, read_config(tmp_path))


def test_one_file_of_weights_beside_the_index_of_others_is_ambiguous(folder: Path, tmp_path: Path):
    config = read_config(folder)
    weights = init_weights(config, 1)
    write_folder(tmp_path, config.source, weights, max_shard_bytes=1 << 19)
    index = (tmp_path / "model.safetensors.index.json").read_bytes()
    arrays(tmp_path, config)
    write_folder(tmp_path, config.source, weights)
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(ModelError, match="some programs read the one, some the other"):
        arrays(tmp_path, config)


def test_missing_shards_and_foreign_paths_are_refused(folder: Path, tmp_path: Path):
    config = read_config(folder)
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        arrays(tmp_path, config)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(ModelError, match="outside its folder"):
        arrays(tmp_path, config)
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(ModelError, match=r"gone\.safetensors"):
        arrays(tmp_path, config)
    index.write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(ModelError, match="no weight_map"):
        arrays(tmp_path, config)


def header(value: object, data: bytes = b"") -> bytes:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234",
        struct.pack("<Q", 1 << 62) + b"{}",
        header(b"{not json}"),
        header([1, 2]),
        header({"x": {"dtype": "F32", "shape": [1] * 9, "data_offsets": [0, 4]}}, bytes(4)),
        header({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234"),
        header({"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, bytes(8)),
        header({"x": {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}}, bytes(8)),
        header({"x": {"dtype": "Q4", "shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
        header({"x": {"dtype": "F32", "shape": [2]}}, bytes(8)),
        header({"x": 7}, bytes(8)),
        *(
            header(f'{{"w":{{"dtype":"F32","shape":[{shape}],"data_offsets":[{first},4]}}}}'.encode(), bytes(4))
            for number in ("1e999", "-1e999", "NaN", "9" * 400)
            for shape, first in ((number, 0), (1, number))
        ),
        header({"x": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 8]}}, bytes(8)),
    ],
)
def test_torn_and_hostile_weight_files_are_refused(content: bytes, tmp_path: Path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors is not a whole safetensors file"), open_safetensors(path):
        pass


def test_a_file_that_cannot_be_written_leaves_nothing_behind(folder: Path, tmp_path: Path):
    config = read_config(folder)
    if os.geteuid() == 0:
        (tmp_path / "model.safetensors.partial").mkdir()  # root may write anywhere, but not over a folder
    else:
        tmp_path.chmod(0o500)
    with pytest.raises((ModelError, IsADirectoryError)):
        write_safetensors(tmp_path / "model.safetensors", init_weights(config, 0))
    assert not (tmp_path / "model.safetensors").exists()


# -- hostile folders -----------------------------------------------------------------------------------------------

LINKS = ("fifo", "device", "folder")


def put_strange(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()


STRANGE = ("config.json", "generation_config.json", "model.safetensors.index.json", "model.safetensors")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", LINKS)
@pytest.mark.parametrize("name", STRANGE)
def test_e10_a_file_that_is_no_regular_file_is_refused_at_once(tmp_path: Path, kind: str, name: str):
    config = make_tiny_model(tmp_path, "0p5m", seed=5)
    put_strange(tmp_path / name, kind)
    with pytest.raises(ModelError, match=f"{name}.*not a regular file"):
        if name == "config.json":
            read_config(tmp_path)
        elif name == "generation_config.json":
            read_eos_token_ids(tmp_path)
        else:
            arrays(tmp_path, config)


def test_e10_a_file_of_huge_size_is_refused_before_it_is_read(tmp_path: Path):
    make_tiny_model(tmp_path, "0p5m", seed=5)
    os.truncate(tmp_path / "config.json", 1 << 40)
    with pytest.raises(ModelError, match="1099511627776 bytes, more than"):
        read_config(tmp_path)


TENSOR = b'{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"{" + b",".join(b'"t%d":%b' % (i, TENSOR) for i in range(400_000)) + b"}", "bytes, more than 16777216"),
        (b'{"a":[' + b"[]," * 5_000_000 + b"0]}", "invalid type: sequence"),
        (b"{" + b",".join(b'"%d":0' % i for i in range(300_000)) + b"}", "invalid type: integer"),
        (b'{"a":{"dtype":"F32","shape":[' + b"1," * 999_999 + b'1],"data_offsets":[0,4]}}', "1000000 dimensions"),
        (b'{"a":' * 60_000 + b"1" + b"}" * 60_000, "deserializing header"),
    ],
    ids=["tensors", "lists", "names", "dimensions", "depth"],
)
def test_e10_a_header_without_measure_is_refused_before_it_fills_the_memory(tmp_path: Path, text: bytes, says: str):
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelError, match=says) as caught, open_safetensors(path):
        pass
    assert len(str(caught.value)) < 1000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 300 << 10


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"]
)
def test_e10_a_json_file_of_millions_of_values_is_refused_before_it_fills_the_memory(tmp_path: Path, name: str):
    make_tiny_model(tmp_path, "0p5m", seed=5)
    (tmp_path / name).write_bytes(b'{"model":{"type":"BPE","x":[' + b"[]," * 5_000_000 + b"0]}}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelError, match=rf"cannot read .*{name}: it has 5000001 commas, more than"):
        if "tokenizer" in name:
            load_tokenizer(tmp_path)
        else:
            arrays(tmp_path, read_config(tmp_path))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 300 << 10


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", LINKS)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "additional_chat_templates/rag.jinja"])
def test_e10_a_tokenizer_file_that_is_no_regular_file_is_neither_read_nor_copied(tmp_path: Path, kind: str, name: str):
    source, target = tmp_path / "source", tmp_path / "target"
    make_tiny_model(source, "0p5m", seed=5)
    target.mkdir()
    (source / name).parent.mkdir(exist_ok=True)
    put_strange(source / name, kind)
    with pytest.raises(ModelError, match=name.replace("/", ".")):
        copy_tokenizer(source, target)
    with pytest.raises(ModelError, match=name.replace("/", ".")):
        load_tokenizer(source)


# -- broken weights --------------------------------------------------------------------------------------------------

NORM = "model.norm.weight"
BITS = {"float64": "<u8", "float32": "<u4", "float16": "<u2", "bfloat16": "<u2"}


def one_weight(dtype: str, bits: Sequence[int] | np.ndarray[Any, Any]) -> NamedArray:
    data = np.asarray(bits, dtype=BITS[dtype]).tobytes()
    spec = TensorSpec(name="model.norm.weight", dtype=dtype, shape=(len(bits),), offset=0, num_bytes=len(data))
    return NamedArray(spec=spec, data=memoryview(data))


INFINITY = {"float64": 0x7FF0 << 48, "float32": 0x7F80 << 16, "float16": 0x7C00, "bfloat16": 0x7F80}
SIGN = {"float64": 1 << 63, "float32": 1 << 31, "float16": 1 << 15, "bfloat16": 1 << 15}


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("place", [0, (1 << 20) + 3])
def test_e6_each_value_that_is_not_finite_is_found_and_placed(dtype: str, place: int):
    good = np.full((1 << 20) + 5, INFINITY[dtype] - 1, dtype=BITS[dtype])  # the largest number
    check_values([NORM], {"model.norm.weight": one_weight(dtype, good)}, "folder")
    for bad in (INFINITY[dtype], INFINITY[dtype] | SIGN[dtype], INFINITY[dtype] + 1):
        bits = good.copy()
        bits[place] = bad
        with pytest.raises(ModelError, match=rf"folder: weight model\.norm\.weight holds NaN.* number {place} of"):
            check_values([NORM], {"model.norm.weight": one_weight(dtype, bits)}, "folder")


def test_e6_of_large_models_the_start_of_each_weight_is_read():
    bits = np.zeros(1000, dtype="<u4")
    bits[500] = INFINITY["float32"]
    tensors = {"model.norm.weight": one_weight("float32", bits)}
    check_values([NORM], tensors, "folder", max_bytes=1000)
    with pytest.raises(ModelError, match="number 500 of 1000"):
        check_values([NORM], tensors, "folder", max_bytes=3000)


def test_e6_weights_of_no_float_type_are_refused():
    spec = TensorSpec(name="model.norm.weight", dtype="int8", shape=(2,), offset=0, num_bytes=2)
    with pytest.raises(ModelError, match="of type int8, not a float type"):
        check_values([NORM], {spec.name: NamedArray(spec=spec, data=memoryview(bytes(2)))}, "f")
