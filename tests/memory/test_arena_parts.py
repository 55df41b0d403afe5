"""A tag dealt out to parts: each leaves and comes back on its own, and no address or bit changes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from myxa.core.clock import SystemClock
from myxa.core.device_memory import OPTIMIZER_PARTS
from myxa.core.errors import MemoryFault
from myxa.memory.arenas.arena import Arena
from myxa.memory.arenas.host_pool import HostPool
from myxa.memory.arenas.host_vmm import HostVmmDriver, device_bytes
from myxa.memory.arenas.tagged_memory import shares
from myxa.memory.arenas.tensors import empty_tensor

MIB = 1 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(HostVmmDriver("host:7", 256 * MIB), HostPool(256 * MIB), SystemClock(), chunk_bytes=8 * MIB)
    for part in OPTIMIZER_PARTS:
        made.tag(part, "backup")
    yield made
    made.close()


def filled(arena: Arena, num: int, mib: int = 4) -> list[torch.Tensor]:
    tensors = [empty_tensor(arena, "optimizer", (mib * MIB // 4,), torch.float32) for _ in range(num)]
    for index, tensor in enumerate(tensors):
        tensor.fill_(index)
    return tensors


def sizes(arena: Arena) -> list[int]:
    return [report.num_bytes // MIB for report in arena.report() if report.num_bytes]


def test_one_part_leaves_and_the_others_stay_in_use(arena: Arena):
    tensors = filled(arena, 16)
    addresses = [tensor.data_ptr() for tensor in tensors]
    arena.divide(OPTIMIZER_PARTS)
    assert sizes(arena) == [8] * 8
    moved = arena.release(["optimizer.3", "optimizer.6"])
    assert moved.copied_bytes == 16 * MIB
    assert device_bytes([os.getpid()], "host:7") == 48 * MIB
    away = {t for t in range(16) if t % 8 in (3, 6)}  # equal sizes are dealt out in turn
    for index in set(range(16)) - away:
        assert tensors[index].eq(index).all()
        tensors[index].add_(1)
    arena.restore(["optimizer.3", "optimizer.6"])
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    assert [int(tensor[-1]) for tensor in tensors] == [i if i in away else i + 1 for i in range(16)]


def test_a_region_made_afterwards_belongs_to_the_first_and_any_can_be_freed(arena: Arena):
    tensors = filled(arena, 8)
    arena.divide(OPTIMIZER_PARTS)
    late = empty_tensor(arena, "optimizer", (MIB,), torch.float32)
    assert sizes(arena) == [8, *[4] * 7]
    arena.free(tensors[5].data_ptr())
    arena.free(late.data_ptr())
    assert sizes(arena) == [4] * 7


def test_small_regions_stay_together(arena: Arena):
    filled(arena, 3, mib=2)
    arena.free(filled(arena, 1, mib=2)[0].data_ptr())
    arena.divide(OPTIMIZER_PARTS)
    assert sizes(arena) == [2, 2, 2], "not more parts than regions"


def test_what_cannot_be_divided_is_left_as_it_was(arena: Arena):
    filled(arena, 4)
    arena.release(["optimizer"])
    with pytest.raises(MemoryFault, match=r"'optimizer' \(backup\) is host and cannot be a part of 'optimizer'"):
        arena.divide(OPTIMIZER_PARTS)
    arena.restore(["optimizer"])
    arena.tag("grads", "discard")
    with pytest.raises(MemoryFault, match=r"'grads' \(discard\) is mapped_dirty and cannot be a part of 'optimizer'"):
        arena.divide(("optimizer", "grads"))
    arena.divide(OPTIMIZER_PARTS)
    with pytest.raises(MemoryFault, match="hold their own memory -- divide a tag once"):
        arena.divide(OPTIMIZER_PARTS)
    assert sizes(arena) == [4] * 4


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 8), st.integers(0, 300))
def test_shares_are_a_partition_and_about_equal(sizes: list[int], num_parts: int, least: int):
    parts = shares(sizes, num_parts, least)
    assert sorted(index for part in parts for index in part) == list(range(len(sizes)))
    assert len(parts) <= num_parts
    assert all(parts)
    filled = [sum(sizes[i] for i in part) for part in parts]
    if len(parts) > 1:
        assert sum(sizes) // len(parts) >= least
        assert max(filled) - min(filled) <= max(sizes)
