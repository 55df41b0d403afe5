"""What a memory manager and the holders of device memory report to each other, and the two seams of memory leases.

A *tenant* is one actor with memory on one device (a trainer rank) or, in like parts, on several (a rollout actor with
its engine); a *gang* is all tenants that must hold or leave memory together. Memory is leased by *tag*, so two gangs
may overlap while weights are handed over. Events of one switch:

    lease       the leader of the trainers asks that tags of a gang be mapped; the manager then sends
    survey      to every tenant: report what you hold, and how each tag can leave the device; obey nothing older
    drain       to every member of the gang that must make room: finish what runs, admit nothing, synchronise
    release     the tags that have to go leave the device, by the policy of each
    restore     to every member of the asking gang, once measured free memory holds what it will take
    commit      to every drained tenant that may continue with what it still holds

Ages are epochs: a command of an older one has no effect. `AssetStore` owns bytes on a device for a tenant; its methods
block and are called in one thread of the tenant's choosing, never on an event loop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal, Protocol

from .messages import Record

Tag = Literal[
    "params", "grads", "masters", "optimizer", "optimizer.1", "optimizer.2", "optimizer.3", "optimizer.4",
    "optimizer.5", "optimizer.6", "optimizer.7", "frozen", "workspace", "weights", "kv_cache", "cuda_graph", "nccl",
    "context",
]  # fmt: skip
OPTIMIZER_PARTS: tuple[Tag, ...] = (
    "optimizer", "optimizer.1", "optimizer.2", "optimizer.3", "optimizer.4", "optimizer.5", "optimizer.6",
    "optimizer.7",
)  # fmt: skip
"""An optimizer's moments are the most that has to be copied, and they are not read before the update. So they lie in
parts: what fits on the device beside the other side stays there, and what left comes back while gradients are made."""
TagPolicy = Literal["discard", "rematerialise", "backup", "keep"]
"""How a tag leaves: dropped (zeros on return), rebuilt by its owner, copied to the host (not while clean), never."""
Backing = Literal["mapped_dirty", "mapped_clean", "copy_out", "host", "discarded", "copy_in", "poisoned"]
TenantState = Literal["quiet", "active", "draining", "moving"]
"""Its gate is closed and nothing runs; it may run; it finishes what runs; tags leave or come back."""
CommandKind = Literal["survey", "drain", "release", "restore", "commit"]


class TagReport(Record, frozen=True):
    """One tag of one tenant."""

    tag: Tag
    num_bytes: int
    """On each of the tenant's devices when mapped, rounded to what the device hands out."""
    policy: TagPolicy
    backing: Backing
    host_bytes: int = 0
    """Held on the host for it now."""


class TenantReport(Record, frozen=True):
    """All that a manager needs to know of a tenant; in the answer to each command, and when it is asked for."""

    tenant: str
    epoch: int
    """Of the tenant's process incarnation."""
    gang: str
    devices: tuple[str, ...]
    """UUIDs of GPUs, or "host:<n>" for memory of the host in place of a device ("host:<n>@<node>" where a run has
    several nodes of them); one name, one device of the run. Fixed for an incarnation. With several devices, a tag is on
    all of them or on none, and all bytes here are those of the fullest one."""
    pids: tuple[int, ...]
    """Processes whose memory this is: the actor's own, and an engine's."""
    state: TenantState
    tags: tuple[TagReport, ...]
    reserved_bytes: int = 0
    """Of the mapped tags' bytes: leased and not taken from the device yet, of what is going to be loaded and of room
    for a step."""
    node: int = 0


class MemoryCommand(Record, frozen=True, kw_only=True):
    """One step of a switch, for one tenant. Idempotent: the same id gets the same reply."""

    command_id: str
    epoch: int
    kind: CommandKind
    tags: tuple[Tag, ...] = ()
    deadline_s: float = 60.0
    tenant_epoch: int = 0
    """Of the incarnation that is meant: another one refuses. 0: any incarnation of that name."""


class MemoryReply(Record, frozen=True, kw_only=True):
    """What a tenant did."""

    command_id: str
    report: TenantReport
    accepted: bool = True
    reason: str = ""
    copied_bytes: int = 0
    """Between device and host."""


class LeaseRequest(Record, frozen=True, kw_only=True):
    """Tags of a gang that are to be mapped on every device it uses."""

    gang: str
    tags: tuple[Tag, ...]
    is_active: bool = True
    """False: mapped for others to write into (weights handed over); the gang does not run yet."""
    quiet: tuple[str, ...] = ()
    """Gangs that must not run meanwhile, whether or not they have to make room."""
    deadline_s: float = 120.0
    request_id: str
    """The same id asked again gets the same lease."""


class LeaseReply(Record, frozen=True, kw_only=True):
    """Whether all of it is mapped now."""

    granted: bool
    epoch: int
    reason: str = ""
    """Of a refusal: what is short, on which device, who holds it."""
    seconds: dict[str, float] = {}
    """Phases of the switch as the manager saw them: drain, release, verify, restore."""
    copied_bytes: int = 0


def whole_of(tag: str) -> str:
    """The tag that this one is a part of, or itself."""
    return tag.partition(".")[0]


def wholes(tags: Iterable[str]) -> str:
    """Tags for people, without their parts: "params, optimizer"."""
    return ", ".join(dict.fromkeys(whole_of(tag) for tag in tags))


class DeviceUse(Record, frozen=True):
    """A device that is to be measured."""

    device: str
    pids: tuple[int, ...]
    """Processes that are known to use it; a device that is made of the host's memory is measured by them."""


class DeviceView(Record, frozen=True):
    """One device, for people."""

    device: str
    capacity_bytes: int
    free_bytes: int
    """Measured."""
    unattributed_bytes: int
    """Used by processes that are no tenants."""
    tenants: tuple[TenantReport, ...]
    node: int = 0


class MemoryView(Record, frozen=True):
    """Answer to `myxa mem`."""

    manager: str
    epoch: int
    switching: str
    """What is being switched; empty: nothing."""
    devices: tuple[DeviceView, ...]
    timeline: tuple[tuple[float, str, str, str], ...]
    """(wall seconds, device, tenant, what happened), oldest first, bounded."""


class AssetStore(Protocol):
    """Bytes of one tenant on one device, by tag. Both commands are idempotent; a tag this store does not have is passed
    over. After an exception `report` is still true, tag by tag (`poisoned`: contents are lost)."""

    def report(self) -> tuple[TagReport, ...]:
        """Every tag it has, mapped or not; quick, safe from any thread."""
        ...

    def release(self, tags: Collection[Tag]) -> int:
        """By the policy of each; returns the bytes copied to the host. Raises MemoryFault."""
        ...

    def restore(self, tags: Collection[Tag]) -> int:
        """Map them again and put their contents back; returns the bytes that are copied. Raises MemoryFault."""
        ...


class DeviceReading(Record, frozen=True):
    """One measurement of one device."""

    capacity_bytes: int
    free_bytes: int
    driver_bytes: int = 0
    """That the driver keeps for itself: neither free nor used by a process; 0: unknown."""
