"""Who holds which memory, as text: devices, tenants with their tags, and what happened last. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from ...core.device_memory import DeviceView, MemoryView, TagReport, TenantReport

MIB = 1 << 20
GIB = 1 << 30
MAX_EVENTS = 20
ON_DEVICE = frozenset({"mapped_dirty", "mapped_clean", "copy_out", "copy_in", "poisoned"})
WORDS = {
    "mapped_dirty": "on the device",
    "mapped_clean": "on the device, copy kept",
    "copy_out": "leaving",
    "host": "on the host",
    "discarded": "dropped",
    "copy_in": "coming back",
    "poisoned": "LOST",
}


def size(num_bytes: int) -> str:
    """1536 MiB -> "1.5 GiB"."""
    return f"{num_bytes / GIB:.1f} GiB" if abs(num_bytes) >= GIB else f"{num_bytes / MIB:.1f} MiB"


def memory_text(view: MemoryView, *, num_events: int = MAX_EVENTS) -> str:
    """The whole page."""
    return "\n".join(_lines(view, num_events)) + "\n"


def _lines(view: MemoryView, num_events: int) -> Iterator[str]:
    doing = f"switching: {view.switching}" if view.switching else "nothing is being switched"
    yield f"{view.manager}, epoch {view.epoch}: {doing}"
    if view.host_pool_bytes:
        yield f"host pool: {size(view.host_pool_used_bytes)} of {size(view.host_pool_bytes)}"
    for device in view.devices:
        yield ""
        yield from _device(device)
    if view.timeline:
        yield ""
        yield f"the last {min(num_events, len(view.timeline))} events"
        yield from _timeline(view.timeline[-num_events:])


def _device(device: DeviceView) -> Iterator[str]:
    line = f"{device.device}: {size(device.capacity_bytes)}, free {size(device.free_bytes)}"
    if device.unattributed_bytes > 0:
        line += f", held by nobody known {size(device.unattributed_bytes)}"
    yield line
    for tenant in device.tenants:
        yield from _tenant(tenant)


def _tenant(tenant: TenantReport) -> Iterator[str]:
    held = sum(tag.num_bytes for tag in tenant.tags if tag.backing in ON_DEVICE)
    rest = f" + {size(tenant.residue_bytes)} that stay" if tenant.residue_bytes else ""
    yield f"  {tenant.tenant} ({tenant.gang}): {tenant.state}, {size(held)}{rest}"
    for tag in tenant.tags:
        yield f"    {_tag(tag)}"


def _tag(tag: TagReport) -> str:
    copy = f", {size(tag.host_bytes)} on the host" if tag.host_bytes and tag.backing != "host" else ""
    return f"{tag.tag:<11}{size(tag.num_bytes):>11}  {WORDS[tag.backing]}{copy} [{tag.policy}]"


def _timeline(events: Sequence[tuple[float, str, str, str]]) -> Iterator[str]:
    for wall_s, device, tenant, what in events:
        clock = datetime.fromtimestamp(wall_s).strftime("%H:%M:%S.%f")[:-3]
        who = " ".join(filter(None, (device, tenant)))
        yield f"  {clock}  {who}  {what}"
