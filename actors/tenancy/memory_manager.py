"""The memory manager: one actor that decides who has the memory of all shared devices, and measures before it gives.

Decisions are `memory/leases`'s, which does no IO; here they are carried out: commands go to tenants by reference,
devices are measured and processes watched by `NodeWatch`, through an agent on each node. The manager holds no device
memory and no context, moves no bytes, and writes nothing down: the tenants of one that is restarted register again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...core.activity import ActivityMeter, TelemetryBuffer
from ...core.actor import PeerEvent
from ...core.clock import Clock
from ...core.device_memory import (
    DeviceMeter,
    DeviceUse,
    LeaseReply,
    LeaseRequest,
    MemoryView,
    TenantReport,
    WatchedProcess,
)
from ...core.errors import CallError, MemoryFault, MyxaError
from ...core.refs import with_deadline
from ...memory.leases.arbiter import Arbiter
from ...memory.leases.switch import (
    ArbiterOptions,
    AskReport,
    Instruction,
    LeaseAnswer,
    Measure,
    PhaseEnded,
    Send,
    TimelineNote,
)
from ..contracts import MemoryContract, MonitorContract, TenantContract
from ..telemetry import report_forever
from .node_agent import NodeWatch

_QUIET_KINDS = frozenset({"state"})
"""For the timeline only; an event for each would drown the others."""
_ANSWER_SLACK_S = 5.0
VIEW_S = 0.5
"""For the measurement of a view."""
TIMELINE_SIZE = 256


@dataclass(frozen=True, slots=True)
class ManagerOptions:
    """Plain settings of the role."""

    arbiter: ArbiterOptions = field(default_factory=ArbiterOptions)
    ask_s: float = 5.0
    measure_s: float = 20.0
    """For all devices of one measurement."""
    node: int = 0
    agents: Mapping[int, str] = field(default_factory=dict[int, str])
    """Actor names of its agents on other nodes with shared devices, by node."""


class MemoryManager(MemoryContract):
    """See the module's head."""

    mailbox_size = 4096

    def __init__(self, *, meter: DeviceMeter, options: ManagerOptions, clock: Clock) -> None:
        self._meter_of_devices = meter
        self._options = options
        self._clock = clock
        self._timeline: deque[tuple[float, str, str, str]] = deque(maxlen=TIMELINE_SIZE)
        """See `MemoryView`."""
        self._waiting: dict[str, list[asyncio.Future[LeaseReply]]] = {}
        self._processes: dict[tuple[str, int], set[WatchedProcess]] = {}
        """(tenant, epoch) -> its processes that have not ended."""
        self._watched: set[str] = set()
        self._poked = asyncio.Event()
        self._measuring: set[tuple[str, tuple[str, ...]]] = set()
        self._look: asyncio.Task[None] | None = None
        """The measurement for a view."""
        self._silent: set[str] = set()
        """Tenants whose silence was said."""

    async def on_start(self) -> None:
        self._arbiter = Arbiter(self._options.arbiter, incarnation=self.ctx.epoch)
        self._meter = ActivityMeter(self.ctx.name, self._clock)
        self._telemetry = TelemetryBuffer(self.ctx.name, self._clock, meter=self._meter)
        self._meter.switch("wait-data", "orders")
        self._node_watch = NodeWatch(
            self.ctx,
            node=self._options.node,
            agents=self._options.agents,
            meter=self._meter_of_devices,
            on_end=self._process_ended,
        )
        send = self.ctx.ref(MonitorContract, "monitor").telemetry
        self.ctx.spawn(report_forever(self._telemetry, send), name="memory-telemetry")
        self.ctx.spawn(self._tick_forever(), name="memory-ticks")

    async def on_stop(self, why: str) -> None:
        for futures in self._waiting.values():
            for future in futures:
                future.cancel()

    async def on_peer(self, event: PeerEvent) -> None:
        """The registry's word that a tenant left. Its processes may live on: their end is seen by pidfd alone."""
        if event.kind not in ("down", "restarted") or event.name not in self._watched:
            return
        known = self._arbiter.ledger.tenants.get(event.name)
        if known is None:
            return
        epoch = known.report.epoch
        if event.kind == "restarted" and epoch >= event.epoch:
            return
        reason = f"it left: {event.reason or event.kind}"
        left = self._processes.get((event.name, epoch), set())
        now = self._clock.monotonic()
        if all(self._node_watch.is_own(process) for process in left):
            self._do(self._arbiter.died(event.name, epoch, reason, now))
        else:
            self._do(self._arbiter.unreachable(event.name, epoch, reason, now))

    async def register(self, report: TenantReport) -> int:
        if not self._node_watch.knows(report.node):
            raise MemoryFault(
                f"{report.tenant} is on node {report.node}, where {self.ctx.name} sees no devices",
                remedy="add the node to roles.memory.nodes",
            )
        self._do(self._arbiter.registered(report, self._clock.monotonic()))
        self._heard(report)
        return self._arbiter.epoch

    async def changed(self, report: TenantReport) -> None:
        self._do(self._arbiter.reported(report, self._clock.monotonic()))
        self._heard(report)

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        future: asyncio.Future[LeaseReply] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(request.request_id, []).append(future)
        self._do(self._arbiter.leased(request, self._clock.monotonic()))
        try:
            async with asyncio.timeout(request.deadline_s + _ANSWER_SLACK_S):
                return await future
        except TimeoutError as error:
            raise MemoryFault(
                f"{self.ctx.name} came to no end of {request.request_id} within {request.deadline_s:g} s",
                remedy="see its log; this is a bug of the manager",
            ) from error

    async def view(self) -> MemoryView:
        """Of devices measured now, or, where that takes too long, as they were measured last."""
        ledger = self._arbiter.ledger
        if self._look is None or self._look.done():
            look = self._measure(Measure("view", tuple(sorted(ledger.devices))))
            self._look = self.ctx.spawn(look, name="measure for a view")
        await asyncio.wait([self._look], timeout=VIEW_S)
        return MemoryView(
            manager=self.ctx.name,
            epoch=self._arbiter.epoch,
            switching=self._arbiter.switching,
            devices=tuple(ledger.view(device) for device in sorted(ledger.devices)),
            timeline=tuple(self._timeline),
        )

    def _do(self, instructions: list[Instruction]) -> None:
        """Carry them out, in order; what takes time is spawned."""
        with self._meter.working("decide"):
            for instruction in instructions:
                self._do_one(instruction)
        self._poked.set()

    def _do_one(self, instruction: Instruction) -> None:
        if isinstance(instruction, Send):
            self.ctx.spawn(self._send(instruction), name=instruction.command.command_id)
        elif isinstance(instruction, Measure):
            key = (instruction.key, instruction.devices)
            if key not in self._measuring:  # a device that hangs is not asked again until it has answered
                self._measuring.add(key)
                self.ctx.spawn(self._measure(instruction), name=f"measure for {instruction.key}")
        elif isinstance(instruction, AskReport):
            self.ctx.spawn(self._ask(instruction.tenant), name=f"ask {instruction.tenant}")
        elif isinstance(instruction, LeaseAnswer):
            self._answer(instruction)
        elif isinstance(instruction, TimelineNote):
            self._note(instruction)
        else:
            self._trace(instruction)

    async def _tick_forever(self) -> None:
        while True:
            now = self._clock.monotonic()
            self._do(self._arbiter.tick(now))
            self._poked.clear()
            wait_s = self._arbiter.wakes_at() - self._clock.monotonic()
            if wait_s > 0:
                try:
                    async with asyncio.timeout(min(wait_s, 60.0)):
                        await self._poked.wait()
                except TimeoutError:
                    continue
            await asyncio.sleep(0.001)

    async def _send(self, send: Send) -> None:
        tenant = with_deadline(self.ctx.ref(TenantContract, send.tenant), send.command.deadline_s + 1.0)
        try:
            reply = await tenant.memory_command(send.command)
        except CallError as error:
            self.ctx.log.info("%s: %s", send.command.command_id, error)
            self._do(self._arbiter.unanswered(send.command.command_id, self._clock.monotonic()))
            return
        self._do(self._arbiter.replied(reply, self._clock.monotonic()))
        self._heard(reply.report)

    async def _ask(self, name: str) -> None:
        try:
            tenant = with_deadline(self.ctx.ref(TenantContract, name), self._options.ask_s)
            report = await tenant.memory_report()
        except CallError as error:
            if name not in self._silent:
                self._silent.add(name)
                self.ctx.log.info("%s does not report: %s", name, error)
            return
        self._silent.discard(name)
        if report is not None:
            self._do(self._arbiter.reported(report, self._clock.monotonic()))
            self._heard(report)

    async def _measure(self, measure: Measure) -> None:
        ledger = self._arbiter.ledger
        try:
            await asyncio.sleep(measure.after_s)
            uses: dict[int, list[DeviceUse]] = {}
            for device in measure.devices:
                pids = sorted({pid for tenant in ledger.on(device) for pid in tenant.report.pids})
                uses.setdefault(ledger.devices[device].node, []).append(DeviceUse(device, tuple(pids)))
            readings = await self._node_watch.measure(uses, within_s=self._options.measure_s)
        except MyxaError as error:
            self.ctx.log.warning("%s could not be measured: %s", ", ".join(measure.devices), error)
            self._do(self._arbiter.unmeasured(measure.key, str(error), self._clock.monotonic()))
            await asyncio.sleep(0.5)
            return
        finally:
            self._measuring.discard((measure.key, measure.devices))
        self._do(self._arbiter.measured(measure.key, readings, self._clock.monotonic()))

    def _answer(self, answer: LeaseAnswer) -> None:
        for future in self._waiting.pop(answer.request_id, []):
            if not future.done():
                future.set_result(answer.reply)
        reply = answer.reply
        values = {f"memory/{phase}_s": seconds for phase, seconds in reply.seconds.items()}
        values |= {
            "memory/copied_bytes": float(reply.copied_bytes),
            "memory/dropped_bytes": float(reply.dropped_bytes),
            "memory/refused": float(not reply.granted),
        }
        self._telemetry.metric(-1, values)
        if not reply.granted:
            self.ctx.log.warning("%s: %s", answer.request_id, reply.reason)

    def _note(self, note: TimelineNote) -> None:
        self._timeline.append((self._clock.wall(), note.device, note.tenant, f"{note.kind}: {note.text}"[:400]))
        if note.kind in ("fenced", "died"):
            self.ctx.log.warning("%s %s: %s", note.tenant, note.kind, note.text)
        if note.kind not in _QUIET_KINDS:
            place = " ".join(word for word in (note.device, note.tenant) if word)
            self._telemetry.event(f"memory-{note.kind.replace(' ', '-')}", f"{place}: {note.text}")

    def _trace(self, phase: PhaseEnded) -> None:
        started_s = self._clock.wall() - (self._clock.monotonic() - phase.started_s)
        spent_s = phase.ended_s - phase.started_s
        for device in phase.devices or ("",):
            self._telemetry.span(phase.phase, "other", started_s, spent_s, track=f"memory {device}", lease=phase.switch)

    def _heard(self, report: TenantReport) -> None:
        """A report is in the books: watch the tenant's name and processes. One that came after the end of its
        processes has brought a dead tenant into the books: it is declared dead right away."""
        if report.tenant not in self._watched:
            self._watched.add(report.tenant)
            self.ctx.watch(report.tenant)
        self._watch_processes(report)

    def _watch_processes(self, report: TenantReport) -> None:
        key = (report.tenant, report.epoch)
        is_new = key not in self._processes
        living = self._processes.setdefault(key, set())
        for pid, started_at in zip(report.pids, report.started_at, strict=False):
            process = WatchedProcess(report.node, pid, started_at)
            if process not in living and self._node_watch.watch(process):
                living.add(process)
        if is_new and not living:
            self.ctx.log.warning("%s: none of its processes %s is there", report.tenant, report.pids)
            self._ended(key)

    def _process_ended(self, process: WatchedProcess) -> None:
        for key, living in list(self._processes.items()):
            if process in living:
                living.discard(process)
                if not living:
                    self._ended(key)

    def _ended(self, key: tuple[str, int]) -> None:
        self._processes.pop(key, None)
        tenant, epoch = key
        self._do(self._arbiter.died(tenant, epoch, "its processes ended", self._clock.monotonic()))
