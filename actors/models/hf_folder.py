"""A model folder as HuggingFace lays it out: config, weights in one file or in shards, tokenizer files. No torch.

Second models (reference, critic) have the policy's shape; a critic has no vocabulary head, but its folder may have a
value head. Every complaint is a ModelError that names the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ...core.errors import ConfigError, ModelError, raised_as
from ...core.files import read_regular
from ...core.messages import TensorSpec
from ...core.protocols import NamedArray
from .fp8 import SCALE_SUFFIXES, Dequantised, check_scales
from .model_config import EMBEDDING, HEAD, MAY_DIFFER, ModelConfig, parse_model_config, token_ids
from .safetensors_file import E8M0, FP8, open_safetensors, parse_json, write_safetensors

if TYPE_CHECKING:
    from ...core.config import CriticConfig  # a tenth of a second and pydantic, which workers of users' code do without

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
ADAPTER_CONFIG = "adapter_config.json"
TEMPLATE_FOLDER = "additional_chat_templates"
TOKENIZER_FILES = (
    TOKENIZER, "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip
MAX_JSON_BYTES = 64 << 20
MAX_TOKENIZER_BYTES = 128 << 20
CHUNK = 1 << 20
"""Numbers that are looked at together."""
FLOATS: dict[str, tuple[str, int]] = {
    "float64": ("<u8", 0x7FF0 << 48),
    "float32": ("<u4", 0x7F80 << 16),
    "float16": ("<u2", 0x7C00),
    "bfloat16": ("<u2", 0x7F80),
}
"""Types of weights: their bits as numpy reads them, and those that are all set in NaN and infinity."""
FP8_BITS: dict[str, tuple[str, int]] = {FP8: ("u1", 0x7F)}
"""The same of what needs scales."""
MAX_SHARD_BYTES = 5_000_000_000
"""Shard size of the Hub; larger models are written in several files."""


def read_json(path: Path, *, remedy: str) -> dict[str, Any]:
    """A JSON object from a file of sane size. Raises ModelError naming the file."""
    try:
        value = parse_json(read_regular(path, MAX_JSON_BYTES))
    except FileNotFoundError as err:
        raise ModelError(f"{path} is missing", remedy=remedy) from err
    except (OSError, ValueError, RecursionError) as err:
        raise ModelError(f"cannot read {path}: {err}", remedy=remedy) from err
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds {type(value).__name__}, not a JSON object", remedy=remedy)
    return cast("dict[str, Any]", value)


def read_config(folder: str | Path, *, has_mtp: bool = False) -> ModelConfig:
    """`config.json`; of a foreign model the shapes of its weights too. Raises ModelError naming the file, ConfigError
    if the model is to have an MTP layer and has none."""
    root = _existing(folder)
    path = root / CONFIG
    if (root / ADAPTER_CONFIG).is_file() and not path.exists():
        raise ModelError(
            f"{root} holds an adapter, not a model",
            remedy='name its model as model.path and it as lora.path; with lora.export = "merged" a run writes a model',
        )
    config = parse_model_config(read_json(path, remedy="the folder must be a HuggingFace model folder"), str(path))
    if config.foreign and any(root.glob("*.safetensors")):
        specs = tensor_specs(root)
        exact = {name for name, spec in specs.items() if spec.dtype == "float32"}
        exact = frozenset(exact if len(exact) < len(specs) else ())
        config = replace(config, folder_shapes={name: spec.shape for name, spec in specs.items()}, exact=exact)
    return config.with_mtp() if has_mtp else config


def _existing(folder: str | Path) -> Path:
    root = Path(folder)
    if not root.is_dir():
        raise ModelError(
            f"model folder {root} {'is no folder' if root.exists() else 'does not exist'}",
            remedy="set model.path to a HuggingFace folder, or make a small one: "
            "python -m myxa.actors.models.tiny FOLDER",
        )
    return root


def tensor_specs(root: Path) -> dict[str, TensorSpec]:
    """Of every weight, from the headers of the folder's files."""
    with _opened(root) as tensors:
        return {name: tensor.spec for name, tensor in tensors.items()}


