"""All decisions of a node's memory manager, without IO: events in, instructions out, time as an argument.

Leases wait in order of arrival. Two may run at once only if no gang connects their devices, so a device is in at most
one transition. The epoch grows by one with every plan that is carried out, and with every fenced tenant that is taken
back. A restarted manager reads its tenants from the journal, treats them as fenced, and begins with an epoch that no
predecessor can have used.

`Recovery` takes fenced tenants back. A live fenced tenant is asked for a report until its state is stable. Then
it gets one command of a new epoch that changes nothing (an active one commits, another one drains). Once it has
answered, no older command can have an effect on it, its report is the truth, and it may get commands again. `Wake`
watches devices without a switch: it proves the memory of dead tenants free and reports memory of unknown processes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ...core.device_memory import (
    DeviceReading,
    LeaseReply,
    LeaseRequest,
    MemoryCommand,
    MemoryReply,
    TenantReport,
    wholes,
)
from .instructions import AskReport, Fence, Instruction, LeaseAnswer, Measure, Send, TimelineNote
from .lease_ledger import PROOF_GAP_S, Incarnation, LeaseLedger, in_words, place_of
from .switch import Switch, SwitchOptions
from .tenant_states import STABLE, is_mapped

ASK_S = 0.5
COMMAND_S = 5.0
_FOR_EVER = float("inf")


@dataclass(slots=True)
class _Watched:
    due: float
    command: MemoryCommand | None = None


class Recovery:
    """Takes fenced tenants back."""

    def __init__(self, ledger: LeaseLedger, next_epoch: Callable[[], int], emit: Callable[[Instruction], None]) -> None:
        self._ledger = ledger
        self._next_epoch = next_epoch
        self._emit = emit
        self._watched: dict[str, _Watched] = {}

    def watch(self, tenant: str, now: float) -> None:
        """It is fenced from now on."""
        self._watched.setdefault(tenant, _Watched(now))

    def forget(self, tenant: str) -> None:
        """It died."""
        self._watched.pop(tenant, None)

    def reported(self, tenant: str, now: float) -> None:
        """It sent a report."""
        watched, known = self._watched.get(tenant), self._ledger.tenants.get(tenant)
        if watched is None or known is None or watched.command is not None or known.report.state not in STABLE:
            return
        kind = "commit" if known.report.state == "active" else "drain"
        epoch = self._next_epoch()
        watched.command = MemoryCommand(
            command_id=f"recover.{epoch}.{tenant}",
            epoch=epoch,
            kind=kind,
            deadline_s=COMMAND_S,
            tenant_epoch=known.report.epoch,
        )
        watched.due = now + COMMAND_S
        self._emit(Send(tenant, known.report.epoch, watched.command))

    def replied(self, reply: MemoryReply, now: float) -> None:
        """Perhaps to a command of ours; the report is in the books."""
        name = reply.report.tenant
        watched, known = self._watched.get(name), self._ledger.tenants.get(name)
        if watched is None or watched.command is None or known is None:
            return
        if watched.command.command_id != reply.command_id:
            return
        watched.command = None
        watched.due = now + ASK_S
        if reply.accepted and reply.report.state in STABLE:
            known.fenced = ""
            known.promised.clear()
            del self._watched[name]
            self._emit(TimelineNote(place_of(reply.report), name, "taken back", f"it is {reply.report.state}"))

    def tick(self, now: float) -> None:
        """AskReport again those who are due."""
        for name, watched in list(self._watched.items()):
            known = self._ledger.tenants.get(name)
            if known is None or known.is_dead or not known.fenced:
                del self._watched[name]
            elif now >= watched.due:
                watched.command = None
                watched.due = now + ASK_S
                self._emit(AskReport(name))

    def wakes_at(self) -> float:
        """When `tick` has something to do."""
        return min((w.due for w in self._watched.values()), default=_FOR_EVER)


WATCH_S = 5.0
"""A quiet device is measured so often."""
UNPROVEN_S = 0.05
"""One whose dead are not proven gone, so often."""
KEY = "watch"


class Wake:
    """The watch over devices without a switch. Keeps each device's baseline of unattributed memory."""

    def __init__(
        self, ledger: LeaseLedger, emit: Callable[[Instruction], None], *, alarm_bytes: int = 256 << 20
    ) -> None:
        self._ledger = ledger
        self._emit = emit
        self._alarm_bytes = alarm_bytes
        self._due: dict[str, float] = {}
        self._gone_since: dict[str, float] = {}
        self._alarmed: set[str] = set()
        self._extra = float("inf")

    def at(self, when: float) -> None:
        """Ask for a tick at that time."""
        self._extra = min(self._extra, when)

    def measured(self, device: str, now: float, *, is_busy: bool, is_moving: bool) -> None:
        """A reading is in the books. `is_moving`: tenants of the device come or go right now, so
        that the books and the reading are of different moments, and prove nothing."""
        if any(g.is_dead for g in self._ledger.unproven_on([device])):
            if is_moving:
                self._gone_since.pop(device, None)
            else:
                self._prove(device, now)
        elif not is_busy:
            self._ledger.settle_baseline(device)
            self._alarm(device, self._ledger.unattributed(device))

    def _prove(self, device: str, now: float) -> None:
        """Two readings, 20 ms apart, that have the memory of the dead free."""
        if not self._ledger.dead_are_gone(device):
            self._gone_since.pop(device, None)
        elif device not in self._gone_since:
            self._gone_since[device] = now
        elif now - self._gone_since[device] >= PROOF_GAP_S:
            del self._gone_since[device]
            for dead in self._ledger.proven(device):
                self._emit(TimelineNote(device, dead.name, "proven free", in_words(dead.held_bytes)))

    def _alarm(self, device: str, num_bytes: int) -> None:
        if num_bytes > self._alarm_bytes and device not in self._alarmed:
            self._alarmed.add(device)
            self._emit(
                TimelineNote(device, "", "unattributed", f"{in_words(num_bytes)} are held by unregistered processes")
            )
        elif num_bytes <= self._alarm_bytes:
            self._alarmed.discard(device)

    def tick(self, now: float, busy: set[str]) -> None:
        """Measure what is due. A device in a switch is measured by it, but its dead are proven all the same."""
        if now >= self._extra:
            self._extra = float("inf")
        unproven = self._unproven_devices()
        due = [d for d in self._ledger.devices if now >= self._due_of(d, d in unproven)]
        for device in due:
            self._due[device] = now
        if wanted := sorted(d for d in due if d in unproven or d not in busy):
            self._emit(Measure(KEY, tuple(wanted)))

    def _unproven_devices(self) -> set[str]:
        """Devices whose dead are not proven gone."""
        return {device for device in self._ledger.devices if any(g.is_dead for g in self._ledger.unproven_on([device]))}

    def _due_of(self, device: str, is_unproven: bool) -> float:
        last = self._due.get(device)
        return -float("inf") if last is None else last + (UNPROVEN_S if is_unproven else WATCH_S)

    def wakes_at(self) -> float:
        """When `tick` has something to do."""
        unproven = self._unproven_devices()
        return min([self._extra, *(self._due_of(d, d in unproven) for d in self._ledger.devices)])


