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
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.filesystem import FileSystemReader

from ...core.errors import ModelError, TrainError
from ...core.protocols import NamedArray
from ..checkpoints.folder import Manifest, check_digest, check_model, find_checkpoint, read_manifest
from ..models.hf_folder import read_config, write_folder
from ..models.model_config import ModelConfig
from ..models.safetensors_file import open_safetensors
from .export import named_arrays
from .megatron.families import HEAD, CutRequest, Family, Rule, family_of
from .torch_backend.checkpoint import KINDS
from .torch_backend.tensors import DTYPE_OF, NAME_OF, from_bytes, largest_beyond


@dataclass(frozen=True, slots=True)
class Converted:
    """What was written."""

    checkpoint: Path
    folder: Path
    backend: str
    num_updates: int
    num_tensors: int
    num_parameters: int
    dtype: str


def convert(checkpoint: str | Path, model: str | Path, folder: str | Path, *, dtype: str = "") -> Converted:
    """Write the weights of `checkpoint` (its folder, or a run's) as the HuggingFace folder `folder`. `model`: the
    folder that the run started from; configuration and tokenizer come from there. `dtype`: of the weights ("" as in the
    checkpoint). Raises TrainError for a torn checkpoint or one of another model, ModelError for a bad model folder, for
    a target that holds something, for an unknown dtype, or for weights that it has no number for."""
    target = Path(folder)
    if dtype and dtype not in ("float32", "bfloat16", "float16"):
        raise ModelError(f"weights of type {dtype!r} are not written", remedy="use float32, bfloat16 or float16")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(f"{target} holds something already", remedy="name a folder that is empty or not there")
    path = find_checkpoint(checkpoint)
    config = read_config(model)
    manifest = read_manifest(path)
    check_model(path, manifest, config, manifest.backend)
    for entry in manifest.files:
        check_digest(path, entry)
    tensors = _tensors(path, manifest, config, dtype)
    name = tensors[0].spec.dtype
    try:
        write_folder(target, {**config.source, "dtype": name, "torch_dtype": name}, tensors, tokenizer_from=model)
    except (ModelError, OSError):
        shutil.rmtree(target, ignore_errors=True)
        raise
    num_parameters = sum(a.spec.num_bytes // DTYPE_OF[a.spec.dtype].itemsize for a in tensors)
    return Converted(path, target, manifest.backend, manifest.num_updates, len(tensors), num_parameters, name)


def _tensors(path: Path, manifest: Manifest, config: ModelConfig, dtype: str) -> list[NamedArray]:
    found: dict[str, Tensor] = {}
    for name, tensor in _read(path, manifest, config):
        if dtype and (largest := largest_beyond(tensor, DTYPE_OF[dtype])):
            raise ModelError(
                f"weight {name} of {path} holds {largest:g}, which {dtype} has not",
                remedy="use --dtype bfloat16, or float32",
            )
        found[name] = tensor.to(DTYPE_OF[dtype]) if dtype else tensor
    shapes = config.tensor_shapes()
    wrong = [name for name, shape in shapes.items() if name not in found or tuple(found[name].shape) != shape]
    if wrong:
        raise TrainError(
            f"checkpoint {path} does not hold {wrong[0]} as {list(shapes[wrong[0]])} (and {len(wrong) - 1} others)",
            remedy="it is torn, or of another model than --model",
        )
    if len(types := {tensor.dtype for tensor in found.values()}) > 1:
        raise TrainError(
            f"checkpoint {path} mixes {', '.join(sorted(NAME_OF[t] for t in types))}", remedy="choose one with --dtype"
        )
    return named_arrays((name, found[name]) for name in shapes)


def _read(path: Path, manifest: Manifest, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    if manifest.backend == "megatron":
        yield from read_whole_weights(path, config)
        return
    with ExitStack() as stack:
        files = [stack.enter_context(open_safetensors(path / entry.name)) for entry in manifest.files]
        for name in config.tensor_shapes():
            rows = [from_bytes(file[key]) for file in files if (key := f"{KINDS[0]}/{name}") in file]
            if rows:
                yield name, torch.cat(rows)


_LAYERS = re.compile(r"decoder\.layers\.(?:(?P<layer>\d+)\.)?(?P<name>.+)")
"""Layers that are alike lie in one tensor; a mixture of experts has each by itself."""


def read_whole_weights(folder: Path, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """(HuggingFace name, whole CPU tensor), one Megatron parameter of the file read at a time; no order is promised.
    Raises TrainError naming the parameter that is missing or that no rule knows."""
    reader = FileSystemReader(folder)
    index = cast("Mapping[str, Any]", reader.read_metadata().state_dict_metadata)
    shapes = config.tensor_shapes()
    for key, entry in index.items():
        if not hasattr(entry, "size") or key.startswith(("optimizer.", "reference.", "rng_state", "rerun_state")):
            continue
        rule, has_experts = _rule_of(family_of(config.model_type), key)
        if rule.names == (HEAD,) and config.tie_word_embeddings:
            continue
        tensor_of_all = torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that one process reads is the point
            cast(Any, checkpoint).load({key: tensor_of_all}, storage_reader=reader, no_dist=True)
        for prefix, tensor in _parts(key, tensor_of_all, has_experts):
            yield from _cut(rule, prefix, tensor, config, shapes).items()


def _rule_of(family: Family, key: str) -> tuple[Rule, bool]:
    match = _LAYERS.fullmatch(key)
    name = match["name"] if match else key
    for rule in (*family.layer, *family.expert) if match else family.model:
        if rule.parameter == name:
            return rule, rule in family.expert
    raise TrainError(
        f"no rule says which HuggingFace weights {key} of the checkpoint is made of",
        remedy="a bug in backends/megatron/families, or a checkpoint of another model than it says",
    )


def _parts(key: str, tensor: Tensor, has_experts: bool) -> Iterator[tuple[str, Tensor]]:
    """(prefix of HuggingFace names, the parameter as one layer or one expert has it)."""
    match = _LAYERS.fullmatch(key)
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


def _cut(
    rule: Rule, prefix: str, tensor: Tensor, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """HuggingFace name -> whole tensor, of those that one parameter is made of."""
    names = [prefix + name for name in rule.names]
    whole = {name: tensor.new_empty(shapes[name]) for name in names}
    row = 0
    for piece in rule.cut(CutRequest(names, shapes, config, 0, 1)):
        target = whole[piece.name][slice(*piece.rows)]
        target.copy_(tensor[row : row + target.shape[0]])
        row += target.shape[0]
    return whole
