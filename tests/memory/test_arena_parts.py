"""The parts an arena on the host is made of, each by itself: driver, pool, tensors, and what they refuse."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.memory.strict_driver import view

from myxa.core.errors import MemoryFault, OutOfDeviceMemory
from myxa.memory.arenas import libc
from myxa.memory.arenas.arena import Arena
from myxa.memory.arenas.host_pool import HostPool
from myxa.memory.arenas.host_vmm import HostVmmDriver
from myxa.memory.arenas.tensors import empty_tensors, tensor_at

PAGE = libc.PAGE_BYTES
MIB = 1 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(HostVmmDriver("host:2", 64 * MIB), HostPool(64 * MIB))
    made.tag("params", "backup")
    yield made
    made.close()


def test_the_driver_says_what_does_not_fit():
    driver = HostVmmDriver("host:2", 16 * PAGE)
    handle = driver.create(2 * PAGE)
    with pytest.raises(OutOfDeviceMemory, match="61,440 bytes were asked for, 57,344 of 65,536 are free"):
        driver.create(15 * PAGE)
    with pytest.raises(MemoryFault, match="mmap of 9,223,372,036,854,771,712 bytes at 0x0: Cannot alloc"):
        driver.reserve((1 << 63) - PAGE)
    driver.release(handle, 2 * PAGE)
    assert driver.free_bytes() == 16 * PAGE
    driver.close()


def test_a_file_limit_is_a_clear_error_and_not_the_end():
    driver = HostVmmDriver("host:7", 64 * MIB)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(MemoryFault, match="a file of 2,097,152 bytes: .* -- see ulimit -f"):
            driver.create(2 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    driver.release(driver.create(2 * MIB), 2 * MIB)
    with pytest.raises(OutOfDeviceMemory):
        driver.create(65 * MIB)
    driver.close()


def test_the_limit_is_hard_and_told():
    pool = HostPool(4 * PAGE)
    first, second, third = pool.take(PAGE), pool.take(2 * PAGE), pool.take(1)
    pool.give(first)
    pool.give(third)
    with pytest.raises(MemoryFault, match="host pool: 8,192 bytes do not fit: 8,192 of 16,384 are taken, the largest free "
                       "piece has 4,096 -- raise the limit"):  # fmt: skip
        pool.take(2 * PAGE)
    pool.give(second)
    assert pool.take(4 * PAGE) == first, "neighbours that are free are one piece again"
    pool.close()
    pool.close()
    with pytest.raises(MemoryFault, match="4,096 bytes do not fit: 0 of 0 are taken"):
        HostPool(0).take(1)


def rss_anon() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def test_given_pages_go_back_to_the_system_unless_they_are_pinned():
    before = rss_anon()
    pool = HostPool(64 * MIB)
    address = pool.take(64 * MIB)
    libc.zero(address, 64 * MIB)
    assert rss_anon() - before > 60 * MIB
    pool.give(address)
    assert rss_anon() - before < 8 * MIB
    pool.close()
    calls: list[tuple] = []

    def pin(at: int, num_bytes: int) -> Callable[[], None]:
        calls.append(("pin", num_bytes))
        return lambda: calls.append(("unpin", num_bytes))

    pool = HostPool(8 * PAGE, pin)
    address = pool.take(PAGE)
    view(address, 3)[:] = b"abc"
    pool.give(address)
    assert bytes(view(pool.take(PAGE), 3)) == b"abc", "a pinned page stays where it is"
    pool.close()
    pool.close()
    assert calls == [("pin", 8 * PAGE), ("unpin", 8 * PAGE)]

    def refuse(at: int, num_bytes: int) -> Callable[[], None]:
        raise MemoryFault(f"cannot pin {num_bytes} bytes")

    num_maps = len(Path("/proc/self/maps").read_text().splitlines())
    for _ in range(20):
        with pytest.raises(MemoryFault, match="cannot pin 65536 bytes"):
            HostPool(16 * PAGE, refuse)
    assert len(Path("/proc/self/maps").read_text().splitlines()) <= num_maps + 2, "a pin that fails leaves nothing"


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64],
)
def test_a_tensor_is_the_memory_itself(arena: Arena, dtype: torch.dtype):
    address = arena.empty("params", 600 * 16)
    tensor = tensor_at(address, (2, 3, 100), dtype)
    assert (tensor.shape, tensor.dtype, tensor.data_ptr()) == ((2, 3, 100), dtype, address)
    assert tensor.is_contiguous()
    assert not tensor.requires_grad
    view(address, 600 * 16)[:] = bytes([1]) * (600 * 16)
    assert bytes(tensor.flatten().view(torch.uint8)[:4].tolist()) == b"\x01\x01\x01\x01"[: 4 * dtype.itemsize]
    same = tensor_at(address, (600,), dtype)
    tensor.zero_()
    assert not same.view(torch.uint8).any()


def test_tensors_side_by_side_share_a_region(arena: Arena):
    tensors = empty_tensors(
        arena, "params", [((3,), torch.float32), ((0, 7), torch.float32), ((), torch.float64), ((5, 5), torch.bfloat16)]
    )
    base = tensors[0].data_ptr()
    assert [tensor.data_ptr() - base for tensor in tensors if tensor.numel()] == [0, 512, 1024]
    assert tensors[1].shape == (0, 7)
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert tensors[0].tolist() == [0, 0, 0]
    assert tensors[2].item() == 2
    assert arena.report()[0].num_bytes == PAGE
    arena.free(base)
    assert empty_tensors(arena, "params", []) == []
