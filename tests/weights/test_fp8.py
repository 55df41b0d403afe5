"""Block-wise FP8: hand-made values, the round trip, blocks of zeros, and which weights of a folder it is for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from myxa.actors.backends.torch_backend.tensors import from_bytes
from myxa.actors.models.fp8 import SCALE_INV
from myxa.actors.models.hf_folder import check_values, open_weights, read_config, write_folder
from myxa.actors.models.model_config import parse_model_config
from myxa.actors.models.tiny import make_tiny_model, tiny_config
from myxa.actors.weights.channels.sender import DeviceWeightSender, Fp8Rule, quantise_blocks
from myxa.core.config import RunConfig
from myxa.core.errors import ConfigError, ModelError
from myxa.core.weight_channel import PlanRequest
from myxa.launch.composition.trainer_parts import guard_bound


def dequantise_blocks(
    quantised: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] = (128, 128)
) -> torch.Tensor:
    """float32 [m, n]: Q * S."""
    rows, columns = quantised.shape
    spread = scale.repeat_interleave(block[0], dim=0)[:rows].repeat_interleave(block[1], dim=1)[:, :columns]
    return quantised.float() * spread


def test_values_worked_out_by_hand():
    weight = torch.tensor([[448.0, -224.0, 1.0, 0.0], [0.0, 17.0, 0.0, 0.0]])
    quantised, scale = quantise_blocks(weight, (2, 2))
    assert scale.tolist() == [[1.0, pytest.approx(1 / 448)]]
    # 17 lies between 16 and 18 of e4m3fn and goes to the even one; 1 is the largest of its block, hence 448.
    assert quantised.float().tolist() == [[448.0, -224.0, 448.0, 0.0], [0.0, 16.0, 0.0, 0.0]]
    assert torch.allclose(
        dequantise_blocks(quantised, scale, (2, 2)), torch.tensor([[448, -224, 1, 0], [0, 16, 0, 0.0]])
    )


@pytest.mark.parametrize("shape", [(1, 1), (200, 130), (257, 384)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_round_trip_errs_by_half_a_step_at_most(shape: tuple[int, int], dtype: torch.dtype):
    maker = torch.Generator().manual_seed(1)
    weight = (torch.randn(*shape, generator=maker) * torch.randn(shape[0], 1, generator=maker).exp()).to(dtype)
    quantised, scale = quantise_blocks(weight)
    assert quantised.shape == weight.shape and quantised.dtype == torch.float8_e4m3fn
    assert scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128)) and scale.dtype == torch.float32
    back = dequantise_blocks(quantised, scale)
    # Three bits of mantissa: half a step is 2**-4 of the value; below 2**-6 of e4m3fn the step is fixed at 2**-9.
    step = scale.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]] * 2**-10
    assert bool(((back - weight.float()).abs() <= weight.float().abs() * 2**-4 * 1.001 + step * 1.001).all())


def test_blocks_of_zeros_and_of_next_to_nothing_stay_finite():
    weight = torch.zeros(256, 256)
    weight[128:, 128:] = 1e-44  # its amax / 448 is no number any more
    weight[:128, 128:] = 3e38
    quantised, scale = quantise_blocks(weight)
    assert torch.isfinite(scale).all() and (scale > 0).all() and torch.isfinite(quantised.float()).all()
    back = dequantise_blocks(quantised, scale)
    assert back[:128, :128].abs().max() == 0 and scale[0, 0] == 1
    assert torch.allclose(back[:128, 128:], weight[:128, 128:], rtol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_is_never_handed_on(bad: float):
    weight = torch.ones(4, 4)
    weight[2, 2] = bad
    rule = Fp8Rule(names=frozenset({"v", "w"}), block=(128, 128))
    with pytest.raises(ModelError, match="weight w cannot be quantised"):
        list(rule.apply(iter([("v", torch.ones(4, 4)), ("w", weight)])))
    with pytest.raises(ModelError, match="weight w cannot be quantised"):
        list(rule.batches(iter([("v", torch.ones(4, 4)), ("w", weight)])))
    with pytest.raises(ValueError, match="a matrix is needed"):
        quantise_blocks(torch.ones(3))


def test_scales_that_are_powers_of_two_are_rounded_up():
    weight = torch.tensor([[448.0, 449.0, 0.0, 0.3]])
    quantised, scale = quantise_blocks(weight, (1, 1), scale_fmt="ue8m0")
    assert scale.tolist() == [[1.0, 2.0, 1.0, 2.0**-10]], "the least power of two by which the block's largest fits"
    assert quantised.float().tolist() == [[448.0, 224.0, 0.0, 320.0]]
    maker = torch.Generator().manual_seed(2)
    matrices = torch.randn(3, 300, 200, generator=maker).bfloat16()
    quantised, scale = quantise_blocks(matrices, scale_fmt="ue8m0")
    assert torch.equal(scale.log2(), scale.log2().round())
    as_read = torch.stack([dequantise_blocks(q, s) for q, s in zip(quantised, scale, strict=True)]).bfloat16()
    again, again_scale = quantise_blocks(as_read, scale_fmt="ue8m0")
    back = torch.stack([dequantise_blocks(q, s) for q, s in zip(again, again_scale, strict=True)])
    assert torch.equal(back, as_read.float()), "weights that were read so lose nothing more on their way"


def folder_of(path: Path, quantisation: object) -> Path:
    (path / "config.json").write_text(json.dumps({"quantization_config": quantisation} if quantisation else {}))
    save_file(
        {
            "a.q_proj.weight": torch.zeros(4, 4, dtype=torch.float8_e4m3fn),
            "a.q_proj.weight_scale_inv": torch.ones(1, 1),
            "lm_head.weight": torch.zeros(4, 4),
        },
        path / "model.safetensors",
    )
    return path


def test_the_folder_says_which_weights(tmp_path: Path):
    folder_of(tmp_path, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    rule = Fp8Rule.of_folder(tmp_path)
    assert rule is not None and rule == Fp8Rule(names=frozenset({"a.q_proj.weight"}), block=(128, 128))
    made = list(rule.apply(iter([("a.q_proj.weight", torch.ones(4, 4)), ("lm_head.weight", torch.ones(4, 4))])))
    assert [(n, t.dtype) for n, t in made] == [
        ("a.q_proj.weight", torch.float8_e4m3fn),
        ("a.q_proj.weight_scale_inv", torch.float32),
        ("lm_head.weight", torch.float32),
    ]


def test_the_folder_says_which_scales(tmp_path: Path):
    said = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    rule = Fp8Rule.of_folder(folder_of(tmp_path, said | {"scale_fmt": "ue8m0"}))
    assert rule is not None
    (_, (_, scales)) = rule.apply(iter([("a.q_proj.weight", torch.full((4, 4), 3.0))]))
    assert scales.tolist() == [[2.0**-7]]
    with pytest.raises(ConfigError, match=r"'ue4m3' - at `\$\.scale_fmt`"):
        Fp8Rule.of_folder(folder_of(tmp_path, said | {"scale_fmt": "ue4m3"}))
    with pytest.raises(ModelError, match=r"'ue4m3' - at `\$\.scale_fmt`"):
        parse_model_config({**tiny_config("0p5m").source, "quantization_config": said | {"scale_fmt": "ue4m3"}}, "x")


def test_matrices_quantised_together_are_those_quantised_alone():
    maker = torch.Generator().manual_seed(4)
    named = [
        (f"m.{number}.{kind}", torch.randn(*shape, generator=maker).to(dtype or torch.float32))
        for number in range(9)
        for kind, shape, dtype in (
            ("a", (130, 200), torch.bfloat16),
            ("b", (200, 130), torch.float32),
            ("c", (3,), None),
        )
    ]
    named.insert(9, ("big.a", torch.ones(1 << 9, 1 << 10).bfloat16()))
    fills = 1 << 20
    rule = Fp8Rule(names=frozenset(name for name, _ in named if not name.endswith("c")), block=(128, 64))
    expected = list[tuple[str, torch.Tensor]]()
    for name, tensor in named:
        if name not in rule.names:
            expected.append((name, tensor))
            continue
        values, scales = quantise_blocks(tensor, rule.block)
        expected += [(name, values), (name + SCALE_INV, scales)]
    found = list(rule.apply(iter(named)))
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert all(torch.equal(got.float(), wanted.float()) for (_, got), (_, wanted) in zip(found, expected, strict=True))
    together = dict[str, torch.Tensor]()
    for names, tensor in rule.batches(iter(named), fills):
        together |= {names: tensor} if isinstance(names, str) else dict(zip(names, tensor, strict=True))
    assert together.keys() == dict(expected).keys()
    assert all(torch.equal(together[name].float(), wanted.float()) for name, wanted in expected)


def test_folders_that_are_not_fp8_or_broken(tmp_path: Path):
    assert Fp8Rule.of_folder(folder_of(tmp_path, None)) is None
    with pytest.raises(ConfigError, match="quantization_config: Invalid value 'awq'"):
        Fp8Rule.of_folder(folder_of(tmp_path, {"quant_method": "awq"}))
    for wrong in ({"quant_method": "fp8", "weight_block_size": [1 << 40, 128]}, "fp8"):  # the first would fill memory
        with pytest.raises(ConfigError, match="quantization_config: Expected"):
            Fp8Rule.of_folder(folder_of(tmp_path, wrong))
    folder_of(tmp_path, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ModelError, match="is not a whole safetensors file"):
        Fp8Rule.of_folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="has neither model.safetensors nor"):
        Fp8Rule.of_folder(tmp_path)
    with pytest.raises(ModelError, match=r"config\.json"):
        Fp8Rule.of_folder(tmp_path / "nowhere")


def test_quantised_weights_travel_in_aligned_buckets(tmp_path: Path):
    rule = Fp8Rule(names=frozenset({"m.0.mlp.up_proj.weight"}), block=(128, 128))
    sender = DeviceWeightSender("trainer/0", channel="nccl", bucket_bytes=1 << 20, host="", quantise=rule)
    tensors = [
        ("m.0.mlp.up_proj.weight", torch.randn(3, 5)),
        ("m.0.mlp.gate_proj.weight", torch.randn(3, 5).bfloat16()),
    ]
    assert sender.publish(1, lambda: iter(tensors)) is not None
    (bucket,) = sender.answer(PlanRequest(version=1)).buckets
    assert [(s.name, s.dtype, s.offset) for s in bucket.tensors] == [
        ("m.0.mlp.up_proj.weight_scale_inv", "float32", 0),
        ("m.0.mlp.gate_proj.weight", "bfloat16", 4),
        ("m.0.mlp.up_proj.weight", "float8_e4m3fn", 34),
    ]
    sender.close()


# -- read as bfloat16 ----------------------------------------------------------------------------------------------

BLOCK = (48, 40)
WEIGHT = "model.layers.1.mlp.up_proj.weight"


def fp8_model(folder: Path, **changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Write a model whose projections are FP8 in blocks; returns what its weights are."""
    config = tiny_config("0p5m")
    torch.manual_seed(3)
    stored = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in config.tensor_shapes().items()}
    expected = dict(stored)
    for name in [name for name in stored if "_proj" in name]:
        stored[name], scale = quantise_blocks(expected[name], BLOCK)
        stored[name + SCALE_INV] = scale
        expected[name] = dequantise_blocks(stored[name], scale, BLOCK).to(torch.bfloat16)
    save_file({k: v for k, v in (stored | changes).items() if v is not None}, folder / "model.safetensors")
    said = {"quant_method": "fp8", "weight_block_size": BLOCK}
    (folder / "config.json").write_text(json.dumps(dict(config.source) | {"quantization_config": said}))
    return expected


