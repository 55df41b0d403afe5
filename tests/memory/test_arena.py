"""Tags that leave the memory of a real device (the host's) and come back: bytes, addresses, residency, order."""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from myxa.core.clock import SystemClock
from myxa.core.device_memory import TagReport
from myxa.core.errors import MemoryFault, OutOfDeviceMemory
from myxa.memory.arenas import libc
from myxa.memory.arenas.arena import Arena
from myxa.memory.arenas.host_pool import HostPool
from myxa.memory.arenas.host_vmm import HostDevice, HostVmmDriver, device_bytes, rss_anon, rss_shmem
from myxa.memory.arenas.tensors import empty_tensor, empty_tensors

MIB = 1 << 20
SEED = 20261120


def make(capacity: int = 256 * MIB, pool: int = 256 * MIB, chunk: int = 8 * MIB, **options) -> Arena:
    driver = options.pop("driver", None) or HostVmmDriver("host:7", capacity)
    arena = Arena(driver, HostPool(pool), SystemClock(), chunk_bytes=chunk, **options)
    arena.tag("optimizer", "backup")
    arena.tag("grads", "discard")
    arena.tag("params", "rematerialise")
    arena.tag("context", "keep")
    return arena


@pytest.fixture
def making() -> Iterator[Callable[..., Arena]]:
    arenas: list[Arena] = []

    def build(**options) -> Arena:
        arenas.append(make(**options))
        return arenas[-1]

    yield build
    for arena in arenas:
        arena.close()


@pytest.fixture
def arena(making: Callable[..., Arena]) -> Arena:
    return making()


def reports(arena: Arena) -> dict[str, TagReport]:
    return {report.tag: report for report in arena.report()}


def backing(arena: Arena) -> dict[str, str]:
    return {report.tag: report.backing for report in arena.report() if report.num_bytes}


def held(device: str = "host:7") -> int:
    return device_bytes([os.getpid()], device)


def is_near(measured: int, wanted: int) -> bool:
    """Of RssShmem: before Linux 6.16 the kernel keeps it in per-thread or per-processor parts and tells it loosely."""
    return abs(measured - wanted) < MIB


def num_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def seeded(shape: tuple[int, ...]) -> torch.Tensor:
    print("seed", SEED)
    return torch.randn(shape, generator=torch.Generator().manual_seed(SEED))


def test_released_memory_is_really_gone_and_comes_back_the_same_at_the_same_place(arena: Arena):
    before = rss_shmem(os.getpid())
    wanted = seeded((16 * MIB,))
    tensor = empty_tensor(arena, "optimizer", (16 * MIB,), torch.float32)
    tensor.copy_(wanted)
    view = tensor[1000:2000].view(10, 100)
    address, digest = tensor.data_ptr(), arena.digest("optimizer")
    assert held() == 64 * MIB
    assert is_near(rss_shmem(os.getpid()) - before, 64 * MIB)
    for _ in range(3):
        moved = arena.release(["optimizer"])
        assert held() == 0, "no page of it is in memory"
        assert is_near(rss_shmem(os.getpid()), before)
        assert moved.copied_bytes + moved.dropped_bytes == 64 * MIB
        assert arena.digest("optimizer") == digest, "of the host copy"
        assert arena.restore(["optimizer"]).copied_bytes == 64 * MIB
        assert (tensor.data_ptr(), view.data_ptr()) == (address, address + 4000)
        assert torch.equal(tensor, wanted)
        assert torch.equal(view.flatten(), wanted[1000:2000])
        assert arena.digest("optimizer") == digest
        assert is_near(rss_shmem(os.getpid()) - before, 64 * MIB)


TOUCH = """
import sys
from myxa.core.clock import SystemClock
from myxa.memory.arenas import libc
from myxa.memory.arenas.arena import Arena
from myxa.memory.arenas.host_pool import HostPool
from myxa.memory.arenas.host_vmm import HostVmmDriver
arena = Arena(HostVmmDriver("host:0", 1 << 24), HostPool(1 << 24), SystemClock())
arena.tag("params", "backup")
address = arena.empty("params", 1 << 20)
libc.zero(address, 1 << 20)
print("touched", flush=True)
when, how = sys.argv[1:]
if when == "released":
    arena.release(["params"])
elif when == "freed":
    arena.free(address)
elif when == "restored":
    arena.release(["params"])
    arena.restore(["params"])
at = address + (1 << 20) - 1
libc.zero(at, 1) if how == "write" else bytes(libc.view(at, 1))
print("survived", flush=True)
arena.close()
"""


