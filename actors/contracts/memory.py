"""What a memory manager and its tenants answer to. Declarations only; see `roles.py` for the rest."""

from __future__ import annotations

from ...core.actor import Actor
from ...core.device_memory import (
    DeviceUse,
    LeaseReply,
    LeaseRequest,
    MeasuredDevice,
    MemoryCommand,
    MemoryReply,
    MemoryView,
    TenantReport,
    WatchedProcess,
)
from ...core.handlers import call, cast


class TenantContract(Actor):
    """An actor with memory on a device that it can give back. Trainer ranks and rollout actors answer to it."""

    @call(deadline=300, reentrant=True)
    async def memory_command(self, command: MemoryCommand) -> MemoryReply:
        """One step of a switch. Idempotent by `command_id`; an older epoch is answered, not obeyed."""
        raise NotImplementedError

    @call(deadline=10, reentrant=True)
    async def memory_report(self) -> TenantReport | None:
        """How it stands now; None: it holds no memory that can be leased."""
        raise NotImplementedError


class MemoryContract(Actor):
    """The memory manager of a run: the ledger of all its shared devices."""

    @call(deadline=30, reentrant=True)
    async def register(self, report: TenantReport) -> int:
        """A tenant is there, with all that it holds; returns the manager's epoch. Repeated after every change."""
        raise NotImplementedError

    @cast
    async def changed(self, report: TenantReport) -> None:
        """A registered tenant holds something else now."""
        raise NotImplementedError

    @call(deadline=600, reentrant=True)
    async def lease(self, request: LeaseRequest) -> LeaseReply:
        """Have tags of a gang mapped, making room where there is none; waits its turn, one switch at a time."""
        raise NotImplementedError

    @call(deadline=10, reentrant=True)
    async def process_ended(self, process: WatchedProcess) -> None:
        """Said by the agent of another node, until it is answered; twice does no harm."""
        raise NotImplementedError

    @call(deadline=10, reentrant=True)
    async def view(self) -> MemoryView:
        """Who holds what, in which state, and the timeline."""
        raise NotImplementedError


class NodeAgentContract(Actor):
    """What the memory manager has on a node that is not its own."""

    @call(deadline=30, reentrant=True)
    async def measure(self, uses: tuple[DeviceUse, ...]) -> tuple[MeasuredDevice, ...]:
        """Each device once, now. Raises MemoryFault for one that is not there."""
        raise NotImplementedError

    @call(deadline=10, reentrant=True)
    async def watch(self, processes: tuple[WatchedProcess, ...]) -> tuple[WatchedProcess, ...]:
        """Watch these, too; returns those that are gone already."""
        raise NotImplementedError
