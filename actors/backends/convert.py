"""A checkpoint of either trainer as a HuggingFace folder: one process, no GPU, no run.

The other direction needs no command: both trainers load a HuggingFace folder into any layout. Only files whose digests
match the checkpoint's manifest are read.

A Megatron gang's shards record their place in tensors of the whole model, so the checkpoint of any layout reads alike:
what lies in layers is one tensor with the layers in front, what lies in experts has the experts behind them. The cuts
that loading uses (`megatron/families.py`) say where each row belongs; nothing of megatron-core is imported. Checkpoints
of other programs that train by megatron-core (`iter_0000100`, torch_dist) have the same names.
torch.distributed.checkpoint reads the format; its index is a pickle, read if it names the format's own classes alone.
"""

from __future__ import annotations

import pickle  # noqa: TID251 -- read by IndexReader alone, which limits what is made
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from ...core.config import LoraConfig
from ...core.errors import ModelError, TrainError
from ...core.files import read_regular
from ..checkpoints.folder import Manifest, check_digest, check_model, find_checkpoint, read_manifest
from ..models.adapters import ADAPTERS, PARTS, adapter_facts, check_facts, file_name, write_adapter
from ..models.hf_folder import open_weights, read_config, write_folder
from ..models.model_config import EMBEDDING, HEAD, MTP_FAMILIES, ModelConfig
from ..models.safetensors_file import open_safetensors
from ..weights.channels.sender import Fp8Rule
from .adapters import merged
from .megatron.families import EXPERTS, MODEL, CutRequest, find_rule, layer_rules, put_together, vocabulary
from .rank_backend import named_arrays, sent_type, written_config
from .torch_backend.checkpoint import KINDS
from .torch_backend.tensors import DTYPE_OF, NAME_OF, from_bytes


def convert(
    checkpoint: str | Path, model: str | Path, folder: str | Path, *, dtype: str = "", adapter: bool = False
) -> dict[str, Any]:
    """Write the weights of `checkpoint` (its folder, a run's, or one that another program's Megatron wrote) as the
    HuggingFace folder `folder`; where it holds adapters merged into those of `model`, or with `adapter` as PEFT's
    folder. `model`: the folder that the run started from; configuration and tokenizer come from there. `dtype`: of the
    weights ("" as in the checkpoint, or of the model that adapters are merged into). Raises TrainError for a torn
    checkpoint, or one of another model or of other names, ModelError for a bad model folder, for a target that holds
    something."""
    target, config = _empty(folder), read_config(model)
    path, manifest, config = _describe(checkpoint, config)
    if adapter and not manifest.lora:
        raise TrainError(f"checkpoint {path} has no adapters: it holds all weights", remedy="leave --adapter out")
    if manifest.lora:
        rank, alpha = manifest.lora.get("rank"), manifest.lora.get("alpha")
        if not (isinstance(rank, int) and isinstance(alpha, int | float) and rank > 0 and alpha > 0):
            raise TrainError(
                f"{path}: its manifest names no adapters that can be", remedy="it is torn; use another one"
            )
        base = adapter_facts(LoraConfig(rank=1), model)["base"]
        check_facts(path, manifest.lora, {**manifest.lora, "base": base})
    read = _read_adapters(path, manifest) if adapter else _read(path, manifest, config, Path(model))
    weights = {name: tensor.to(sent_type(name, DTYPE_OF.get(dtype, tensor.dtype), config)) for name, tensor in read}
    head = weights.pop(HEAD, None) if config.tie_word_embeddings else None
    if head is not None and not torch.equal(head, weights[EMBEDDING]):
        raise TrainError(
            f"{path}: {HEAD} differs from the embedding, but tie_word_embeddings is true in config.json of {model}",
            remedy="name a copy of that folder with --model, in whose config.json it is false",
        )
    names = sorted(weights) if adapter else list(config.tensor_shapes())
    if missing := next((name for name in names if name not in weights), ""):
        reason = ': with trainer.impl = "hf" weights keep the names that transformers gives them'
        remedy = "resume the run from it with trainer.export_at_end = true, or name its model with --model"
        if manifest.backend == "megatron":
            reason, remedy = "", "name the folder of the model that was trained with --model"
        raise TrainError(f"{path} holds no {missing}{reason}", remedy=remedy)
    tensors = named_arrays((file_name(name) if adapter else name, weights[name]) for name in names)
    name = next(tensor.spec.dtype for tensor in tensors if tensor.spec.name not in config.exact)
    try:
        if adapter:
            write_adapter(target, str(Path(model).absolute()), manifest.lora, tensors)
        else:
            write_folder(target, written_config(config, name, model), tensors, tokenizer_from=model)
    except (ModelError, OSError):
        shutil.rmtree(target, ignore_errors=True)
        raise
    return {
        "checkpoint": str(path),
        "folder": str(target),
        "backend": manifest.backend,
        "num_updates": manifest.num_updates,
        "num_tensors": len(tensors),
        "num_parameters": sum(tensor.numel() for tensor in weights.values()),
        "dtype": name,
    }