@contextmanager
def _opened(root: Path) -> Generator[dict[str, NamedArray], None, None]:
    """All tensors of the folder's files. Raises ModelError for a name that comes twice."""
    with ExitStack() as stack:
        tensors: dict[str, NamedArray] = {}
        for name in weight_files(root):
            for key, tensor in stack.enter_context(open_safetensors(root / name)).items():
                if key in tensors:
                    raise ModelError(f"{root / name}: tensor {key} is in another shard too", remedy="export it again")
                tensors[key] = tensor
        yield tensors


def find_tokenizer(folder: str | Path) -> Path:
    """The folder's tokenizer file. Raises ModelError when there is none, or no folder."""
    path = _existing(folder) / TOKENIZER
    if not path.is_file():
        raise ModelError(
            f"{path} is missing",
            remedy="copy the tokenizer files of the model into its folder (transformers' "
            "AutoTokenizer.save_pretrained writes tokenizer.json)",
        )
    return path


def read_eos_token_ids(folder: str | Path) -> tuple[int, ...]:
    """Ids that end a generation by both config files; `load_tokenizer` adds the tokenizer's own."""
    root = Path(folder)
    ids: list[int] = []
    for name in (GENERATION_CONFIG, CONFIG):
        path = root / name
        if path.exists():
            value = read_json(path, remedy="mend the file").get("eos_token_id")
            ids.extend(token_ids(value, f"{path}: eos_token_id"))
    return tuple(dict.fromkeys(ids))


@contextmanager
def open_weights(
    folder: str | Path, config: ModelConfig, *, as_stored: bool = False
) -> Generator[Mapping[str, NamedArray], None, None]:
    """All weights by HuggingFace name, as views of the mapped files, valid inside the block; FP8 is read as bfloat16,
    unless `as_stored`. Raises ModelError for a missing file, name or a wrong shape."""
    with _opened(Path(folder)) as tensors:
        _take_apart(config, tensors, str(folder))
        check_tensors(config, tensors, str(folder))
        yield Dequantised(tensors, config.fp8) if config.fp8 and not as_stored else tensors


PACKED = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(gate_up|down)_proj")
"""Experts of a layer as one tensor."""


def _take_apart(config: ModelConfig, tensors: dict[str, NamedArray], place: str) -> None:
    """Put views under the names of single experts in place of those that transformers 5 wrote as it holds them
    (`save_original_format=False`): `gate_up_proj` [experts, 2 * inner, hidden], an expert's gate rows first, and
    `down_proj` [experts, hidden, inner]. Raises ModelError for another shape or a name that comes twice."""
    inner, hidden = config.moe_intermediate_size, config.hidden_size
    has_experts = config.num_experts and not config.foreign
    for name in list(filter(PACKED.fullmatch, tensors if has_experts else ())):
        stem, kind = name.removesuffix("_proj").rsplit(".", 1)
        kinds, shape = (("gate", "up"), (inner, hidden)) if kind == "gate_up" else (("down",), (hidden, inner))
        array, num_parts = tensors.pop(name), config.num_experts * len(kinds)
        if array.spec.shape != (whole := (config.num_experts, len(kinds) * shape[0], shape[1])):
            raise ModelError(
                f"{place}: {name} holds experts as {list(array.spec.shape)}, {list(whole)} is read",
                remedy="let transformers' save_pretrained write it with save_original_format=True",
            )
        size = array.spec.num_bytes // num_parts
        for number in range(num_parts):
            key = f"{stem}.{number // len(kinds)}.{kinds[number % len(kinds)]}_proj.weight"
            if key in tensors:
                raise ModelError(f"{place}: {key} is in {name} too", remedy="export it again")
            spec = TensorSpec(name=key, dtype=array.spec.dtype, shape=shape, offset=0, num_bytes=size)
            tensors[key] = NamedArray(spec=spec, data=array.data[number * size : (number + 1) * size])


