"""Devices measured and processes watched by an agent on each node; the one of the memory manager's own node is local.

measure   all devices asked about, of all nodes at the same time: half a picture proves nothing
gone      asked for again and again: an agent keeps nothing, so no death is lost with a message or with a process
"""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable, Collection, Mapping

from ...core.actor import ActorContext
from ...core.device_memory import DeviceMeter, DeviceReading, DeviceUse, WatchedProcess
from ...core.errors import MemoryFault, MyxaError
from ...core.process import start_time
from ..contracts import NodeAgentContract
from ..daemon_thread import in_daemon_thread


class NodeAgent(NodeAgentContract):
    """One on each node with shared devices; the manager hosts that of its own node itself."""

    mailbox_size = 1024

    def __init__(self, *, meter: DeviceMeter) -> None:
        self._meter = meter

    async def measure(self, uses: tuple[DeviceUse, ...]) -> dict[str, DeviceReading]:
        def read() -> dict[str, DeviceReading]:
            return {use.device: self._meter.measure(use.device, use.pids) for use in uses}

        return await in_daemon_thread(read, "measure devices")

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
ASK_AGAIN_S = 0.25


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
        self._names = {node: ctx.name, **agents}
        self._agents: dict[int, NodeAgentContract] = {node: NodeAgent(meter=meter)}
        self._agents |= {other: ctx.ref(NodeAgentContract, name) for other, name in agents.items()}
        self._on_end = on_end
        self._watched: dict[int, set[WatchedProcess]] = {}
        """By node."""
        for each, name in self._names.items():
            ctx.spawn(self._ask_forever(each), name=f"ask {name} for ended processes")

    def knows(self, node: int) -> bool:
        return node in self._agents

    async def measure(self, uses: Mapping[int, Collection[DeviceUse]], *, within_s: float) -> dict[str, DeviceReading]:
        """`uses`: by node. Raises MemoryFault for a device that cannot be read in time, CallError naming the agent that
        does not answer."""
        parts = [self._measure_at(node, tuple(of_node), within_s) for node, of_node in uses.items()]
        return {device: reading for part in await asyncio.gather(*parts) for device, reading in part.items()}

    async def _measure_at(self, node: int, uses: tuple[DeviceUse, ...], within_s: float) -> dict[str, DeviceReading]:
        if (agent := self._agents.get(node)) is None:
            raise MemoryFault(f"node {node} has no agent of {self._ctx.name}", remedy="add it to roles.memory.nodes")
        try:
            async with asyncio.timeout(within_s):
                measured = await agent.measure(uses)
        except TimeoutError as error:
            names = ", ".join(use.device for use in uses)
            why = f"{self._names[node]}: {names} gave no reading within {within_s:g} s"
            raise MemoryFault(why, remedy="see `nvidia-smi`") from error
        if missing := {use.device for use in uses} - measured.keys():
            names = ", ".join(sorted(missing))
            raise MemoryFault(f"{self._names[node]} does not say how full {names} is", remedy="a bug")
        return measured

    def watch(self, process: WatchedProcess) -> bool:
        """From now on; False if it is known to be gone already."""
        if process.node == self._node and has_ended(process.pid, process.started_at):
            return False
        self._watched.setdefault(process.node, set()).add(process)
        return True

    def is_own(self, process: WatchedProcess) -> bool:
        """The manager's process itself."""
        return process.node == self._node and process.pid == os.getpid()

    async def _ask_forever(self, node: int) -> None:
        while True:
            await asyncio.sleep(ASK_AGAIN_S)
            if not (watched := tuple(self._watched.get(node, ()))):
                continue
            try:
                async with asyncio.timeout(ASK_S):
                    gone = await self._agents[node].gone(watched)
            except (MyxaError, TimeoutError) as error:
                self._ctx.log.info("%s does not say which processes ended: %s", self._names[node], error)
                continue
            for process in gone:
                if process in self._watched[node]:  # an agent's word may be anything
                    self._watched[node].discard(process)
                    self._on_end(process)
