"""The words of a refusal: how much is short, where, and who holds the rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...core.device_memory import DeviceReading, Holder, TenantReport

MAX_HOLDERS = 12


def in_words(num_bytes: int) -> str:
    """Bytes for people: "24.6 GiB", "512 MiB", "7 bytes"."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            value = num_bytes / size
            return f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"
    return f"{num_bytes} bytes"


def place_of(report: TenantReport) -> str:
    """Where a tenant is: "GPU-6f1c", "GPU-6f1c, GPU-88a0"."""
    return ", ".join(report.devices)


def holders_in_words(holders: Sequence[Holder]) -> str:
    """Each with tag, bytes and state; what nobody registered last."""
    named = [h for h in holders if h.tenant]
    parts = [f"{h.tenant} {h.tag} {in_words(h.num_bytes)} ({h.state})" for h in named[:MAX_HOLDERS]]
    if len(named) > MAX_HOLDERS:
        rest = named[MAX_HOLDERS:]
        parts.append(f"{len(rest)} more {in_words(sum(h.num_bytes for h in rest))}")
    nobody = sum(h.num_bytes for h in holders if not h.tenant)
    if nobody:
        parts.append(f"{in_words(nobody)} by nobody registered")
    return ", ".join(parts) or "nobody"


def short_words(short_bytes: int, device: str, holders: Sequence[Holder], measured: str = "") -> str:
    """Of a device that cannot be made to hold what is asked. `measured`: see `unproven_words`."""
    return f"refused: {in_words(short_bytes)} short on {device}, held by {holders_in_words(holders)}{measured}"


def unproven_words(reading: DeviceReading, nobody_bytes: int, before_bytes: int) -> str:
    """Why the memory of the dead is not proven free. `nobody_bytes`: used, and by nobody that lives; `before_bytes`:
    how much of that there was when all lived."""
    return (
        f"; measured: {in_words(reading.free_bytes)} of {in_words(reading.capacity_bytes)} free, "
        f"{in_words(nobody_bytes)} used by nobody that lives, before they died {in_words(before_bytes)}"
    )


def unmeasured_words(devices: Iterable[str], trouble: str) -> str:
    """Of devices that nobody could look at. `trouble`: why, if anybody said."""
    return f"refused: {', '.join(sorted(devices))} could not be measured in time" + (f": {trouble}" if trouble else "")


def host_pool_words(need_bytes: int, used_bytes: int, limit_bytes: int) -> str:
    """Of copies that the host has no room for."""
    return (
        f"refused: the host pool has no room for {in_words(need_bytes)} of copies: {in_words(used_bytes)} of "
        f"{in_words(limit_bytes)} are in use; raise memory.host_pool_gb"
    )