def check_experts_apart(folder: str) -> None:
    """Raise ModelError for a folder whose experts SGLang (0.5.17) would leave as they were in memory: it passes names
    over that it does not know, and loads each expert by its own."""
    root = Path(folder)
    specs = tensor_specs(root) if any(root.glob("*.safetensors")) else ()
    if packed := next(filter(PACKED.fullmatch, specs), ""):
        raise ModelError(
            f"{folder}: {packed} holds all experts of a layer, which SGLang does not load",
            remedy="let transformers' save_pretrained write it with save_original_format=True; or write another in FP8 "
            "(`myxa convert MODEL FOLDER --dtype fp8`), and name it in weights.served_folder",
        )


def weight_files(root: Path) -> list[str]:
    index = root / INDEX
    if not index.exists():
        if not (root / WEIGHTS).exists():
            raise ModelError(
                f"{root} has neither {WEIGHTS} nor {INDEX}",
                remedy="convert the weights to safetensors; other formats can run code and are not read",
            )
        return [WEIGHTS]
    weight_map = read_json(index, remedy="download the index again").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map", remedy="download the index again")
    names = sorted({str(name) for name in cast("dict[str, Any]", weight_map).values()})
    for name in names:
        if Path(name).name != name:
            raise ModelError(f"{index} names a file outside its folder: {name!r}", remedy="do not use this folder")
    if WEIGHTS not in names and (root / WEIGHTS).exists():
        raise ModelError(
            f"{root} has {WEIGHTS} and {INDEX}, which does not name it: some programs read the one, some the other",
            remedy="keep the weights that are meant, and remove the others",
        )
    return names


def check_tensors(config: ModelConfig, tensors: Mapping[str, NamedArray], place: str) -> None:
    """Raise ModelError naming the first weight that is missing, has another shape than `config` demands, or is of
    another model than it."""
    shapes = config.tensor_shapes()
    for name, shape in shapes.items():
        tensor = tensors.get(name)
        if tensor is None:
            alike = [other for other in tensors if other.endswith(f".{name}") or name.endswith(f".{other}")]
            if name == EMBEDDING and config.source.get("tie_word_embeddings"):  # other servers would leave it empty
                alike += [HEAD] * (HEAD in tensors)
            remedy = "the config belongs to another model, or a shard is missing"
            if alike:
                remedy = "let transformers' save_pretrained write the whole model: it gives weights their names"
            elif name == HEAD:
                remedy += "; or tie_word_embeddings must be true in config.json"
            found = f"{alike[0]} is there" if alike else f"{len(tensors)} weights found"
            raise ModelError(f"{place}: weight {name} is missing ({found})", remedy=remedy)
        if tensor.spec.shape != shape:
            raise ModelError(
                f"{place}: weight {name} has shape {list(tensor.spec.shape)}, config.json demands {list(shape)}",
                remedy="config and weights must come from the same model",
            )
        if tensor.spec.dtype == FP8:
            check_scales(config.fp8, tensor.spec, tensors, place)
    if not config.foreign:
        _check_rest(config, shapes, tensors, place)


_LAYER = re.compile(r"model\.layers\.(\d+)\..*\.(weight|bias)")


def _check_rest(config: ModelConfig, shapes: Mapping[str, Any], tensors: Mapping[str, NamedArray], place: str) -> None:
    """Raise ModelError naming a weight of a layer that the model of `config` does not have, or a head of its own where
    `config.json` says that the embedding serves as one."""
    for name in tensors.keys() - shapes.keys():
        layer = _LAYER.fullmatch(name)
        if layer is not None and int(layer[1]) < config.num_layers:
            raise ModelError(
                f"{place}: weight {name} is none of a {config.model_type} model's by config.json: it would be left out",
                remedy="merge adapters into the weights (merge_and_unload of peft), or use the model's own config.json",
            )
    pair = [tensors.get(name) for name in (EMBEDDING, HEAD)]
    rows = [np.frombuffer(tensor.data, np.uint8) for tensor in pair if tensor is not None]
    if config.source.get("tie_word_embeddings") and len(rows) == len(pair) and not np.array_equal(rows[0], rows[1]):
        raise ModelError(
            f"{place}: tie_word_embeddings is true in config.json, but {HEAD} differs from the embedding",
            remedy=f"set it to false, or remove {HEAD} from the weights if the embedding is meant",
        )


