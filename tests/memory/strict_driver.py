"""The host's driver, refusing what would corrupt memory: an arena that misuses its driver fails under test."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from myxa.core.errors import MemoryFault
from myxa.memory.arenas import libc
from myxa.memory.arenas.host_vmm import HostVmmDriver


def view(address: int, num_bytes: int) -> memoryview:
    """What lies there."""
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")


class StrictDriver(HostVmmDriver):
    """See `HostVmmDriver`."""

    def __init__(self, device: str = "host:0", capacity_bytes: int = 1 << 30) -> None:
        super().__init__(device, capacity_bytes)
        self._chunks: dict[int, int] = {}
        """Handle -> bytes."""
        self._mapped: dict[int, tuple[int, int]] = {}
        """Address -> (bytes, handle)."""
        self._tickets: set[int] = set()

    def reserve(self, num_bytes: int) -> int:
        self._check(num_bytes > 0 and not num_bytes % libc.PAGE_BYTES, f"reserve of {num_bytes} bytes")
        return super().reserve(num_bytes)

    def free_reservation(self, address: int, num_bytes: int) -> None:
        self._check(self._reserved.get(address) == num_bytes, f"{num_bytes:,} bytes at {address:#x} are no reservation")
        is_empty = not any(address <= at < address + num_bytes for at in self._mapped)
        self._check(is_empty, f"the reservation at {address:#x} has memory mapped in it")
        super().free_reservation(address, num_bytes)

    def create(self, num_bytes: int) -> int:
        self._check(num_bytes > 0 and not num_bytes % libc.PAGE_BYTES, f"create of {num_bytes} bytes")
        handle = super().create(num_bytes)
        self._chunks[handle] = num_bytes
        return handle

    def release(self, handle: int, num_bytes: int) -> None:
        self._check_handle(handle, num_bytes)
        self._check(all(held != handle for _, held in self._mapped.values()), f"memory {handle} is still mapped")
        super().release(handle, num_bytes)
        del self._chunks[handle]

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        self._check_handle(handle, num_bytes)
        is_inside = _is_within_one(address, num_bytes, self._reserved.items())
        self._check(is_inside, f"{num_bytes:,} bytes at {address:#x} are not within one reservation")
        is_free = not any(at < address + num_bytes and address < at + size for at, (size, _) in self._mapped.items())
        self._check(is_free, f"something is mapped within {num_bytes:,} bytes at {address:#x}")
        super().map(address, num_bytes, handle)
        self._mapped[address] = (num_bytes, handle)

    def unmap(self, address: int, num_bytes: int) -> None:
        is_it = self._mapped.get(address, (0, 0))[0] == num_bytes
        self._check(is_it, f"{num_bytes:,} bytes at {address:#x} are not what is mapped there")
        super().unmap(address, num_bytes)
        del self._mapped[address]

    def wait(self, ticket: int) -> None:
        self._check(ticket in self._tickets, f"no copy has the ticket {ticket}")
        super().wait(ticket)

    def _begun(self, address: int, num_bytes: int) -> int:
        is_mapped = _is_within_one(address, num_bytes, ((at, size) for at, (size, _) in self._mapped.items()))
        self._check(is_mapped, f"{num_bytes:,} bytes at {address:#x} are not mapped")
        ticket = super()._begun(address, num_bytes)
        self._tickets.add(ticket)
        return ticket

    def _check_handle(self, handle: int, num_bytes: int) -> None:
        self._check(self._chunks.get(handle) == num_bytes, f"there is no memory {handle} of {num_bytes:,} bytes")

    def _check(self, is_well: bool, what: str) -> None:
        if not is_well:
            raise MemoryFault(f"{self.device}: {what}", remedy="a bug of the arena")


def _is_within_one(address: int, num_bytes: int, ranges: Iterable[tuple[int, int]]) -> bool:
    return any(at <= address and address + num_bytes <= at + size for at, size in ranges)
