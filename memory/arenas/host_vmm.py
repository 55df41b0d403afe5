"""Memory of the host in place of a device: real pages that leave and return while their addresses stay.

All physical memory is one anonymous file (memfd) per driver. A chunk is a range of it with pages, and releasing it
punches a hole. So a process needs one file descriptor for any number of chunks, the pages of a dead process are freed
with it, and another process can measure what is held: `device_bytes` counts the pages of the memfd through /proc.
RssShmem would also count weight slabs that were never on the device, and the kernel keeps it only roughly on machines
with many cores. A mapping replaces a part of a reservation that cannot be touched; unmapping restores that part in one
step.

Python's `mmap` and `multiprocessing.shared_memory` were considered: they choose the addresses themselves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from ...core.errors import MemoryFault, OutOfDeviceMemory
from . import libc
from .driver import VmmDriver, next_ticket


def file_name(device: str) -> str:
    """Of the memfd that is a device's memory in one process; /proc shows it to those who count it."""
    return "myxa-device-" + device.replace("/", "_")


class CopyThread:
    """Work of one kind: one after another, in its own thread."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._running: dict[int, tuple[Future[None], int, int]] = {}
        self._error: BaseException | None = None
        self._spoiled_until = 0

    def begin(self, ticket: int, address: int, num_bytes: int, work: Callable[[], None]) -> None:
        """`address` and `num_bytes` are what must stay mapped until it is done."""
        self._running[ticket] = (self._thread.submit(work), address, num_bytes)

    def wait(self, ticket: int) -> None:
        """For it and all before it. Every wait for work begun before a failure was seen raises that failure."""
        for earlier in [number for number in self._running if number <= ticket]:
            error = self._running.pop(earlier)[0].exception()
            if error is not None:
                self._error, self._spoiled_until = error, max([ticket, *self._running])
        if self._error is not None and ticket <= self._spoiled_until:
            raise MemoryFault(f"a copy failed: {self._error!r}") from self._error

    def wait_all(self) -> None:
        for ticket in list(self._running):
            self.wait(ticket)

    def is_using(self, address: int, num_bytes: int) -> bool:
        """Whether something that has not ended works on the range."""
        return any(
            not work.done() and at < address + num_bytes and address < at + size
            for work, at, size in self._running.values()
        )

    def close(self) -> None:
        self._thread.shutdown(wait=True)


class HostVmmDriver(VmmDriver):
    """A device of `capacity_bytes` made of the host's memory; see `VmmDriver` for the calls.

    `granularity` is the smallest thing handed out, a multiple of the page. The capacity bounds this process alone;
    `free` (bytes free on the whole device, as `HostDevice.free_bytes` measures them) makes processes share one.
    """

    def __init__(
        self,
        device: str = "host:0",
        capacity_bytes: int = 1 << 30,
        *,
        granularity: int = libc.PAGE_BYTES,
        free: Callable[[], int] | None = None,
    ) -> None:
        if capacity_bytes <= 0 or granularity <= 0 or granularity % libc.PAGE_BYTES:
            raise MemoryFault(
                f"{device}: capacity {capacity_bytes} and granularity {granularity} bytes",
                remedy=f"use a positive capacity and a multiple of {libc.PAGE_BYTES}",
            )
        self._device = device
        self._capacity_bytes = capacity_bytes
        self._granularity = granularity
        self._free = free
        self._fd = os.memfd_create(file_name(device))
        self._end = 0
        self._reserved: dict[int, int] = {}
        self._chunks: dict[int, int] = {}
        """Handle (1 + offset in the file: never 0, never used twice) -> bytes."""
        self._mapped: dict[int, tuple[int, int]] = {}
        """Address -> (bytes, handle)."""
        self._num_tickets = 0
        self._out = CopyThread(f"{device} out")
        self._in = CopyThread(f"{device} in")
        self._fill = CopyThread(f"{device} fill")
        self._lanes = (self._out, self._in, self._fill)

    @property
    def device(self) -> str:
        return self._device

    @property
    def granularity(self) -> int:
        return self._granularity

    def reserve(self, num_bytes: int) -> int:
        self._check_size("reserve", num_bytes)
        address = libc.reserve(num_bytes)
        self._reserved[address] = num_bytes
        return address

    def free_reservation(self, address: int, num_bytes: int) -> None:
        if self._reserved.get(address) != num_bytes:
            raise self._fault(f"{num_bytes:,} bytes at {address:#x} are no reservation")
        if any(address <= at < address + num_bytes for at in self._mapped):
            raise self._fault(f"the reservation at {address:#x} has memory mapped in it", "unmap it first")
        del self._reserved[address]
        libc.unmap(address, num_bytes)

    def create(self, num_bytes: int) -> int:
        self._check_size("create", num_bytes)
        offset = self._end
        if num_bytes <= self.free_bytes():
            self._grow_file(offset + num_bytes)
            if libc.fill_file(self._fd, offset, num_bytes):
                self._end += num_bytes
                self._chunks[1 + offset] = num_bytes
                return 1 + offset
            libc.empty_file(self._fd, offset, num_bytes)
        raise OutOfDeviceMemory(
            f"{self._device}: {num_bytes:,} bytes were asked for, {self.free_bytes():,} of {self._capacity_bytes:,} "
            "are free",
            remedy="release tags first, or give the device a higher capacity",
        )

    def release(self, handle: int, num_bytes: int) -> None:
        self._check_handle(handle, num_bytes)
        if any(held == handle for _, held in self._mapped.values()):
            raise self._fault(f"memory {handle} is still mapped", "unmap it first")
        del self._chunks[handle]
        libc.empty_file(self._file(), handle - 1, num_bytes)

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        self._check_handle(handle, num_bytes)
        self._check_reserved(address, num_bytes)
        if any(at < address + num_bytes and address < at + size for at, (size, _) in self._mapped.items()):
            raise self._fault(f"something is mapped within {num_bytes:,} bytes at {address:#x}", "unmap it first")
        libc.map_file(address, num_bytes, self._file(), handle - 1)
        self._mapped[address] = (num_bytes, handle)

    def unmap(self, address: int, num_bytes: int) -> None:
        if self._mapped.get(address, (0, 0))[0] != num_bytes:
            raise self._fault(f"{num_bytes:,} bytes at {address:#x} are not what is mapped there")
        if any(lane.is_using(address, num_bytes) for lane in self._lanes):
            raise self._fault(f"{num_bytes:,} bytes at {address:#x} are being copied", "wait for the copy's ticket")
        del self._mapped[address]
        libc.reserve_again(address, num_bytes)

    def copy_out(self, host_address: int, address: int, num_bytes: int) -> int:
        self._check_mapped(address, num_bytes)
        return self._begin(self._out, address, num_bytes, lambda: libc.copy(host_address, address, num_bytes))

    def copy_in(self, address: int, host_address: int, num_bytes: int, *, is_awaited: bool = False) -> int:
        self._check_mapped(address, num_bytes)
        return self._begin(self._in, address, num_bytes, lambda: libc.copy(address, host_address, num_bytes))

    def zero(self, address: int, num_bytes: int) -> int:
        self._check_mapped(address, num_bytes)
        return self._begin(self._fill, address, num_bytes, lambda: libc.zero(address, num_bytes))

    def wait(self, ticket: int) -> None:
        if not 0 < ticket <= self._num_tickets:
            raise self._fault(f"no copy has the ticket {ticket}")
        self._lanes[ticket % len(self._lanes)].wait(ticket)

    def synchronise(self) -> None:
        for lane in self._lanes:
            lane.wait_all()

    def free_bytes(self) -> int:
        held = os.fstat(self._file()).st_blocks * 512
        own = max(self._capacity_bytes - held, 0)
        return own if self._free is None else min(own, max(self._free(), 0))

    def capacity_bytes(self) -> int:
        return self._capacity_bytes

    def close(self) -> None:
        """Whatever is still mapped is gone, with its addresses."""
        if self._fd < 0:
            return
        for lane in self._lanes:
            lane.close()
        for address, num_bytes in self._reserved.items():
            libc.unmap(address, num_bytes)
        self._reserved.clear()
        self._mapped.clear()
        self._chunks.clear()
        fd, self._fd = self._fd, -1
        os.close(fd)

    def _begin(self, lane: CopyThread, address: int, num_bytes: int, work: Callable[[], None]) -> int:
        self._num_tickets = next_ticket(self._num_tickets, self._lanes.index(lane), len(self._lanes))
        lane.begin(self._num_tickets, address, num_bytes, work)
        return self._num_tickets

    def _fault(self, what: str, remedy: str = "") -> MemoryFault:
        return MemoryFault(f"{self._device}: {what}", remedy=remedy)

    def _file(self) -> int:
        if self._fd < 0:
            raise self._fault("the driver is closed")
        return self._fd

    def _grow_file(self, num_bytes: int) -> None:
        try:
            os.ftruncate(self._fd, num_bytes)
        except OSError as error:
            raise self._fault(f"a file of {num_bytes:,} bytes: {error.strerror}", "see ulimit -f") from error

    def _check_size(self, call: str, num_bytes: int) -> None:
        self._file()
        if num_bytes <= 0 or num_bytes % self._granularity:
            raise self._fault(f"{call} of {num_bytes} bytes", f"use a positive multiple of {self._granularity}")

    def _check_handle(self, handle: int, num_bytes: int) -> None:
        if self._chunks.get(handle) != num_bytes:
            raise self._fault(f"there is no memory {handle} of {num_bytes:,} bytes", "each is given back once, whole")

    def _check_reserved(self, address: int, num_bytes: int) -> None:
        if not any(at <= address and address + num_bytes <= at + size for at, size in self._reserved.items()):
            raise self._fault(f"{num_bytes:,} bytes at {address:#x} are not within one reservation")

    def _check_mapped(self, address: int, num_bytes: int) -> None:
        if not any(at <= address and address + num_bytes <= at + size for at, (size, _) in self._mapped.items()):
            raise self._fault(f"{num_bytes:,} bytes at {address:#x} are not mapped", "map them first")


PROC = Path("/proc")


def rss_shmem(pid: int) -> int:
    """Shared pages that the process has in its page table: mapped chunks, and all other shared memory."""
    return _status(pid, "RssShmem:")


def rss_anon(pid: int) -> int:
    """Private pages: the host pool, and Python itself."""
    return _status(pid, "RssAnon:")


def device_bytes(pids: Iterable[int], device: str) -> int:
    """Pages of `device` that these processes have created, mapped or not; a file held by several counts once."""
    files: dict[int, int] = {}
    for pid in set(pids):
        files |= _device_files(pid, f"/memfd:{file_name(device)} (deleted)")
    return sum(files.values())


def _device_files(pid: int, wanted: str) -> dict[int, int]:
    files: dict[int, int] = {}
    try:
        for link in (PROC / str(pid) / "fd").iterdir():
            with suppress(FileNotFoundError):  # closed while we looked
                if str(link.readlink()) == wanted:
                    stat = link.stat()
                    files[stat.st_ino] = stat.st_blocks * 512
    except (FileNotFoundError, ProcessLookupError):
        return {}
    except PermissionError as error:
        raise MemoryFault(
            f"process {pid} belongs to another user, so the device memory that it holds cannot be read",
            remedy="run all tenants of a device of the host as one user",
        ) from error
    return files


class HostDevice:
    """The measure of a device that is made of the host's memory: what a GPU's management library is for a GPU."""

    def __init__(self, device: str, capacity_bytes: int) -> None:
        if capacity_bytes <= 0:
            raise MemoryFault(f"{device}: a capacity of {capacity_bytes} bytes", remedy="use a positive capacity")
        self.device = device
        self.capacity_bytes = capacity_bytes

    def used_bytes(self, pids: Iterable[int]) -> int:
        """By these processes, now."""
        return device_bytes(pids, self.device)

    def free_bytes(self, pids: Iterable[int]) -> int:
        """Capacity less what these processes hold; negative when they hold more than there is."""
        return self.capacity_bytes - self.used_bytes(pids)


def _status(pid: int, key: str) -> int:
    try:
        lines = (PROC / str(pid) / "status").read_text(encoding="ascii", errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), 0)
