"""Matrices that a model folder holds as FP8: what `config.json` says of them, and how they are read.

W ~= Q * S: Q is float8_e4m3fn, S has a number for each block, each channel (row), or the whole matrix. Two ways to say
so are known: `quant_method` fp8 (DeepSeek-V3, Qwen3-FP8) and compressed-tensors (GLM-4.5-FP8, llm-compressor). Which
matrices are FP8, their number types say: `ignore` and `targets` are not needed. The package compressed-tensors was
considered: it fills modules of transformers, by torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from ...core.errors import ConfigError, ModelError, raised_as
from ...core.messages import TensorSpec
from ...core.protocols import NamedArray
from .safetensors_file import E8M0, FP8

SCALE_INV, SCALE = "_scale_inv", "_scale"
"""After the name of a matrix, the name of its scales: DeepSeek's; compressed-tensors'."""
SCALE_SUFFIXES = (SCALE_INV, SCALE)
SCALE_TYPES = ("float32", "bfloat16", "float16", E8M0)
"""Of scales: DeepSeek-V3's; Qwen3's and GLM-4.5's; those of some of Qwen3's later folders; powers of two."""
Side = Annotated[int, msgspec.Meta(ge=1, le=1 << 12)]
"""Rows or columns of a block; matrices are filled up to whole ones while they are quantised."""
STORED = ("float-quantized", "naive-quantized")
"""Formats of compressed-tensors that hold a matrix as it is, beside its scales."""
READ = "FP8 in blocks is read, and compressed-tensors' FP8 in blocks, by channel or tensor, of families that myxa knows"


class _Blocks(msgspec.Struct, tag_field="quant_method", tag="fp8"):
    weight_block_size: tuple[Side, Side]
    scale_fmt: Literal["", "ue8m0"] | None = None
    """Which float32 scales are: any number; a power of two (DeepSeek-V3.1)."""


class _Weights(msgspec.Struct):
    num_bits: Literal[8]
    type: Literal["float"]
    strategy: Literal["block", "channel", "tensor"]
    symmetric: bool
    dynamic: bool
    block_structure: tuple[Side, Side] | None = None


class _Group(msgspec.Struct):
    weights: _Weights
    format: str | None = None


class _CompressedTensors(msgspec.Struct, tag_field="quant_method", tag="compressed-tensors"):
    config_groups: dict[str, _Group]
    format: str | None = None
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None

    def block(self) -> tuple[int, int]:
        """Of every group. Raises ValueError naming what would be read otherwise than it is stored."""
        if self.transform_config or (self.sparsity_config or {}).get("format", "dense") != "dense":
            raise ValueError(f"transform_config is {self.transform_config}, sparsity_config {self.sparsity_config}")
        blocks = set[tuple[int, int]]()
        for name, group in self.config_groups.items():
            weights, stored = group.weights, group.format or self.format
            block = {"block": weights.block_structure, "channel": (1, 0), "tensor": (0, 0)}[weights.strategy]
            if block is None or stored not in STORED or weights.dynamic or not weights.symmetric:
                why = f"symmetric {weights.symmetric}, dynamic {weights.dynamic}, block_structure {block}"
                raise ValueError(f"config_groups.{name}: weights of format {stored!r}, {why}")
            blocks.add(block)
        if len(blocks) != 1:
            raise ValueError(f"config_groups has {len(blocks)} kinds of scales, one is needed")
        return blocks.pop()


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """How all FP8 matrices of a folder lie there."""

    block: tuple[int, int]
    """Rows and columns that share a scale; 0: as many as there are. (1, 0): one scale for each row."""
    suffix: str = SCALE_INV
    scale_fmt: str = ""

    def grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """How many scales a matrix has, down and across."""
        return tuple(-(-size // (part or size or 1)) for size, part in zip(shape, self.block, strict=True))

    def check_sent(self, place: str) -> None:
        """Raise ConfigError if SGLang (0.5.17, compressed_tensors_w8a8_fp8.py) takes no new weights in this format: it
        transposes matrices without blocks once it has loaded them, and drops what a later load needs."""
        if not all(self.block):
            raise ConfigError(
                f"{place}: its FP8 weights have one scale for each {'channel' if self.block[0] else 'matrix'}; SGLang "
                "transposes such weights when it has loaded them, and takes no others later",
                remedy="write a folder in FP8 blocks (`myxa convert MODEL FOLDER --dtype fp8`), and name it in "
                "weights.served_folder",
            )


def fp8_format(source: Mapping[str, Any]) -> Fp8Format | None:
    """What a `config.json` says; None: nothing is quantised. Raises ValueError for a quantisation that is not read."""
    try:
        said = msgspec.convert(source.get("quantization_config") or None, _Blocks | _CompressedTensors | None)
        if isinstance(said, _CompressedTensors):
            return Fp8Format(said.block(), SCALE)
    except (msgspec.ValidationError, ValueError) as err:
        raise ValueError(f"quantization_config: {err!s:.400}") from err
    return None if said is None else Fp8Format(said.weight_block_size, scale_fmt=said.scale_fmt or "")


def served_fp8(source: Mapping[str, Any], place: str) -> Fp8Format | None:
    """The same of a folder that engines serve. Raises ConfigError naming the place."""
    what = f"{place}: weights are sent as FP8 in blocks, or not quantised"
    remedy = "serve a folder without quantization_config, or one of kind fp8 with weight_block_size"
    with raised_as(ConfigError, what, ValueError, remedy=remedy):
        return fp8_format(source)


def check_scales(fp8: Fp8Format | None, spec: TensorSpec, tensors: Mapping[str, NamedArray], place: str) -> None:
    """Raise ModelError unless an FP8 matrix has a scale for each of its blocks."""
    scales = tensors.get(spec.name + fp8.suffix) if fp8 else None
    found = scales and (scales.spec.dtype, scales.spec.shape)
    grid = fp8.grid(spec.shape) if fp8 and len(spec.shape) == len(fp8.block) else ()
    fits = grid and found and found[0] in SCALE_TYPES and _no_ones(found[1]) == _no_ones(grid)
    if not fits:
        raise ModelError(
            f"{place}: weight {spec.name} is FP8 {list(spec.shape)} in blocks of {fp8 and fp8.block}, its scales are "
            f"{found}: {' or '.join(SCALE_TYPES)} {list(grid)} is needed",
            remedy="quantization_config of config.json and the weights must come from the same model",
        )


def _no_ones(shape: tuple[int, ...]) -> list[int]:
    """One scale may be written as [], [1] or [1, 1], one for each row as [rows] or [rows, 1]."""
    return [size for size in shape if size != 1]


_CODES = np.arange(128)
_POSITIVE = np.where(_CODES < 8, _CODES * 2.0**-9, (8 + _CODES % 8) * 2.0 ** (_CODES // 8 - 10))
_POSITIVE[127] = np.nan
E4M3 = np.concatenate([_POSITIVE, -_POSITIVE]).astype(np.float32)
"""What each byte of a float8_e4m3fn stands for."""
ROWS = 16
"""Read together: their numbers stay in the cache of a core."""


class Dequantised(Mapping[str, NamedArray]):
    """Tensors of a folder, FP8 matrices as bfloat16: value x scale of its block, rounded to nearest even, as DeepSeek's
    own conversion does. Made when asked for; the last few stay."""

    def __init__(self, stored: Mapping[str, NamedArray], fp8: Fp8Format) -> None:
        self._stored, self._fp8 = stored, fp8
        self._dequantised = lru_cache(maxsize=4)(self._dequantise)

    def __getitem__(self, name: str) -> NamedArray:
        return self._dequantised(name) if self._stored[name].spec.dtype == FP8 else self._stored[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._stored if not name.endswith(SCALE_SUFFIXES))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _dequantise(self, name: str) -> NamedArray:
        weight, grid = self._stored[name], self._fp8.grid(self._stored[name].spec.shape)
        rows, columns = weight.spec.shape
        high, wide = (part or size for part, size in zip(self._fp8.block, weight.spec.shape, strict=True))
        codes = np.frombuffer(weight.data, np.uint8).reshape(rows, columns)
        scales = _as_float32(self._stored[name + self._fp8.suffix]).reshape(grid)
        values = np.empty((rows, columns), np.uint16)
        for row in range(0, rows, ROWS):
            some = slice(row, row + ROWS)
            spread = scales[np.arange(rows)[some] // high].repeat(wide, axis=1)[:, :columns]
            bits = (E4M3[codes[some]] * spread).view(np.uint32)
            values[some] = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        spec = TensorSpec(name=name, dtype="bfloat16", shape=(rows, columns), offset=0, num_bytes=values.nbytes)
        return NamedArray(spec=spec, data=values.reshape(-1).view(np.uint8).data)


def _as_float32(array: NamedArray) -> np.ndarray[Any, np.dtype[np.float32]]:
    if array.spec.dtype == E8M0:  # exponents alone; 255 is NaN
        codes = np.frombuffer(array.data, np.uint8)
        return np.where(codes == 255, np.nan, np.exp2(codes - 127.0)).astype(np.float32)
    if array.spec.dtype == "bfloat16":
        return (np.frombuffer(array.data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(array.data, array.spec.dtype).astype(np.float32)
