"""Low-rank adapters as PEFT has them: which matrices of a model get one, and the folder with them. No torch.

    W x + alpha / rank * B (A x)         A [rank, columns of W], B [rows of W, rank]      (arXiv 2106.09685)

`peft.PeftModel.from_pretrained` reads such folders. What would compute something else is refused by name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.config.learning import ALL_LINEAR, LoraConfig
from ...core.errors import ConfigError, ModelError, TrainError, raised_as
from ...core.protocols import NamedArray
from ...core.suggestion import suggest
from .hf_folder import ADAPTER_CONFIG, check_values, read_json, weight_files
from .model_config import ModelConfig
from .safetensors_file import open_safetensors, write_safetensors

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What PEFT puts before the name of a module."""
PARTS = ("lora_A", "lora_B")
ADAPTERS = "adapters."
"""Before their names in a Megatron checkpoint."""
HARMLESS = ("auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
            "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform",
            "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core",
            "peft_type", "peft_version", "qalora_group_size", "r", "revision", "runtime_config", "target_modules",
            "target_parameters", "task_type")  # fmt: skip
"""Keys of PEFT's that do not change what is computed of the adapter's matrices. Any other may, where it says more than
"none"."""
KEEP_WEIGHTS = (None, False, True, "eva", "gaussian", "orthogonal")
"""Of PEFT's `init_lora_weights`: the others (pissa, olora, corda, loftq, ...) change the model's own weights too."""
IN_LAYERS = re.compile(r"\.\d+\.")
EXPERTS = re.compile(r"\.experts\.|\.mlp\.gate\.weight$")

Matrices = Mapping[str, tuple[int, int]]
"""Name of a module -> (rows, columns) of its weight."""


def adapted_matrices(lora: LoraConfig, shapes: Mapping[str, tuple[int, ...]]) -> Matrices:
    """Weights (name -> shape) that get one. Raises ConfigError for an unknown target, and for experts."""
    matrices = {name[: -len(".weight")]: shape for name, shape in shapes.items() if _is_matrix(name, shape)}
    takes_all, adapted = lora.target_modules == ALL_LINEAR, dict[str, tuple[int, int]]()
    for target in ("",) if takes_all else lora.target_modules:
        matching = {name: shape for name, shape in matrices.items() if takes_all or name.rpartition(".")[2] == target}
        if not matching:
            raise ConfigError(
                f'lora.target_modules: "{target}" is no matrix of the model\'s layers',
                remedy=suggest(target, {name.rpartition(".")[2] for name in matrices}),
            )
        adapted |= {name: (shape[0], shape[1]) for name, shape in matching.items()}
    experts = any(EXPERTS.search(f"{name}.weight") for name in adapted)
    if experts or (takes_all and any(".experts." in name for name in shapes)):
        raise ConfigError(
            "lora.target_modules: experts and their routers get no adapters yet",
            remedy='name matrices of attention: ["q_proj", "k_proj", "v_proj", "o_proj"]',
        )
    name, smallest = min(((name, min(shape)) for name, shape in adapted.items()), key=lambda item: item[1])
    if lora.rank > smallest:
        raise ConfigError(
            f"lora.rank = {lora.rank}: {name} has {smallest} rows or columns, so no change of it has a higher rank",
            remedy=f"set it to at most {smallest}",
        )
    return adapted


def _is_matrix(name: str, shape: Sequence[int]) -> bool:
    return len(shape) == 2 and name.endswith(".weight") and IN_LAYERS.search(name) is not None


def num_adapted(lora: LoraConfig, model: ModelConfig) -> int:
    """Numbers in all adapters; 0 without."""
    matrices = adapted_matrices(lora, model.tensor_shapes()).values() if lora.rank else ()
    return sum(lora.rank * (rows + columns) for rows, columns in matrices)


def adapter_shapes(rank: int, matrices: Matrices) -> dict[str, tuple[int, int]]:
    """Name of every number of adapters, as a trainer has it -> its shape."""
    return {
        f"{name}.{part}": shape
        for name, (rows, columns) in matrices.items()
        for part, shape in zip(PARTS, ((rank, columns), (rows, rank)), strict=True)
    }


