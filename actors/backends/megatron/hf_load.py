"""Weights of a HuggingFace folder into this rank's model chunks: only the bytes that the rank needs are read.

Every rank reads for itself, from the mapped files; nothing is communicated. Library considered: safetensors'
`get_slice` does the same; the house's reader also checks names and shapes against the config before anything is built.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ....core.errors import ConfigError, TrainError
from ....core.protocols import NamedArray
from ...models.hf_folder import open_weights
from ...models.model_config import ModelConfig
from ..torch_backend.tensors import DTYPE_OF, from_array
from .layout import ParallelLayout
from .mcore import read_grid
from .weight_cut import Piece, vocabulary
from .weight_map import MappedWeight, map_weights


def load_hf_folder(
    chunks: Sequence[nn.Module], folder: str | Path, config: ModelConfig, layout: ParallelLayout
) -> None:
    """Fill this rank's parameters; table rows that only pad the vocabulary become zero. Not collective.

    Raises ModelError naming file and weight if the folder is not the config's, ConfigError if the chunks were not
    built with this layout.
    """
    grid = read_grid()
    built = (grid.tp.size(), grid.pp.size(), grid.cp.size(), grid.ep.size(), grid.etp.size())
    if built != (layout.tp, layout.pp, layout.cp, layout.ep, layout.etp):
        raise ConfigError(f"{layout} is not how the gang was set up: {built}", remedy="a bug: one layout for both")
    shapes = config.tensor_shapes()
    with torch.no_grad(), open_weights(folder, config) as tensors:
        for weight in map_weights(chunks, config, grid):
            group = grid.tp if weight.expert is None else grid.etp
            pieces = weight.pieces(config, shapes, group.rank(), group.size(), grid.ep.rank())
            _fill(weight, list(_read(pieces, tensors)))


def _fill(weight: MappedWeight, parts: Sequence[Tensor]) -> None:
    target = weight.part(weight.parameter)
    source = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
    num_rows = source.shape[0]
    is_padded = num_rows < target.shape[0] and weight.rule.cut is vocabulary
    if source.shape[1:] != target.shape[1:] or not (is_padded or num_rows == target.shape[0]):
        raise TrainError(
            f"{weight.prefix}{weight.rule.names[0]} gives {list(source.shape)} for {weight.rule.parameter} of "
            f"{list(target.shape)}",
            remedy="a bug in backends/megatron/families, or a megatron-core that cuts otherwise",
        )
    target[:num_rows].copy_(source)
    target[num_rows:].zero_()


def _read(pieces: Sequence[Piece], tensors: Mapping[str, NamedArray]) -> Iterator[Tensor]:
    for piece in pieces:
        yield read_piece(tensors[piece.name], piece)


def read_piece(array: NamedArray, piece: Piece) -> Tensor:
    """A copy of a rectangle of a tensor's bytes, as a CPU tensor of the same number type."""
    num_rows, *rest = array.spec.shape
    item_bytes = DTYPE_OF[array.spec.dtype].itemsize
    width = rest[0] if rest else 1
    first, last = piece.columns or (0, width)
    rows = np.frombuffer(array.data, dtype=np.uint8).reshape(num_rows, width * item_bytes)
    chosen = rows[slice(*piece.rows), first * item_bytes : last * item_bytes]
    tensor = from_array(np.array(chosen)).view(DTYPE_OF[array.spec.dtype])
    return tensor if rest else tensor.reshape(-1)
