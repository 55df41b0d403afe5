"""Who holds which memory, as text: devices, tenants with their tags, and what happened last. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from ...core.device_memory import DeviceView, MemoryView, TagReport, TenantReport, whole_of

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
    at = f" on node {device.node}" if device.node else ""
    line = f"{device.device}{at}: {size(device.capacity_bytes)}, free {size(device.free_bytes)}"
    if device.unattributed_bytes > 0:
        line += f", held by nobody known {size(device.unattributed_bytes)}"
    yield line
    for tenant in device.tenants:
        yield from _tenant(tenant)


def _tenant(tenant: TenantReport) -> Iterator[str]:
    held = sum(tag.num_bytes for tag in tenant.tags if tag.backing in ON_DEVICE)
    rest = f" + {size(tenant.residue_bytes)} that stay" if tenant.residue_bytes else ""
    yield f"  {tenant.tenant} ({tenant.gang}): {tenant.state}, {size(held)}{rest}"
    for parts in _alike(tenant.tags):
        yield f"    {_tag(parts)}"


def _alike(tags: Sequence[TagReport]) -> list[list[TagReport]]:
    """Parts of one tag that are in the same place together, in the order of the first of each."""
    found: dict[tuple[str, str, str], list[TagReport]] = {}
    for tag in tags:
        found.setdefault((whole_of(tag.tag), tag.backing, tag.policy), []).append(tag)
    return list(found.values())


def _tag(parts: Sequence[TagReport]) -> str:
    first, on_host = parts[0], sum(part.host_bytes for part in parts)
    copy = f", {size(on_host)} on the host" if on_host and first.backing != "host" else ""
    total = size(sum(part.num_bytes for part in parts))
    return f"{whole_of(first.tag):<11}{total:>11}  {WORDS[first.backing]}{copy} [{first.policy}]"


def _timeline(events: Sequence[tuple[float, str, str, str]]) -> Iterator[str]:
    for wall_s, device, tenant, what in events:
        clock = datetime.fromtimestamp(wall_s).strftime("%H:%M:%S.%f")[:-3]
        who = " ".join(filter(None, (device, tenant)))
        yield f"  {clock}  {who}  {what}"
