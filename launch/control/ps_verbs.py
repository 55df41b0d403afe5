"""The verb `ps`: every actor, where it runs, how it stands and what it does. Asked of the supervisor, the
kernel and the monitor; whoever does not answer leaves blanks."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import Any

import msgspec
import psutil

from ...actors.contracts.roles import BufferContract, MonitorContract
from ...core.actor import with_deadline
from ...core.errors import CallError
from ...core.knobs import Operator
from .verb import Arguments, Room, Verb

ASK_S = 2.0
TIME_PREFIX = "time/"


class ActorRow(msgspec.Struct, frozen=True, kw_only=True):
    """One actor."""

    name: str
    role: str
    node: int
    host: str
    state: str
    """Of the supervision: waiting, starting, up, hung, draining, ending, exited, backing-off, failed, stopped."""
    pid: int
    """0: it has no process now."""
    attempt: int
    """0 is the first start."""
    epoch: int
    """Of its process in the registry; 0: it is not registered."""
    restarts_left: int
    """How often it may fail and be started again now."""
    devices: tuple[int, ...]
    """GPU numbers on its node."""
    uptime_s: float
    """Of its process; 0: it has none."""
    memory_bytes: int
    """Resident memory, of processes of this host; 0: not known."""
    doing: str
    """What it spent most of the last minute with, such as "wait-data 62 %"."""
    note: str = ""
    """What holds it up now, where a person must mend it: its disk."""


async def _ps(room: Room, arguments: Arguments, who: Operator) -> list[ActorRow]:
    roster = room.supervisor.roster()
    now = room.node.clock.wall()
    here = socket.gethostname()
    shares, disk = await asyncio.gather(_shares(room), _disk(room))
    return [
        ActorRow(
            name=actor.name,
            role=actor.role,
            node=actor.node,
            host=actor.host,
            state=actor.state,
            pid=actor.pid,
            attempt=actor.attempt,
            epoch=actor.epoch,
            uptime_s=max(0.0, now - actor.started_wall_s) if actor.pid and actor.started_wall_s else 0.0,
            restarts_left=actor.restarts_left,
            devices=actor.devices,
            memory_bytes=_memory(actor.pid) if actor.pid and actor.host in ("", here) else 0,
            doing=doing(shares.get(f"{TIME_PREFIX}{actor.name}", {})),
            note=disk if actor.name == "buffer" else "",
        )
        for actor in roster
    ]


async def _shares(room: Room) -> Mapping[str, Mapping[str, float]]:
    if not room.node.peers("monitor"):
        return {}
    try:
        return await with_deadline(room.node.ref(MonitorContract, "monitor"), ASK_S).snapshot()
    except CallError:
        return {}


async def _disk(room: Room) -> str:
    if not room.node.peers("buffer"):
        return ""
    try:
        return (await with_deadline(room.node.ref(BufferContract, "buffer"), ASK_S).stats()).disk
    except CallError:
        return ""


def _memory(pid: int) -> int:
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0


def doing(shares: Mapping[str, float]) -> str:
    """Parts of a kind ("wait-data/reward") say more than the kind, where they are most of it."""
    kinds = {name: share for name, share in shares.items() if "/" not in name}
    if not kinds:
        return ""
    kind = max(kinds, key=lambda name: kinds[name])
    parts = {name: share for name, share in shares.items() if name.startswith(f"{kind}/") and share > kinds[kind] / 2}
    return f"{max(parts, key=lambda name: parts[name]) if parts else kind} {kinds[kind] * 100:.0f} %"


VERBS: tuple[Verb[Any], ...] = (Verb("ps", "view", Arguments, "every actor, where it runs and what it does", run=_ps),)
