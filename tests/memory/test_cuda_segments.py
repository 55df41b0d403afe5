"""The allocator that torch is given: compiled for real, run over a driver library made of Linux's memory."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.memory.standin_gpu import GRANULE, MIB, StandinGpu

from myxa.core.errors import MemoryFault
from myxa.memory import native
from myxa.memory.arenas.segment_table import SegmentTable, SlotRegister

SLOTS = SlotRegister.numbers
SLOT = SLOTS[0]


class Functions:
    """As torch calls them."""

    def __init__(self, table: SegmentTable, slot: int = SLOT) -> None:
        library = ctypes.CDLL(str(table.path))
        self._allocate, self._free = (getattr(library, name) for name in table.function_names(slot))
        self._allocate.argtypes = (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        self._allocate.restype = ctypes.c_void_p
        self._free.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)

    def allocate(self, num_bytes: int, device: int = 0) -> int | None:
        return self._allocate(num_bytes, device, None)

    def free(self, address: int, num_bytes: int = 0, device: int = 0) -> None:
        self._free(address, num_bytes, device, None)


@pytest.fixture
def table(gpu: StandinGpu, cache_dir: Path):
    table = SegmentTable(library=gpu.path, chunk_bytes=4 * MIB, cache_dir=cache_dir)
    yield table
    gpu.fail_nothing()
    assert table.close() == 0


def test_a_segment_is_memory_in_chunks_made_accessible_at_once_and_ends_whole(table: SegmentTable, gpu: StandinGpu):
    torch = Functions(table)
    address = torch.allocate(9 * MIB)
    assert address is not None
    ctypes.memset(address, 1, 9 * MIB)
    (segment,) = table.segments()
    assert (segment.address, segment.num_bytes, segment.num_chunks) == (address, 10 * MIB, 3)
    assert (segment.device, segment.slot, segment.is_taken, segment.is_freed) == (0, SLOT, False, False)
    names = [name for name, _, _ in gpu.calls()]
    assert (names.count("cuMemCreate"), names.count("cuMemMap"), names.count("cuMemSetAccess")) == (3, 3, 1)
    torch.free(address)
    assert table.segments() == ()
    names = [name for name, _, _ in gpu.calls()]
    assert names.index("cuCtxSynchronize") < names.index("cuMemUnmap")
    assert gpu.held() == 0


def test_each_device_has_its_own_memory(table: SegmentTable, gpu: StandinGpu):
    torch = Functions(table)
    address = torch.allocate(GRANULE, device=1)
    assert address is not None
    assert (gpu.held(0), gpu.held(1)) == (0, GRANULE)
    assert table.segments()[0].device == 1
    torch.free(address)


def test_a_device_that_is_not_there_gives_nothing_and_says_why(table: SegmentTable):
    for device in (-1, 7, 64, 1000):
        assert Functions(table).allocate(GRANULE, device) is None
        assert table.last_failure().call == b"cuDeviceGet"
        assert table.last_failure().result == 101


@pytest.mark.parametrize(
    ("name", "after"),
    [("cuMemAddressReserve", 0), ("cuMemCreate", 0), ("cuMemCreate", 2), ("cuMemMap", 0), ("cuMemMap", 1),
     ("cuMemSetAccess", 0), ("cuCtxPushCurrent_v2", 0)],
)  # fmt: skip
def test_a_segment_that_fails_halfway_leaves_nothing(table: SegmentTable, gpu: StandinGpu, name: str, after: int):
    torch = Functions(table)
    first = torch.allocate(GRANULE)
    assert first is not None
    before = gpu.live()
    gpu.fail(name, 2, after=after)
    assert torch.allocate(9 * MIB) is None
    failure = table.last_failure()
    assert (failure.call, failure.result, failure.num_failures) == (name.encode(), 2, 1)
    assert gpu.live() == before
    torch.free(first)


def test_out_of_memory_is_told_with_its_size(table: SegmentTable, gpu: StandinGpu):
    gpu.set_capacity(0, 6 * MIB)
    assert Functions(table).allocate(9 * MIB) is None
    failure = table.last_failure()
    assert (failure.call, failure.result, failure.num_bytes) == (b"cuMemGetInfo", 2, 10 * MIB)
    assert "cuMemCreate" not in [name for name, _, _ in gpu.calls()]
    assert gpu.held() == 0


def test_what_an_arena_took_is_only_noted_when_torch_frees_it(table: SegmentTable, gpu: StandinGpu):
    torch = Functions(table)
    address = torch.allocate(6 * MIB)
    assert address is not None
    handles = table.take(address, 2)
    assert handles is not None
    assert [size for _, size in handles] == [4 * MIB, 2 * MIB]
    assert table.take(address, 2) is None
    torch.free(address)
    torch.free(address)
    assert table.segments()[0].is_freed
    assert gpu.held() == 6 * MIB
    assert table.last_failure().num_unknown == 1  # the second time
    table.untake(address)  # nobody has it now and torch does not want it: it ends
    assert table.segments() == ()
    assert gpu.held() == 0


def test_a_free_of_anything_else_changes_nothing(table: SegmentTable, gpu: StandinGpu):
    address = Functions(table).allocate(GRANULE)
    assert address is not None
    Functions(table).free(address + 4096)
    Functions(table, SLOTS[1]).free(address)  # a pool of somebody else, which saw this address in another life
    assert table.last_failure().num_unknown == 2
    assert len(table.segments()) == 1
    for wrong in (address, 12345):
        with pytest.raises(MemoryFault, match="was not taken"):
            table.forget(wrong)
        with pytest.raises(MemoryFault, match="was not taken"):
            table.untake(wrong)
    Functions(table).free(address)


def test_a_device_that_cannot_be_waited_for_keeps_the_segment_until_it_can(table: SegmentTable, gpu: StandinGpu):
    torch = Functions(table)
    address = torch.allocate(GRANULE)
    assert address is not None
    gpu.fail("cuCtxSynchronize", 900)
    torch.free(address)  # while a graph is captured, say
    (segment,) = table.segments()
    assert (segment.is_freed, segment.is_taken, gpu.held()) == (True, False, GRANULE)
    assert table.take(address, 1) is None
    gpu.fail("cuCtxSynchronize", 900)
    assert table.reap() == 900
    assert table.reap() == 0
    assert table.segments() == ()


def test_many_threads_allocate_and_free_and_the_table_is_right(table: SegmentTable, gpu: StandinGpu):
    """Half of the segments are freed by another thread than the one that asked for them; some are taken meanwhile."""
    seed = 20261120
    print(f"seed {seed}")
    gpu.set_capacity(0, 1 << 30)
    handed: list[tuple[int, int]] = []
    guard = threading.Lock()
    is_over = threading.Event()

    def work(number: int) -> None:
        chance = random.Random(seed + number)
        torch = Functions(table, SLOTS[number])
        own: list[int] = []
        for _ in range(60):
            address = torch.allocate(chance.randint(1, 10 * MIB))
            if address is not None:
                ctypes.memset(address, number, 4096)
                own.append(address)
            if own and chance.random() < 0.6:
                torch.free(own.pop(chance.randrange(len(own))))
            with guard:
                if own and chance.random() < 0.3:
                    handed.append((SLOTS[number], own.pop()))
                stranger = handed.pop() if handed and chance.random() < 0.3 else None
            if stranger is not None:
                Functions(table, stranger[0]).free(stranger[1])
        for address in own:
            torch.free(address)

    def look() -> None:
        while not is_over.is_set():
            for segment in table.segments():
                if not segment.is_taken and table.take(segment.address, segment.num_chunks) is not None:
                    table.untake(segment.address)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        with ThreadPoolExecutor(4) as threads:
            for done in [threads.submit(work, number) for number in range(4)]:
                done.result(timeout=60)
    finally:
        is_over.set()
        watcher.join(30)
    for slot, address in handed:
        Functions(table, slot).free(address)
    assert table.segments() == ()
    assert gpu.held() == 0
    assert table.last_failure().num_unknown == 0


def test_one_driver_library_and_chunk_size_while_segments_live(table: SegmentTable, gpu: StandinGpu, cache_dir: Path):
    address = Functions(table).allocate(GRANULE)
    assert address is not None
    SegmentTable(library=gpu.path, chunk_bytes=4 * MIB, cache_dir=cache_dir)
    with pytest.raises(MemoryFault, match="still there.*one driver library and one chunk size"):
        SegmentTable(library=gpu.path, chunk_bytes=8 * MIB, cache_dir=cache_dir)
    assert table.close() == 1
    Functions(table).free(address)
    SegmentTable(library=gpu.path, chunk_bytes=8 * MIB, cache_dir=cache_dir)


def test_a_library_that_is_no_driver_is_told(cache_dir: Path):
    with pytest.raises(MemoryFault, match="cannot use /nowhere/libcuda"):
        SegmentTable(library="/nowhere/libcuda.so.1", cache_dir=cache_dir)
    with pytest.raises(MemoryFault, match="libc.so.6 has no cuInit"):
        SegmentTable(library="libc.so.6", cache_dir=cache_dir)


def test_slots_run_out_and_come_back(table: SegmentTable):
    register = SlotRegister()
    taken = [register.take(table) for _ in SLOTS]
    assert sorted(taken) == sorted(SLOTS)
    with pytest.raises(MemoryFault, match="all 48 pools"):
        register.take(table)
    register.give(taken[5])
    address = Functions(table, taken[5]).allocate(GRANULE)  # a slot whose segments live on is not handed out
    assert address is not None
    with pytest.raises(MemoryFault, match="all 48 pools"):
        register.take(table)
    Functions(table, taken[5]).free(address)
    assert register.take(table) == taken[5]


def compile_seven(source: Path, cache_dir: Path | None, *compilers: str, headers: object = "/include") -> Path:
    return native.built(
        source, compilers or ("gcc",), ["-shared", "-fPIC", f"-I{headers}", str(source)],
        facts=("here",), cache_dir=cache_dir, timeout_s=30.0, remedy="see the compiler",
    )  # fmt: skip


@pytest.fixture
def seven(tmp_path: Path) -> Path:
    source = tmp_path / "seven.c"
    source.write_text("int seven(void) { return 7; }\n")
    return source


def test_a_source_is_compiled_once_whoever_asks(seven: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []
    compile_it = native._compile
    monkeypatch.setattr(native, "_compile", lambda *a: (calls.append("one"), compile_it(*a)))
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(compile_seven, seven, tmp_path / "c", headers=tmp_path / f"venv{n}") for n in range(4)]
        paths = {done.result(timeout=60) for done in asked}
    assert len(paths) == len(calls) == 1
    assert ctypes.CDLL(str(paths.pop())).seven() == 7
    seven.write_text(seven.read_text().replace("7;", "8;"))
    assert ctypes.CDLL(str(compile_seven(seven, tmp_path / "c"))).seven() == 8
    assert len(calls) == 2
    assert not list((tmp_path / "c").glob(".building-*"))


def test_a_build_that_fails_leaves_nothing_and_says_why(seven: Path, tmp_path: Path):
    seven.write_text("int seven(void) { return it; }")
    with pytest.raises(MemoryFault, match=r"/gcc cannot compile seven.c \(1\): .*error: .*it.* -- see the compiler"):
        compile_seven(seven, tmp_path / "c")
    assert not list((tmp_path / "c").glob("*.so"))
    with pytest.raises(MemoryFault, match=r"none of no-such-cc, nor-this is on the PATH -- see the compiler"):
        compile_seven(seven, tmp_path / "c", "no-such-cc", "nor-this")


def test_a_home_without_locks_that_several_machines_share(seven: Path, tmp_path: Path, monkeypatch):
    """Such as Lustre without flock; a library of one machine's C library need not load on another."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    made = compile_seven(seven, tmp_path / "c")
    assert ctypes.CDLL(str(made)).seven() == 7
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.17"))
    assert compile_seven(seven, tmp_path / "c") != made


def test_what_is_compiled_is_kept_in_the_home(seven: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    made = compile_seven(seven, None)
    assert made.parent == tmp_path / "home/.cache/myxa/native"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    with pytest.raises(MemoryFault, match="cannot be compiled into .* -- set HOME"):
        compile_seven(seven, None)
