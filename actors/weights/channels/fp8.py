"""Block-wise FP8 on the way to engines that hold their weights so (convention of DeepSeek-V3 and Qwen3-FP8).

A matrix W [m, n] becomes Q [m, n] in float8_e4m3fn and `<name>_scale_inv` S [ceil(m / 128), ceil(n / 128)] in float32:

    S[i, j] = max |W block i, j| / 448        Q = W / S, rounded to nearest even        W ~= Q * S

448 is the largest number of e4m3fn. A block of zeros has scale 1, not 0: dividing by 0 makes NaN. Blocks at the edges
are smaller. Which matrices: those of which the engines' own model folder holds a `_scale_inv`; asked of the folder, so
that routers, embeddings, heads and whatever a recipe left out stay as they are there.

torch only: amax, division and a cast are three kernels that read the matrix at memory speed. Triton kernels were
considered (slime's): not faster here, and not on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import safetensors
import torch
from torch import Tensor
from torch.nn.functional import pad

from ....core.errors import ConfigError, ModelError
from ...models.hf_folder import CONFIG, read_json

LARGEST = 448.0
"""Of float8_e4m3fn."""
SCALE_SUFFIX = "_scale_inv"


def quantise_blocks(weight: Tensor, block: tuple[int, int] = (128, 128)) -> tuple[Tensor, Tensor]:
    """(Q float8_e4m3fn [m, n], S float32 [blocks down, blocks across]) of a matrix of any float type. Raises ValueError
    for what is no matrix, or holds NaN or infinity: an engine must never be handed those."""
    if weight.dim() != 2:
        raise ValueError(f"a matrix is needed, not {list(weight.shape)}")
    rows, columns = weight.shape
    high, wide = block
    grid = (-(-rows // high), -(-columns // wide))
    values = pad(weight.float(), (0, grid[1] * wide - columns, 0, grid[0] * high - rows))
    blocks = values.view(grid[0], high, grid[1], wide)
    amax = blocks.abs().amax(dim=(1, 3))
    if not bool(torch.isfinite(amax).all()):
        raise ValueError("it holds NaN or infinity")
    scale = amax / LARGEST
    # Zeros, and numbers so small that the scale is none that can be divided by: such a block becomes zeros.
    scale = torch.where(scale > torch.finfo(torch.float32).tiny, scale, torch.ones_like(scale))
    scaled = (blocks / scale[:, None, :, None]).clamp(-LARGEST, LARGEST)
    quantised = scaled.view(grid[0] * high, grid[1] * wide)[:rows, :columns].to(torch.float8_e4m3fn)
    return quantised.contiguous(), scale


@dataclass(frozen=True, slots=True)
class Fp8Rule:
    """Which weights become FP8, and in which blocks. Use `of_folder`."""

    names: frozenset[str]
    block: tuple[int, int]

    @staticmethod
    def of_folder(folder: Path) -> Fp8Rule | None:
        """As the folder's own weights are; None for a folder that is not quantised. Raises ConfigError for a
        quantisation of another kind, ModelError for a folder that cannot be read."""
        config = read_json(folder / CONFIG, remedy="see weights.served_folder")
        quantisation = config.get("quantization_config")
        if not isinstance(quantisation, dict):
            return None
        facts = cast("dict[str, Any]", quantisation)
        block = facts.get("weight_block_size")
        is_pair = isinstance(block, list) and len(cast("list[Any]", block)) == 2
        if facts.get("quant_method") != "fp8" or not is_pair:
            raise ConfigError(
                f"{folder}/config.json: quantization_config is {facts.get('quant_method')!r} with blocks {block!r}; "
                "weights are sent as fp8 in blocks, or not quantised",
                remedy="serve a folder without quantization_config, or one of kind fp8 with weight_block_size",
            )
        high, wide = (int(size) for size in cast("list[int]", block))
        names = {name.removesuffix(SCALE_SUFFIX) for name in _tensor_names(folder) if name.endswith(SCALE_SUFFIX)}
        return Fp8Rule(names=frozenset(names), block=(high, wide))

    def apply(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The stream with its matrices quantised, each followed by its scales."""
        for name, tensor in tensors:
            if name not in self.names:
                yield name, tensor
                continue
            try:
                quantised, scale = quantise_blocks(tensor, self.block)
            except ValueError as err:
                raise ModelError(
                    f"weight {name} cannot be quantised: {err}", remedy="look at the trainer's gradient norm"
                ) from err
            yield name, quantised
            yield name + SCALE_SUFFIX, scale


def _tensor_names(folder: Path) -> Iterator[str]:
    """Names of all tensors in the folder's safetensors files."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} holds no safetensors files", remedy="see weights.served_folder")
    for path in files:
        try:
            with cast(Any, safetensors).safe_open(path, framework="np") as file:
                yield from file.keys()
        except (OSError, safetensors.SafetensorError) as err:
            raise ModelError(f"cannot read {path}: {err}", remedy="the file is torn; copy it again") from err
