"""Allocations by tag, from torch's side of the allocator to the arena's side, over a driver library made of Linux's
memory."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.memory.standin_caching import NoMemory, StandinCaching
from tests.memory.standin_gpu import MIB, StandinGpu

from myxa.core.errors import MemoryFault, OutOfDeviceMemory
from myxa.memory.arenas.cuda_memory import open_cuda


class Bench:
    """A device, torch's side, our side."""

    def __init__(self, gpu: StandinGpu, cache_dir: Path) -> None:
        self.gpu = gpu
        self.caching = StandinCaching()
        self.memory = open_cuda(
            0, 64 * MIB, chunk_bytes=4 * MIB, num_threads=2, library=gpu.path, cache_dir=cache_dir,
            caching=self.caching,
        )  # fmt: skip

    def tensor(self, tag: Any, policy: Any, num_bytes: int, value: int) -> int:
        with self.memory.region(tag, policy):
            address = self.caching.empty(num_bytes)
            ctypes.memset(address, value, num_bytes)
        return address

    def pool(self, tag: Any) -> Any:
        return self.memory._pools[tag].pool  # type: ignore[attr-defined]

    def backing(self, tag: Any) -> str:
        return next(report.backing for report in self.memory.report() if report.tag == tag)


@pytest.fixture
def bench(gpu: StandinGpu, cache_dir: Path):
    bench = Bench(gpu, cache_dir)
    yield bench
    gpu.fail_nothing()
    bench.memory.close()
    assert bench.memory.table.close() == 0


def test_tensors_of_two_tags_leave_and_return_each_by_its_policy(bench: Bench):
    params = bench.tensor("params", "backup", 5 * MIB, 1)
    grads = bench.tensor("grads", "discard", 3 * MIB, 2)
    assert [(r.tag, r.num_bytes, r.policy) for r in bench.memory.report()] == [
        ("params", 6 * MIB, "backup"), ("grads", 4 * MIB, "discard")]  # fmt: skip
    moved = bench.memory.release(("params", "grads"))
    assert moved == 6 * MIB
    assert bench.gpu.held() == 0
    assert bench.caching.num_trims == 1
    bench.memory.begin_restore(("params", "grads")).wait_all()
    assert ctypes.string_at(params, 5 * MIB) == b"\x01" * (5 * MIB)
    assert ctypes.string_at(grads, 3 * MIB) == bytes(3 * MIB)


def test_a_region_inside_a_region_is_refused_on_one_thread_and_fine_on_two(bench: Bench):
    bench.tensor("params", "backup", MIB, 1)
    addresses: list[int] = []
    with bench.memory.region("params", "backup"):
        with (
            pytest.raises(MemoryFault, match="region 'grads' within region 'params'"),
            bench.memory.region("grads", "discard"),
        ):
            pass
        other = threading.Thread(target=lambda: addresses.append(bench.tensor("grads", "discard", 4 * MIB, 3)))
        other.start()
        other.join(20)
    assert len(addresses) == 1
    assert {r.tag: r.num_bytes for r in bench.memory.report()} == {"params": 2 * MIB, "grads": 4 * MIB}


def test_nothing_is_allocated_in_a_tag_that_is_away(bench: Bench):
    bench.tensor("params", "backup", MIB, 1)
    bench.memory.release(("params",))
    with pytest.raises(MemoryFault, match=r"region of tag 'params', which is host.*restore the tag first"):
        bench.tensor("params", "backup", MIB, 1)
    bench.memory.begin_restore(("params",)).wait_all()
    bench.tensor("params", "backup", MIB, 1)


def test_a_tag_that_its_owner_rebuilds_may_be_allocated_in_before_it_is_marked(bench: Bench):
    bench.tensor("params", "rematerialise", MIB, 1)
    bench.memory.release(("params",))
    bench.memory.begin_restore(("params",)).wait_all()
    assert bench.backing("params") == "copy_in"
    bench.tensor("params", "rematerialise", 4 * MIB, 1)
    bench.memory.arena.mark_dirty("params")


