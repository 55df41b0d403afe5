"""The embedded engine's weights and cache on memory that a memory manager may take back between steps.

Knows an arena and the sizes that were planned; must not know requests or versions. Both tags are dropped when they
leave: weights are given anew by the trainer, the cache of parked requests is computed anew from their tokens.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from ....core.assets import MovedBytes
from ....core.device_memory import Tag, TagReport
from ....memory.arenas.arena import Arena
from ....memory.arenas.tensors import empty_tensors
from .allocation import Allocate, Spec


class LentMemory:
    """One engine's. Methods block."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        for tag in ("weights", "kv_cache"):
            arena.tag(tag, "discard")

    @property
    def device_bytes(self) -> int:
        """Of the whole device."""
        return self._arena.driver.capacity_bytes()

    @property
    def pids(self) -> tuple[int, ...]:
        """The engine lives in this process."""
        return (os.getpid(),)

    def allocate(self, tag: Tag) -> Allocate:
        """How tensors of that tag are made."""

        def make(specs: Sequence[Spec]) -> list[Tensor]:
            tensors = empty_tensors(self._arena, tag, specs, torch.device("cpu"))
            for tensor in tensors:
                tensor.zero_()
            return tensors

        return make

    def tags(self) -> tuple[TagReport, ...]:
        """As they are now."""
        return self._arena.report()

    def release(self, tags: Collection[Tag]) -> MovedBytes:
        """Have them leave."""
        return self._arena.release(tags)

    def restore(self, tags: Collection[Tag]) -> MovedBytes:
        """Have them back, zeroed."""
        return self._arena.restore(tags)

    def close(self) -> None:
        """Give everything back; no tensor on it may be used again."""
        self._arena.close()


def expected(weight_bytes: int, kv_bytes: int) -> tuple[TagReport, ...]:
    """What an engine that was not started yet is going to hold."""
    return (
        TagReport(tag="weights", num_bytes=weight_bytes, policy="discard", backing="discarded"),
        TagReport(tag="kv_cache", num_bytes=kv_bytes, policy="discard", backing="discarded"),
    )