@pytest.mark.parametrize(
    ("when", "how", "dies"), [("released", "read", True), ("freed", "write", True), ("restored", "write", False)]
)
def test_touching_what_is_away_is_a_segmentation_fault(when: str, dies: bool, how: str):
    child = subprocess.run([sys.executable, "-c", TOUCH, when, how], capture_output=True, timeout=30, check=False)
    assert child.returncode == (-11 if dies else 0), child.stderr.decode()
    assert child.stdout.decode().split() == ["touched"] + ([] if dies else ["survived"])


def test_nothing_piles_up_over_many_cycles(arena: Arena):
    tensors = [empty_tensor(arena, tag, (MIB,), torch.float32) for tag in ("optimizer", "grads", "params")]
    for tensor in tensors:
        tensor.fill_(1)
    arena.release(["optimizer", "grads", "params"])
    arena.restore(["optimizer", "grads", "params"])
    arena.mark_dirty("params")
    start = (num_fds(), threading.active_count(), len(Path("/proc/self/maps").read_text().splitlines()))
    for cycle in range(30):
        arena.mark_dirty("optimizer")
        arena.release(["optimizer", "grads", "params"])
        arena.restore(["optimizer", "grads", "params"])
        tensors[2].fill_(cycle)
        arena.mark_dirty("params")
    now = (num_fds(), threading.active_count(), len(Path("/proc/self/maps").read_text().splitlines()))
    assert now[:2] == start[:2]
    assert abs(now[2] - start[2]) <= 8, "mappings"
    assert held() == 12 * MIB


def test_close_leaves_nothing():
    fds, threads, shmem = num_fds(), threading.active_count(), rss_shmem(os.getpid())
    arena = make()
    tensors = empty_tensors(arena, "optimizer", [((MIB,), torch.float32)] * 4)
    empty_tensor(arena, "context", (MIB,), torch.float32)
    tensors[0].fill_(1)
    arena.release(["optimizer"])
    arena.begin_restore(["optimizer"])
    arena.close()
    arena.close()
    assert (num_fds(), threading.active_count()) == (fds, threads)
    assert is_near(rss_shmem(os.getpid()), shmem)
    with pytest.raises(MemoryFault, match="arena is closed"):
        arena.empty("optimizer", 1)


def test_a_backup_moves_pages_from_shared_to_private(arena: Arena):
    tensor = empty_tensor(arena, "optimizer", (64 * MIB,), torch.uint8)
    tensor.fill_(7)
    shmem, anon = rss_shmem(os.getpid()), rss_anon(os.getpid())
    arena.release(["optimizer"])
    assert is_near(rss_shmem(os.getpid()) - shmem, -64 * MIB)
    assert 60 * MIB < rss_anon(os.getpid()) - anon < 72 * MIB, "the copy, and some noise of Python's own"
    assert reports(arena)["optimizer"].host_bytes == 64 * MIB
    arena.restore(["optimizer"])
    assert is_near(rss_shmem(os.getpid()), shmem)
    arena.free(tensor.data_ptr())
    assert is_near(rss_shmem(os.getpid()) - shmem, -64 * MIB)
    assert abs(rss_anon(os.getpid()) - anon) < 8 * MIB, "the host copy went too"


# -- C11: only what changed is copied, and it is told exactly ---------------------------------------------------------


