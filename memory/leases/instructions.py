"""What the sans-IO part of the memory manager wants done. The actor does it and comes back with events."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.device_memory import LeaseReply, MemoryCommand


@dataclass(frozen=True, slots=True)
class Send:
    """A command to that incarnation of a tenant; journalled before it goes. Comes back as `replied` or `failed`."""

    tenant: str
    tenant_epoch: int
    command: MemoryCommand


@dataclass(frozen=True, slots=True)
class Measure:
    """Read these devices, `after_s` from now. Comes back as `measured` under the same key."""

    key: str
    devices: tuple[str, ...]
    after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AskReport:
    """Have a tenant report. Comes back as `reported`, or not at all."""

    tenant: str


@dataclass(frozen=True, slots=True)
class LeaseAnswer:
    """The end of a lease request."""

    request_id: str
    reply: LeaseReply


@dataclass(frozen=True, slots=True)
class Fence:
    """Nothing of this incarnation counts from now on; its memory is taken to be in use until proven free."""

    tenant: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class TimelineNote:
    """Something for the timeline and the event log."""

    device: str
    tenant: str
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class PhaseEnded:
    """A stretch of a switch, for the trace and for `memory/*` metrics."""

    switch: str
    phase: str
    started_s: float
    ended_s: float
    devices: tuple[str, ...] = ()


Instruction = Send | Measure | AskReport | LeaseAnswer | Fence | TimelineNote | PhaseEnded
