"""The real CUDA driver class, and an arena on it, over a driver library made of Linux's memory."""

from __future__ import annotations

import ctypes
import threading

import pytest
from tests.memory.standin_gpu import GRANULE, MIB, StandinGpu

from myxa.core.device_memory import Tag
from myxa.core.errors import MemoryFault, OutOfDeviceMemory
from myxa.memory.arenas.arena import Arena
from myxa.memory.arenas.cuda_driver import IN, OUT, CudaDriver, CudaLibrary, Pinning, PrimaryContext
from myxa.memory.arenas.host_pool import HostPool

OUT_OF_MEMORY, INVALID_VALUE, INVALID_DEVICE, LAUNCH_FAILED = 2, 1, 101, 719


@pytest.fixture
def driver(gpu: StandinGpu):
    driver = CudaDriver(0, gpu.path)
    yield driver
    gpu.fail_nothing()
    driver.close()


def mapped(driver: CudaDriver, num_bytes: int) -> tuple[int, int]:
    address, handle = driver.reserve(num_bytes), driver.create(num_bytes)
    driver.map(address, num_bytes, handle)
    return address, handle


def give_back(driver: CudaDriver, address: int, num_bytes: int, handle: int, *, is_last: bool = True) -> None:
    driver.unmap(address, num_bytes)
    driver.release(handle, num_bytes)
    if is_last:
        driver.free_reservation(address, num_bytes)


def test_a_device_tells_what_it_is(driver: CudaDriver, gpu: StandinGpu):
    assert driver.device == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert driver.granularity == GRANULE
    assert driver.capacity_bytes() == driver.free_bytes() == 256 * MIB
    handle = driver.create(4 * MIB)
    assert driver.free_bytes() == 252 * MIB
    driver.release(handle, 4 * MIB)
    second = CudaDriver(1, gpu.path)
    assert (second.ordinal, second.device) == (1, "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f")
    assert gpu.live()["contexts"] == 2
    second.close()


def test_waiting_for_a_ticket_waits_for_all_before_it_in_its_direction_only(driver: CudaDriver, gpu: StandinGpu):
    host = ctypes.create_string_buffer(8 * GRANULE)
    at = ctypes.addressof(host)
    address, handle = mapped(driver, 4 * GRANULE)
    ctypes.memset(address, 7, 4 * GRANULE)
    out = [driver.copy_out(at + i * GRANULE, address + i * GRANULE, GRANULE) for i in range(3)]
    into = driver.copy_in(address + 3 * GRANULE, at + 7 * GRANULE, GRANULE)
    assert [ticket % 3 for ticket in (*out, into)] == [OUT, OUT, OUT, IN]
    driver.wait(out[1])
    assert [host.raw[i * GRANULE] for i in range(3)] == [7, 7, 0]
    assert ctypes.string_at(address + 3 * GRANULE, 1) == b"\x07"
    driver.wait(out[0])
    driver.wait(out[2])
    driver.wait(into)
    assert host.raw[2 * GRANULE] == 7
    assert ctypes.string_at(address + 3 * GRANULE, 1) == b"\x00"
    driver.wait(into)
    give_back(driver, address, 4 * GRANULE, handle)
    assert gpu.live()["events"] <= 4  # used again, not made anew


@pytest.fixture
def pinned_page(gpu: StandinGpu):
    """A granule of the host that kernels of the device may read."""
    host = ctypes.create_string_buffer(2 * GRANULE)
    at = ctypes.addressof(host) + -ctypes.addressof(host) % 4096
    ctypes.memset(at, 5, GRANULE)
    unpin = Pinning(0, library=gpu.path)(at, GRANULE)
    assert unpin is not None
    yield at
    unpin()