class Watched(HostVmmDriver):
    """The real driver, which writes down what it is asked; `gate` holds copies in until it is opened."""

    def __init__(self, capacity: int = 256 * MIB) -> None:
        super().__init__("host:7", capacity)
        self.calls: list[tuple[str, int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self._tickets: dict[int, int] = {}

    def copy_out(self, host_address: int, address: int, num_bytes: int) -> int:
        self.calls.append(("copy", address))
        ticket = super().copy_out(host_address, address, num_bytes)
        self._tickets[ticket] = address
        return ticket

    def copy_in(self, address: int, host_address: int, num_bytes: int, *, is_awaited: bool = False) -> int:
        self.calls.append(("copy in", address))

        def work() -> None:
            assert self.gate.wait(20)
            libc.copy(address, host_address, num_bytes)

        return self._begin(self._in, address, num_bytes, work)

    def wait(self, ticket: int) -> None:
        super().wait(ticket)
        if ticket in self._tickets:
            self.calls.append(("waited", self._tickets[ticket]))

    def synchronise(self) -> None:
        self.calls.append(("synchronise", 0))
        super().synchronise()

    def unmap(self, address: int, num_bytes: int) -> None:
        self.calls.append(("unmap", address))
        super().unmap(address, num_bytes)


def test_each_chunk_goes_back_while_the_next_one_copies(making: Callable[..., Arena]):
    driver, freed = Watched(), []
    arena = making(driver=driver, chunk=MIB, on_freed=freed.append)
    address = arena.empty("optimizer", 6 * MIB - 5000)
    cheap = arena.empty("grads", 3 * MIB)
    arena.release(["optimizer", "grads"])
    chunks = [address + index * MIB for index in range(6)]
    assert driver.calls[0] == ("synchronise", 0), "whatever writes to it has ended"
    at = {call: index for index, call in enumerate(driver.calls)}
    for this, following in pairwise(chunks):
        assert at["copy", this] < at["waited", this] < at["unmap", this], "gone only when its copy is done"
        assert at["copy", following] < at["unmap", this] < at["waited", following], "one copies while one goes"
    assert at["copy", chunks[1]] < at["unmap", cheap] < at["waited", chunks[0]], "dropped while the first two copy"
    assert freed == [MIB] * 8 + [MIB - 4096], "told piece by piece, to the page"


def test_chunks_larger_than_the_window_overlap_too(making: Callable[..., Arena]):
    driver = Watched()
    arena = making(driver=driver, chunk=MIB)
    address = driver.reserve(9 * MIB)
    handles = [(driver.create(3 * MIB), 3 * MIB) for _ in range(3)]
    for index, (handle, size) in enumerate(handles):
        driver.map(address + index * size, size, handle)
    arena.adopt("optimizer", address, 9 * MIB, handles)
    arena.release(["optimizer"])
    assert [(what, (at - address) // (3 * MIB)) for what, at in driver.calls[1:]] == [
        ("copy", 0), ("copy", 1), ("waited", 0), ("unmap", 0), ("copy", 2),
        ("waited", 1), ("unmap", 1), ("waited", 2), ("unmap", 2),
    ]  # fmt: skip


def test_low_priorities_leave_first_and_come_back_last(making: Callable[..., Arena]):
    driver = Watched()
    arena = making(driver=driver, chunk=MIB)
    arena.tag("optimizer", "backup", priority=5)
    arena.tag("frozen", "backup", priority=-1)
    last, first = arena.empty("optimizer", MIB), arena.empty("frozen", MIB)
    arena.release(["optimizer", "frozen"])
    assert [where for what, where in driver.calls if what == "unmap"] == [first, last]
    driver.gate.clear()
    restoring = arena.begin_restore(["frozen", "optimizer"])
    assert [where for what, where in driver.calls if what == "copy in"] == [last, first]
    driver.gate.set()
    restoring.wait_all()


def test_what_is_only_zeroed_never_waits_behind_copies(making: Callable[..., Arena]):
    driver = Watched()
    arena = making(driver=driver, chunk=MIB)
    arena.empty("optimizer", 4 * MIB)
    grads = empty_tensor(arena, "grads", (MIB,), torch.uint8)
    grads.fill_(3)
    arena.release(["optimizer", "grads"])
    driver.gate.clear()
    restoring = arena.begin_restore(["optimizer", "grads"])
    restoring.wait("grads")
    assert backing(arena) == {"optimizer": "copy_in", "grads": "mapped_dirty"}
    assert not grads.any()
    driver.gate.set()
    restoring.wait_all()


def test_contents_stream_in_while_others_are_used_already(making: Callable[..., Arena]):
    driver = Watched()
    arena = making(driver=driver, chunk=MIB)
    arena.tag("frozen", "backup", priority=1)
    frozen = empty_tensor(arena, "frozen", (MIB,), torch.uint8)
    moments = empty_tensor(arena, "optimizer", (4 * MIB,), torch.uint8)
    frozen.fill_(1)
    moments.fill_(2)
    arena.release(["frozen", "optimizer"])
    driver.gate.clear()
    restoring = arena.begin_restore(["frozen", "optimizer", "grads"])
    assert held() == 5 * MIB, "mapped at once"
    assert backing(arena) == {"optimizer": "copy_in", "frozen": "copy_in"}
    assert int(frozen[0]) == 0, "not there yet"
    with pytest.raises(MemoryFault, match="'optimizer' was written to while its contents still come in"):
        arena.mark_dirty("optimizer")
    driver.gate.set()
    restoring.wait("frozen")
    assert int(frozen.sum(dtype=torch.int64)) == MIB
    restoring.wait_address(moments.data_ptr() + MIB)
    assert int(moments[: 2 * MIB].sum(dtype=torch.int64)) == 4 * MIB
    assert backing(arena)["optimizer"] == "copy_in"
    restoring.wait_address(moments.data_ptr() + 4 * MIB - 1)
    assert backing(arena)["optimizer"] == "mapped_clean"
    assert restoring.wait_all().copied_bytes == 5 * MIB
    with pytest.raises(MemoryFault, match="'params' is not on its way here"):
        restoring.wait("params")
    with pytest.raises(MemoryFault, match="is in none of frozen, optimizer, grads"):
        restoring.wait_address(moments.data_ptr() + 4 * MIB)


def test_a_report_does_not_wait_for_a_move(making: Callable[..., Arena]):
    driver = Watched()
    arena = making(driver=driver, chunk=MIB)
    arena.empty("optimizer", 4 * MIB)
    arena.release(["optimizer"])
    driver.gate.clear()
    mover = threading.Thread(target=arena.restore, args=(["optimizer"],))
    mover.start()
    try:
        report = reports(arena)["optimizer"]
        deadline = time.monotonic() + 20
        while report.backing != "copy_in" and time.monotonic() < deadline:
            time.sleep(0.005)
            report = reports(arena)["optimizer"]
        assert report == TagReport("optimizer", 4 * MIB, "backup", "copy_in", 4 * MIB)
        assert mover.is_alive(), "told while it waited"
    finally:
        driver.gate.set()
        mover.join(20)
    assert reports(arena)["optimizer"].backing == "mapped_clean"


# -- allocations made by others -----------------------------------------------------------------------------------------


def test_adopted_memory_leaves_and_returns_like_its_own(making: Callable[..., Arena]):
    driver = HostVmmDriver("host:7", 64 * MIB)
    arena = making(driver=driver, chunk=MIB)

    def segment(*sizes: int) -> tuple[int, list[tuple[int, int]]]:
        address = at = driver.reserve(sum(sizes))
        handles = []
        for size in sizes:
            handles.append((driver.create(size), size))
            driver.map(at, size, handles[-1][0])
            at += size
        return address, handles

    address, handles = segment(2 * MIB, 3 * MIB)
    arena.adopt("optimizer", address, 5 * MIB - 7, handles)
    libc.view(address, 5 * MIB)[:] = bytes([8]) * (5 * MIB)
    with pytest.raises(MemoryFault, match="overlap a region it has"):
        arena.adopt("grads", address + 4096, 4096, [(1, 4096)])
    assert arena.release(["optimizer"]).copied_bytes == 5 * MIB
    with pytest.raises(MemoryFault, match="'optimizer'.*is host and cannot be given more memory -- restore the tag"):
        arena.adopt("optimizer", address + 64 * MIB, 4096, [(1, 4096)])
    arena.restore(["optimizer"])
    assert bytes(libc.view(address, 5 * MIB)) == bytes([8]) * (5 * MIB)
    now = arena.forget(address)
    assert [size for _, size in now] == [2 * MIB, 3 * MIB]
    assert not {handle for handle, _ in now} & {handle for handle, _ in handles}, "others than those adopted"
    driver.unmap(address, 2 * MIB)
    driver.unmap(address + 2 * MIB, 3 * MIB)
    for handle, size in now:
        driver.release(handle, size)
    driver.free_reservation(address, 5 * MIB)
    with pytest.raises(MemoryFault, match="in chunks of"):
        arena.adopt("optimizer", address, 4096, [])
    with pytest.raises(MemoryFault, match=r"in chunks of \[4096\] -- name every chunk"):
        arena.adopt("optimizer", address, 8192, [(1, 4096)])
    second, handles = segment(MIB)
    arena.adopt("grads", second, MIB, handles)
    arena.release(["grads"])
    assert arena.forget(second) == ()
    driver.free_reservation(second, MIB)
    third, handles = segment(MIB)
    arena.restore(["grads"])
    arena.adopt("grads", third, MIB, handles)
    arena.free(third)
    assert held() == 0


@pytest.mark.parametrize("call", ["release", "restore", "begin_restore", "begin_backup"])
def test_an_unknown_tag_stops_a_command_before_it_begins(arena: Arena, call: str):
    empty_tensor(arena, "optimizer", (100,), torch.uint8)
    with pytest.raises(
        MemoryFault, match=r"host:7: tag 'weights' was not declared \(optimizer, grads, params, context\)"
    ):
        getattr(arena, call)(["optimizer", "weights"])
    assert backing(arena) == {"optimizer": "mapped_dirty"}
    with pytest.raises(MemoryFault, match="pass a collection of tags"):
        getattr(arena, call)("optimizer")


def test_a_listener_that_fails_does_not_tear_a_tag_in_two(making: Callable[..., Arena]):
    def listen(num_bytes: int) -> None:
        raise ValueError(num_bytes)

    arena = making(chunk=MIB, on_freed=listen)
    tensor = empty_tensor(arena, "optimizer", (4 * MIB,), torch.uint8)
    tensor.fill_(6)
    with pytest.raises(ValueError, match=str(MIB)):
        arena.release(["optimizer"])
    assert backing(arena) == {"optimizer": "host"}
    arena.restore(["optimizer"])
    assert int(tensor.sum(dtype=torch.int64)) == 24 * MIB


def test_threads_do_not_meet_in_the_middle(arena: Arena):
    """What torch's allocator does: memory comes and goes from other threads while tags leave and return."""
    errors: list[BaseException] = []
    moments = empty_tensor(arena, "optimizer", (4 * MIB,), torch.uint8)
    moments.fill_(5)

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
    assert held() == 4 * MIB
    assert int(moments.sum(dtype=torch.int64)) == 20 * MIB


HOLD = """
import sys
from myxa.core.clock import SystemClock
from myxa.memory.arenas.arena import Arena
from myxa.memory.arenas.host_pool import HostPool
from myxa.memory.arenas.host_vmm import HostVmmDriver
arena = Arena(HostVmmDriver("host:3", 1 << 26), HostPool(1 << 26), SystemClock())
arena.tag("params", "backup")
arena.empty("params", 5 << 20)
print("ready", flush=True)
for line in sys.stdin:
    getattr(arena, line.strip())(["params"])
    print("done", flush=True)
"""


def test_a_device_is_measured_over_processes_and_a_killed_one_gives_everything_back(tmp_path: Path):
    device = HostDevice("host:3", 64 * MIB)
    children = [
        subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]

    def tell(child: subprocess.Popen, command: str) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(command + "\n")
        child.stdin.flush()
        assert child.stdout.readline() == "done\n"

    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        pids = [child.pid for child in children]
        assert device.free_bytes([*pids, *pids, os.getpid()]) == 54 * MIB
        assert is_near(rss_shmem(pids[0]), 5 * MIB)
        tell(children[0], "release")
        assert (device.free_bytes(pids), device.used_bytes(pids[:1])) == (59 * MIB, 0)
        assert is_near(rss_shmem(pids[0]), 0)
        tell(children[0], "restore")
        assert device.free_bytes(pids) == 54 * MIB
        children[1].kill()
        os.waitid(os.P_PID, pids[1], os.WEXITED | os.WNOWAIT)  # dead, not yet buried
        assert device.free_bytes(pids) == 59 * MIB
        assert (rss_shmem(pids[1]), rss_anon(pids[1])) == (0, 0)
        children[1].wait(10)
        assert device.free_bytes(pids) == 59 * MIB
        full = HostVmmDriver("host:3", 64 * MIB, free=lambda: device.free_bytes([*pids, os.getpid()]))
        full.create(58 * MIB)
        with pytest.raises(OutOfDeviceMemory, match="2,097,152 bytes were asked for, 1,048,576 of 67,108,864 are free"):
            full.create(2 * MIB)  # what others hold counts
        full.close()
    finally:
        for child in children:
            child.kill()
            child.communicate(timeout=10)
    assert device.free_bytes(pids) == 64 * MIB
    with pytest.raises(MemoryFault, match="use a positive capacity"):
        HostDevice("host:0", 0)


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
    driver.close()
