"""A memory manager's eyes on a node that is not its own: measures devices, watches processes, decides nothing.

It keeps nothing that matters: restarted, it is told again whom to watch. That a process ended it says until the manager
has heard it, so that no death is lost with a message, nor with the manager.
"""

from __future__ import annotations

from ...core.actor import MailboxPolicy
from ...core.assets import DeviceMeter
from ...core.clock import Clock
from ...core.device_memory import DeviceUse, MeasuredDevice, WatchedProcess
from ...core.errors import MyxaError
from ...core.patience import until_answered
from ..contracts.memory import MemoryContract, NodeAgentContract
from ..own_thread import in_own_thread
from .process_watch import ProcessWatch
from .sight import read_all


class NodeAgent(NodeAgentContract):
    """See the module's head. One on each node with shared devices, but the manager's."""

    mailbox = MailboxPolicy(size=1024)

    def __init__(self, *, manager: str, meter: DeviceMeter, clock: Clock) -> None:
        """`manager`: actor name."""
        self._manager = manager
        self._meter = meter
        self._clock = clock
        self._processes: dict[tuple[int, int], WatchedProcess] = {}
        """By pid and start time."""

    async def on_start(self) -> None:
        self._watch = ProcessWatch(self._ended)

    async def on_stop(self, why: str) -> None:
        self._watch.close()

    async def measure(self, uses: tuple[DeviceUse, ...]) -> tuple[MeasuredDevice, ...]:
        found = await in_own_thread(lambda: read_all(self._meter, uses), "measure devices")
        return tuple(
            MeasuredDevice(device, reading.capacity_bytes, reading.free_bytes, reading.driver_bytes)
            for device, reading in found.items()
        )

    async def watch(self, processes: tuple[WatchedProcess, ...]) -> tuple[WatchedProcess, ...]:
        gone: list[WatchedProcess] = []
        for process in processes:
            if self._watch.watch(process.pid, process.started_at):
                self._processes[process.pid, process.started_at] = process
            else:
                gone.append(process)
        return tuple(gone)

    def _ended(self, pid: int, started_at: int) -> None:
        process = self._processes.pop((pid, started_at), None)
        if process is not None:
            self.ctx.spawn(self._tell_end(process), name=f"end of process {pid}")

    async def _tell_end(self, process: WatchedProcess) -> None:
        manager = self.ctx.ref(MemoryContract, self._manager)
        try:
            await until_answered(
                lambda: manager.process_ended(process), who=self._manager, clock=self._clock, log=self.ctx.log
            )
        except MyxaError as error:
            self.ctx.log.warning("%s: that process %d ended is not told: %s", self._manager, process.pid, error)
