"""The memory manager: one actor that decides who has the memory of all shared devices, and measures before it gives.

`memory/leases` acts on this: tenants called by reference, devices measured by an agent on each node (`NodeAgent`). The
manager holds no device memory, moves no bytes, and writes nothing down: each lease begins by asking the tenants.
"""

from __future__ import annotations

import asyncio
import importlib
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ...core.actor import Actor, PeerEvent
from ...core.daemon_thread import in_daemon_thread
from ...core.device_memory import (
    DeviceReading,
    DeviceUse,
    LeaseReply,
    LeaseRequest,
    MemoryCommand,
    MemoryReply,
    MemoryView,
)
from ...core.errors import CallError, ConfigError, MemoryFault, MyxaError
from ...core.handlers import call
from ...core.refs import with_deadline
from ...core.timeouts import TIMEOUTS
from ...memory.arenas.host_vmm import device_bytes
from ...memory.leases.switch import LeaseOptions, Leases
from ..contracts import MemoryContract, TenantContract
from ..telemetry import Reporter

TIMELINE_SIZE = 256


T = TypeVar("T")


def ask_gpu(gpu: int | str, question: Callable[[Any, Any], T], error: type[MyxaError] = ConfigError) -> T:
    """What NVML answers of a GPU (UUID, or number on this node, whatever CUDA_VISIBLE_DEVICES says); `question` gets
    pynvml and the device's handle. No CUDA context is made, which torch's question would. Raises `error`."""
    try:
        nvml: Any = importlib.import_module("pynvml")  # on GPU hosts only
    except ImportError as missing:
        raise error(f"{gpu}: NVML is not here: {missing}", remedy="pip install nvidia-ml-py") from missing
    try:
        nvml.nvmlInit()  # counts its calls: only the first one costs time
        find = nvml.nvmlDeviceGetHandleByUUID if isinstance(gpu, str) else nvml.nvmlDeviceGetHandleByIndex
        return question(nvml, find(gpu))
    except nvml.NVMLError as wrong:
        raise error(f"GPU {gpu}: {wrong}", remedy="see `nvidia-smi -L`, and roles.*.devices") from wrong


def gpu_uuid(number: int) -> str:
    """Like "GPU-1d2c..."; raises ConfigError for a GPU that is not there."""
    return ask_gpu(number, lambda nvml, handle: str(nvml.nvmlDeviceGetUUID(handle)))


def read_gpu(gpu: int | str, error: type[MyxaError] = ConfigError) -> DeviceReading:
    """How full it is now. Raises `error` for a GPU that is not there."""
    info = ask_gpu(gpu, lambda nvml, handle: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2), error)
    return DeviceReading(int(info.total), int(info.free), int(info.reserved))


class NodeAgent(Actor):
    """One on each node with shared devices; the manager has that of its own node itself."""

    mailbox_size = 1024

    def __init__(self, host_capacity: Mapping[str, int] | None = None) -> None:
        """`host_capacity`: bytes of each "host:<n>" device, whose use is what its tenants hold."""
        self._hosts = host_capacity or {}
        self._turn = asyncio.Lock()
        """A device that hangs is not asked again until it has answered."""

    @call(deadline=30, reentrant=True)
    async def measure(self, uses: tuple[DeviceUse, ...]) -> dict[str, DeviceReading]:
        """Each device once, now. Raises MemoryFault for one that is not there."""

        def read() -> dict[str, DeviceReading]:
            return {use.device: self._read(use) for use in uses}

        async with self._turn:
            return await in_daemon_thread(read, "measure devices")

    def _read(self, use: DeviceUse) -> DeviceReading:
        if not use.device.startswith("host:"):
            return read_gpu(use.device, MemoryFault)
        if use.device not in self._hosts:
            raise MemoryFault(f"{use.device} has no capacity here", remedy="set memory.capacity_mb")
        capacity_bytes = self._hosts[use.device]
        return DeviceReading(capacity_bytes, capacity_bytes - device_bytes(use.pids, use.device))


@dataclass(frozen=True, slots=True)
class ManagerOptions:
    """Plain settings of the role."""

    gangs: Mapping[str, Sequence[str]]
    """Actor names of each gang's tenants."""
    limits: LeaseOptions = field(default_factory=LeaseOptions)
    measure_s: float = 20.0
    node: int = 0
    agents: Mapping[int, str] = field(default_factory=dict[int, str])
    """Actor names of its agents on other nodes with shared devices, by node."""