@pytest.mark.parametrize(
    ("offset", "num_bytes", "by"),
    [
        (0, GRANULE, "cuLaunchKernel"),
        (64, GRANULE - 64, "cuLaunchKernel"),
        (8, 1024, "cuMemcpyHtoDAsync_v2"),  # between two units
        (0, 1000, "cuMemcpyHtoDAsync_v2"),  # not a number of units
        (GRANULE - 64, 128, "cuMemcpyHtoDAsync_v2"),  # not pinned to its end
    ],
)
def test_what_is_awaited_is_copied_by_a_kernel_where_it_can_read_it(
    driver: CudaDriver, gpu: StandinGpu, pinned_page: int, offset: int, num_bytes: int, by: str
):
    address, handle = mapped(driver, GRANULE)
    gpu.calls()
    ticket = driver.copy_in(address, pinned_page + offset, num_bytes, is_awaited=True)
    assert ticket % 3 == IN
    assert [name for name, _, _ in gpu.calls() if name in ("cuLaunchKernel", "cuMemcpyHtoDAsync_v2")] == [by]
    driver.wait(ticket)
    assert ctypes.string_at(address, min(num_bytes, 64)) == b"\x05" * min(num_bytes, 64)
    driver.wait(driver.copy_in(address, pinned_page, GRANULE))
    assert [name for name, _, _ in gpu.calls() if name == "cuLaunchKernel"] == [], "nobody stands still for it"
    give_back(driver, address, GRANULE, handle)


@pytest.mark.parametrize("name", ["cuModuleLoadData", "cuModuleGetFunction"])
def test_a_gpu_that_cannot_have_the_kernel_copies_by_its_engines(gpu: StandinGpu, pinned_page: int, name: str):
    gpu.fail(name, INVALID_VALUE)
    driver = CudaDriver(0, gpu.path)
    address, handle = mapped(driver, GRANULE)
    gpu.calls()
    driver.wait(driver.copy_in(address, pinned_page, GRANULE, is_awaited=True))
    assert "cuLaunchKernel" not in [name for name, _, _ in gpu.calls()]
    assert ctypes.string_at(address, 2) == b"\x05\x05"
    give_back(driver, address, GRANULE, handle)
    driver.close()


@pytest.mark.parametrize(
    ("name", "act"),
    [
        ("cuMemAddressReserve", lambda d, a, h: d.reserve(GRANULE)),
        ("cuMemAddressFree", lambda d, a, h: d.free_reservation(a, 2 * GRANULE)),
        ("cuMemCreate", lambda d, a, h: d.create(GRANULE)),
        ("cuMemRelease", lambda d, a, h: d.release(h, GRANULE)),
        ("cuMemMap", lambda d, a, h: d.map(a + GRANULE, GRANULE, h)),
        ("cuMemSetAccess", lambda d, a, h: d.map(a + GRANULE, GRANULE, h)),
        ("cuMemUnmap", lambda d, a, h: d.unmap(a, GRANULE)),
        ("cuMemcpyDtoHAsync_v2", lambda d, a, h: d.copy_out(HOST_AT, a, GRANULE)),
        ("cuMemcpyHtoDAsync_v2", lambda d, a, h: d.copy_in(a, HOST_AT, GRANULE)),
        ("cuMemsetD8Async", lambda d, a, h: d.zero(a, GRANULE)),
        ("cuEventCreate", lambda d, a, h: d.zero(a, GRANULE)),
        ("cuEventRecord", lambda d, a, h: d.zero(a, GRANULE)),
        ("cuEventSynchronize", lambda d, a, h: d.wait(d.zero(a, GRANULE))),
        ("cuCtxSynchronize", lambda d, a, h: d.synchronise()),
        ("cuMemGetInfo_v2", lambda d, a, h: d.free_bytes()),
        ("cuCtxPushCurrent_v2", lambda d, a, h: d.free_bytes()),
        ("cuCtxPopCurrent_v2", lambda d, a, h: d.free_bytes()),
    ],
)
def test_every_refusal_of_the_driver_is_told_in_its_words_and_it_goes_on(driver, gpu: StandinGpu, name: str, act):
    address, first, second = driver.reserve(2 * GRANULE), driver.create(GRANULE), driver.create(GRANULE)
    driver.map(address, GRANULE, first)
    gpu.fail(name, LAUNCH_FAILED)
    with pytest.raises(MemoryFault, match=rf"{name}.*: CUDA_ERROR_LAUNCH_FAILED \(719\), as told.* -- a kernel failed"):
        act(driver, address, second)
    if name == "cuCtxPopCurrent_v2":
        PrimaryContext.__exit__(driver._context, None, None, None)  # the context is still this thread's
    driver.synchronise()
    driver.map(address + GRANULE, GRANULE, second)
    give_back(driver, address, GRANULE, first, is_last=False)
    driver.unmap(address + GRANULE, GRANULE)
    driver.release(second, GRANULE)
    driver.free_reservation(address, 2 * GRANULE)


