"""A checkpoint of either trainer as a HuggingFace folder: one process, no GPU, no run.

The other direction needs no command: both trainers load a HuggingFace folder into any layout. Only files whose digests
match the checkpoint's manifest are read.

A Megatron gang's shards record their place in tensors of the whole model, so the checkpoint of any layout reads alike:
what lies in layers is one tensor with the layers in front, what lies in experts has the experts behind them. The cuts
that loading uses (`megatron/families.py`) say where each row belongs; nothing of megatron-core is imported.
torch.distributed.checkpoint reads the format; its index is a pickle, so convert checkpoints of your own runs only.
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.filesystem import FileSystemReader

from ...core.config import LoraConfig
from ...core.errors import ModelError, TrainError
from ..checkpoints.folder import Manifest, check_digest, check_model, find_checkpoint, read_manifest
from ..models.adapters import ADAPTERS, PARTS, adapter_facts, check_facts, file_name, write_adapter
from ..models.hf_folder import open_weights, read_config, write_folder
from ..models.model_config import ModelConfig
from ..models.safetensors_file import SCALE_SUFFIX, open_safetensors
from ..weights.channels.sender import quantise_blocks
from .adapters import merged
from .megatron.families import HEAD, CutRequest, Rule, family_of, find_rule, put_together
from .rank_backend import named_arrays, sent_type
from .torch_backend.checkpoint import KINDS
from .torch_backend.tensors import DTYPE_OF, NAME_OF, from_bytes


def convert(
    checkpoint: str | Path, model: str | Path, folder: str | Path, *, dtype: str = "", adapter: bool = False
) -> dict[str, Any]:
    """Write the weights of `checkpoint` (its folder, or a run's) as the HuggingFace folder `folder`; where it holds
    adapters merged into those of `model`, or with `adapter` as PEFT's folder. `model`: the folder that the run started
    from; configuration and tokenizer come from there. `dtype`: of the weights ("" as in the checkpoint, or of the model
    that adapters are merged into). Raises TrainError for a torn checkpoint, or one of another model or of other
    names, ModelError for a bad model folder, for a target that holds something."""
    target = _empty(folder)
    path = find_checkpoint(checkpoint)
    config = read_config(model)
    manifest = read_manifest(path)
    check_model(path, manifest, config, manifest.backend)
    for entry in manifest.files:
        check_digest(path, entry)
    if adapter and not manifest.lora:
        raise TrainError(f"checkpoint {path} has no adapters: it holds all weights", remedy="leave --adapter out")
    if manifest.lora:
        base = adapter_facts(LoraConfig(rank=1), model)["base"]
        check_facts(path, manifest.lora, {**manifest.lora, "base": base})
    read = _read_adapters(path, manifest) if adapter else _read(path, manifest, config, Path(model))
    found = {name: tensor.to(sent_type(name, DTYPE_OF[dtype or NAME_OF[tensor.dtype]])) for name, tensor in read}
    names = sorted(found) if adapter else list(config.tensor_shapes())
    if missing := next((name for name in names if name not in found), ""):
        raise TrainError(
            f'{path} holds no {missing}: with trainer.impl = "hf" weights keep the names that transformers gives them',
            remedy="resume the run from it with trainer.export_at_end = true",
        )
    tensors = named_arrays((file_name(name) if adapter else name, found[name]) for name in names)
    name = tensors[0].spec.dtype
    try:
        if adapter:
            write_adapter(target, str(Path(model).absolute()), manifest.lora, tensors)
        else:
            write_folder(target, {**config.source, "dtype": name, "torch_dtype": name}, tensors, tokenizer_from=model)
    except (ModelError, OSError):
        shutil.rmtree(target, ignore_errors=True)
        raise
    return {
        "checkpoint": str(path),
        "folder": str(target),
        "backend": manifest.backend,
        "num_updates": manifest.num_updates,
        "num_tensors": len(tensors),
        "num_parameters": sum(tensor.numel() for tensor in found.values()),
        "dtype": name,
    }


def _empty(folder: str | Path) -> Path:
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(f"{target} holds something already", remedy="name a folder that is empty or not there")
    return target


FP8_BLOCK = (128, 128)


def quantise_folder(model: str | Path, folder: str | Path) -> dict[str, Any]:
    """Write a model folder with its projections as FP8 in blocks (convention of DeepSeek-V3 and Qwen3-FP8), all else in
    bfloat16, for `weights.served_folder`. Raises ModelError for a bad model folder, for a target that holds something.
    """
    target, config = _empty(folder), read_config(model)
    found: list[tuple[str, Tensor]] = []
    with open_weights(model, config) as arrays:
        for name in config.tensor_shapes():
            tensor = from_bytes(arrays[name])
            if not name.endswith("_proj.weight"):  # embeddings, norms, routers, head
                found.append((name, tensor.to(sent_type(name, torch.bfloat16))))
                continue
            values, scales = quantise_blocks(tensor, FP8_BLOCK)
            found += [(name, values), (name + SCALE_SUFFIX, scales)]
    said = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [*FP8_BLOCK]}
    source = {**config.source, "dtype": "bfloat16", "torch_dtype": "bfloat16", "quantization_config": said}
    write_folder(target, source, named_arrays(found), tokenizer_from=model)
    return {"folder": str(target), "num_tensors": len(found), "num_parameters": config.num_parameters, "dtype": "fp8"}


def _read(path: Path, manifest: Manifest, config: ModelConfig, model: Path) -> Iterator[tuple[str, Tensor]]:
    if manifest.lora:
        yield from _read_merged(path, manifest, config, model)
    elif manifest.backend == "megatron":
        yield from read_whole_weights(path, config)
    else:
        yield from _read_rows(path, manifest, config.tensor_shapes())


def _read_rows(path: Path, manifest: Manifest, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Weights of the torch trainer's files; `names` that are in none are left out."""
    with ExitStack() as stack:
        files = [stack.enter_context(open_safetensors(path / entry.name)) for entry in manifest.files]
        for name in names:
            rows = [from_bytes(file[key]) for file in files if (key := f"{KINDS[0]}/{name}") in file]
            if rows:
                yield name, torch.cat(rows)


def _read_adapters(path: Path, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
    """(a trainer's name, whole CPU tensor) of all adapters."""
    if manifest.backend == "megatron":
        reader = FileSystemReader(path)
        for key, tensor in _read_shards(reader, lambda key: key.startswith(ADAPTERS)):
            yield key.removeprefix(ADAPTERS), tensor
        return
    with ExitStack() as stack:
        files = [stack.enter_context(open_safetensors(path / entry.name)) for entry in manifest.files]
        names = {key.partition("/")[2]: None for file in files for key in file if key.startswith(f"{KINDS[0]}/")}
    yield from _read_rows(path, manifest, names)


def _read_merged(path: Path, manifest: Manifest, config: ModelConfig, model: Path) -> Iterator[tuple[str, Tensor]]:
    adapters, scale = dict(_read_adapters(path, manifest)), manifest.lora["alpha"] / manifest.lora["rank"]
    with open_weights(model, config) as weights:
        for name in config.tensor_shapes():
            a, b = (adapters.pop(f"{name.removesuffix('.weight')}.{part}", None) for part in PARTS)
            weight = from_bytes(weights[name])
            yield name, weight if a is None or b is None else merged(weight, a, b, scale)
    if adapters:
        raise ModelError(
            f"{model} has no weight of its own for {min(adapters)}", remedy="use --adapter, and merge it by PEFT"
        )


_LAYERS = re.compile(r"decoder\.layers\.(?:(?P<layer>\d+)\.)?(?P<name>.+)")
"""Layers that are alike lie in one tensor; a mixture of experts has each by itself."""


def read_whole_weights(folder: Path, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """(HuggingFace name, whole CPU tensor), one Megatron parameter of the file read at a time; no order is promised.
    Raises TrainError naming the parameter that is missing or that no rule knows."""
    shapes, family = config.tensor_shapes(), family_of(config.model_type)

    def rule_of(key: str) -> tuple[re.Match[str] | None, Rule]:
        match = _LAYERS.fullmatch(key)
        return match, find_rule(
            (*family.layer, *family.expert) if match else family.model, match["name"] if match else key
        )

    def is_weight(key: str) -> bool:
        if key.startswith(("optimizer.", "reference.", "rng_state", "rerun_state")):
            return False
        return not (rule_of(key)[1].names == (HEAD,) and config.tie_word_embeddings)

    for key, tensor_of_all in _read_shards(FileSystemReader(folder), is_weight):
        match, rule = rule_of(key)
        for prefix, tensor in _parts(match, tensor_of_all, rule in family.expert):
            names = [prefix + name for name in rule.names]
            pieces = rule.cut(CutRequest(names, shapes, config, 0, 1))
            yield from put_together(names, shapes, [pieces], [tensor]).items()


def _read_shards(reader: FileSystemReader, wants: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    """(key, whole CPU tensor), one at a time."""
    index = cast("Mapping[str, Any]", reader.read_metadata().state_dict_metadata)
    for key, entry in index.items():
        if not hasattr(entry, "size") or not wants(key):
            continue
        whole = torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that one process reads is the point
            cast(Any, checkpoint).load({key: whole}, storage_reader=reader, no_dist=True)
        yield key, whole


def _parts(match: re.Match[str] | None, tensor: Tensor, has_experts: bool) -> Iterator[tuple[str, Tensor]]:
    """(prefix of HuggingFace names, the parameter as one layer or one expert has it)."""
    if match is None:
        yield "", tensor
        return
    layers = enumerate(tensor) if match["layer"] is None else [(int(match["layer"]), tensor)]
    for layer, of_layer in layers:
        prefix = f"model.layers.{layer}."
        if not has_experts:
            yield prefix, of_layer
            continue
        for number, of_expert in enumerate(of_layer):
            gates_apart = of_expert.ndim == 3  # [gate or up, inner, hidden]
            yield f"{prefix}mlp.experts.{number}.", of_expert.flatten(0, 1) if gates_apart else of_expert
