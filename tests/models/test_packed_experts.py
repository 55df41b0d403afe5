"""Folders whose experts transformers wrote as it holds them in memory: one tensor for all of a layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.backends.test_megatron_model import CORRECTED, DEEPSEEK, EXPERTS, SIZES
from tests.plan.memory_cases import run
from tests.plan.test_memory_estimate import SHARED, unfit

from myxa.actors.backends.torch_backend.tensors import from_bytes
from myxa.actors.models.hf_folder import open_weights, read_config
from myxa.core.errors import ModelError

FAMILIES: dict[str, dict[str, Any]] = {"Qwen3Moe": EXPERTS, "Glm4Moe": CORRECTED, "DeepseekV3": DEEPSEEK}
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"
ONE = "model.layers.1.mlp.experts.3.up_proj.weight"


def folders_of(place: Path, family: str) -> tuple[Path, Path]:
    """The same weights, each expert by itself and packed."""
    torch.manual_seed(5)
    sizes = {key: value for key, value in SIZES.items() if family != "DeepseekV3" or key != "head_dim"}
    config = getattr(transformers, f"{family}Config")(**sizes | FAMILIES[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config).bfloat16()
    apart, packed = place / "apart", place / "packed"
    model.save_pretrained(apart)
    model.save_pretrained(packed, save_original_format=False)
    return apart, packed


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_have_the_weights_that_the_usual_folder_gives_them(family: str, tmp_path: Path) -> None:
    apart, packed = folders_of(tmp_path, family)
    assert GATE_UP in load_file(packed / "model.safetensors")
    with open_weights(apart, read_config(apart)) as usual, open_weights(packed, read_config(packed)) as found:
        assert usual.keys() == found.keys()
        assert all(torch.equal(from_bytes(usual[name]), from_bytes(found[name])) for name in usual)
    assert "holds all experts" not in launched_on(apart)
    said = launched_on(packed)
    assert f"{packed}: model.layers." in said and "holds all experts of a layer, which SGLang does not load" in said


def launched_on(folder: Path) -> str:
    """What is wrong with servers that are launched on it."""
    config = run("megatron", 1, **SHARED, model={"path": str(folder)})
    return " ".join(str(one.error) for one in unfit(config, read_config(folder)))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({GATE_UP: torch.zeros(8, 32, 31)}, r"gate_up_proj holds experts as \[8, 32, 31\], \[8, 32, 32\] is read"),
        ({GATE_UP: torch.zeros(7, 32, 32)}, r"holds experts as \[7, 32, 32\]"),
        ({GATE_UP: torch.zeros(8, 32, 32).to(torch.float8_e4m3fn)}, r"gate_proj\.weight is FP8 .* its scales are None"),
        ({GATE_UP: None}, r"weight model\.layers\.1\.mlp\.experts\.0\.gate_proj\.weight is missing"),
        ({ONE: torch.zeros(16, 32)}, rf"{ONE} is in {GATE_UP} too"),
    ],
)
def test_experts_that_cannot_be_told_apart_are_refused(
    changes: dict[str, torch.Tensor | None], named: str, tmp_path: Path
) -> None:
    _, packed = folders_of(tmp_path, "Qwen3Moe")
    stored = {**load_file(packed / "model.safetensors"), **changes}
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, packed / "model.safetensors")
    with pytest.raises(ModelError, match=named), open_weights(packed, read_config(packed)):
        pass
