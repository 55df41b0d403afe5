"""Tags that leave the memory of a real device (the host's) and come back: bytes, addresses, residency, parts, devices."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.memory.strict_driver import StrictDriver, view

from myxa.core.device_memory import OPTIMIZER_PARTS, Tag, TagReport
from myxa.core.errors import MemoryFault
from myxa.memory.arenas import libc
from myxa.memory.arenas.arena import Arena
from myxa.memory.arenas.host_pool import HostPool
from myxa.memory.arenas.host_vmm import HostVmmDriver, device_bytes
from myxa.memory.arenas.tagged_memory import shares
from myxa.memory.arenas.tensors import empty_tensors

MIB = 1 << 20
DEVICE = "host:7"


def make(capacity: int = 256 * MIB, chunk: int = 8 * MIB, driver: HostVmmDriver | None = None) -> Arena:
    made = Arena(driver or StrictDriver(DEVICE, capacity), HostPool(256 * MIB), chunk_bytes=chunk)
    for tag, policy in (
        ("optimizer", "backup"),
        ("grads", "discard"),
        ("params", "rematerialise"),
        ("context", "keep"),
    ):
        made.tag(tag, policy)  # pyright: ignore[reportArgumentType]
    return made


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = make()
    yield made
    made.close()
    assert device_bytes([os.getpid()], DEVICE) == 0


def empty(arena: Arena, tag: Tag, num_bytes: int, value: int = 0) -> torch.Tensor:
    tensor = empty_tensors(arena, tag, [((num_bytes,), torch.uint8)])[0]
    tensor.fill_(value)
    return tensor


def backing(arena: Arena) -> dict[str, str]:
    return {report.tag: report.backing for report in arena.report() if report.num_bytes}


def held(device: str = DEVICE) -> int:
    return device_bytes([os.getpid()], device)


def open_things() -> tuple[int, int, int]:
    """Files, threads, mappings."""
    num_maps = len(Path("/proc/self/maps").read_text().splitlines())
    return len(os.listdir("/proc/self/fd")), threading.active_count(), num_maps


def test_released_memory_is_really_gone_and_comes_back_the_same_at_the_same_place(arena: Arena):
    wanted = torch.randn((4 * MIB,), generator=torch.Generator().manual_seed(20261120))
    tensor = empty_tensors(arena, "optimizer", [((4 * MIB,), torch.float32)])[0]
    tensor.copy_(wanted)
    view = tensor[1000:2000].view(10, 100)
    address = tensor.data_ptr()
    assert held() == 16 * MIB
    for cycle in range(3):
        moved = arena.release(["optimizer"])
        assert held() == 0, "no page of it is in memory"
        assert moved == (16 * MIB if cycle == 0 else 0)
        assert arena.report()[0] == TagReport("optimizer", 16 * MIB, "backup", "host", 16 * MIB)
        assert arena.restore(["optimizer"]) == 16 * MIB
        assert (tensor.data_ptr(), view.data_ptr()) == (address, address + 4000)
        assert torch.equal(tensor, wanted)
    arena.mark_dirty("optimizer")
    assert arena.release(["optimizer"]) == 16 * MIB, "its owner wrote to it"
    arena.free(address)
    assert arena.report()[0].host_bytes == 0, "the host copy went too"


TOUCH = """
import ctypes
import os
from myxa.memory.arenas import libc
from myxa.memory.arenas.arena import Arena
from myxa.memory.arenas.host_pool import HostPool
from myxa.memory.arenas.host_vmm import HostVmmDriver
arena = Arena(HostVmmDriver("host:0", 1 << 24), HostPool(1 << 24))
arena.tag("params", "backup")
for when, touch, signal in (("released", ctypes.string_at, 11), ("freed", libc.zero, 11), ("restored", libc.zero, 0)):
    address = arena.empty("params", 1 << 20)
    libc.zero(address, 1 << 20)
    arena.release(["params"])
    if when == "restored":
        arena.restore(["params"])
    if when == "freed":
        arena.free(address)
    at = address + (1 << 20) - 1
    child = os.fork()
    if not child:
        bytes(touch(at, 1) or b"")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal, when
    if when != "freed":
        arena.free(address)
    arena.restore(["params"])
