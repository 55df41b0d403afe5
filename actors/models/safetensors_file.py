"""One safetensors file, read through a memory map and written from raw bytes; needs no torch.

Format: 8 bytes little-endian header length, a JSON header `name -> {dtype, shape, data_offsets}`, the data. The library
checks the header; its numpy front knows no bfloat16, so the bytes are taken from the map here.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
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

FP8 = "float8_e4m3fn"
DTYPES: Mapping[str, tuple[str, int]] = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": (FP8, 1),
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


SCALE_SUFFIX = "_scale_inv"
"""After the name of a matrix of FP8 in blocks: the name of its scales, one for each block."""
SCALE_TYPES = ("float32", "bfloat16", "float16")
"""Of scales: DeepSeek-V3's; Qwen3's; those of some of Qwen3's later folders."""
_CODES = np.arange(128)
_POSITIVE = np.where(_CODES < 8, _CODES * 2.0**-9, (8 + _CODES % 8) * 2.0 ** (_CODES // 8 - 10))
_POSITIVE[127] = np.nan
E4M3 = np.concatenate([_POSITIVE, -_POSITIVE]).astype(np.float32)
"""What each byte of a float8_e4m3fn stands for."""


class Dequantised(Mapping[str, NamedArray]):
    """Tensors of a folder whose matrices are FP8 in blocks (DeepSeek-V3, Qwen3-FP8), those as bfloat16: value x scale
    of its block, rounded to nearest even, as DeepSeek's own conversion does. Made when asked for; the last few stay."""

    def __init__(self, stored: Mapping[str, NamedArray], block: tuple[int, int]) -> None:
        self._stored, self._block = stored, block
        self._dequantised = lru_cache(maxsize=4)(self._dequantise)

    def __getitem__(self, name: str) -> NamedArray:
        return self._dequantised(name) if self._stored[name].spec.dtype == FP8 else self._stored[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._stored if not name.endswith(SCALE_SUFFIX))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _dequantise(self, name: str) -> NamedArray:
        weight, scale, (high, wide) = self._stored[name], self._stored[name + SCALE_SUFFIX], self._block
        rows, columns = weight.spec.shape
        codes = np.frombuffer(weight.data, np.uint8).reshape(rows, columns)
        if scale.spec.dtype == "bfloat16":
            numbers = (np.frombuffer(scale.data, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            numbers = np.frombuffer(scale.data, scale.spec.dtype).astype(np.float32)
        scales = numbers.reshape(scale.spec.shape)
        values = np.empty((rows, columns), np.uint16)
        for number, row in enumerate(range(0, rows, high)):
            bits = (E4M3[codes[row : row + high]] * scales[number].repeat(wide)[:columns]).view(np.uint32)
            values[row : row + high] = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        spec = TensorSpec(name=name, dtype="bfloat16", shape=(rows, columns), offset=0, num_bytes=values.nbytes)
        return NamedArray(spec=spec, data=values.reshape(-1).view(np.uint8).data)


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
