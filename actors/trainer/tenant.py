"""A trainer rank's side of taking turns: its backend's memory is leased by tag, before anything is loaded.

    (room is made) -> set-up -> loaded -> train -> (the engines' turn) -> (its turn) -> train -> ...

It is the tenant's side of leases, with the backend's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...core.device_memory import AssetStore, Tag, TagPolicy
from ...memory.communicators.residency import CommResidency
from ..telemetry import Reporter
from ..tenancy.tenant import WORKSPACE, CountedRoom, Tenant, TenantOptions
from ..tenancy.time_share import TRAINER, TimeShareOptions

InThread = Callable[[Callable[[], Any]], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class TrainerTenancy:
    """Where the rank's memory lies, and who leases it."""

    device: str
    node: int
    planned: Mapping[Tag, tuple[int, TagPolicy]]
    """What the rank is going to hold: bytes and how they leave."""
    share: TimeShareOptions
    taken: Callable[[], int]
    """Bytes of the device that the backend's steps took and torch keeps."""
    vacate: Callable[[], None]
    """Gives back what the backend's steps left behind; called in the backend's thread."""
    comms: Callable[[], CommResidency] | None = None
    """Makes what releases communicators, in the backend's thread after set-up; None: they stay."""


class BackendTurn:
    """The gate of a backend's thread: closed, nothing that computes is begun; what runs is waited for."""

    def __init__(self, in_thread: InThread) -> None:
        self._in_thread = in_thread
        self._gate = asyncio.Event()

    async def quiesce(self) -> None:
        """Begin nothing more; returns when the thread is idle."""
        self._gate.clear()
        await self._in_thread(int)

    async def resume(self) -> None:
        self._gate.set()

    async def wait(self) -> None:
        while not self._gate.is_set():  # it may be closed again before this wakes up
            await self._gate.wait()


class TrainerTenant(Tenant):
    """See the module's head. To be made on the actor's loop."""

    def __init__(self, report: Reporter, tenancy: TrainerTenancy, in_thread: InThread) -> None:
        """`in_thread`: runs work in the backend's thread, in order."""
        self._tenancy = tenancy
        self.turn = BackendTurn(in_thread)
        options = TenantOptions(
            name=report.ctx.name,
            epoch=report.ctx.epoch,
            gang=TRAINER,
            devices=(tenancy.device,),
            node=tenancy.node,
            planned=dict(tenancy.planned),
        )
        super().__init__(
            options=options, gate=self.turn, in_thread=in_thread, clock=report.clock, telemetry=report.telemetry
        )

    async def set_up(self, store: AssetStore | None) -> None:
        stores = [] if store is None else [store]
        if WORKSPACE in self._tenancy.planned:
            room: dict[Tag, tuple[int, TagPolicy]] = {WORKSPACE: self._tenancy.planned[WORKSPACE]}
            stores.append(CountedRoom(room, is_held=True, taken=self._tenancy.taken, vacate=self._tenancy.vacate))
        comms = None if self._tenancy.comms is None else await self.in_thread(self._tenancy.comms)
        self.loaded(stores, comms)