TOLERANCE = 0.02


def overruns(before: TenantReport, after: TenantReport) -> Iterator[str]:
    """A sentence for each mapped tag that is larger than it was by more than 2 %. What was planned before anything was
    loaded is an estimate, and no promise."""
    if before.state in ("cold", "granted") or before.reserved_bytes:
        return
    known = {tag.tag: tag.num_bytes for tag in before.tags}
    for tag in after.tags:
        old = known.get(tag.tag, 0)
        if old and is_mapped(tag) and tag.num_bytes > old * (1 + TOLERANCE):
            yield f"{tag.tag} grew from {in_words(old)} to {in_words(tag.num_bytes)}"


EPOCHS_PER_MANAGER = 1000
"""A restarted manager begins so far above the last epoch that its journal has."""
MAX_ANSWERS = 256


@dataclass(frozen=True, slots=True)
class ArbiterOptions:
    """Limits of one node."""

    reserve_bytes: int = 1 << 30
    margin_bytes: int = 64 << 20
    alarm_bytes: int = 256 << 20
    """Unregistered memory beyond which an alarm is raised."""
    switch: SwitchOptions = field(default_factory=SwitchOptions)


@dataclass(slots=True)
class _Queued:
    request: LeaseRequest
    since: float
    until: float


class Arbiter:
    """All decisions of one node. Every event method returns the instructions to carry out now."""

    def __init__(self, options: ArbiterOptions, *, last_epoch: int = 0, known: Iterable[TenantReport] = ()) -> None:
        """`last_epoch`, `known`: from the journal of the manager before this one."""
        self._options = options
        self.ledger = LeaseLedger(reserve_bytes=options.reserve_bytes, margin_bytes=options.margin_bytes)
        self.epoch = last_epoch + EPOCHS_PER_MANAGER if last_epoch else 0
        self._queue: deque[_Queued] = deque()
        self._running: list[Switch] = []
        self._answers: OrderedDict[str, LeaseReply] = OrderedDict()
        self._out: list[Instruction] = []
        self._recovery = Recovery(self.ledger, self._next_epoch, self._out.append)
        self._wake = Wake(self.ledger, self._out.append, alarm_bytes=options.alarm_bytes)
        for report in known:
            self.ledger.accept(report)
            self.ledger.fence(report.tenant, "the manager was restarted and has not heard of it since")
            self._recovery.watch(report.tenant, 0.0)

    @property
    def switching(self) -> str:
        """What is under way, for people."""
        return "; ".join(
            f"{s.request.gang}: {wholes(s.request.tags)} on {', '.join(sorted(s.devices))} ({s.stage})"
            for s in self._running
        )

    # -- events

    def registered(self, report: TenantReport, now: float) -> list[Instruction]:
        """A tenant is there, or says again what it holds."""
        before = self.ledger.tenants.get(report.tenant)
        self._accept(report, now)
        after = self.ledger.tenants.get(report.tenant)
        if after is not None and after is not before:
            self._note(report, "registered", f"gang {report.gang}, {report.state}, pids {report.pids}")
            if before is not None:
                self._lost(report.tenant, now)
        return self._go(now)

    def reported(self, report: TenantReport, now: float) -> list[Instruction]:
        """A tenant that is known reports its state; others have to register."""
        if report.tenant in self.ledger.tenants:
            self._accept(report, now)
        return self._go(now)

    def leased(self, request: LeaseRequest, now: float) -> list[Instruction]:
        """A lease request. An id that was answered gets the same answer; a waiting one keeps its place."""
        if (known := self._answers.get(request.request_id)) is not None:
            self._out.append(LeaseAnswer(request.request_id, known))
        elif not any(request.request_id == r.request_id for r in self._requests()):
            self._queue.append(_Queued(request, now, now + request.deadline_s))
        return self._go(now)

    def replied(self, reply: MemoryReply, now: float) -> list[Instruction]:
        """A tenant answered a command."""
        self._accept(reply.report, now)
        self._recovery.replied(reply, now)
        for switch in list(self._running):
            switch.replied(reply, now)
        return self._go(now)

    def unanswered(self, command_id: str, now: float) -> list[Instruction]:
        """A call of a command ended without an answer."""
        for switch in self._running:
            switch.unanswered(command_id, now)
        return self._go(now)

    def measured(self, key: str, readings: Mapping[str, DeviceReading], now: float) -> list[Instruction]:
        """Devices were read."""
        for device, reading in readings.items():
            if device in self.ledger.devices:
                self.ledger.devices[device].reading = reading
                on_it = [switch for switch in self._running if device in switch.devices]
                is_moving = any(switch.is_moving for switch in on_it)
                self._wake.measured(device, now, is_busy=bool(on_it), is_moving=is_moving)
        for switch in list(self._running):
            if switch.request.request_id == key:
                switch.measured(now)
            elif switch.devices & readings.keys():
                switch.noticed()
        return self._go(now)

    def unmeasured(self, key: str, reason: str, now: float) -> list[Instruction]:
        """A measurement ended without readings; it is asked for again when that is due."""
        for switch in self._running:
            if switch.request.request_id == key:
                switch.unmeasured(reason)
        return self._go(now)

    def lost_a_process(self, tenant: str, epoch: int) -> None:
        """One of an incarnation's processes ended; that it is dead is said when the last one has."""
        self.ledger.lost_a_process(tenant, epoch)

    def died(self, tenant: str, epoch: int, reason: str, now: float) -> list[Instruction]:
        """All processes of an incarnation ended."""
        gone = self.ledger.died(tenant, epoch)
        if gone is not None:
            self._note(gone.report, "died", f"{reason}; {in_words(gone.held_bytes)} to be proven free")
            self._out.append(Fence(tenant, epoch, reason))
            self._recovery.forget(tenant)
            if self.ledger.tenants.get(tenant) is gone:
                self._lost(tenant, now)
        return self._go(now)

    def unreachable(self, tenant: str, epoch: int, reason: str, now: float) -> list[Instruction]:
        """It left the registry without a seen end of its processes: its memory counts, and it gets no commands."""
        known = self.ledger.tenants.get(tenant)
        if known is not None and known.report.epoch == epoch and known.is_usable:
            self.ledger.fence(tenant, reason)
            self._note(known.report, "fenced", reason)
            self._out.append(Fence(tenant, epoch, reason))
            self._recovery.watch(tenant, now)
            self._lost(tenant, now)
        return self._go(now)

    def tick(self, now: float) -> list[Instruction]:
        """Time passed."""
        for switch in list(self._running):
            switch.tick(now)
        self._recovery.tick(now)
        self._wake.tick(now, {d for s in self._running for d in s.devices})
        return self._go(now)

    def wakes_at(self) -> float:
        """When `tick` is due at the latest."""
        due = [self._recovery.wakes_at(), self._wake.wakes_at()]
        due += [switch.wakes_at() for switch in self._running]
        due += [queued.until for queued in self._queue]
        return min(due, default=_FOR_EVER)

    # -- inside

    def _next_epoch(self) -> int:
        self.epoch += 1
        return self.epoch

    def _requests(self) -> list[LeaseRequest]:
        return [q.request for q in self._queue] + [s.request for s in self._running]

    def _accept(self, report: TenantReport, now: float) -> None:
        before = self.ledger.tenants.get(report.tenant)
        old = before.report if before is not None else None
        after = self.ledger.accept(report)
        if after is None:
            return
        if old is not None and after is before:
            for words in overruns(old, report):
                self._note(report, "overrun", words)
            if old.state != report.state:
                self._note(report, "state", f"{old.state} -> {report.state}")
        if after.fenced:
            self._recovery.watch(report.tenant, now)
            self._recovery.reported(report.tenant, now)

    def _note(self, report: TenantReport, kind: str, text: str) -> None:
        self._out.append(TimelineNote(place_of(report), report.tenant, kind, text))

    def _lost(self, tenant: str, now: float) -> None:
        for switch in list(self._running):
            switch.lost(tenant, now)

    def _go(self, now: float) -> list[Instruction]:
        """End what is over, begin what can begin, hand out what is to be done."""
        while True:
            over = [switch for switch in self._running if switch.is_over]
            for switch in over:
                self._running.remove(switch)
                for tenant in self.ledger.tenants.values():
                    if tenant.fenced and not tenant.is_dead:
                        self._recovery.watch(tenant.name, now)
            if not self._begin(now) and not over:
                break
        out = [self._noted(instruction) for instruction in self._out]
        self._out.clear()
        return out

    def _noted(self, instruction: Instruction) -> Instruction:
        if isinstance(instruction, LeaseAnswer):
            self._answers[instruction.request_id] = instruction.reply
            while len(self._answers) > MAX_ANSWERS:
                self._answers.popitem(last=False)
        return instruction

    def _begin(self, now: float) -> bool:
        """Start what has its devices for itself, in order; True if something began or was refused."""
        taken = {device for switch in self._running for device in switch.devices}
        for queued in list(self._queue):
            devices = self._devices_of(queued.request)
            if now >= queued.until:
                self._queue.remove(queued)
                self._refuse_queued(queued, now)
                return True
            if devices & taken:
                taken |= devices  # those behind it do not overtake it on any of its devices
                continue
            if self._may_hear_more(queued, devices, now):
                taken |= devices
                self._wake.at(now + 0.1)
                continue
            self._queue.remove(queued)
            if devices:
                self._start(queued, devices, now)
            else:
                self._refuse_unknown(queued)
            return True
        return False

    def _may_hear_more(self, queued: _Queued, devices: frozenset[str], now: float) -> bool:
        """Whether waiting a little may bring members that did not register yet, or that are being taken back."""
        half = 0.5 * (queued.until - queued.since)
        if not devices:
            return now < queued.since + min(half, self._options.switch.settle_s)
        patience = min(half, self._options.switch.unproven_s)
        return self._is_deaf(queued.request, devices) and now < queued.since + patience

    def _is_deaf(self, request: LeaseRequest, devices: frozenset[str]) -> bool:
        """Members that this manager has not heard of since it was restarted, or that are being taken back."""
        gangs = {request.gang, *request.quiet}
        return any(
            tenant.fenced
            and not tenant.is_dead
            and (tenant.report.gang in gangs or not devices.isdisjoint(tenant.report.devices))
            for tenant in self.ledger.tenants.values()
        )

    def _start(self, queued: _Queued, devices: frozenset[str], now: float) -> None:
        request = queued.request
        for device in sorted(devices):
            self._out.append(TimelineNote(device, "", "switch", f"{request.gang} asks for {wholes(request.tags)}"))
        switch = Switch(
            self.ledger,
            request,
            devices=devices,
            now=now,
            until_s=queued.until,
            epoch=self.epoch,
            next_epoch=self._next_epoch,
            options=self._options.switch,
            emit=self._out.append,
        )
        self._running.append(switch)
        switch.start()

    def _refuse_queued(self, queued: _Queued, now: float) -> None:
        waited = now - queued.since
        behind = self.switching or "tenants that do not answer"
        reason = f"refused: {queued.request.gang} waited {waited:.1f} s for its turn behind {behind}"
        self._out.append(
            LeaseAnswer(queued.request.request_id, LeaseReply(granted=False, epoch=self.epoch, reason=reason))
        )

    def _refuse_unknown(self, queued: _Queued) -> None:
        reason = f"refused: no tenant of gang {queued.request.gang!r} is registered"
        self._out.append(
            LeaseAnswer(queued.request.request_id, LeaseReply(granted=False, epoch=self.epoch, reason=reason))
        )

    def _devices_of(self, request: LeaseRequest) -> frozenset[str]:
        """Every device that a switch for this request might touch: gangs that share a device hang together."""
        gangs = {request.gang, *request.quiet}
        live = [t for t in self.ledger.tenants.values() if not t.is_dead]
        if not any(t.report.gang == request.gang for t in live):
            return frozenset()
        devices: set[str] = set()
        while True:
            more = {device for t in live if t.report.gang in gangs for device in t.report.devices}
            reached = gangs | {t.report.gang for t in live if not more.isdisjoint(t.report.devices)}
            if more == devices and reached == gangs:
                return frozenset(devices)
            devices, gangs = more, reached

    def is_idle(self) -> bool:
        """No lease waits or is being carried out."""
        return not self._queue and not self._running

    def incarnation(self, tenant: str) -> Incarnation | None:
        """Of that name, if there is one."""
        return self.ledger.tenants.get(tenant)


class Timeline:
    """(wall seconds, device, tenant, what happened), oldest first."""

    def __init__(self, size: int = 256) -> None:
        self._ring: deque[tuple[float, str, str, str]] = deque(maxlen=size)

    def add(self, wall_s: float, device: str, tenant: str, what: str) -> None:
        """What happened, in a few words."""
        self._ring.append((wall_s, device, tenant, what[:400]))

    @property
    def rows(self) -> tuple[tuple[float, str, str, str], ...]:
        """All of it."""
        return tuple(self._ring)
