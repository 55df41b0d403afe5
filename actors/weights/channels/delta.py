"""Weight versions as what changed since the version before: for the disk channel (`weights.full_every`).

A delta is a safetensors file. Tensors are cut into pieces of PIECE_BYTES; of each piece that changed there is an entry
`<number>/<tensor>`: two zlib streams (level 1), one behind the other.

    gaps    numbers that did not change before each that did, a byte each; 255: and 255 more, the next byte says on
    bits    old XOR new of those that changed: all first bytes, then all second bytes, ...

After a step of AdamW at lr 1e-6 1.3 % of the numbers differ in bfloat16, and a delta has 1.0 % of the bytes. XOR of all
numbers under zlib has 2.8 %, a bitmap of the changed ones 1.6 %, plain positions and values 4.0 %; zlib's level 6 makes
0.95 % of it, at half to three quarters of the speed. Where all numbers change (float32, large steps) it has 41 to 75 %,
at most 4 more than the best of the others. Python has zstd from 3.14 on.

XOR has no direction or order, so only the digest says whether the result is right: nothing is served before that
was checked.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....core.messages import TensorSpec, WeightDelta
from ....core.protocols import NamedArray
from ...models.hf_folder import weight_files
from ...models.safetensors_file import open_safetensors, write_safetensors

FILE = "weights.delta"
"""Servers load all of a folder that is called *.safetensors."""
PIECE_BYTES = 16 << 20
LEVEL = 1
ESCAPE = 255

Bytes = NDArray[np.uint8]


def encode(old: NDArray[Any], new: NDArray[Any]) -> bytes:
    """What makes `new` of `old`, two flat arrays of one unsigned type; empty: nothing changed."""
    bits = old ^ new
    places = np.flatnonzero(bits)
    if not places.size:
        return b""
    escapes, remainders = np.divmod(np.diff(places, prepend=-1) - 1, ESCAPE)
    gaps = np.full(places.size + int(escapes.sum()), ESCAPE, np.uint8)
    gaps[np.cumsum(escapes + 1) - 1] = remainders
    planes = np.ascontiguousarray(bits[places].view(np.uint8).reshape(-1, bits.itemsize).T)
    return zlib.compress(gaps.data, LEVEL) + zlib.compress(planes.data, LEVEL)


def decode(data: bytes | memoryview, numbers: NDArray[Any]) -> None:
    """Apply to `numbers` in place. Raises ValueError for bytes that are no delta of so many; `numbers` are then as
    they were."""
    gap_bytes, data = _inflate(data, 2 * numbers.size)
    gaps = np.frombuffer(gap_bytes, np.uint8)
    ends = np.flatnonzero(gaps != ESCAPE)
    if not ends.size or ends[-1] != gaps.size - 1:
        raise ValueError("its gaps end in the middle")
    places = np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(ends.size)
    planes, data = _inflate(data, numbers.itemsize * ends.size)
    if data or len(planes) != numbers.itemsize * ends.size or places[-1] >= numbers.size:
        raise ValueError(f"it changes {ends.size} numbers up to {places[-1]} of {numbers.size}")
    bits = np.ascontiguousarray(np.frombuffer(planes, np.uint8).reshape(numbers.itemsize, -1).T)
    numbers[places] ^= bits.view(numbers.dtype)[:, 0]


def _inflate(data: bytes | memoryview, max_bytes: int) -> tuple[bytes, bytes]:
    """One stream, and what follows it. Raises ValueError if it is torn, or larger."""
    stream = zlib.decompressobj()
    try:
        out = stream.decompress(data, max_bytes + 1)
    except zlib.error as err:
        raise ValueError(str(err)) from err
    if not stream.eof or len(out) > max_bytes:
        raise ValueError("a stream is torn, or too large")
    return out, stream.unused_data


def _pieces(spec: TensorSpec, data: Bytes) -> dict[str, NDArray[Any]]:
    """Name in the file -> numbers, of a tensor's bytes."""
    count = int(np.prod(spec.shape, dtype=np.int64))
    numbers: NDArray[Any] = data.view(f"u{spec.num_bytes // count}") if count else data
    step = PIECE_BYTES // numbers.itemsize
    return {f"{start // step}/{spec.name}": numbers[start : start + step] for start in range(0, numbers.size, step)}


def _map_in_threads(work: Callable[..., Any], *items: Iterable[Any]) -> list[Any]:
    """Zlib and numpy work side by side."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="weight delta") as pool:
        return list(pool.map(work, *items))


def write_delta(folder: Path, old: Mapping[str, Bytes], tensors: Sequence[NamedArray]) -> tuple[Path, int]:
    """Write a file into `folder` that makes `tensors` of their bytes in `old`; the file and its size. Raises OSError,
    ModelError."""
    before, after = dict[str, NDArray[Any]](), dict[str, NDArray[Any]]()
    for tensor in tensors:
        before |= _pieces(tensor.spec, old[tensor.spec.name])
        after |= _pieces(tensor.spec, np.frombuffer(tensor.data, np.uint8))
    deltas = zip(after, _map_in_threads(encode, before.values(), after.values()), strict=True)
    entries = [
        NamedArray(
            spec=TensorSpec(name=name, dtype="uint8", shape=(len(data),), offset=0, num_bytes=len(data)),
            data=memoryview(data),
        )
        for name, data in deltas
        if data
    ]
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / FILE, entries)
    return folder / FILE, (folder / FILE).stat().st_size


def patch_folder(folder: Path, deltas: Sequence[WeightDelta]) -> None:
    """Apply them to a model folder in place. Raises OSError, ValueError, ModelError: it is then worth nothing."""
    pieces = dict[str, NDArray[Any]]()
    for file in weight_files(folder):
        with open_safetensors(folder / file) as tensors:
            specs = [tensor.spec for tensor in tensors.values()]
        data = np.asarray(np.memmap(folder / file, np.uint8, "r+"))
        begin = data.size - sum(spec.num_bytes for spec in specs)
        for spec in specs:
            pieces |= _pieces(spec, data[begin + spec.offset :][: spec.num_bytes])
    for delta in deltas:
        with open_safetensors(Path(delta.path)) as entries:
            if strange := set(entries) - set(pieces):
                raise ValueError(f"{delta.path} changes {min(strange)}, which is not there")
            _map_in_threads(decode, [entry.data for entry in entries.values()], [pieces[name] for name in entries])
