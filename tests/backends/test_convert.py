"""Checkpoints of the torch trainer as HuggingFace folders, and what the command says to mistakes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tests.backends.gang_rank import Backends, make_shards, save
from tests.models.deepseek import DEEPSEEK_V3

from myxa.actors.backends.convert import convert, quantise_folder
from myxa.actors.backends.torch_backend.tensors import from_bytes
from myxa.actors.models.hf_folder import open_weights, read_config
from myxa.actors.models.model_config import parse_model_config
from myxa.actors.models.tiny import make_tiny_model
from myxa.core.errors import ModelError, TrainError
from myxa.launch.cli import main


@pytest.fixture
def checkpoint(tmp_path: Path, backends: Backends) -> tuple[Path, dict[str, np.ndarray]]:
    """A checkpoint after one step, and the weights that it must hold."""
    backend = backends()
    backend.train(make_shards(51)[0], {})
    save(backend, str(tmp_path / "run" / "checkpoints" / "version_00000001"), {"version": 1})
    weights = {
        array.spec.name: np.frombuffer(array.data, np.float32).reshape(array.spec.shape).copy()
        for array in backend.export_weights()
    }
    return tmp_path / "run", weights


def test_the_folder_holds_the_weights_of_the_newest_checkpoint(
    checkpoint: tuple[Path, dict[str, np.ndarray]], model: Path, tmp_path: Path
) -> None:
    run, weights = checkpoint
    done = convert(run, model, tmp_path / "hf")
    assert (done["backend"], done["num_updates"], done["dtype"]) == ("torch", 1, "float32")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    assert done["num_parameters"] == sum(value.size for value in weights.values())
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


def test_the_command_takes_the_model_from_the_run_and_writes_the_type_asked_for(
    checkpoint: tuple[Path, dict[str, np.ndarray]], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = checkpoint
    (run / "config.toml").write_text(
        f'[model]\npath = "{model}"\n[data]\ntrain = "{model}/tokenizer.json"\npreset = "plain"\n'
    )
    assert main(["convert", str(run), str(tmp_path / "hf"), "--dtype", "bfloat16"]) == 0
    assert "bfloat16" in capsys.readouterr().out
    with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as file:
        assert {str(file.get_tensor(name).dtype) for name in file.keys()} == {"torch.bfloat16"}  # noqa: SIM118 - no dict


def test_mistakes_are_told_before_anything_is_written(
    checkpoint: tuple[Path, dict[str, np.ndarray]], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = checkpoint
    other = tmp_path / "other"
    make_tiny_model(other, "1m", seed=0, vocab_size=300)
    with pytest.raises(TrainError, match="of another model|vocab_size|hidden_size"):
        convert(run, other, tmp_path / "hf")
    with pytest.raises(ModelError, match="holds something already"):
        convert(run, model, other)
    assert main(["convert", str(run), str(tmp_path / "hf")]) == 2
    assert "name the folder that the run started from with --model" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "nowhere"), str(tmp_path / "hf")]) == 2
    assert "nowhere does not exist" in capsys.readouterr().err
    torn = tmp_path / "torn"
    shutil.copytree(run / "checkpoints" / "version_00000001", torn)
    shard = torn / "rank-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(TrainError, match=r"the bytes of rank-00000\.safetensors have changed"):
        convert(torn, model, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_model_folder_becomes_fp8_in_blocks_that_our_reader_takes(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "fp8"
    assert main(["convert", str(model), str(target), "--dtype", "fp8"]) == 0
    config = read_config(target)
    assert config.fp8 and config.fp8.block == (128, 128)
    with open_weights(model, config) as exact, open_weights(target, config, as_stored=True) as stored:
        kinds = {name: stored[name].spec.dtype for name in stored}
        assert {name for name, kind in kinds.items() if kind == "float8_e4m3fn"} == {
            name for name in exact if name.endswith("_proj.weight")
        }
        assert all(kinds[name + "_scale_inv"] == "float32" for name, kind in kinds.items() if kind == "float8_e4m3fn")
        was = {name: from_bytes(exact[name]).float() for name in exact}
    with open_weights(target, config) as read:
        for name, value in was.items():
            found = from_bytes(read[name]).float()
            bound = 2**-4 if name.endswith("_proj.weight") else 2**-8
            assert float((found - value).abs().max()) <= bound * float(value.abs().max()) * 1.01, name
    with pytest.raises(ModelError, match="holds something already"):
        quantise_folder(model, target)


@pytest.mark.parametrize("has_layer", [False, True])
def test_latent_attention_and_the_mtp_layer_become_fp8_where_servers_hold_fp8(tmp_path: Path, has_layer: bool) -> None:
    """SGLang holds both low-rank inputs of MLA as one FP8 matrix, and `eh_proj`, routers and head in bfloat16."""
    small = {
        "hidden_size": 16, "intermediate_size": 128, "num_hidden_layers": 2, "first_k_dense_replace": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4, "v_head_dim": 4, "moe_intermediate_size": 8, "n_routed_experts": 4, "n_group": 1,
        "topk_group": 1, "num_experts_per_tok": 2, "vocab_size": 32,
    }  # fmt: skip
    source = {key: value for key, value in (DEEPSEEK_V3 | small).items() if key != "quantization_config"}
    config = parse_model_config(source, "small")
    shapes = (config.with_mtp() if has_layer else config).tensor_shapes()
    folder, target = tmp_path / "model", tmp_path / "fp8"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(source))
    (folder / "tokenizer.json").write_text("{}")
    save_file({name: np.ones(shape, np.float32) for name, shape in shapes.items()}, folder / "model.safetensors")
    quantise_folder(folder, target)
    with open_weights(target, read_config(target, has_mtp=has_layer), as_stored=True) as stored:
        kinds = {name: stored[name].spec.dtype for name in shapes}
        assert {name.removesuffix("_scale_inv") for name in stored} == shapes.keys()
    whole = {name.split(".")[-2] for name, kind in kinds.items() if len(shapes[name]) == 2 and kind == "bfloat16"}
    assert whole == {"embed_tokens", "lm_head", "gate", *(["eh_proj"] if has_layer else [])}