@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float16])
def test_scales_of_less_digits_are_read_as_they_are(scales: torch.dtype, tmp_path: Path) -> None:
    """Qwen3-1.7B-FP8 has them in bfloat16, Qwen3-4B-Instruct-2507-FP8 in float16."""
    scale = torch.rand(8, 4).add(0.01).to(scales)
    fp8_model(tmp_path, **{WEIGHT + SCALE_INV: scale})
    values = load_file(tmp_path / "model.safetensors")[WEIGHT]
    with open_weights(tmp_path, read_config(tmp_path)) as tensors:
        weight = from_bytes(tensors[WEIGHT])
    assert torch.equal(weight, dequantise_blocks(values, scale.float(), BLOCK).to(torch.bfloat16))


def test_fp8_in_blocks_is_read_as_bfloat16(tmp_path: Path) -> None:
    expected = fp8_model(tmp_path)
    with open_weights(tmp_path, config := read_config(tmp_path)) as tensors:
        assert set(tensors) == set(expected)
        write_folder(tmp_path / "out", config.source, [tensors[name] for name in expected])
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], weight) for name, weight in expected.items())
    assert read_config(tmp_path / "out").fp8 is None
    with open_weights(tmp_path, config, as_stored=True) as tensors:
        check_values(expected, tensors, "x")


