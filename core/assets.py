"""What owns bytes on a device for a tenant, and what measures a device: the two seams of memory leases.

Arenas fulfil `AssetStore`, and so does an adapter of an engine that keeps its own memory. Methods block and are called
in one thread of the tenant's choosing, never on an event loop.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from .device_memory import Tag, TagReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What one release or restore did."""

    copied_bytes: int = 0
    """Between device and host."""
    dropped_bytes: int = 0
    """Left the device without a copy, or came back without one."""
    seconds: float = 0.0


class MovedBytes(Protocol):
    """The same as seen by who reads it; `Moved` fits."""

    @property
    def copied_bytes(self) -> int: ...
    @property
    def dropped_bytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...


class AssetStore(Protocol):
    """Bytes of one tenant on one device, by tag.

    Both commands are idempotent: a tag that is gone already, or mapped already, is passed over, and so is a tag this
    store does not have. After an exception `report` still tells the truth, tag by tag (`poisoned`: contents are lost).
    """

    def report(self) -> tuple[TagReport, ...]:
        """Every tag it has, mapped or not; quick, safe from any thread."""
        ...

    def release(self, tags: Collection[Tag]) -> MovedBytes:
        """Take them off the device, by the policy of each; on return the memory is given back.
        Raises MemoryFault."""
        ...

    def restore(self, tags: Collection[Tag]) -> MovedBytes:
        """Map them again and put their contents back. Raises MemoryFault."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """One measurement of one device."""

    capacity_bytes: int
    free_bytes: int
    driver_bytes: int = 0
    """That the driver keeps for itself, whoever uses the device: neither free nor anybody's; 0: it does not tell."""


class DeviceMeter(Protocol):
    """Measures devices without using them (no context is made). Blocks; called in one thread, not on an event loop."""

    def measure(self, device: str, pids: Collection[int]) -> DeviceReading:
        """`device`: UUID, or "host:<n>", whose use is the shared memory resident in `pids`.
        Raises MemoryFault for a device that is not there."""
        ...