def _empty(folder: str | Path) -> Path:
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(f"{target} holds something already", remedy="name a folder that is empty or not there")
    return target


FP8_BLOCK = (128, 128)
IN_FP8 = re.compile(r"(?<!\.eh)_proj(_with_mqa)?\.weight$")
"""Matrices that servers hold in FP8 where their folder is: SGLang casts one that comes in bfloat16, without a scale."""
JOINED = re.compile(r"(.+\.(?:self_attn|mlp))\.(?:k|gate)_proj\.weight")
"""Matrices that SGLang joins with the next one, and that must therefore end where a block does."""


def _left_out(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Matrices of attentions and dense MLPs in which a joined one ends within a block: a server would not start
    (GLM-4.5-Air's first layer, 10944 wide). They stay in bfloat16, as `modules_to_not_convert` says."""
    ends = {match[1]: shapes[name][0] for name in shapes if (match := JOINED.fullmatch(name))}
    odd = tuple(f"{parent}." for parent, rows in ends.items() if rows % FP8_BLOCK[0])
    return [name for name in shapes if IN_FP8.search(name) and name.startswith(odd)]


def quantise_folder(model: str | Path, folder: str | Path) -> dict[str, Any]:
    """Write a model folder with its projections as FP8 in blocks (convention of DeepSeek-V3 and Qwen3-FP8), all else in
    bfloat16, for `weights.served_folder`. Raises ModelError for a bad model folder, for a target that holds something.
    """
    target, config = _empty(folder), read_config(model)
    with open_weights(model, config, as_stored=True) as arrays:
        is_one = config.model_type in MTP_FAMILIES and config.source.get("num_nextn_predict_layers") == 1
        if is_one and f"model.layers.{config.num_layers}.eh_proj.weight" in arrays:
            config = config.with_mtp()
    with open_weights(model, config) as arrays:
        left_out = _left_out(shapes := config.tensor_shapes())
        rule = Fp8Rule(frozenset(filter(IN_FP8.search, shapes)).difference(left_out), FP8_BLOCK)
        tensors = ((name, from_bytes(arrays[name])) for name in shapes)
        sent = ((n, t if n in rule.names else t.to(sent_type(n, torch.bfloat16, config))) for n, t in tensors)
        quantised = list(rule.apply(sent))
    facts = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [*FP8_BLOCK],
        "modules_to_not_convert": [name.removesuffix(".weight") for name in left_out],
    }  # fmt: skip
    source = {**config.source, "dtype": "bfloat16", "torch_dtype": "bfloat16", "quantization_config": facts}
    write_folder(target, source, named_arrays(quantised), tokenizer_from=model)
    sizes = {"num_tensors": len(quantised), "num_parameters": config.num_parameters}
    return {"folder": str(target), **sizes, "dtype": "fp8"}


ITERATION = re.compile(r"iter_(\d{7,})|release")
"""Name of a checkpoint's folder as Megatron-LM and what is built on it give it."""
TRACKER = "latest_checkpointed_iteration.txt"
"""Beside such folders: the newest one's number, or "release"."""


def foreign_checkpoint(place: str | Path) -> Path | None:
    """The folder of a checkpoint that another program's megatron-core wrote: `place`, or the newest in it; None: there
    is none. Raises TrainError for one of another format than torch_dist."""
    path = Path(place)
    with suppress(OSError, ValueError):
        newest = (path / TRACKER).read_text(encoding="ascii").strip()
        path /= newest if newest == "release" else f"iter_{int(newest):07d}"
    if not ITERATION.fullmatch(path.name) or not path.is_dir():
        return None
    if not (path / INDEX).is_file():
        raise TrainError(
            f"{path} has no {INDEX}, so it is no checkpoint in Megatron's torch_dist format",
            remedy="let the program that wrote it save once more with --ckpt-format torch_dist",
        )
    return path


def _describe(checkpoint: str | Path, config: ModelConfig) -> tuple[Path, Manifest, ModelConfig]:
    """A checkpoint's folder, what it says of itself, and the model that it is of, with digests compared; that of
    another program says little."""
    if path := foreign_checkpoint(checkpoint):
        config.require_own("the Megatron trainer")
        number = int(path.name.removeprefix("iter_")) if path.name != "release" else 0
        nothing: dict[str, Any] = {"model": {}, "world_size": 0, "files": (), "extra": {}}
        return path, Manifest(format=0, num_updates=number, backend="megatron", **nothing), config
    path = find_checkpoint(checkpoint)
    manifest = read_manifest(path)
    config = config.with_mtp() if manifest.model.get("has_mtp") else config
    config = config.as_scorer() if manifest.model.get("is_scorer") else config
    check_model(path, manifest, config, manifest.backend)
    for entry in manifest.files:
        check_digest(path, entry)
    return path, manifest, config


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
        reader = ShardReader(path)
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


MAX_INDEX_BYTES = 1 << 30
_LAYERS = re.compile(r"decoder\.layers\.(?:(?P<layer>\d+)\.)?(?P<name>.+)")
"""Layers that are alike lie in one tensor; a mixture of experts has each by itself."""


_AFTER_NEXT = re.compile(r"after_next\.(transformer_layer\.)?")
"""The MTP layer, which is the layer behind the last one in a folder."""


def read_whole_weights(folder: Path, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """(HuggingFace name, whole CPU tensor), one Megatron parameter of the file read at a time; no order is promised.
    Raises TrainError naming the parameter that is missing or that no rule knows."""
    shapes, layer = dict(config.tensor_shapes()), (*layer_rules(config.model_type), *EXPERTS)
    shapes.setdefault(HEAD, shapes[EMBEDDING])  # where the embedding is the head, but was not in training
    prefixes = ("embedding.", "decoder.", "output_layer.", *(("after_next.",) if config.has_mtp else ()))

    def is_weight(key: str) -> bool:
        return key.startswith(prefixes) and not key.endswith(COUNTERS)

    for key, tensor_of_all in _read_shards(ShardReader(folder), is_weight):
        match = _LAYERS.fullmatch(_AFTER_NEXT.sub(f"decoder.layers.{config.num_layers}.", key))
        rule = find_rule(layer, match["name"]) if match else find_rule(MODEL, key)
        for prefix, tensor in _parts(match, tensor_of_all, rule in EXPERTS):
            names = [prefix + name for name in rule.names]
            _check_shape(key, tensor, [shapes.get(name, ()) for name in names], is_padded=rule.cut is vocabulary)
            pieces = rule.cut(CutRequest(names, shapes, config, 0, 1))
            yield from put_together(names, shapes, [pieces], [tensor]).items()


COUNTERS = (".local_tokens_per_expert", ".global_tokens_per_expert")
"""Of routers, which train nothing."""


def _check_shape(key: str, tensor: Tensor, shapes: Sequence[tuple[int, ...]], *, is_padded: bool) -> None:
    num_rows = sum(shape[0] for shape in shapes if shape)
    fits = tensor.shape[0] >= num_rows if is_padded else tensor.shape[0] == num_rows
    if not fits or any(tuple(tensor.shape[1:]) != shape[1:] for shape in shapes):
        raise TrainError(
            f"the checkpoint's {key} of {list(tensor.shape)} does not make weights of {list(map(list, shapes))}",
            remedy="name the folder of the model that was trained with --model",
        )


INDEX = ".metadata"
FORMAT = "torch.distributed.checkpoint."
CLASSES: Mapping[str, tuple[str, ...]] = {
    f"{FORMAT}metadata": (
        "Metadata", "StorageMeta", "MetadataIndex", "BytesStorageMetadata", "TensorStorageMetadata",
        "TensorProperties", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
    f"{FORMAT}planner": ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"),
    f"{FORMAT}filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", *(str(dtype).removeprefix("torch.") for dtype in NAME_OF)),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath",),
}  # fmt: skip
"""Module -> what an index may be made of."""


class IndexReader(pickle.Unpickler):
    """Makes what an index may be made of. Raises ValueError for the name of anything else."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in CLASSES.get(module, ()):
            raise ValueError(f"it names {module}.{name}, which no index needs")
        return super().find_class(module, name)


class ShardReader(FileSystemReader):
    """torch's reader, of an index that runs no code and names no file outside the folder."""

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        place = Path(cast(Any, self).path) / INDEX
        try:
            metadata = IndexReader(BytesIO(read_regular(place, MAX_INDEX_BYTES))).load()
            files = {str(entry.relative_path) for entry in cast("dict[Any, Any]", metadata.storage_data).values()}
            if outside := next((name for name in files if Path(name).name != name), ""):
                raise ValueError(f"it names the file {outside!r}")
        except Exception as error:  # of any kind: the format is torch's
            raise TrainError(f"cannot read {place}: {error}", remedy="use another checkpoint") from error
        return metadata


def _read_shards(reader: FileSystemReader, wants: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    """(key, whole CPU tensor), one at a time."""
    index = cast("Mapping[str, Any]", reader.read_metadata().state_dict_metadata)
    for key, entry in index.items():
        if not hasattr(entry, "size") or not wants(key):
            continue
        tensor = torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that one process reads is the point
            cast(Any, checkpoint).load({key: tensor}, storage_reader=reader, no_dist=True)
        yield key, tensor


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
