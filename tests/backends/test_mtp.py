"""`megatron.mtp`: the layer for the token after the next, trained beside the policy, is transformers' layer of these
weights however the model is cut; it is loaded, exported and saved under the folder's names, and without it nothing
changes.

Real processes over gloo.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.backends.test_megatron_model import SIZES, as_in_the_folder, make_folder
from tests.harness.ports import held_port
from torch.nn import functional

from myxa.actors.backends.convert import convert, quantise_folder
from myxa.actors.models.hf_folder import read_config
from myxa.core.errors import ConfigError

PROGRAM = Path(__file__).with_name("mtp_rank.py")
SEED = 20261130
FACTOR = 0.5
NUM_ROWS = 5
"""Two micro-batches, or one on each of two replicas."""
CUTS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("glm4-moe", {"cp": 2}, ("apart", "whole")),
    ("deepseek", {"ep": 2}, ("apart",)),
    ("deepseek", {"tp": 2, "sequence_parallel": True}, ("whole",)),
]
pytestmark = pytest.mark.timeout(300)


def name_of(model: str, layout: dict[str, Any], mode: str) -> str:
    return "-".join([model, *layout, mode])


def with_mtp(place: Path, name: str) -> Path:
    """A folder of the family with one more layer behind its last one."""
    folder = make_folder(place, name)
    (folder / "tokenizer.json").write_text("{}")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_nextn_predict_layers": 1}))
    config, generator = read_config(folder), torch.Generator().manual_seed(SEED)
    weights = load_file(folder / "model.safetensors")
    for key, shape in config.with_mtp().tensor_shapes().items():
        if key not in weights:
            noise = torch.randn(shape, generator=generator) * 0.2
            weights[key] = noise + (14 if "correction" in key else 1 if len(shape) == 1 and "norm" in key else 0)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def make_rows() -> list[dict[str, list[int]]]:
    rng = np.random.default_rng(SEED)
    rows: list[dict[str, list[int]]] = []
    for number in range(NUM_ROWS):
        before, length = int(rng.integers(1 if number == 3 else 2, 2 if number == 3 else 9)), int(rng.integers(4, 12))
        mask = np.ones(length, int)
        mask[2 : 4 if number == 1 else 2] = 0
        ids = rng.integers(2, SIZES["vocab_size"], before + length).tolist()
        rows.append({"prompt": ids[:before], "response": ids[before:], "mask": mask.tolist()})
    return rows


def by_transformers(folder: Path, *, reaches_trunk: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """Sum of the MTP layer's cross entropies, and its gradients by the folder's names."""
    config = transformers.AutoConfig.from_pretrained(folder)
    number = config.num_hidden_layers
    config = transformers.AutoConfig.from_pretrained(folder, num_hidden_layers=number + 1)
    if hasattr(config, "mlp_layer_types") and config.mlp_layer_types:
        config.mlp_layer_types = [*config.mlp_layer_types[:number], "sparse"]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    layer, model.model.layers = model.model.layers[number], model.model.layers[:number]
    prefix, stored = f"model.layers.{number}.", load_file(folder / "model.safetensors")
    own = {
        key: stored[prefix + key].clone().requires_grad_()
        for key in ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
    }

    def norm(x: torch.Tensor, key: str) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], own[key], config.rms_norm_eps)

    total = torch.zeros(())
    for row in make_rows():
        ids = torch.tensor(row["prompt"] + row["response"])
        hidden = model.model(ids[None, :-1]).last_hidden_state
        embedded, table = model.model.embed_tokens(ids[None, 1:]), model.lm_head.weight
        if not reaches_trunk:
            hidden, embedded, table = hidden.detach(), embedded.detach(), table.detach()
        both = torch.cat([norm(embedded, "enorm.weight"), norm(hidden, "hnorm.weight")], -1)
        x = both @ own["eh_proj.weight"].T
        places = torch.arange(x.shape[1])[None]
        mask = torch.full((x.shape[1],) * 2, -torch.inf).triu(1)[None, None]
        out = layer(x, attention_mask=mask, position_ids=places, position_embeddings=model.model.rotary_emb(x, places))
        logprobs = torch.log_softmax(
            norm(out[0] if isinstance(out, tuple) else out, "shared_head.norm.weight")[0] @ table.T, -1
        )
        for at, counts in enumerate(row["mask"]):
            place = len(row["prompt"]) + at
            if counts and place >= 2:
                total = total - logprobs[place - 2, ids[place]]
    total.backward()
    found = {prefix + key: weight.grad for key, weight in own.items()}
    for key, weight in (*model.named_parameters(), *((prefix + key, w) for key, w in layer.named_parameters())):
        if weight.grad is not None:
            found |= as_in_the_folder(key, weight.grad)
    return float(total.detach()), {key: grad for key, grad in found.items() if grad is not None}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    print(f"seed {SEED}")
    place = tmp_path_factory.mktemp("families")
    return {name: with_mtp(place, name) for name in ("glm4-moe", "deepseek")}


@pytest.fixture(scope="module")
def outcomes(
    folders: dict[str, Path], ranks: Callable[..., list[tuple[int, str]]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("mtp")
    modes = {"off": {}, "apart": {"mtp": FACTOR}, "whole": {"mtp": FACTOR, "mtp_reaches_trunk": True}}
    cases = [
        {
            "name": name_of(model, layout, mode), "model": str(folders[model]), "port": held_port(),
            "trains": mode != "off", "saves": mode == "apart", "comes_back": mode == "apart" and "ep" in layout,
            "megatron": {**layout, **settings, "distributed_optimizer": False, "routing_replay": mode == "apart"},
        }
        for model, layout, chosen in CUTS for mode, settings in modes.items() if mode in ("off", *chosen)
    ]  # fmt: skip
    spec = {
        "out": str(out), "num_ranks": 2, "cases": cases, "optimizer": {"lr": 0.01}, "rows": make_rows(),
        "algo": {"kind": "grpo", "batch_size": NUM_ROWS},
    }  # fmt: skip
    (out / "spec.json").write_text(json.dumps(spec))
    for rank, (status, output) in enumerate(ranks(2, PROGRAM, str(out / "spec.json"), timeout_s=200)):
        assert status == 0, f"rank {rank} ended with {status}:\n{output}"
    return out


@pytest.mark.parametrize(("model", "layout", "chosen"), CUTS)
def test_the_layer_is_that_of_its_folder_and_its_loss_is_added_where_it_is_asked_for(
    model: str,
    layout: dict[str, Any],
    chosen: tuple[str, ...],
    outcomes: Path,
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    found = {mode: outcomes / name_of(model, layout, mode) for mode in ("off", *chosen)}
    stored = load_file(folders[model] / "model.safetensors")
    prefix = f"model.layers.{read_config(folders[model]).num_layers}."
    grads = {mode: load_file(place / "grads.safetensors") for mode, place in found.items()}
    assert not any(key.startswith(prefix) for key in grads["off"]), "left out unless asked for"
    num_tokens = sum(sum(row["mask"]) for row in make_rows())
    for mode in chosen:
        weights = load_file(found[mode] / "weights.safetensors")
        assert weights.keys() == stored.keys()
        assert all(torch.equal(weights[key], stored[key]) for key in stored), "what is exported is what was loaded"
        loss, theirs = by_transformers(folders[model], reaches_trunk=mode == "whole")
        rest = json.loads((found[mode] / "rest.json").read_text())
        assert rest["metrics"]["train/mtp_loss"] == pytest.approx(loss / num_tokens, rel=1e-5)
        if mode == "apart":
            assert rest["is_back"] or "ep" not in layout, "a checkpoint holds it"
            convert(outcomes / f"{found[mode].name}-saved", folders[model], tmp_path / mode)
            converted, later = (
                load_file(file) for file in (tmp_path / mode / "model.safetensors", found[mode] / "later.safetensors")
            )
            assert converted.keys() == later.keys()
            assert all(torch.equal(converted[key], later[key]) for key in later), "and a folder made of it"
        for key, own in grads[mode].items():
            if "correction" in key:
                continue
            added = FACTOR / num_tokens * theirs.get(key, torch.zeros_like(own))
            whole = added + grads["off"].get(key, torch.zeros_like(own))
            scale = max(float(whole.abs().max()), 1e-4)
            assert float((own - whole).abs().max()) < 1e-4 * scale, (mode, key)
            assert rest["moved"][key] > 0 or not whole.any(), key
        trunk = [key for key in grads["off"] if "correction" not in key]
        if mode == "apart":
            assert all(torch.equal(grads[mode][key], grads["off"][key]) for key in trunk), "equal to the bit"
        assert any(theirs[key].any() for key in theirs if key.startswith(prefix))


@pytest.mark.parametrize(("changes", "says"), [
    ({"num_nextn_predict_layers": 0}, "num_nextn_predict_layers = 0"), ({"num_nextn_predict_layers": 2}, "= 2"),
])  # fmt: skip
def test_a_model_without_one_such_layer_is_refused(
    folders: dict[str, Path], tmp_path: Path, changes: dict[str, int], says: str
) -> None:
    source = json.loads((folders["glm4-moe"] / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(source))
    with pytest.raises(ConfigError, match=says):
        read_config(tmp_path).with_mtp()


def test_a_folder_in_fp8_keeps_the_layer(folders: dict[str, Path], tmp_path: Path) -> None:
    quantise_folder(folders["deepseek"], tmp_path / "fp8")
    stored, found = load_file(folders["deepseek"] / "model.safetensors"), load_file(tmp_path / "fp8/model.safetensors")
    assert stored.keys() == {key for key in found if not key.endswith("_scale_inv")}
    prefix = f"model.layers.{read_config(folders['deepseek']).num_layers}."
    kinds = {key.removeprefix(prefix): tensor.dtype for key, tensor in found.items() if key.startswith(prefix)}
    assert kinds["eh_proj.weight"] == kinds["enorm.weight"] == torch.bfloat16, "as DeepSeek-V3's own folder has it"
    assert kinds["self_attn.o_proj.weight"] == kinds["mlp.experts.0.down_proj.weight"] == torch.float8_e4m3fn