def test_a_region_that_fails_is_told_in_the_drivers_words_and_its_tag_goes_on(bench: Bench):
    bench.tensor("params", "backup", MIB, 1)
    with pytest.raises(OutOfDeviceMemory, match=r"tag 'params': cuMemGetInfo of 536,870,912 bytes answered 2"):
        bench.tensor("params", "backup", 512 * MIB, 1)
    with pytest.raises(NoMemory), bench.memory.region("params", "backup"):
        raise NoMemory("of something else")
    with pytest.raises(ZeroDivisionError), bench.memory.region("params", "backup"):
        bench.caching.empty(8 * MIB)
        raise ZeroDivisionError
    assert bench.memory.report()[0].num_bytes == 10 * MIB  # what was allocated before is the tag's


def test_segments_that_torch_frees_while_their_tag_is_away_are_given_back_with_their_copy(bench: Bench):
    first = bench.tensor("optimizer", "backup", 4 * MIB, 1)
    second = bench.tensor("optimizer", "backup", 8 * MIB, 2)
    bench.memory.release(("optimizer",))
    bench.caching.end(first, bench.pool("optimizer"))
    bench.memory.shrink(("optimizer",))  # the pool ends, the living segment stays
    (report,) = bench.memory.report()
    assert (report.num_bytes, report.host_bytes, report.backing) == (8 * MIB, 8 * MIB, "host")
    bench.memory.begin_restore(("optimizer",)).wait_all()
    assert ctypes.string_at(second, 8 * MIB) == b"\x02" * (8 * MIB)
    third = bench.tensor("optimizer", "backup", 2 * MIB, 3)  # a new pool
    assert sum(segment.num_bytes for segment in bench.memory.segments()) == 10 * MIB
    assert third not in (first, second)


def test_a_block_that_another_thread_frees_is_no_trouble(bench: Bench):
    address = bench.tensor("grads", "discard", 4 * MIB, 1)
    bench.caching.end(address, bench.pool("grads"))
    pool = bench.pool("grads")
    other = threading.Thread(target=lambda: pool.free(address, pool.segments.pop(address)[0], 0, None))
    other.start()
    other.join(20)
    assert bench.gpu.held() == 4 * MIB  # the arena's: it may be moving it
    bench.memory.release(("grads",))
    assert bench.memory.report()[0].num_bytes == 0
    assert bench.gpu.held() == 0


def test_closing_ends_what_lives(bench: Bench):
    dead = bench.tensor("params", "backup", 2 * MIB, 1)
    bench.tensor("grads", "discard", 4 * MIB, 1)
    bench.caching.end(dead, bench.pool("params"))
    pool = bench.pool("grads")
    bench.memory.close()
    bench.memory.close()
    assert bench.gpu.live().keys() <= {"contexts"}  # the table's own, which its end gives back
    for address, (size, _) in pool.segments.items():
        pool.free(address, size, 0, None)  # torch, later: nobody minds
    assert bench.memory.table.last_failure().num_unknown == 1


@pytest.mark.parametrize("name", ["cuMemHostRegister_v2", "cuDevicePrimaryCtxRetain", "cuStreamCreate"])
def test_what_cannot_be_put_together_leaves_nothing(gpu: StandinGpu, cache_dir: Path, name: str):
    gpu.fail(name, 2)
    with pytest.raises(MemoryFault, match=name):
        open_cuda(0, MIB, library=gpu.path, cache_dir=cache_dir, caching=StandinCaching())
    assert gpu.live() == {}


def test_torch_without_a_gpu_is_refused_before_anything_is_pinned(gpu: StandinGpu, cache_dir: Path):
    assert not torch.cuda.is_available()
    with pytest.raises(MemoryFault, match="torch sees no GPU"):
        open_cuda(0, MIB, library=gpu.path, cache_dir=cache_dir)
    assert gpu.live() == {}
    assert "cuMemHostRegister_v2" not in [name for name, _, _ in gpu.calls()]