@pytest.mark.parametrize("scales", [None, torch.ones(3, 3), torch.ones(8, 4, dtype=torch.float64)])
def test_fp8_without_its_scales_is_refused(scales: torch.Tensor | None, tmp_path: Path) -> None:
    fp8_model(tmp_path, **{WEIGHT + SCALE_INV: scales})
    wanted = rf"{WEIGHT} is FP8 \[384, 128\].*float32 or .* \[8, 4\] is needed"
    with pytest.raises(ModelError, match=wanted), open_weights(tmp_path, read_config(tmp_path)):
        pass


def test_fp8_that_config_json_does_not_speak_of_is_refused(tmp_path: Path) -> None:
    fp8_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
    with pytest.raises(ModelError, match="in blocks of None"), open_weights(tmp_path, read_config(tmp_path)):
        pass


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        (WEIGHT, torch.full((384, 128), torch.nan).to(torch.float8_e4m3fn)),
        (WEIGHT + SCALE_INV, torch.full((8, 4), torch.inf)),
    ],
)
def test_nan_in_fp8_is_found(name: str, bad: torch.Tensor, tmp_path: Path) -> None:
    fp8_model(tmp_path, **{name: bad})
    config = read_config(tmp_path)
    with (
        open_weights(tmp_path, config, as_stored=True) as tensors,
        pytest.raises(ModelError, match=f"{name} holds NaN"),
    ):
        check_values(config.tensor_shapes(), tensors, "x")


def test_the_guard_leaves_room_for_engines_that_hold_fp8(tmp_path: Path) -> None:
    """SGLang sees by the folder that it is FP8: the run file need not say so."""
    model, served = tmp_path / "model", tmp_path / "served"
    source = dict(make_tiny_model(model, preset="0p5m", seed=0).source)
    served.mkdir()
    said = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (served / "config.json").write_text(json.dumps(source | said))
    roles = {"rollout": {"kind": "sglang"}}
    bf16 = {"data": {"train": "t"}, "roles": roles, "engine": {"dtype": "bfloat16"}, "trainer": {"dtype": "bfloat16"}}
    group = {"a": {"sglang": {"kv_cache_dtype": "fp8_e4m3"}}}
    bounds = [
        guard_bound(RunConfig.model_validate({"model": {"path": str(path)}, **bf16, **more}))
        for path, more in (
            (model, {}),
            (served, {}),
            (model, {"weights": {"served_folder": str(served)}}),
            (model, {"engine": {"dtype": "bfloat16", "groups": group}}),
        )
    ]
    assert bounds[0] < bounds[1] == bounds[2] == bounds[3]