"""


def test_touching_what_is_away_is_a_segmentation_fault():
    child = subprocess.run([sys.executable, "-c", TOUCH], capture_output=True, timeout=30, check=False)
    assert child.returncode == 0, child.stderr.decode()


def test_nothing_piles_up_over_many_cycles_and_closing_leaves_nothing():
    before = open_things()
    arena = make()
    tags: tuple[Tag, ...] = ("optimizer", "grads", "params")
    for tag in tags:
        empty(arena, tag, 4 * MIB, 1)
    start = open_things()
    for _ in range(10):
        arena.mark_dirty("optimizer")
        arena.release(tags)
        arena.restore(tags)
        arena.mark_dirty("params")
    now = open_things()
    assert now[:2] == start[:2]
    assert abs(now[2] - start[2]) <= 8, "mappings"
    assert held() == 12 * MIB
    arena.release(["optimizer"])
    arena.begin_restore(["optimizer"])
    arena.close()
    arena.close()
    assert (open_things()[:2], held()) == (before[:2], 0)
    with pytest.raises(MemoryFault, match="arena is closed"):
        arena.empty("optimizer", 1)


class Watched(StrictDriver):
    """The real driver, which writes down what it is asked."""

    def __init__(self) -> None:
        super().__init__(DEVICE, 256 * MIB)
        self.calls: list[tuple[str, int]] = []
        self._addresses: dict[int, int] = {}

    def copy_out(self, host_address: int, address: int, num_bytes: int) -> int:
        self.calls.append(("copy", address))
        ticket = super().copy_out(host_address, address, num_bytes)
        self._addresses[ticket] = address
        return ticket

    def wait(self, ticket: int) -> None:
        super().wait(ticket)
        self.calls.append(("waited", self._addresses.get(ticket, 0)))

    def synchronise(self) -> None:
        self.calls.append(("synchronise", 0))

    def unmap(self, address: int, num_bytes: int) -> None:
        self.calls.append(("unmap", address))
        super().unmap(address, num_bytes)


def test_each_chunk_goes_back_while_the_next_one_copies():
    driver = Watched()
    arena = make(driver=driver, chunk=MIB)
    address, cheap = arena.empty("optimizer", 6 * MIB - 5000), arena.empty("grads", 3 * MIB)
    arena.release(["optimizer", "grads"])
    chunks = [address + index * MIB for index in range(6)]
    assert driver.calls[0] == ("synchronise", 0), "whatever writes to it has ended"
    at = {call: index for index, call in enumerate(driver.calls)}
    for this, following in pairwise(chunks):
        assert at["copy", this] < at["waited", this] < at["unmap", this], "gone only when its copy is done"
        assert at["copy", following] < at["unmap", this] < at["waited", following], "one copies while one goes"
    assert at["copy", chunks[1]] < at["unmap", cheap] < at["waited", chunks[0]], "dropped while the first two copy"
    arena.close()


def test_adopted_memory_in_chunks_of_any_size_leaves_and_returns_like_its_own():
    driver = Watched()
    arena = make(driver=driver, chunk=MIB)
    address = driver.reserve(9 * MIB)
    handles = [(driver.create(3 * MIB), 3 * MIB) for _ in range(3)]
    for index, (handle, size) in enumerate(handles):
        driver.map(address + index * size, size, handle)
    arena.adopt("optimizer", address, 9 * MIB - 7, handles)
    view(address, 9 * MIB)[:] = bytes([8]) * (9 * MIB)
    assert arena.release(["optimizer"]) == 9 * MIB
    assert [(what, (at - address) // (3 * MIB)) for what, at in driver.calls[1:]] == [
        ("copy", 0), ("copy", 1), ("waited", 0), ("unmap", 0), ("copy", 2),
        ("waited", 1), ("unmap", 1), ("waited", 2), ("unmap", 2),
    ]  # fmt: skip
    with pytest.raises(MemoryFault, match="'optimizer'.*is host and cannot be given more memory -- restore the tag"):
        arena.adopt("optimizer", 1 << 40, 4096, [(1, 4096)])
    arena.restore(["optimizer"])
    assert bytes(view(address, 9 * MIB)) == bytes([8]) * (9 * MIB)
    arena.free(address)
    assert held() == 0
    arena.close()


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda a: a.release(["optimizer", "weights"]), r"'weights' was not declared \(optimizer, grads, params, cont"),
        (lambda a: a.begin_restore(["optimizer", "weights"]), "'weights' was not declared"),
        (lambda a: a.release(["optimizer", "context"]), "'context' is kept: it never leaves the device"),
        (lambda a: a.tag("optimizer", "discard"), "holds 4,096 bytes under policy backup -- free them"),
        (lambda a: a.free(4096), "no region begins at 0x1000 -- free each region once"),
        (lambda a: a.empty("grads", 1 << 40), "1,099,511,627,776 bytes for tag 'grads': .* are free"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_moves(arena: Arena, act, says: str):
    empty(arena, "optimizer", 100)
    with pytest.raises(MemoryFault, match=says):
        act(arena)
    assert backing(arena) == {"optimizer": "mapped_dirty"}


def test_threads_do_not_meet_in_the_middle(arena: Arena):
    """What torch's allocator does: memory comes and goes from other threads while tags leave and return."""
    errors: list[BaseException] = []
    moments = empty(arena, "optimizer", 4 * MIB, 5)

    def churn(seed: int) -> None:
        dice = random.Random(seed)
        try:
            for _ in range(40):
                address = arena.empty("context", dice.randrange(1, 100_000))
                libc.zero(address, 1)
                arena.free(address)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=churn, args=(seed,)) for seed in range(3)]
    for worker in workers:
        worker.start()
    for _ in range(30):
        arena.release(["optimizer"])
        arena.restore(["optimizer"])
        arena.mark_dirty("optimizer")
    for worker in workers:
        worker.join(30)
    assert not errors
    assert int(moments.sum(dtype=torch.int64)) == 20 * MIB


