"""Memory of the host in place of a device: real pages that leave and return while their addresses stay.

All physical memory is one anonymous file (memfd) per driver. A chunk is a range of it with pages, and releasing it
punches a hole. So a process needs one file descriptor for any number of chunks, the pages of a dead process are freed
with it, and another process can measure what is held: `device_bytes` counts the pages of the memfd through /proc.
RssShmem would also count weight slabs that were never on the device, and the kernel keeps it only roughly on machines
with many cores. A mapping replaces a part of a reservation that cannot be touched; unmapping restores that part in one
step. Copies are done when the call returns.

Python's `mmap` and `multiprocessing.shared_memory` were considered: they choose the addresses themselves.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ...core.errors import MemoryFault, OutOfDeviceMemory
from . import libc
from .driver import VmmDriver

PROC = Path("/proc")


def file_name(device: str) -> str:
    """Of the memfd that is a device's memory in one process; /proc shows it to those who count it."""
    return "myxa-device-" + device.replace("/", "_")


class HostVmmDriver(VmmDriver):
    """A device of `capacity_bytes` made of the host's memory; see `VmmDriver` for the calls. The capacity bounds this
    process alone. What would corrupt memory is refused."""

    def __init__(self, device: str = "host:0", capacity_bytes: int = 1 << 30) -> None:
        if capacity_bytes <= 0:
            raise MemoryFault(f"{device}: a capacity of {capacity_bytes} bytes", remedy="use a positive capacity")
        self._device = device
        self._capacity_bytes = capacity_bytes
        self._fd = os.memfd_create(file_name(device))
        self._end = 0
        self._reserved: dict[int, int] = {}
        self._chunks: dict[int, int] = {}
        """Handle (1 + offset in the file: never 0, never used twice) -> bytes."""
        self._mapped: dict[int, tuple[int, int]] = {}
        """Address -> (bytes, handle)."""
        self._num_tickets = 0

    @property
    def device(self) -> str:
        return self._device

    @property
    def granularity(self) -> int:
        return libc.PAGE_BYTES

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
            try:
                os.ftruncate(self._fd, offset + num_bytes)
            except OSError as error:
                what = f"a file of {offset + num_bytes:,} bytes: {error.strerror}"
                raise self._fault(what, "see ulimit -f") from error
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
        if not _is_within_one(address, num_bytes, self._reserved.items()):
            raise self._fault(f"{num_bytes:,} bytes at {address:#x} are not within one reservation")
        if any(at < address + num_bytes and address < at + size for at, (size, _) in self._mapped.items()):
            raise self._fault(f"something is mapped within {num_bytes:,} bytes at {address:#x}", "unmap it first")
        libc.map_file(address, num_bytes, self._file(), handle - 1)
        self._mapped[address] = (num_bytes, handle)

    def unmap(self, address: int, num_bytes: int) -> None:
        if self._mapped.get(address, (0, 0))[0] != num_bytes:
            raise self._fault(f"{num_bytes:,} bytes at {address:#x} are not what is mapped there")
        del self._mapped[address]
        libc.reserve_again(address, num_bytes)

    def copy_out(self, host_address: int, address: int, num_bytes: int) -> int:
        ticket = self._ticket(address, num_bytes)
        libc.copy(host_address, address, num_bytes)
        return ticket

    def copy_in(self, address: int, host_address: int, num_bytes: int, *, is_awaited: bool = False) -> int:
        ticket = self._ticket(address, num_bytes)
        libc.copy(address, host_address, num_bytes)
        return ticket

    def zero(self, address: int, num_bytes: int) -> int:
        ticket = self._ticket(address, num_bytes)
        libc.zero(address, num_bytes)
        return ticket

    def wait(self, ticket: int) -> None:
        if not 0 < ticket <= self._num_tickets:
            raise self._fault(f"no copy has the ticket {ticket}")

    def synchronise(self) -> None:
        return

    def free_bytes(self) -> int:
        return max(self._capacity_bytes - os.fstat(self._file()).st_blocks * 512, 0)

    def capacity_bytes(self) -> int:
        return self._capacity_bytes

    def close(self) -> None:
        """Whatever is still mapped is gone, with its addresses."""
        if self._fd < 0:
            return
        for address, num_bytes in self._reserved.items():
            libc.unmap(address, num_bytes)
        self._reserved.clear()
        self._mapped.clear()
        self._chunks.clear()
        fd, self._fd = self._fd, -1
        os.close(fd)

    def _ticket(self, address: int, num_bytes: int) -> int:
        if not _is_within_one(address, num_bytes, ((at, size) for at, (size, _) in self._mapped.items())):
            raise self._fault(f"{num_bytes:,} bytes at {address:#x} are not mapped", "map them first")
        self._num_tickets += 1
        return self._num_tickets

    def _fault(self, what: str, remedy: str = "") -> MemoryFault:
        return MemoryFault(f"{self._device}: {what}", remedy=remedy)

    def _file(self) -> int:
        if self._fd < 0:
            raise self._fault("the driver is closed")
        return self._fd

    def _check_size(self, call: str, num_bytes: int) -> None:
        self._file()
        if num_bytes <= 0 or num_bytes % libc.PAGE_BYTES:
            raise self._fault(f"{call} of {num_bytes} bytes", f"use a positive multiple of {libc.PAGE_BYTES}")

    def _check_handle(self, handle: int, num_bytes: int) -> None:
        if self._chunks.get(handle) != num_bytes:
            raise self._fault(f"there is no memory {handle} of {num_bytes:,} bytes", "each is given back once, whole")


def _is_within_one(address: int, num_bytes: int, ranges: Iterable[tuple[int, int]]) -> bool:
    return any(at <= address and address + num_bytes <= at + size for at, size in ranges)


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
