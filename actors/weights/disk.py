"""Weights through a folder of safetensors: for engines on other hosts, and for servers that load from disk.

Each version is a complete HuggingFace folder (config and tokenizer are copied from the model's), so any server that
takes a model path can load it. The file appears under its final name only when it is complete.

safetensors' torch front would import torch and its numpy front knows no bfloat16; `serialize_file` takes bytes as they
are, in any dtype.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import safetensors

from ...core.errors import EngineError, TrainError
from ...core.messages import TensorSpec, WeightManifest
from ...core.protocols import NamedArray

COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
)
WEIGHTS = "model.safetensors"

_WIRE_DTYPE = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


class DiskWeightWriter:
    """Publishes versions as folders `<root>/version_<v>`; `release` deletes them."""

    def __init__(self, root: Path, model_folder: Path, host: str) -> None:
        self._root = root
        self._model_folder = model_folder
        self._host = host
        self._folders: dict[int, Path] = {}

    def publish(self, version: int, tensors: Sequence[NamedArray]) -> WeightManifest:
        """Write the folder. Raises TrainError naming the path when the disk refuses."""
        folder = self._root / f"version_{version:08d}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in COPIED:
                if (self._model_folder / name).exists():
                    shutil.copyfile(self._model_folder / name, folder / name)
            digest = self._write(folder / WEIGHTS, tensors)
        except OSError as err:
            raise TrainError(
                f"cannot write weight version {version} to {folder}: {err}",
                remedy="free disk space, or put run.dir on another disk",
            ) from err
        self._folders[version] = folder
        return WeightManifest(
            version=version,
            channel="disk",
            location=str(folder),
            generation=0,
            num_bytes=sum(t.spec.num_bytes for t in tensors),
            tensors=tuple(t.spec for t in tensors),
            digest=digest,
            host=self._host,
        )

    def _write(self, path: Path, tensors: Sequence[NamedArray]) -> str:
        digest = hashlib.blake2b(digest_size=16)
        arrays = [np.frombuffer(t.data, dtype=np.uint8) for t in tensors]
        for array in arrays:
            digest.update(array.data)
        # `arrays` keeps every pointer alive until the file is written, as serialize_file demands.
        table = {
            t.spec.name: safetensors.TensorSpec(
                dtype=t.spec.dtype, shape=list(t.spec.shape), data_ptr=a.ctypes.data, data_len=a.nbytes
            )
            for t, a in zip(tensors, arrays, strict=True)
        }
        partial = path.with_suffix(".partial")
        safetensors.serialize_file(table, str(partial), {"format": "pt"})
        partial.chmod(0o644)
        os.replace(partial, path)
        return digest.hexdigest()

    def release(self, version: int) -> None:
        """Delete that version's folder."""
        folder = self._folders.pop(version, None)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Delete every folder that was not released."""
        for version in list(self._folders):
            self.release(version)


class DiskWeightReader:
    """Reads a published folder; the digest is checked before anything is handed out."""

    @contextmanager
    def open(self, manifest: WeightManifest) -> Iterator[Mapping[str, NamedArray]]:
        """Named tensors of the version. Raises EngineError for a missing, torn or altered file."""
        path = Path(manifest.location) / WEIGHTS
        try:
            entries = dict(safetensors.deserialize(path.read_bytes()))
        except (OSError, safetensors.SafetensorError) as err:
            raise EngineError(
                f"cannot read weight version {manifest.version} from {path}: {err}",
                remedy="the folder must be reachable from this host (a shared file system)",
            ) from err
        digest = hashlib.blake2b(digest_size=16)
        tensors: dict[str, NamedArray] = {}
        for spec in manifest.tensors:
            entry = entries.get(spec.name)
            if entry is None or _spec_of(spec, entry) != (spec.dtype, spec.shape):
                raise EngineError(
                    f"weight version {manifest.version}: tensor {spec.name} in {path} is not what was published",
                    remedy="do not write into the run's weight folders",
                )
            digest.update(entry["data"])
            tensors[spec.name] = NamedArray(spec=spec, data=memoryview(entry["data"]))
        if digest.hexdigest() != manifest.digest:
            raise EngineError(
                f"weight version {manifest.version} in {path} does not match its digest",
                remedy="the file was altered or is torn; the next version will be read afresh",
            )
        yield tensors


def _spec_of(spec: TensorSpec, entry: Mapping[str, object]) -> tuple[str, tuple[int, ...]]:
    shape = entry["shape"]
    dtype = _WIRE_DTYPE.get(str(entry["dtype"]), str(entry["dtype"]))
    return dtype, tuple(shape) if isinstance(shape, list) else spec.shape