def check_values(names: Collection[str], tensors: Mapping[str, NamedArray], place: str, *, max_bytes: int = 0) -> None:
    """Raise ModelError naming the first of the weights `names` that is of no float type, or holds NaN or infinity.
    `max_bytes`: read no more than that; of larger models an equal share from the start of each weight. 0: read all."""
    names = [*names, *(scale for name in names for end in SCALE_SUFFIXES if (scale := name + end) in tensors)]
    num_bytes = sum(tensors[name].spec.num_bytes for name in names)
    share = min(1.0, max_bytes / num_bytes) if max_bytes and num_bytes else 1.0
    for name in names:
        spec = tensors[name].spec
        bits_of = FLOATS | FP8_BITS | ({E8M0: ("u1", 0xFF)} if name.endswith(SCALE_SUFFIXES) else {})
        if spec.dtype not in bits_of:
            raise ModelError(
                f"{place}: weight {name} is of type {spec.dtype}, not a float type",
                remedy="quantised weights are not read; export the model in bfloat16",
            )
        kind, exponent = bits_of[spec.dtype]
        bits = np.frombuffer(tensors[name].data, dtype=kind)
        bits = bits[: max(1, int(len(bits) * share))]
        for start in range(0, len(bits), CHUNK):
            bad = np.flatnonzero((bits[start : start + CHUNK] & exponent) == exponent)
            if bad.size:
                raise ModelError(
                    f"{place}: weight {name} holds NaN or infinity, first at number {start + int(bad[0])} of "
                    f"{tensors[name].spec.num_bytes // bits.itemsize}",
                    remedy="the run that wrote it diverged, or the file is damaged: use an earlier checkpoint",
                )


def export_dtype(wish: str, config: ModelConfig, otherwise: str) -> str:
    """The number type of weights that are written: as wished, or "model": the folder's own, or `otherwise` where that
    is no type that training writes; float16 does not hold every number of it."""
    folder_dtype = config.dtype.removeprefix("torch.")
    return wish if wish != "model" else folder_dtype if folder_dtype in ("float32", "bfloat16") else otherwise