HOST = ctypes.create_string_buffer(2 * GRANULE)
HOST_AT = ctypes.addressof(HOST)


def test_a_copy_whose_event_fails_is_waited_for_before_anyone_may_unmap(driver: CudaDriver, gpu: StandinGpu):
    address, handle = mapped(driver, GRANULE)
    gpu.fail("cuEventRecord", INVALID_VALUE)
    with pytest.raises(MemoryFault, match="cuEventRecord"):
        driver.copy_in(address, HOST_AT, GRANULE)
    give_back(driver, address, GRANULE, handle)  # the stand-in would note an unmap under a copy


def test_the_thread_keeps_the_context_that_it_had(driver: CudaDriver, gpu: StandinGpu):
    other = PrimaryContext(CudaLibrary(gpu.path), 1)
    seen: list[int] = []

    def work() -> None:
        with other as cuda:
            driver.free_bytes()
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            gpu.set_capacity(1, 64 * MIB)
            cuda.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
            seen.append(total.value)
        assert gpu.live().get("pushed", 0) == 0

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    assert seen == [64 * MIB]
    other.close()
    other.close()
    with pytest.raises(MemoryFault, match="its context was given back"), other:
        pass


def test_a_copy_that_failed_is_told_to_whoever_waits_for_it_not_only_to_the_first(driver: CudaDriver, gpu: StandinGpu):
    address, handle = mapped(driver, 4 * GRANULE)
    first, second, third = (driver.copy_in(address + i * GRANULE, HOST_AT, GRANULE) for i in range(3))
    other_way = driver.copy_out(HOST_AT, address + 3 * GRANULE, GRANULE)
    gpu.fail("cuEventSynchronize", LAUNCH_FAILED)
    for ticket in (second, first, third):
        with pytest.raises(MemoryFault, match=rf"cuEventSynchronize \(copy of .* at {address:#x}\): CUDA_ERROR_LAUNCH"):
            driver.wait(ticket)
    driver.wait(other_way)
    driver.wait(driver.copy_in(address, HOST_AT, GRANULE))
    give_back(driver, address, 4 * GRANULE, handle)


def test_a_driver_that_cannot_be_made_leaves_nothing(gpu: StandinGpu):
    with pytest.raises(MemoryFault, match=r"CUDA_ERROR_INVALID_DEVICE \(101\).*CUDA_VISIBLE_DEVICES"):
        CudaDriver(7, gpu.path)
    for name, after in [("cuStreamCreate", 0), ("cuStreamCreate", 1), ("cuDeviceGetUuid_v2", 0),
                        ("cuMemGetAllocationGranularity", 0), ("cuDevicePrimaryCtxRetain", 0)]:  # fmt: skip
        gpu.fail(name, INVALID_VALUE, after=after)
        with pytest.raises(MemoryFault, match=name):
            CudaDriver(0, gpu.path)
        assert gpu.live() == {}


