"""All decisions of a node's memory manager, without IO: events in, instructions out, time as an argument.

Leases wait their turn in order of arrival; two may be under way at once only if no gang connects their devices, so a
device is in one transition at most. Epochs grow by one with every plan that is carried out, and with every tenant that
is taken back after it was fenced. Restarted, the manager knows of its tenants what its journal says, trusts none of it,
and begins with an epoch that no predecessor can have used.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ...core.device_memory import DeviceReading, LeaseReply, LeaseRequest, MemoryReply, TenantReport, wholes
from .book import Book, Incarnation
from .instructions import Answer, Ask, Fence, Instruction, Send, Told
from .overrun import overruns
from .recovery import Recovery
from .refusal import in_words, place_of
from .switch import Switch, SwitchOptions
from .wake import Wake

EPOCHS_PER_MANAGER = 1000
"""A restarted manager begins so far above the last epoch that its journal has."""
MAX_ANSWERS = 256
_FOR_EVER = float("inf")


@dataclass(frozen=True, slots=True)
class ArbiterOptions:
    """Limits of one node."""

    reserve_bytes: int = 1 << 30
    margin_bytes: int = 64 << 20
    alarm_bytes: int = 256 << 20
    """Memory that nobody registered, beyond which somebody should know."""
    switch: SwitchOptions = field(default_factory=SwitchOptions)


@dataclass(slots=True)
class _Queued:
    request: LeaseRequest
    since: float
    until: float


class Arbiter:
    """See the module's head. Every event method returns what is to be done now."""

    def __init__(self, options: ArbiterOptions, *, last_epoch: int = 0, known: Iterable[TenantReport] = ()) -> None:
        """`last_epoch`, `known`: from the journal of the manager before this one."""
        self._options = options
        self.book = Book(reserve_bytes=options.reserve_bytes, margin_bytes=options.margin_bytes)
        self.epoch = last_epoch + EPOCHS_PER_MANAGER if last_epoch else 0
        self._queue: deque[_Queued] = deque()
        self._running: list[Switch] = []
        self._answers: OrderedDict[str, LeaseReply] = OrderedDict()
        self._out: list[Instruction] = []
        self._recovery = Recovery(self.book, self._next_epoch, self._out.append)
        self._wake = Wake(self.book, self._out.append, alarm_bytes=options.alarm_bytes)
        for report in known:
            self.book.accept(report)
            self.book.fence(report.tenant, "the manager was restarted and has not heard of it since")
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
        before = self.book.tenants.get(report.tenant)
        self._accept(report, now)
        after = self.book.tenants.get(report.tenant)
        if after is not None and after is not before:
            self._told(report, "registered", f"gang {report.gang}, {report.state}, pids {report.pids}")
            if before is not None:
                self._lost(report.tenant, now)
        return self._go(now)

    def reported(self, report: TenantReport, now: float) -> list[Instruction]:
        """A tenant that is known says how it stands; others have to register."""
        if report.tenant in self.book.tenants:
            self._accept(report, now)
        return self._go(now)

    def leased(self, request: LeaseRequest, now: float) -> list[Instruction]:
        """Somebody asks. An id that was answered is answered again; one that waits goes on waiting."""
        if (known := self._answers.get(request.request_id)) is not None:
            self._out.append(Answer(request.request_id, known))
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
            if device in self.book.devices:
                self.book.devices[device].reading = reading
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
        self.book.lost_a_process(tenant, epoch)

    def died(self, tenant: str, epoch: int, reason: str, now: float) -> list[Instruction]:
        """All processes of an incarnation ended."""
        gone = self.book.died(tenant, epoch)
        if gone is not None:
            self._told(gone.report, "died", f"{reason}; {in_words(gone.held_bytes)} to be proven free")
            self._out.append(Fence(tenant, epoch, reason))
            self._recovery.forget(tenant)
            if self.book.tenants.get(tenant) is gone:
                self._lost(tenant, now)
        return self._go(now)

    def unreachable(self, tenant: str, epoch: int, reason: str, now: float) -> list[Instruction]:
        """It left the registry, but its processes have not been seen to end: it counts, and is told nothing."""
        known = self.book.tenants.get(tenant)
        if known is not None and known.report.epoch == epoch and known.is_usable:
            self.book.fence(tenant, reason)
            self._told(known.report, "fenced", reason)
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
        before = self.book.tenants.get(report.tenant)
        old = before.report if before is not None else None
        after = self.book.accept(report)
        if after is None:
            return
        if old is not None and after is before:
            for words in overruns(old, report):
                self._told(report, "overrun", words)
            if old.state != report.state:
                self._told(report, "state", f"{old.state} -> {report.state}")
        if after.fenced:
            self._recovery.watch(report.tenant, now)
            self._recovery.reported(report.tenant, now)

    def _told(self, report: TenantReport, kind: str, text: str) -> None:
        self._out.append(Told(place_of(report), report.tenant, kind, text))

    def _lost(self, tenant: str, now: float) -> None:
        for switch in list(self._running):
            switch.lost(tenant, now)

    def _go(self, now: float) -> list[Instruction]:
        """End what is over, begin what can begin, hand out what is to be done."""
        while True:
            over = [switch for switch in self._running if switch.is_over]
            for switch in over:
                self._running.remove(switch)
                for tenant in self.book.tenants.values():
                    if tenant.fenced and not tenant.is_dead:
                        self._recovery.watch(tenant.name, now)
            if not self._begin(now) and not over:
                break
        out = [self._noted(instruction) for instruction in self._out]
        self._out.clear()
        return out

    def _noted(self, instruction: Instruction) -> Instruction:
        if isinstance(instruction, Answer):
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
        patience = min(half, self._options.switch.ghost_s)
        return self._is_deaf(queued.request, devices) and now < queued.since + patience

    def _is_deaf(self, request: LeaseRequest, devices: frozenset[str]) -> bool:
        """Members that this manager has not heard of since it was restarted, or that are being taken back."""
        gangs = {request.gang, *request.quiet}
        return any(
            tenant.fenced
            and not tenant.is_dead
            and (tenant.report.gang in gangs or not devices.isdisjoint(tenant.report.devices))
            for tenant in self.book.tenants.values()
        )

    def _start(self, queued: _Queued, devices: frozenset[str], now: float) -> None:
        request = queued.request
        for device in sorted(devices):
            self._out.append(Told(device, "", "switch", f"{request.gang} asks for {wholes(request.tags)}"))
        switch = Switch(
            self.book,
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
        self._out.append(Answer(queued.request.request_id, LeaseReply(granted=False, epoch=self.epoch, reason=reason)))

    def _refuse_unknown(self, queued: _Queued) -> None:
        reason = f"refused: no tenant of gang {queued.request.gang!r} is registered"
        self._out.append(Answer(queued.request.request_id, LeaseReply(granted=False, epoch=self.epoch, reason=reason)))

    def _devices_of(self, request: LeaseRequest) -> frozenset[str]:
        """Every device that a switch for this request might touch: gangs that share a device hang together."""
        gangs = {request.gang, *request.quiet}
        live = [t for t in self.book.tenants.values() if not t.is_dead]
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
        """Of that name, if it lives."""
        return self.book.tenants.get(tenant)


__all__ = ["Arbiter", "ArbiterOptions", "Ask", "Send"]
