"""Folders as llm-compressor writes them (GLM-4.5-FP8): FP8 with a scale for each channel, tensor or block."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.test_hf_folder import CORRECTED

from myxa.actors.backends.convert import quantise_folder
from myxa.actors.backends.torch_backend.tensors import from_bytes
from myxa.actors.models.hf_folder import check_values, open_weights, read_config
from myxa.actors.models.model_config import parse_model_config
from myxa.actors.models.tiny import tiny_config, write_tokenizer
from myxa.actors.weights.channels.sender import Fp8Rule, quantise_blocks
from myxa.core.errors import ConfigError, ModelError

MODEL = dict(tiny_config("1m").source) | CORRECTED
SHAPES = parse_model_config(MODEL, "x").tensor_shapes()
WEIGHT = "model.layers.3.mlp.experts.5.up_proj.weight"
BLOCK = (24, 48)
ACTIVATIONS: dict[str, Any] = {
    "actorder": None, "block_structure": None, "dynamic": True, "group_size": None, "num_bits": 8, "observer": None,
    "observer_kwargs": {}, "strategy": "token", "symmetric": True, "type": "float",
}  # fmt: skip
WEIGHTS = ACTIVATIONS | {"dynamic": False, "observer": "minmax", "strategy": "channel"}
GROUP: dict[str, Any] = {
    "input_activations": ACTIVATIONS, "output_activations": None, "targets": ["Linear"], "weights": WEIGHTS,
}  # fmt: skip


def said(*groups: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """`quantization_config` as it is published."""
    return {
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
        "format": "float-quantized", "global_compression_ratio": None,
        "ignore": ["lm_head", "model.layers.3.mlp.gate", "model.layers.0.mlp.down_proj"], "kv_cache_scheme": None,
        "quant_method": "compressed-tensors", "quantization_status": "compressed", **more,
    }  # fmt: skip


def weights(**changes: Any) -> dict[str, Any]:
    return GROUP | {"weights": WEIGHTS | changes}


def is_quantised(name: str) -> bool:
    return "_proj.weight" in name and name != "model.layers.0.mlp.down_proj.weight"


def folder_of(
    folder: Path,
    strategy: str = "channel",
    kind: torch.dtype = torch.bfloat16,
    changes: Mapping[str, torch.Tensor | None] | None = None,
) -> dict[str, torch.Tensor]:
    """Write a folder of random weights, quantised by torch alone; returns what each weight is."""
    torch.manual_seed(7)
    expected = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in SHAPES.items()}
    stored = dict(expected)
    for name in filter(is_quantised, SHAPES):
        whole = expected[name].float()
        high, wide = {"channel": (1, whole.shape[1]), "tensor": tuple(whole.shape), "block": BLOCK}[strategy]
        scales = torch.stack(
            [torch.stack([b.abs().max() / 448 for b in row.split(wide, 1)]) for row in whole.split(high, 0)]
        ).to(kind)
        spread = scales.float().repeat_interleave(high, 0).repeat_interleave(wide, 1)
        spread = spread[: whole.shape[0], : whole.shape[1]]
        stored[name] = (whole / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored[name + "_scale"] = scales.squeeze() if strategy == "tensor" else scales
        expected[name] = (stored[name].float() * spread).to(torch.bfloat16)
    folder.mkdir(exist_ok=True)
    save_file({k: v for k, v in (stored | dict(changes or {})).items() if v is not None}, folder / "model.safetensors")
    group = weights(strategy=strategy, block_structure=list(BLOCK) if strategy == "block" else None)
    (folder / "config.json").write_text(json.dumps(MODEL | {"quantization_config": said(group)}))
    return expected


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32, torch.float8_e8m0fnu])
@pytest.mark.parametrize("strategy", ["channel", "tensor", "block"])
def test_weights_are_value_times_scale(strategy: str, kind: torch.dtype, tmp_path: Path) -> None:
    expected = folder_of(tmp_path, strategy, kind)
    config = read_config(tmp_path)
    with open_weights(tmp_path, config, as_stored=True) as tensors:
        check_values(expected, tensors, "x")
    with open_weights(tmp_path, config) as tensors:
        assert set(tensors) == set(expected)
        wrong = [name for name in expected if not torch.equal(from_bytes(tensors[name]), expected[name])]
    assert not wrong
    assert "quantization_config" not in config.source, "an export is not quantised"


@pytest.mark.parametrize("shape", [(8,), (8, 1)])
def test_a_scale_for_each_row_may_lie_in_a_row_or_a_column(shape: tuple[int, ...], tmp_path: Path) -> None:
    scales = torch.arange(1, 9).float()
    folder_of(tmp_path, changes={WEIGHT + "_scale": scales.view(shape)})
    values = load_file(tmp_path / "model.safetensors")[WEIGHT].float()
    with open_weights(tmp_path, read_config(tmp_path)) as tensors:
        assert torch.equal(from_bytes(tensors[WEIGHT]).float(), (values * scales[:, None]).bfloat16().float())


@pytest.mark.parametrize(
    "scales", [None, torch.ones(7, 1), torch.ones(1, 128), torch.ones(()), torch.ones(8, 1, dtype=torch.float64)]
)
def test_scales_that_do_not_fit_are_refused(scales: torch.Tensor | None, tmp_path: Path) -> None:
    folder_of(tmp_path, changes={WEIGHT + "_scale": scales})
    wanted = rf"{WEIGHT} is FP8 \[8, 128\] in blocks of \(1, 0\), its scales are .*\[8, 1\] is needed"
    with pytest.raises(ModelError, match=wanted), open_weights(tmp_path, read_config(tmp_path)):
        pass


def test_scales_of_the_other_kind_are_not_taken_for_them(tmp_path: Path) -> None:
    folder_of(tmp_path, changes={WEIGHT + "_scale": None, WEIGHT + "_scale_inv": torch.ones(8, 1)})
    with pytest.raises(ModelError, match="its scales are None"), open_weights(tmp_path, read_config(tmp_path)):
        pass


@pytest.mark.parametrize(
    "bad",
    [
        torch.full((8, 1), torch.nan),
        torch.full((8, 1), torch.inf, dtype=torch.bfloat16),
        torch.full((8, 1), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu),
    ],
)
def test_a_scale_that_is_no_number_is_found(bad: torch.Tensor, tmp_path: Path) -> None:
    folder_of(tmp_path, changes={WEIGHT + "_scale": bad})
    config = read_config(tmp_path)
    with open_weights(tmp_path, config, as_stored=True) as tensors, pytest.raises(ModelError, match="_scale holds NaN"):
        check_values(config.tensor_shapes(), tensors, "x")


def test_a_weight_of_exponents_alone_is_none(tmp_path: Path) -> None:
    name = "model.norm.weight"
    folder_of(tmp_path, changes={name: torch.ones(SHAPES[name]).to(torch.float8_e8m0fnu)})
    config = read_config(tmp_path)
    with open_weights(tmp_path, config, as_stored=True) as tensors, pytest.raises(ModelError, match="not a float type"):
        check_values(config.tensor_shapes(), tensors, "x")


@pytest.mark.parametrize(
    "quantisation",
    [
        said(
            GROUP | {"targets": ["re:.*self_attn.*"]}, GROUP | {"targets": ["re:.*mlp.*"], "format": "naive-quantized"}
        ),
        said(
            GROUP | {"input_activations": None}, kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor"}
        ),
        said(GROUP, sparsity_config={"format": "dense"}, transform_config={}, ignore=[]),
    ],
)
def test_what_does_not_change_the_weights_is_passed_over(quantisation: dict[str, Any], tmp_path: Path) -> None:
    """Which matrices are FP8, the files say; scales of activations and of the cache lie beside them."""
    beside = {f"model.layers.0.self_attn.{name}": torch.ones(1) for name in ("k_scale", "q_proj.input_scale")}
    expected = folder_of(tmp_path, changes=beside)
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"quantization_config": quantisation}))
    with open_weights(tmp_path, read_config(tmp_path)) as tensors:
        assert set(tensors) == set(expected)
        assert torch.equal(from_bytes(tensors[WEIGHT]), expected[WEIGHT])


REFUSED: list[tuple[Any, str]] = [
    (said(weights(type="int")), "'int' - at `$.config_groups[...].weights.type`"),
    (said(GROUP, weights(type="int", num_bits=4, strategy="group")), "4 - at `$.config_groups[...].weights.num_bits`"),
    (said(weights(strategy="group", group_size=128)), "'group' - at `$.config_groups[...].weights.strategy`"),
    (said(weights(), format="pack-quantized"), "config_groups.group_0: weights of format 'pack-quantized'"),
    (said(GROUP | {"format": "nvfp4-pack-quantized"}, format="mixed-precision"), "format 'nvfp4-pack-quantized'"),
    (said(weights(symmetric=False)), "symmetric False"),
    (said(weights(dynamic=True)), "dynamic True"),
    (said(weights(strategy="block", block_structure=[1 << 40, 128])), "weights.block_structure[0]"),
    (said(weights(strategy="block")), "block_structure None"),
    (said(weights(strategy=["channel"])), "weights.strategy"),
    (said(GROUP, weights(strategy="tensor")), "config_groups has 2 kinds of scales"),
    (said(GROUP | {"weights": None}), "`null` - at `$.config_groups[...].weights`"),
    (said(), "config_groups has 0 kinds of scales"),
    (said() | {"config_groups": [GROUP]}, "at `$.config_groups`"),
    (said() | {"config_groups": {"a": 3}}, "at `$.config_groups[...]`"),
    (said(GROUP, transform_config={"config_groups": {"R1": {}}}), "transform_config is {'config_groups'"),
    (said(GROUP, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config {'format': 'sparse-24"),
    ("fp8", "quantization_config: Expected `object"),
    ({"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": ["ue8m0"]}, "scale_fmt"),
]


@pytest.mark.parametrize(("quantisation", "named"), REFUSED)
def test_what_is_not_read_is_refused_by_name(quantisation: Any, named: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as error:
        parse_model_config(MODEL | {"quantization_config": quantisation}, "place")
    assert named in error.value.message and error.value.message.startswith("place: the weights are quantised")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantisation}))
    with pytest.raises(ConfigError) as served:
        Fp8Rule.of_folder(tmp_path)
    assert named in served.value.message and str(tmp_path) in served.value.message


def test_servers_get_blocks_with_scales_by_the_names_of_their_folder(tmp_path: Path) -> None:
    expected = folder_of(tmp_path, "block")
    rule = Fp8Rule.of_folder(tmp_path)
    assert rule is not None and rule.names == set(filter(is_quantised, SHAPES))
    sent = dict(rule.apply(iter([(name, expected[name]) for name in (WEIGHT, "model.norm.weight")])))
    values, scales = quantise_blocks(expected[WEIGHT], BLOCK)
    assert list(sent) == [WEIGHT, WEIGHT + "_scale", "model.norm.weight"]
    assert torch.equal(sent[WEIGHT].float(), values.float()) and torch.equal(sent[WEIGHT + "_scale"], scales)


@pytest.mark.parametrize(("strategy", "named"), [("channel", "each channel"), ("tensor", "each matrix")])
def test_servers_that_hold_other_scales_are_refused(strategy: str, named: str, tmp_path: Path) -> None:
    """SGLang transposes their weights when it has loaded them, and fails at, or misreads, those that come later."""
    folder_of(tmp_path, strategy)
    with pytest.raises(ConfigError, match=f"one scale for {named}.*--dtype fp8.*weights.served_folder"):
        Fp8Rule.of_folder(tmp_path)


def left_out(folder: Path) -> list[str]:
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    return said["modules_to_not_convert"]


def test_matrices_that_a_server_would_join_within_a_block_stay_as_they_are(tmp_path: Path) -> None:
    """GLM-4.5-Air's first MLP is 10944 wide: SGLang joins gate and up, and refuses gates of 85.5 blocks."""
    source, target = tmp_path / "source", tmp_path / "target"
    config = parse_model_config(MODEL | {"intermediate_size": 200, "num_key_value_heads": 1}, "x")
    source.mkdir()
    weights = {name: torch.ones(shape).bfloat16() for name, shape in config.tensor_shapes().items()}
    save_file(weights, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(config.source))
    write_tokenizer(source, tiny_config("1m"))
    quantise_folder(source, target)
    rule = Fp8Rule.of_folder(target)
    assert rule is not None and rule.names == {name for name in weights if "_proj.weight" in name and "experts" in name}
    layers = range(config.num_layers)
    odd = {f"model.layers.{n}.self_attn.{x}_proj" for n in layers for x in "qkvo"}
    odd |= {f"model.layers.{n}.mlp.{x}_proj" for n in config.dense_layers for x in ("gate", "up", "down")}
    assert set(left_out(target)) == odd


def test_such_a_folder_becomes_one_in_blocks_that_servers_take(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    expected = folder_of(source)
    write_tokenizer(source, tiny_config("1m"))
    config = json.loads((source / "config.json").read_text())
    quantise_folder(source, target)
    rule = Fp8Rule.of_folder(target)
    assert rule is not None and rule.block == (128, 128) and WEIGHT in rule.names
    assert config["intermediate_size"] % 128 == 0 and not left_out(target)
    values, scales = quantise_blocks(expected[WEIGHT])
    written = load_file(target / "model.safetensors")
    assert torch.equal(written[WEIGHT].float(), values.float()) and torch.equal(written[WEIGHT + "_scale_inv"], scales)
