"""Devices measured and processes watched: by the memory manager on its own node, by a node agent on each other node.

measure   all devices asked about, of all nodes at the same time: half a picture proves nothing
gone      asked for again and again: an agent keeps nothing, so no death is lost with a message or with a process
"""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable, Collection, Mapping

from ...core.actor import ActorContext, MailboxPolicy
from ...core.device_memory import DeviceMeter, DeviceReading, DeviceUse, MeasuredDevice, WatchedProcess
from ...core.errors import MemoryFault, MyxaError
from ...core.process import start_time
from ...core.refs import with_deadline
from ..contracts import NodeAgentContract
from ..daemon_thread import in_daemon_thread


class NodeAgent(NodeAgentContract):
    """One on each node with shared devices, except the manager's."""

    mailbox = MailboxPolicy(size=1024)

    def __init__(self, *, meter: DeviceMeter) -> None:
        self._meter = meter

    async def measure(self, uses: tuple[DeviceUse, ...]) -> tuple[MeasuredDevice, ...]:
        found = await in_daemon_thread(lambda: read_all(self._meter, uses), "measure devices")
        return tuple(
            MeasuredDevice(device, reading.capacity_bytes, reading.free_bytes, reading.driver_bytes)
            for device, reading in found.items()
        )

    async def gone(self, processes: tuple[WatchedProcess, ...]) -> tuple[WatchedProcess, ...]:
        return tuple(process for process in processes if has_ended(process.pid, process.started_at))


def has_ended(pid: int, started_at: int) -> bool:
    """Whether that process has; a number that is used again is another process. psutil was considered: of a process
    that nobody has reaped it says that it is there."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], 0)[0]) or bool(started_at and start_time(pid) != started_at)
    finally:
        os.close(fd)


ASK_S = 5.0
ASK_AGAIN_S = 0.5


class NodeWatch:
    """The manager's side, for all nodes. Made on the manager's loop."""

    def __init__(
        self,
        ctx: ActorContext,
        *,
        node: int,
        agents: Mapping[int, str],
        meter: DeviceMeter,
        on_end: Callable[[WatchedProcess], None],
    ) -> None:
        """`node`: the manager's own. `agents`: actor names, by node, of all others. `on_end`: called once for each
        watched process that ends."""
        self._ctx = ctx
        self._node = node
        self._agents = dict(agents)
        self._meter = meter
        self._on_end = on_end
        self._own = ProcessWatch(lambda pid, started_at: self.ended(WatchedProcess(self._node, pid, started_at)))
        self._watched: dict[int, set[WatchedProcess]] = {}
        """By node."""
        for other, name in self._agents.items():
            ctx.spawn(self._ask_forever(other), name=f"ask {name} for ended processes")

    def knows(self, node: int) -> bool:
        """Whether this node or an agent there can be asked."""
        return node == self._node or node in self._agents

    async def measure(self, uses: Mapping[int, Collection[DeviceUse]], *, within_s: float) -> dict[str, DeviceReading]:
        """`uses`: by node. Raises MemoryFault for a device that cannot be read in time, CallError naming the agent that
        does not answer."""
        parts = [self._measure_at(node, tuple(of_node), within_s) for node, of_node in uses.items()]
        found: dict[str, DeviceReading] = {}
        for part in await asyncio.gather(*parts):
            found |= part
        return found

    async def _measure_at(self, node: int, uses: tuple[DeviceUse, ...], within_s: float) -> dict[str, DeviceReading]:
        if node == self._node:
            return await self._measure_here(uses, within_s)
        measured = await with_deadline(self._agent(node), within_s).measure(uses)
        readings = {m.device: DeviceReading(m.capacity_bytes, m.free_bytes, m.driver_bytes) for m in measured}
        missing = [use.device for use in uses if use.device not in readings]
        if missing:
            raise MemoryFault(f"{self._agents[node]} does not say how full {', '.join(missing)} is", remedy="a bug")
        return readings

    async def _measure_here(self, uses: tuple[DeviceUse, ...], within_s: float) -> dict[str, DeviceReading]:
        try:
            async with asyncio.timeout(within_s):
                return await in_daemon_thread(lambda: read_all(self._meter, uses), "measure devices")
        except TimeoutError as error:
            names = ", ".join(use.device for use in uses)
            raise MemoryFault(f"{names} gave no reading within {within_s:g} s", remedy="see `nvidia-smi`") from error

    def _agent(self, node: int) -> NodeAgentContract:
        name = self._agents.get(node)
        if name is None:
            raise MemoryFault(f"node {node} has no agent of {self._ctx.name}", remedy="add it to roles.memory.nodes")
        return self._ctx.ref(NodeAgentContract, name)

    def watch(self, process: WatchedProcess) -> bool:
        """From now on; False if it is known to be gone already."""
        if process.node == self._node:
            is_there = self._own.watch(process.pid, process.started_at)
            if is_there:
                self._watched.setdefault(self._node, set()).add(process)
            return is_there
        self._watched.setdefault(process.node, set()).add(process)
        return True

    def is_own(self, process: WatchedProcess) -> bool:
        """The manager's process itself."""
        return process.node == self._node and process.pid == os.getpid()

    def ended(self, process: WatchedProcess) -> None:
        """It did; said by the kernel or by an agent."""
        watched = self._watched.get(process.node, set())
        if process in watched:
            watched.discard(process)
            self._on_end(process)

    async def _ask_forever(self, node: int) -> None:
        agent = with_deadline(self._agent(node), ASK_S)
        while True:
            await asyncio.sleep(ASK_AGAIN_S)
            if watched := tuple(self._watched.get(node, ())):
                try:
                    gone = await agent.gone(watched)
                except MyxaError as error:
                    self._ctx.log.info("%s does not say which processes ended: %s", self._agents[node], error)
                    continue
                for process in gone:
                    self.ended(process)

    def close(self) -> None:
        self._own.close()


def read_all(meter: DeviceMeter, uses: Collection[DeviceUse]) -> dict[str, DeviceReading]:
    """One reading of each device. Blocks. Raises MemoryFault for a device that is not there."""
    return {use.device: meter.measure(use.device, use.pids) for use in uses}


class ProcessWatch:
    """Calls `on_end(pid, started_at)` on the loop, once for each watched process that ends. The kernel reports the end
    (pidfd), not silence. A number that is used again is another process: start times tell them apart. psutil was
    considered: it polls."""

    def __init__(self, on_end: Callable[[int, int], None]) -> None:
        self._on_end = on_end
        self._fds: dict[tuple[int, int], int] = {}

    def watch(self, pid: int, started_at: int) -> bool:
        """From now on; False if that process is gone already. `started_at` 0: the process that has the number now."""
        if (pid, started_at) in self._fds or pid == os.getpid():
            return True
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        if started_at and start_time(pid) != started_at:
            os.close(fd)
            return False
        self._fds[pid, started_at] = fd
        asyncio.get_running_loop().add_reader(fd, self._ended, pid, started_at)
        return True

    def _ended(self, pid: int, started_at: int) -> None:
        self._drop(pid, started_at)
        self._on_end(pid, started_at)

    def _drop(self, pid: int, started_at: int) -> None:
        fd = self._fds.pop((pid, started_at), None)
        if fd is not None:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)

    def close(self) -> None:
        for pid, started_at in list(self._fds):
            self._drop(pid, started_at)
