"""A checkpoint of either trainer as a HuggingFace folder: by one process, without a GPU, without starting a run.

The way in needs no command: both trainers load a HuggingFace folder into any layout by themselves. Knows both kinds of
checkpoint folder; reads what their manifests vouch for, digests first.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...core.errors import ModelError, TrainError
from ...core.protocols import NamedArray
from ..checkpoints.folder import Manifest, check_digest, find_checkpoint, read_manifest
from ..checkpoints.whose_model import check_model
from ..models.hf_folder import ModelConfig, read_config, write_folder
from ..models.safetensors_file import open_safetensors
from .torch_backend.checkpoint import KINDS
from .torch_backend.export import named_array
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
    """Write the weights of `checkpoint` (its folder, or a run's) as the HuggingFace folder `folder`.

    `model`: the folder that the run started from; configuration and tokenizer come from there. `dtype`: of the weights
    ("" as in the checkpoint). Raises TrainError for a torn checkpoint or one of another model, ModelError for a bad
    model folder, for a target that holds something, for an unknown dtype, or for weights that it has no number for.
    """
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
    num_parameters = sum(_num_values(tensor) for tensor in tensors)
    return Converted(path, target, manifest.backend, manifest.num_updates, len(tensors), num_parameters, name)


def _num_values(array: NamedArray) -> int:
    return array.spec.num_bytes // DTYPE_OF[array.spec.dtype].itemsize


def _tensors(path: Path, manifest: Manifest, config: ModelConfig, dtype: str) -> list[NamedArray]:
    """Every weight of the model in its own order, checked against the shapes that the model has."""
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
    arrays: list[NamedArray] = []
    offset = 0
    for name in shapes:
        arrays.append(named_array(name, found[name], offset))
        offset += arrays[-1].spec.num_bytes
    return arrays


def _read(path: Path, manifest: Manifest, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    if manifest.backend == "megatron":
        from .megatron.whole_weights import read_whole_weights  # torch's checkpoint reader takes a second to import

        yield from read_whole_weights(path, config)
        return
    with ExitStack() as stack:
        files = [stack.enter_context(open_safetensors(path / entry.name)) for entry in manifest.files]
        for name in config.tensor_shapes():
            rows = [from_bytes(file[key]) for file in files if (key := f"{KINDS[0]}/{name}") in file]
            if rows:
                yield name, torch.cat(rows)
