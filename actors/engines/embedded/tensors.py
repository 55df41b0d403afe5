"""The tensors of the embedded engine: types of its per-row arrays, and the memory that weights and cache lie in.

`plain_zeros` allocates torch's own memory. `LentMemory` allocates memory of arenas (one per device), which a memory
manager may take back between steps. Both of its tags are dropped when they leave: the trainer sends the weights again,
and the cache of parked requests is computed again from their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ....core.device_memory import Tag, TagReport
from ....memory.arenas.arena import Arena, SpreadArenas
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


class LentMemory(SpreadArenas):
    """One engine's. Methods block."""

    def __init__(self, *arenas: Arena) -> None:
        super().__init__(arenas)
        self._lent_bytes = [0] * len(arenas)
        for arena in arenas:
            for tag in ("weights", "kv_cache"):
                arena.tag(tag, "discard")

    @property
    def device_bytes(self) -> int:
        return sum(arena.driver.capacity_bytes() for arena in self.arenas)

    def allocate(self, tag: Tag) -> Allocate:

        def make(specs: Sequence[Spec]) -> list[Tensor]:
            tensors: dict[int, Tensor] = {}
            for arena, numbers in zip(self.arenas, self._dealt(specs), strict=True):
                made = empty_tensors(arena, tag, [specs[number] for number in numbers], torch.device("cpu"))
                tensors.update(zip(numbers, made, strict=True))
            for tensor in tensors.values():
                tensor.zero_()
            return [tensors[number] for number in range(len(specs))]

        return make

    def _dealt(self, specs: Sequence[Spec]) -> list[list[int]]:
        """Which tensors each device gets, by number: each goes to the device that has least so far."""
        dealt: list[list[int]] = [[] for _ in self._lent_bytes]
        for number, (shape, dtype) in enumerate(specs):
            least = min(range(len(dealt)), key=lambda device: self._lent_bytes[device])
            dealt[least].append(number)
            self._lent_bytes[least] += prod(shape) * dtype.itemsize
        return dealt


def expected(weight_bytes: int, kv_bytes: int) -> tuple[TagReport, ...]:
    """What an engine will hold once it is started: an upper bound for each device, since the cache is one tensor and
    the spread of the weights is not known yet."""
    return (
        TagReport(tag="weights", num_bytes=weight_bytes + PADDING_BYTES, policy="discard", backing="discarded"),
        TagReport(tag="kv_cache", num_bytes=kv_bytes + PADDING_BYTES, policy="discard", backing="discarded"),
    )