def write_folder(
    folder: str | Path,
    config: Mapping[str, Any],
    tensors: Sequence[NamedArray],
    *,
    tokenizer_from: str | Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a folder that transformers, SGLang, vLLM and myxa load: config, weights, tokenizer files. `config` is the
    JSON object of `config.json` (`ModelConfig.source`); MTP layers that are not among the weights leave it. Files are
    mode 0644; the weights appear under their names only when complete. Raises ModelError naming the file when the disk
    refuses."""
    root = Path(folder)
    shards = _shards(tensors, max_shard_bytes)
    behind = f"model.layers.{config.get('num_hidden_layers')}."
    if config.get("num_nextn_predict_layers") and not any(tensor.spec.name.startswith(behind) for tensor in tensors):
        config = {**config, "num_nextn_predict_layers": 0}  # a server would guess with weights that were not written
    with raised_as(ModelError, f"cannot write model folder {root}", OSError, remedy="choose another folder"):
        root.mkdir(parents=True, exist_ok=True)
        (root / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if tokenizer_from is not None:
            copy_tokenizer(tokenizer_from, root)
    if len(shards) == 1:
        write_safetensors(root / WEIGHTS, shards[0])
        (root / INDEX).unlink(missing_ok=True)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(root / name, shard)
        weight_map.update({t.spec.name: name for t in shard})
    index = {"metadata": {"total_size": sum(t.spec.num_bytes for t in tensors)}, "weight_map": weight_map}
    (root / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    (root / WEIGHTS).unlink(missing_ok=True)


def _shards(tensors: Sequence[NamedArray], max_bytes: int) -> list[list[NamedArray]]:
    shards: list[list[NamedArray]] = [[]]
    room = max_bytes
    for tensor in tensors:
        if shards[-1] and tensor.spec.num_bytes > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(tensor)
        room -= tensor.spec.num_bytes
    return shards


def copy_tokenizer(source: str | Path, target: str | Path) -> None:
    """Also `generation_config.json`. Raises ModelError: no `tokenizer.json`, no regular file, too large."""
    root, into = find_tokenizer(source).parent, Path(target)
    if root.resolve() == into.resolve():
        return
    templates = sorted(path.relative_to(root) for path in (root / TEMPLATE_FOLDER).glob("*.jinja"))
    for name in (*map(Path, (*TOKENIZER_FILES, GENERATION_CONFIG)), *templates):
        if (root / name).exists():
            with raised_as(ModelError, f"cannot read {root / name}", OSError, remedy="download the file again"):
                content = read_regular(root / name, MAX_TOKENIZER_BYTES)
            (into / name).parent.mkdir(exist_ok=True)
            (into / name).write_bytes(content)


HEADS = ("value_head", "score")
"""What a value head is called in a folder: by us, and by transformers' models for classification."""


def check_second_model(key: str, path: str, model: ModelConfig) -> None:
    """Raise ConfigError unless `path`, which the run file's `key` names (or is empty), is shaped as `model`."""
    if not path:
        return
    with raised_as(ConfigError, key, ModelError):
        second = read_config(path)
    if key == "critic.path":
        second, model = critic_layers(second), critic_layers(model)
    for field in fields(ModelConfig):
        value, second_value = getattr(model, field.name), getattr(second, field.name)
        if value != second_value and field.name not in MAY_DIFFER:
            raise ConfigError(
                f"{key} = {path}: its {field.name} is {second_value}, that of model.path is {value}",
                remedy="name a folder of a model of the same shape, such as an earlier checkpoint's export",
            )


def critic_layers(model: ModelConfig) -> ModelConfig:
    """The configuration of a critic's layers: no vocabulary head, which tied embeddings say."""
    return replace(model, tie_word_embeddings=True, is_scorer=False)


def check_critic(critic: CriticConfig, model: ModelConfig) -> None:
    """Raise ConfigError if `critic.path` has no weights of the policy's shape, or a head of several values."""
    check_second_model("critic.path", critic.path, model)
    layers = critic_layers(model)
    with raised_as(ConfigError, "critic.path", ModelError), open_weights(critic.path, layers) as tensors:
        value_head_in(tensors, layers, critic.path)


def value_head_in(tensors: Mapping[str, NamedArray], layers: ModelConfig, place: str) -> dict[str, NamedArray]:
    """`weight` and perhaps `bias` of a folder's value head; empty: it has none. Raises ModelError for another shape."""
    name = next((name for name in HEADS if f"{name}.weight" in tensors), "")
    arrays = {part: tensors[f"{name}.{part}"] for part in ("weight", "bias") if f"{name}.{part}" in tensors}
    shapes = {"weight": (1, layers.hidden_size), "bias": (1,)}
    for part, array in arrays.items():
        if array.spec.shape != shapes[part]:
            raise ModelError(
                f"{place}: {name}.{part} has shape {list(array.spec.shape)}, a value head's is {list(shapes[part])}",
                remedy="name a model that gives one value for each token",
            )
    return arrays


def critic_parameters(critic: CriticConfig, model: ModelConfig) -> int:
    """How many parameters the critic has; 0 without one."""
    return critic_layers(model).num_parameters + model.hidden_size + 1 if critic.enabled else 0