def test_no_library_and_a_wrong_one_are_told(tmp_path):
    with pytest.raises(MemoryFault, match=r"cannot be loaded.*no NVIDIA driver"):
        CudaLibrary(str(tmp_path / "libcuda.so.1"))
    with pytest.raises(MemoryFault, match=r"libc.so.6 has no cuInit"):
        CudaLibrary("libc.so.6")


def test_closing_twice_is_closing_once_and_a_failing_stream_keeps_nothing_back(gpu: StandinGpu):
    driver = CudaDriver(0, gpu.path)
    gpu.fail("cuStreamSynchronize", LAUNCH_FAILED)
    with pytest.raises(MemoryFault, match="cuStreamSynchronize"):
        driver.close()
    driver.close()


def test_a_pool_is_resident_and_pinned_once_and_unpinned_at_its_end(gpu: StandinGpu):
    pool = HostPool(5 * MIB, Pinning(0, library=gpu.path, num_threads=3))
    address = pool.take(MIB)
    assert gpu.is_pinned(address, MIB)
    assert gpu.live() == {"registrations": 1, "contexts": 1}
    assert resident_bytes(address) == MIB
    pool.close()
    pool.close()


def resident_bytes(address: int, num_bytes: int = MIB) -> int:
    present = (ctypes.c_ubyte * (num_bytes // 4096))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), present) == 0
    return sum(byte & 1 for byte in present) * 4096


def test_a_pool_that_cannot_be_pinned_is_not_there(gpu: StandinGpu):
    gpu.fail("cuMemHostRegister_v2", OUT_OF_MEMORY)
    with pytest.raises(
        MemoryFault, match=r"cuMemHostRegister_v2.*bytes of the host.*make the host pool smaller"
    ) as told:
        HostPool(MIB, Pinning(0, library=gpu.path))
    assert not isinstance(told.value, OutOfDeviceMemory)


@pytest.fixture
def host_pool(gpu: StandinGpu):
    return HostPool(64 * MIB, Pinning(0, library=gpu.path, num_threads=2))


@pytest.fixture
def arena(gpu: StandinGpu, host_pool: HostPool):
    arena = Arena(CudaDriver(0, gpu.path), host_pool, chunk_bytes=4 * MIB)
    yield arena
    gpu.fail_nothing()
    arena.close()


def test_what_is_waited_for_takes_the_kernel_and_what_streams_in_begins_when_everything_is_mapped(
    arena: Arena, gpu: StandinGpu
):
    """Its copies would hold up the mapping of what a trainer begins with."""
    tags: tuple[Tag, ...] = ("optimizer", "params", "grads")
    for tag in tags:
        arena.tag(tag, "discard" if tag == "grads" else "backup")
        arena.empty(tag, 12 * MIB)
    arena.release(tags)
    gpu.calls()
    arena.begin_restore(tags, awaited=("params", "grads")).wait_all()
    steps = [name for name, _, _ in gpu.calls() if name in ("cuMemMap", "cuLaunchKernel", "cuMemcpyHtoDAsync_v2")]
    assert steps == ["cuMemMap", "cuLaunchKernel"] * 3 + ["cuMemMap"] * 6 + ["cuMemcpyHtoDAsync_v2"] * 3


def test_waiting_for_one_tag_does_not_hide_that_another_did_not_arrive(arena: Arena, gpu: StandinGpu):
    tags: tuple[Tag, ...] = ("params", "optimizer")
    for tag in tags:
        arena.tag(tag, "backup")
        arena.empty(tag, 8 * MIB)
    arena.release(tags)
    restoring = arena.begin_restore(tags)
    gpu.fail("cuEventSynchronize", LAUNCH_FAILED)
    for tag in reversed(tags):
        with pytest.raises(MemoryFault, match="CUDA_ERROR_LAUNCH_FAILED"):
            restoring.wait(tag)
    assert [report.backing for report in arena.report()] == ["poisoned", "poisoned"]
