"""The tensors of the embedded engine: types of its per-row arrays, and the memory that weights and cache lie in.

`plain_zeros` allocates torch's own memory, `lent_zeros` that of an arena, which a memory manager may take back between
steps. Both of its tags are dropped when they leave: the trainer sends the weights again, and the cache of parked
requests is computed again from their tokens. Before a byte is allocated `plan_engine` counts weights twice, because a
new version is laid beside the one that is being served, and the cache at its fullest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ....core.device_memory import Tag
from ....core.errors import EngineError
from ....memory.arenas.arena import Arena
from ....memory.arenas.tensors import empty_tensors
from ...models.model_config import ITEM_BYTES, ModelConfig

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


# -- what an engine will take, decided before a byte is allocated ------------------------------------------------------

WEIGHT_COPIES = 2
"""Served and prepared."""
OUTPUT_BYTES = 12
"""Per token position of a slot: id, log-prob and version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBudget:
    """What was planned: `weight_bytes + kv_bytes` fit into the share of the host's memory."""

    num_slots: int
    """Sequences decoded together."""
    context_length: int
    """Longest prompt plus answer in tokens."""
    weight_bytes: int
    kv_bytes: int


def weight_bytes(shape: ModelConfig, dtype: str) -> int:
    """Bytes of all weight copies an engine holds."""
    return WEIGHT_COPIES * shape.num_parameters * ITEM_BYTES[dtype]


def kv_bytes(shape: ModelConfig, dtype: str, *, num_slots: int, context_length: int) -> int:
    """Bytes of keys, values and outputs of `num_slots` sequences at full length."""
    per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * ITEM_BYTES[dtype] + OUTPUT_BYTES
    return num_slots * context_length * per_token


def plan_engine(
    shape: ModelConfig,
    *,
    dtype: str,
    max_running: int,
    context_length: int,
    available_bytes: int,
    share: float,
) -> EngineBudget:
    """Choose the number of slots: `max_running`, or fewer if memory demands it. `context_length` 0 means the model's
    own. Raises EngineError with the numbers when the settings are impossible or not even one sequence fits."""
    length = context_length or shape.context_length
    if not 2 <= length <= shape.context_length:
        raise EngineError(
            f"engine: context_length {length} is outside 2..{shape.context_length}, which the model was made for",
            remedy="lower engine.context_length, or set it to 0 for the model's own",
        )
    weights = weight_bytes(shape, dtype)
    slot = kv_bytes(shape, dtype, num_slots=1, context_length=length)
    room = int(available_bytes * share)
    num_slots = min(max_running, (room - weights) // slot)
    if num_slots < 1:
        raise EngineError(
            f"engine: {weights:,} bytes of weights (two versions, {dtype}) and {slot:,} bytes per sequence of {length} "
            f"tokens do not fit into {room:,} bytes ({share:.0%} of the {available_bytes:,} available on this host)",
            remedy="lower engine.context_length, use dtype bfloat16, or a host with more memory",
        )
    return EngineBudget(num_slots=num_slots, context_length=length, weight_bytes=weights, kv_bytes=num_slots * slot)
