"""Memory of the host in place of a device: real pages that leave and return while their addresses stay.

All physical memory is one anonymous file (memfd) per driver. A chunk is a range of it with pages, and releasing it
punches a hole: the pages of a dead process are freed with it, and `device_bytes` counts what is held through /proc. A
mapping replaces a part of a reservation that cannot be touched. Copies are done when the call returns.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ...core.errors import MemoryFault, OutOfDeviceMemory, raised_as
from . import libc
from .driver import VmmDriver

PROC = Path("/proc")


def file_name(device: str) -> str:
    """Of the memfd that is a device's memory in one process; /proc shows it to those who count it."""
    return "myxa-device-" + device.replace("/", "_")


class HostVmmDriver(VmmDriver):
    """A device of `capacity_bytes` (of this process) made of the host's memory; see `VmmDriver`."""

    def __init__(self, device: str = "host:0", capacity_bytes: int = 1 << 30) -> None:
        self._device = device
        self._capacity_bytes = capacity_bytes
        self._fd = os.memfd_create(file_name(device))
        self._end = 0
        """Of the file: offsets are not used twice, and a handle is 1 + an offset."""
        self._reserved: dict[int, int] = {}
        self._num_tickets = 0

    @property
    def device(self) -> str:
        return self._device

    @property
    def granularity(self) -> int:
        return libc.PAGE_BYTES

    def reserve(self, num_bytes: int) -> int:
        address = libc.reserve(num_bytes)
        self._reserved[address] = num_bytes
        return address

    def free_reservation(self, address: int, num_bytes: int) -> None:
        del self._reserved[address]
        libc.unmap(address, num_bytes)

    def create(self, num_bytes: int) -> int:
        offset = self._end
        if num_bytes <= self.free_bytes():
            with raised_as(
                MemoryFault, f"{self._device}: a file of {offset + num_bytes:,} bytes", OSError, remedy="see ulimit -f"
            ):
                os.ftruncate(self._fd, offset + num_bytes)
            if libc.fill_file(self._fd, offset, num_bytes):
                self._end += num_bytes
                return 1 + offset
            libc.empty_file(self._fd, offset, num_bytes)
        raise OutOfDeviceMemory(
            f"{self._device}: {num_bytes:,} bytes were asked for, {self.free_bytes():,} of {self._capacity_bytes:,} "
            "are free",
            remedy="release tags first, or give the device a higher capacity",
        )

    def release(self, handle: int, num_bytes: int) -> None:
        libc.empty_file(self._fd, handle - 1, num_bytes)

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        libc.map_file(address, num_bytes, self._fd, handle - 1)

    def unmap(self, address: int, num_bytes: int) -> None:
        libc.reserve_again(address, num_bytes)

    def copy_out(self, host_address: int, address: int, num_bytes: int) -> int:
        ticket = self._begun(address, num_bytes)
        libc.copy(host_address, address, num_bytes)
        return ticket

    def copy_in(self, address: int, host_address: int, num_bytes: int, *, is_awaited: bool = False) -> int:
        ticket = self._begun(address, num_bytes)
        libc.copy(address, host_address, num_bytes)
        return ticket

    def zero(self, address: int, num_bytes: int) -> int:
        ticket = self._begun(address, num_bytes)
        libc.zero(address, num_bytes)
        return ticket

    def wait(self, ticket: int) -> None:
        return

    def synchronise(self) -> None:
        return

    def free_bytes(self) -> int:
        return max(self._capacity_bytes - os.fstat(self._fd).st_blocks * 512, 0)

    def capacity_bytes(self) -> int:
        return self._capacity_bytes

    def close(self) -> None:
        """Whatever is still mapped is gone, with its addresses."""
        if self._fd < 0:
            return
        for address, num_bytes in self._reserved.items():
            libc.unmap(address, num_bytes)
        self._reserved.clear()
        fd, self._fd = self._fd, -1
        os.close(fd)

    def _begun(self, address: int, num_bytes: int) -> int:
        """The ticket of a copy that works on this range of the device."""
        self._num_tickets += 1
        return self._num_tickets


def device_bytes(pids: Iterable[int], device: str) -> int:
    """Pages of `device` that these processes have created, mapped or not; a file held by several counts once."""
    files: dict[int, int] = {}
    for pid in set(pids):
        files |= _device_files(pid, f"/memfd:{file_name(device)} (deleted)")
    return sum(files.values())


def _device_files(pid: int, target: str) -> dict[int, int]:
    files: dict[int, int] = {}
    try:
        for link in (PROC / str(pid) / "fd").iterdir():
            with suppress(FileNotFoundError):  # closed while we looked
                if str(link.readlink()) == target:
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
