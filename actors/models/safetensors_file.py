"""One safetensors file, read through a memory map and written from raw bytes; needs no torch.

Format: 8 bytes little-endian header length, a JSON header `name -> {dtype, shape, data_offsets}`, the data. The library
checks the header; its numpy front knows no bfloat16, so the bytes are taken from the map here.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from ...core.errors import ModelError
from ...core.files import open_regular
from ...core.messages import TensorSpec
from ...core.protocols import NamedArray

MAX_HEADER_BYTES = 16 << 20
"""Names and places of 100,000 tensors; the format allows six times as many."""
HEAD_BYTES = 8
MAX_DIMENSIONS = 8
MAX_COMMAS = 1 << 21
"""Of a JSON text: each may part two empty lists, which take 64 bytes each."""

FP8, E8M0 = "float8_e4m3fn", "float8_e8m0fnu"
DTYPES: Mapping[str, tuple[str, int]] = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": (FP8, 1),
    "F8_E8M0": (E8M0, 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
"""Name in the file -> (name in a TensorSpec, bytes per element)."""


@contextmanager
def open_safetensors(path: Path) -> Generator[dict[str, NamedArray], None, None]:
    """Tensors of the file by name; their bytes are a view of the file and valid inside the block only. Raises
    ModelError naming the file when it is missing, torn or not of this format."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size < HEAD_BYTES:
                raise _torn(path, f"it has {size} bytes")
            mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)  # some FUSE have no other
    except OSError as err:
        raise ModelError(f"cannot read {path}: {err}", remedy="the weights must lie in the model folder") from err
    try:
        yield _tensors(path, mapped)
    finally:
        with suppress(BufferError):  # a view is still alive; the map then ends with it
            mapped.close()


def parse_json(text: bytes) -> Any:
    """The value of a JSON text of a folder that may be hostile. Raises ValueError, also for more values than a model
    folder needs, and RecursionError for lists in lists without end."""
    num_commas = text.count(b",")
    if num_commas > MAX_COMMAS:
        raise ValueError(f"it has {num_commas} commas, more than {MAX_COMMAS}")
    return json.loads(text)


def _tensors(path: Path, mapped: mmap.mmap) -> dict[str, NamedArray]:
    header_bytes = int.from_bytes(mapped[:HEAD_BYTES], "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise _torn(path, f"its header has {header_bytes} bytes, more than {MAX_HEADER_BYTES}")
    try:
        opened: Any = safetensors.safe_open(path, framework="np")
        with opened as file:  # tensors fill it, one behind the other
            slices: list[tuple[str, Any]] = [(name, file.get_slice(name)) for name in file.offset_keys()]
    except (OSError, safetensors.SafetensorError) as err:
        raise _torn(path, str(err)[:500]) from err
    tensors, offset, view = dict[str, NamedArray](), 0, memoryview(mapped)[HEAD_BYTES + header_bytes :]
    for name, part in slices:
        shape: tuple[int, ...] = tuple(part.get_shape())
        dtype, item_bytes = DTYPES.get(part.get_dtype(), ("", 0))
        if not dtype:
            raise ModelError(
                f"{path}: tensor {name} is of type {part.get_dtype()}, which is not read",
                remedy="export the model in bfloat16",
            )
        if len(shape) > MAX_DIMENSIONS:
            raise _torn(path, f"tensor {name} has {len(shape)} dimensions")
        spec = TensorSpec(name=name, dtype=dtype, shape=shape, offset=offset, num_bytes=item_bytes * math.prod(shape))
        tensors[name] = NamedArray(spec=spec, data=view[offset : (offset := offset + spec.num_bytes)])
    return tensors


def _torn(path: Path, why: str) -> ModelError:
    return ModelError(f"{path} is not a whole safetensors file: {why}", remedy="download or export the weights again")


def write_safetensors(path: Path, tensors: Iterable[NamedArray]) -> None:
    """Write a file of mode 0644, complete or not at all. Raises ModelError if the disk refuses."""
    arrays = {t.spec.name: (t.spec, np.frombuffer(t.data, dtype=np.uint8)) for t in tensors}
    # `arrays` keeps every pointer alive until the file is written, as serialize_file demands.
    table = {
        name: safetensors.TensorSpec(
            dtype=spec.dtype, shape=list(spec.shape), data_ptr=array.ctypes.data, data_len=array.nbytes
        )
        for name, (spec, array) in arrays.items()
    }
    partial = path.with_name(path.name + ".partial")
    try:
        safetensors.serialize_file(table, str(partial), {"format": "pt"})
        partial.chmod(0o644)  # serialize_file makes it 0600, which another user's server cannot read
        partial.replace(path)
    except (OSError, safetensors.SafetensorError) as err:
        partial.unlink(missing_ok=True)
        raise ModelError(f"cannot write {path}: {err}", remedy="free disk space or choose another folder") from err
