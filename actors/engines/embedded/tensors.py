"""The tensors of the embedded engine: types of its per-row arrays, and the memory that weights and cache lie in.

`plain_zeros` allocates torch's own memory, `lent_zeros` that of an arena, which a memory manager may take back between
steps. Both of its tags are dropped when they leave: the trainer sends the weights again, and the cache of parked
requests is computed again from their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ....core.device_memory import Tag, TagReport
from ....memory.arenas.arena import Arena
from ....memory.arenas.tensors import empty_tensors

Index = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
F64 = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Records = npt.NDArray[Any]
"""With named fields."""


def as_tensor(array: npt.NDArray[Any]) -> Tensor:
    """The array as a tensor over the same memory."""
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType] -- torch's stub leaves it open


Spec = tuple[Sequence[int], torch.dtype]
Allocate = Callable[[Sequence[Spec]], list[Tensor]]
"""Tensors of zeros, one for each (shape, number type)."""


def plain_zeros(specs: Sequence[Spec]) -> list[Tensor]:
    return [torch.zeros(tuple(shape), dtype=dtype) for shape, dtype in specs]


PADDING_BYTES = 64 << 10
"""Of a tag, before it is known: tensors begin at multiples of 512 bytes, and a region ends with a page."""


def lent_zeros(arena: Arena, tag: Tag) -> Allocate:
    """Memory of that tag, dropped when it leaves."""
    arena.tag(tag, "discard")

    def make(specs: Sequence[Spec]) -> list[Tensor]:
        tensors = empty_tensors(arena, tag, specs)
        for tensor in tensors:
            tensor.zero_()
        return tensors

    return make


def expected(weight_bytes: int, kv_bytes: int) -> tuple[TagReport, ...]:
    """What an engine will hold once it is started: an upper bound."""
    return (
        TagReport(tag="weights", num_bytes=weight_bytes + PADDING_BYTES, policy="discard", backing="discarded"),
        TagReport(tag="kv_cache", num_bytes=kv_bytes + PADDING_BYTES, policy="discard", backing="discarded"),
    )