def read_adapter(lora: LoraConfig, matrices: Matrices) -> dict[str, NamedArray]:
    """The adapters of `lora.path`, copied, by a trainer's names. Raises ModelError for a folder that is not PEFT's or
    not whole, ConfigError for one of another rank, alpha or choice of matrices."""
    folder = Path(lora.path)
    config = read_json(folder / ADAPTER_CONFIG, remedy="lora.path must be an adapter folder in PEFT's format")
    for key, value in (("peft_type", "LORA"), ("r", lora.rank), ("lora_alpha", lora.alpha)):
        if config.get(key) != value:
            own_key = {"r": "rank", "lora_alpha": "alpha"}.get(key, "path")
            raise ConfigError(
                f"lora.{own_key}: the adapter in {folder} has {key} = {config.get(key)!r}, not {value!r}",
                remedy="set rank and alpha as the adapter has them, or name another adapter",
            )
    changed = ("init_lora_weights",) if config.get("init_lora_weights") not in KEEP_WEIGHTS else ()
    for key in (*changed, *sorted(config.keys() - set(HARMLESS))):
        if config[key] not in (None, False, "none", [], {}):
            raise ConfigError(
                f"lora.path: {folder} has {key} = {config[key]!r}, which is not computed here",
                remedy="merge it by PEFT, and start from the merged model",
            )
    shapes = adapter_shapes(lora.rank, matrices)
    expected = {file_name(name): shape for name, shape in shapes.items()}
    with open_safetensors(folder / WEIGHTS) as tensors:
        stored = {name: tensor.spec.shape for name, tensor in tensors.items()}
        for name in sorted(name for name in stored.keys() | expected.keys() if stored.get(name) != expected.get(name)):
            pair = (stored.get(name), expected.get(name))
            has, needs = (f"of shape {shape}" if shape else "absent" for shape in pair)
            raise ConfigError(
                f"lora.target_modules: {name} in {folder / WEIGHTS} is {has}, for this model it must be {needs}",
                remedy="choose the matrices that the adapter is of, or another adapter",
            )
        check_values(list(expected), tensors, str(folder / WEIGHTS))
        arrays = {name: tensors[file_name(name)] for name in shapes}
        return {name: NamedArray(spec=array.spec, data=memoryview(bytes(array.data))) for name, array in arrays.items()}


def file_name(name: str) -> str:
    """Of a trainer's number in the folder."""
    return f"{PREFIX}{name}.weight"


def write_adapter(folder: str | Path, base: str, facts: Mapping[str, Any], tensors: Sequence[NamedArray]) -> None:
    """`base`: the model's; `facts`: as `adapter_facts`; the folder's names. Raises ModelError for the disk."""
    names = {tensor.spec.name.rsplit(".", 3)[1] for tensor in tensors}
    alpha = float(facts["alpha"])
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": facts["rank"], "lora_alpha": int(alpha) if alpha.is_integer() else alpha, "lora_dropout": 0.0,
        "target_modules": sorted(names), "bias": "none", "fan_in_fan_out": False, "use_rslora": False,
        "use_dora": False,
    }  # fmt: skip
    with raised_as(ModelError, f"cannot write adapter folder {folder}", OSError, remedy="choose another folder"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_safetensors(Path(folder) / WEIGHTS, tensors)


SAMPLES, SAMPLE_BYTES = 64, 4096


def adapter_facts(lora: LoraConfig, folder: str | Path) -> dict[str, Any]:
    """What a checkpoint says of its adapters, which are nothing without the weights that they were trained on: `base`
    is a digest of samples of them. Empty: all weights are trained. Raises ModelError."""
    if not lora.rank:
        return {}
    digest = hashlib.sha256()
    for name in weight_files(Path(folder)):
        path = Path(folder) / name
        try:
            with path.open("rb") as file:
                for number in range(SAMPLES):
                    file.seek(path.stat().st_size * number // SAMPLES)
                    digest.update(file.read(SAMPLE_BYTES))
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error}", remedy="check disk and rights") from error
    return {
        "rank": lora.rank,
        "alpha": lora.alpha,
        "targets": sorted(lora.target_modules),
        "base": digest.hexdigest()[:16],
    }


def check_facts(path: Path, stored: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise TrainError if a checkpoint's `adapter_facts` are not those of this run."""
    for key in ("rank", "alpha", "targets", "base"):
        if stored.get(key) != expected.get(key):
            has, wants = (f"adapters of {key} {facts[key]}" if facts else "no adapters" for facts in (stored, expected))
            raise TrainError(
                f"checkpoint {path} has {has}, this run has {wants}",
                remedy="set [lora] and model.path as they were, or start from what the run exported",
            )
