"""The few operations on device memory that arenas are made of; a GPU's driver has them, and so has Linux.

A *reservation* is a range of addresses without memory; a *chunk* is memory without an address. Mapping a chunk into a
reservation makes it readable; unmapping and releasing it gives the memory back while the addresses, and every tensor
and CUDA graph that names them, stay as they are. Sizes are multiples of `granularity`.
"""

from __future__ import annotations

from typing import Protocol


class VmmDriver(Protocol):
    """One device; not thread-safe, one worker thread per device uses it. Raises `MemoryFault` in the driver's words."""

    @property
    def device(self) -> str:
        """UUID, or "host:<n>"."""
        ...

    @property
    def granularity(self) -> int:
        """Bytes."""
        ...

    def reserve(self, num_bytes: int) -> int:
        """Addresses; returns the first."""
        ...

    def free_reservation(self, address: int, num_bytes: int) -> None:
        """Nothing may be mapped in it."""

    def create(self, num_bytes: int) -> int:
        """Memory; returns its handle. Raises OutOfDeviceMemory when there is not enough."""
        ...

    def release(self, handle: int, num_bytes: int) -> None:
        """Give it back; it must not be mapped."""

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        """The whole chunk, readable and writable."""

    def unmap(self, address: int, num_bytes: int) -> None:
        """The addresses stay reserved; touching them is an error from now on. Copies of it were waited for."""

    def copy_out(self, host_address: int, address: int, num_bytes: int) -> int:
        """Begin a copy to the host; returns a ticket for `wait`."""
        ...

    def copy_in(self, address: int, host_address: int, num_bytes: int, *, is_awaited: bool = False) -> int:
        """Returns a ticket for `wait`. `is_awaited`: it may use the device's processors."""
        ...

    def zero(self, address: int, num_bytes: int) -> int:
        """Begin filling with zeros, beside what is copied; returns a ticket for `wait`."""
        ...

    def wait(self, ticket: int) -> None:
        """Until that copy or filling is done, and all of its kind that were begun before it."""

    def synchronise(self) -> None:
        """Until nothing that this process started runs on the device any more."""

    def free_bytes(self) -> int:
        """Measured now, as this process sees it."""
        ...

    def capacity_bytes(self) -> int:
        """Of the whole device."""
        ...

    def close(self) -> None:
        """Streams and handles of the driver itself."""
