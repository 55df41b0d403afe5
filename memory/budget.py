"""What an engine will take of a host's memory, decided before a byte is allocated.

Arithmetic only: no torch, no IO, the available bytes are an argument. Weights are counted twice, because a new version
is laid beside the one that is being served; the key-value cache is counted at its fullest, although the embedded
engine's pages are only backed once they are used.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from ..core.errors import EngineError

ITEM_BYTES = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})
WEIGHT_COPIES = 2
"""Served and prepared."""
OUTPUT_BYTES = 12
"""Per token position of a slot: id, log-prob and version."""
DEFAULT_SHARE = 0.6
"""Part of the available memory an engine may plan with; the rest is for activations, other processes, surprises."""


class DecoderShape(Protocol):
    """Sizes of a dense decoder; `ModelConfig` has them."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def context_length(self) -> int: ...
    @property
    def num_parameters(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBudget:
    """What was planned: `weight_bytes + kv_bytes` fit into the share of the host's memory."""

    num_slots: int
    """Sequences decoded together."""
    context_length: int
    """Longest prompt plus answer in tokens."""
    weight_bytes: int
    kv_bytes: int

    @property
    def total_bytes(self) -> int:
        """Everything counted."""
        return self.weight_bytes + self.kv_bytes


def weight_bytes(shape: DecoderShape, dtype: str) -> int:
    """Bytes of all weight copies an engine holds."""
    return WEIGHT_COPIES * shape.num_parameters * ITEM_BYTES[dtype]


def kv_bytes(shape: DecoderShape, dtype: str, *, num_slots: int, context_length: int) -> int:
    """Bytes of keys, values and outputs of `num_slots` sequences at full length."""
    per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * ITEM_BYTES[dtype] + OUTPUT_BYTES
    return num_slots * context_length * per_token


def plan_engine(
    shape: DecoderShape,
    *,
    dtype: str,
    max_running: int,
    context_length: int,
    available_bytes: int,
    share: float = DEFAULT_SHARE,
) -> EngineBudget:
    """Choose the number of slots: `max_running`, or fewer if memory demands it. `context_length` 0 means the model's
    own. Raises EngineError with the numbers when the settings are impossible or not even one sequence fits."""
    if dtype not in ITEM_BYTES:
        raise EngineError(f"engine: unknown number type {dtype!r}", remedy=f"use one of {', '.join(ITEM_BYTES)}")
    if max_running < 1:
        raise EngineError(f"engine: max_running is {max_running}", remedy="set engine.max_running to at least 1")
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
