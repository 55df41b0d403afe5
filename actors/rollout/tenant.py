"""A rollout actor's side of taking turns: its engine registered with the memory manager, and when it may load.

    register -> (room is made) -> load -> loaded -> (weights handed over) -> (its turn) -> (the trainer's turn) -> ...

Knows the engine's turn, the tenant's side of leases and the coordinator; must not know assignments.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from ...core.activity import TelemetryBuffer
from ...core.actor import ActorContext, PeerEvent
from ...core.clock import Clock
from ...core.device_memory import MemoryCommand, MemoryReply, TenantReport
from ...core.errors import EngineError
from ...core.patience import until_answered
from ...core.protocols import Engine, EngineMemory
from ..contracts.memory import MemoryContract
from ..contracts.roles import CoordinatorContract
from ..own_thread import in_own_thread
from ..tenancy.tenant import Tenant, TenantOptions
from ..tenancy.time_share import ROLLOUT
from .engine_turn import EngineTurn


@dataclass(frozen=True, slots=True)
class Tenancy:
    """Where the engine's memory lies, and who leases it."""

    memory: EngineMemory
    devices: tuple[str, ...]
    node: int
    manager: str
    """Actor name."""


class RolloutTenant:
    """See the module's head. To be made on the actor's loop."""

    def __init__(
        self,
        ctx: ActorContext,
        engine: Engine,
        tenancy: Tenancy,
        *,
        telemetry: TelemetryBuffer,
        clock: Clock,
        on_change: Callable[[bool], None],
    ) -> None:
        """`on_change(has_turn)`: the device was given to, or taken from, this engine."""
        self._ctx = ctx
        self._memory = tenancy.memory
        self._manager = tenancy.manager
        self._may_load = asyncio.Event()
        self._has_joined = asyncio.Event()
        self.has_weights = False
        """Whether the version that the engine was given last is on its device."""
        self.turn = EngineTurn(engine, tenancy.memory, on_weights_lost=self._tell_loss, on_change=on_change)
        self._tenant = Tenant(
            options=TenantOptions(
                name=ctx.name,
                epoch=ctx.epoch,
                gang=ROLLOUT,
                devices=tenancy.devices,
                node=tenancy.node,
                planned={r.tag: (r.num_bytes, r.policy) for r in tenancy.memory.memory_tags()},
            ),
            stores=(),
            gate=self.turn,
            in_thread=lambda work: in_own_thread(work, "engine memory"),
            clock=clock,
            pids=tenancy.memory.memory_pids,
            telemetry=telemetry,
        )

    async def register(self) -> None:
        """With the memory manager: room for the engine may be asked for from now on."""
        self._ctx.watch(self._manager)
        await self._tenant.join(self._ctx.ref(MemoryContract, self._manager))

    async def until_room(self) -> None:
        """Until the leader says that the engine may load."""
        await self._may_load.wait()

    async def loaded(self) -> None:
        """The engine holds its memory now."""
        self.turn.started()
        self._tenant.add_store(self.turn)
        await self._tenant.loaded()

    def joined(self) -> None:
        """The coordinator knows the engine."""
        self._has_joined.set()

    async def load(self) -> None:
        """Said by the leader; returns once `joined`."""
        self._may_load.set()
        await self._has_joined.wait()

    async def on_peer(self, event: PeerEvent) -> None:
        """The manager may be another one now."""
        await self._tenant.on_peer(event)

    async def command(self, command: MemoryCommand) -> MemoryReply:
        """One step of a switch."""
        return await self._tenant.command(command)

    def report(self) -> TenantReport:
        """How the engine's memory stands."""
        return self._tenant.report()

    async def _tell_loss(self) -> None:
        self.has_weights = False
        coordinator = self._ctx.ref(CoordinatorContract, "coordinator")
        await until_answered(
            lambda: coordinator.weights_lost(self._ctx.name, self._ctx.epoch),
            who="coordinator",
            clock=self._ctx.clock,
            log=self._ctx.log,
        )


def require(tenant: RolloutTenant | None, name: str) -> RolloutTenant:
    """Raises EngineError for an actor that takes no turns."""
    if tenant is None:
        raise EngineError(f"{name} has its device for itself", remedy='set memory.share = "switch"')
    return tenant