# -- a tag in parts ------------------------------------------------------------------------------------------------------


def sizes(arena: Arena) -> list[int]:
    return [report.num_bytes // MIB for report in arena.report() if report.num_bytes]


@pytest.fixture
def parted(arena: Arena) -> Arena:
    for part in OPTIMIZER_PARTS:
        arena.tag(part, "backup")
    return arena


def test_one_part_leaves_and_the_others_stay_in_use(parted: Arena):
    tensors = [empty(parted, "optimizer", 4 * MIB, index) for index in range(16)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    parted.divide(OPTIMIZER_PARTS)
    assert sizes(parted) == [8] * 8
    moved = parted.release(["optimizer.3", "optimizer.6"])
    assert (moved, held()) == (16 * MIB, 48 * MIB)
    away = {t for t in range(16) if t % 8 in (3, 6)}  # equal sizes are dealt out in turn
    for index in set(range(16)) - away:
        assert tensors[index].eq(index).all()
        tensors[index].add_(1)
    parted.restore(["optimizer.3", "optimizer.6"])
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    assert [int(tensor[-1]) for tensor in tensors] == [i if i in away else i + 1 for i in range(16)]
    late = empty(parted, "optimizer", 4 * MIB)
    assert sizes(parted) == [12, *[8] * 7], "a region made afterwards belongs to the first"
    for address in (tensors[5].data_ptr(), late.data_ptr()):
        parted.free(address)
    assert sum(sizes(parted)) == 60


def test_small_regions_stay_together_and_what_cannot_be_divided_is_left_as_it_was(parted: Arena):
    for _ in range(3):
        empty(parted, "optimizer", 2 * MIB)
    parted.release(["optimizer"])
    with pytest.raises(MemoryFault, match=r"'optimizer' \(backup\) is host and cannot be a part of 'optimizer'"):
        parted.divide(OPTIMIZER_PARTS)
    parted.restore(["optimizer"])
    with pytest.raises(MemoryFault, match=r"'grads' \(discard\) is mapped_dirty and cannot be a part of 'optimizer'"):
        parted.divide(("optimizer", "grads"))
    parted.divide(OPTIMIZER_PARTS)
    assert sizes(parted) == [2, 2, 2], "not more parts than regions"


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
