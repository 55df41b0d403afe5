"""The embedded engine's weights and cache on memory that a memory manager may take back between steps.

Knows arenas (one a device) and the sizes that were planned; must not know requests or versions. Both tags are dropped
when they leave: weights are given anew by the trainer, the cache of parked requests is computed anew from their tokens.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from math import prod

import torch
from torch import Tensor

from ....core.device_memory import MovedBytes, Tag, TagReport
from ....memory.arenas.arena import Arena, SpreadArenas
from ....memory.arenas.tensors import empty_tensors
from .allocation import Allocate, Spec

PADDING_BYTES = 64 << 10
"""Of a tag, before it is known: tensors begin at multiples of 512 bytes, and a region ends with a page."""


class LentMemory:
    """One engine's. Methods block."""

    def __init__(self, *arenas: Arena) -> None:
        """Raises MemoryFault without any arena."""
        self._store = SpreadArenas(arenas)
        self._lent_bytes = [0] * len(arenas)
        for arena in arenas:
            for tag in ("weights", "kv_cache"):
                arena.tag(tag, "discard")

    @property
    def num_devices(self) -> int:
        """Among which tensors are dealt out."""
        return len(self._store.arenas)

    @property
    def device_bytes(self) -> int:
        """Of all devices."""
        return sum(arena.driver.capacity_bytes() for arena in self._store.arenas)

    @property
    def pids(self) -> tuple[int, ...]:
        """The engine lives in this process."""
        return (os.getpid(),)

    def allocate(self, tag: Tag) -> Allocate:
        """How tensors of that tag are made."""

        def make(specs: Sequence[Spec]) -> list[Tensor]:
            tensors: dict[int, Tensor] = {}
            for arena, numbers in zip(self._store.arenas, self._dealt(specs), strict=True):
                made = empty_tensors(arena, tag, [specs[number] for number in numbers], torch.device("cpu"))
                tensors.update(zip(numbers, made, strict=True))
            for tensor in tensors.values():
                tensor.zero_()
            return [tensors[number] for number in range(len(specs))]

        return make

    def _dealt(self, specs: Sequence[Spec]) -> list[list[int]]:
        """Which tensors each device gets, by number: one after another to whichever has least."""
        dealt: list[list[int]] = [[] for _ in self._lent_bytes]
        for number, (shape, dtype) in enumerate(specs):
            least = min(range(len(dealt)), key=lambda device: self._lent_bytes[device])
            dealt[least].append(number)
            self._lent_bytes[least] += prod(shape) * dtype.itemsize
        return dealt

    def tags(self) -> tuple[TagReport, ...]:
        """As they are now."""
        return self._store.report()

    def release(self, tags: Collection[Tag]) -> MovedBytes:
        """Have them leave."""
        return self._store.release(tags)

    def restore(self, tags: Collection[Tag]) -> MovedBytes:
        """Have them back, zeroed."""
        return self._store.restore(tags)

    def close(self) -> None:
        """Give everything back; no tensor on it may be used again."""
        self._store.close()


def expected(weight_bytes: int, kv_bytes: int) -> tuple[TagReport, ...]:
    """What an engine that was not started yet is going to hold, on each of its devices at worst: the cache is one
    tensor, and nothing can be said of how weights are going to be dealt out."""
    return (
        TagReport(tag="weights", num_bytes=weight_bytes + PADDING_BYTES, policy="discard", backing="discarded"),
        TagReport(tag="kv_cache", num_bytes=kv_bytes + PADDING_BYTES, policy="discard", backing="discarded"),
    )
