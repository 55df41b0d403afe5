"""Keys and values of all running sequences: one slot per sequence, rows 0..n-1 always dense.

When a sequence ends, the last row moves into its place, so that attention reads a view of the first n slots: no page
table, no gather. That costs one copy of a row per finished sequence and memory for the longest context per slot;
pages begin to pay past contexts of about a thousand tokens, which is not what a CPU engine is for. Library considered:
transformers' paged cache (continuous batching), measured 2-5 times slower than this on a CPU.
"""

from __future__ import annotations

import math
import mmap

import numpy as np
import torch
from torch import Tensor

from ...models.model_config import ModelConfig
from .allocation import Allocate
from .arrays import Index, as_tensor


class SlotCache:
    """[layers, 2, slots * kv heads, context, head_dim]; index 1 is 0 for keys and 1 for values."""

    def __init__(
        self,
        config: ModelConfig,
        num_slots: int,
        context_length: int,
        dtype: torch.dtype,
        allocate: Allocate | None = None,
    ) -> None:
        """`allocate` None: of the system, which backs pages when they are first written."""
        self._num_heads = config.num_kv_heads
        self.context_length = context_length
        shape = (config.num_layers, 2, num_slots * config.num_kv_heads, context_length, config.head_dim)
        self._data = _lazy_zeros(shape, dtype) if allocate is None else allocate([(shape, dtype)])[0]
        self._flat = self._data.view(config.num_layers, 2, -1, config.head_dim)
        self._head_offsets = np.arange(config.num_kv_heads) * context_length

    def places(self, rows: Index, positions: Index) -> Tensor:
        """Where to write tokens at (rows, positions): int64 [N * kv heads], for `write`."""
        base = rows * (self._num_heads * self.context_length) + positions
        return as_tensor((base[:, None] + self._head_offsets).reshape(-1))

    def write(self, layer: int, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values, [N, kv heads, head_dim] each."""
        flat = self._flat[layer]
        flat[0].index_copy_(0, places, keys.reshape(-1, keys.shape[-1]))
        flat[1].index_copy_(0, places, values.reshape(-1, values.shape[-1]))

    def read(self, layer: int, num_rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first rows as views, [num_rows * kv heads, length, head_dim] each."""
        both = self._data[layer, :, : num_rows * self._num_heads, :length]
        return both[0], both[1]

    def read_rows(self, layer: int, rows: Index, length: int) -> tuple[Tensor, Tensor]:
        """The same of any rows [n], which may repeat: views where they follow one another, copies otherwise."""
        heads, first = self._num_heads, int(rows[0])
        if np.array_equal(rows, np.arange(first, first + len(rows))):
            both = self._data[layer, :, first * heads : (first + len(rows)) * heads, :length]
            return both[0], both[1]
        copied = torch.empty(2, len(rows), heads, length, self._data.shape[-1], dtype=self._data.dtype)
        starts = np.flatnonzero(np.diff(rows, prepend=-1)).tolist()
        for start, end in zip(starts, [*starts[1:], len(rows)], strict=True):  # tokens of one prompt side by side
            row = int(rows[start])
            copied[:, start:end] = self._data[layer, :, row * heads : (row + 1) * heads, :length].unsqueeze(1)
        both = copied.flatten(1, 2)
        return both[0], both[1]

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a row to another, in all layers."""
        heads = self._num_heads
        first, other = target * heads, source * heads
        self._data[:, :, first : first + heads, :length] = self._data[:, :, other : other + heads, :length]

    def clear_row(self, row: int) -> None:
        """Zero a row: masked places are multiplied by zero probability, which does not silence NaN."""
        self._data[:, :, row * self._num_heads : (row + 1) * self._num_heads] = 0


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeroed pages of the system, which are backed when first written: memory grows with use. Numpy's own zeros would
    ask for huge pages, of which the first few tokens of each sequence touch all."""
    kind = np.dtype(np.float32 if dtype == torch.float32 else np.uint16)
    nbytes = math.prod(shape) * kind.itemsize
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"Unable to allocate {nbytes / 2**30:.3g} GiB for keys and values ({error})") from error
    words = np.frombuffer(pages, dtype=kind).reshape(shape)
    return as_tensor(words) if dtype == torch.float32 else as_tensor(words).view(dtype)