class MemoryManager(MemoryContract):
    """See the module's head. It is the `Site` of its leases."""

    mailbox_size = 4096

    def __init__(self, *, agent: NodeAgent, options: ManagerOptions) -> None:
        self._own_agent = agent
        self._options = options
        self._timeline: deque[tuple[float, str, str, str]] = deque(maxlen=TIMELINE_SIZE)
        """See `MemoryView`."""
        self._look: asyncio.Task[None] | None = None
        """The reports and the measurement for a view."""

    async def on_start(self) -> None:
        options = self._options
        self._leases = Leases(self, options.gangs, options.limits, self.ctx.clock, incarnation=self.ctx.epoch)
        report = Reporter.begin(self.ctx)
        self._telemetry = report.telemetry
        report.meter.switch("wait-data", "orders")
        for gang in options.gangs:
            self.ctx.watch(f"{gang}/")

    async def on_peer(self, event: PeerEvent) -> None:
        """What an incarnation said last does not count once it is gone."""
        report = self._leases.reports.get(event.name)
        if report is not None and (
            (event.kind == "down" and report.epoch <= event.epoch)
            or (event.kind == "restarted" and report.epoch < event.epoch)
        ):
            del self._leases.reports[event.name]

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        reply = await self._leases.lease(request)
        values = {f"memory/{phase}_s": seconds for phase, seconds in reply.seconds.items()}
        values |= {"memory/copied_bytes": float(reply.copied_bytes), "memory/refused": float(not reply.granted)}
        self._telemetry.metric(-1, values)
        if not reply.granted:
            self.ctx.log.warning("%s: %s", request.request_id, reply.reason)
        return reply

    async def view(self) -> MemoryView:
        """Of tenants and devices now, or, where that takes too long, as they were last."""
        if self._look is None or self._look.done():
            self._look = self.ctx.spawn(self._look_around(), name="look for a view")
        await asyncio.wait([self._look], timeout=TIMEOUTS.memory.view_s)
        ledger = self._leases.ledger()
        return MemoryView(
            manager=self.ctx.name,
            epoch=self._leases.epoch,
            switching=self._leases.switching,
            devices=tuple(ledger.view(device) for device in ledger.devices),
            timeline=tuple(self._timeline),
        )

    async def _look_around(self) -> None:
        async def ask(name: str) -> None:
            try:
                report = await with_deadline(self.ctx.ref(TenantContract, name), TIMEOUTS.memory.view_s).memory_report()
            except CallError:
                return
            if report is not None:
                self._leases.reports[name] = report

        names = [name for gang in self._options.gangs.values() for name in gang if self.is_there(name)]
        await asyncio.gather(*map(ask, names))
        try:
            self._leases.readings |= await self.measure(self._leases.ledger().uses())
        except MyxaError as error:
            self.ctx.log.info("no measurement for a view: %s", error)

    # -- the site of leases

    def is_there(self, tenant: str) -> bool:
        return tenant in self.ctx.peers(tenant)

    async def command(self, tenant: str, command: MemoryCommand, within_s: float) -> MemoryReply:
        return await with_deadline(self.ctx.ref(TenantContract, tenant), within_s).memory_command(command)

    async def measure(self, uses: Mapping[int, Iterable[DeviceUse]]) -> dict[str, DeviceReading]:
        """All devices, of all nodes, at the same time: half a picture proves nothing."""
        parts = await asyncio.gather(*(self._measure_at(node, tuple(of_node)) for node, of_node in uses.items()))
        return {device: reading for part in parts for device, reading in part.items()}

    async def _measure_at(self, node: int, uses: tuple[DeviceUse, ...]) -> dict[str, DeviceReading]:
        name = self.ctx.name if node == self._options.node else self._options.agents.get(node)
        if name is None:
            raise MemoryFault(f"node {node} has no agent of {self.ctx.name}", remedy="add it to roles.memory.nodes")
        agent = self._own_agent if node == self._options.node else self.ctx.ref(NodeAgent, name)
        try:
            async with asyncio.timeout(self._options.measure_s):
                return await agent.measure(uses)
        except TimeoutError as error:
            names = ", ".join(use.device for use in uses)
            why = f"{name}: {names} gave no reading within {self._options.measure_s:g} s"
            raise MemoryFault(why, remedy="see `nvidia-smi`") from error

    def note(self, device: str, tenant: str, kind: str, text: str) -> None:
        self._timeline.append((self.ctx.clock.wall(), device, tenant, f"{kind}: {text}"[:400]))
        place = " ".join(word for word in (device, tenant) if word)
        self._telemetry.event(f"memory-{kind}", f"{place}: {text}")

    def spent(self, switch: str, phase: str, started_s: float, ended_s: float, devices: Iterable[str]) -> None:
        wall_s = self.ctx.clock.wall() - (self.ctx.clock.monotonic() - started_s)
        for device in devices:
            self._telemetry.span(phase, "other", wall_s, ended_s - started_s, track=f"memory {device}", lease=switch)

    def spawn(self, work: Coroutine[Any, Any, LeaseReply], name: str) -> asyncio.Task[LeaseReply]:
        return self.ctx.spawn(work, name=name)
