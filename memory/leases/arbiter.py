"""All decisions of a run's memory manager, without IO: events in, instructions out, time as an argument.

Leases are carried out one at a time, in order of arrival: trainer and engines share all devices. The epoch grows by one
with every plan that is carried out, and with every fenced tenant that is taken back. A restarted manager knows nothing:
its tenants are the truth, and register with it again. Its epochs are above all that its predecessors can have used, and
each tenant is fenced at first, since a command of a predecessor may be under way to it.

A live fenced tenant is asked for a report until its state is stable. Then it gets one command of a new epoch that
changes nothing (an active one commits, another one drains). Once it has answered, no older command can have an effect
on it, its report is the truth, and it may get commands again.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass

from ...core.device_memory import (
    DeviceReading,
    LeaseReply,
    LeaseRequest,
    MemoryCommand,
    MemoryReply,
    TenantReport,
    wholes,
)
from .lease_ledger import STABLE, LeaseLedger, in_words, place_of
from .switch import ArbiterOptions, AskReport, Instruction, LeaseAnswer, Send, Switch, TimelineNote

ASK_S = 0.5
"""Between two questions to a fenced tenant."""
COMMAND_S = 5.0
"""For the command that takes it back."""
EPOCHS_PER_MANAGER = 1 << 32
MAX_ANSWERS = 256
_FOR_EVER = float("inf")


@dataclass(slots=True)
class _Fenced:
    due: float
    command: MemoryCommand | None = None
    """That takes it back, while it is not answered."""


@dataclass(slots=True)
class _Queued:
    request: LeaseRequest
    since: float
    until: float


class Arbiter:
    """All decisions of one run. Every event method returns the instructions to carry out now."""

    def __init__(self, options: ArbiterOptions, *, incarnation: int = 1) -> None:
        """`incarnation`: number of this manager, above that of all before it."""
        self._options = options
        self.ledger = LeaseLedger(reserve_bytes=options.reserve_bytes, margin_bytes=options.margin_bytes)
        self._first_epoch = self.epoch = max(incarnation - 1, 0) * EPOCHS_PER_MANAGER
        self.switch: Switch | None = None
        self._queue: deque[_Queued] = deque()
        self._answers: OrderedDict[str, LeaseReply] = OrderedDict()
        self._out: list[Instruction] = []
        self._fenced: dict[str, _Fenced] = {}
        """Being taken back."""
        self._look_at = _FOR_EVER
        """When a waiting lease is looked at again."""
        self._opens_at = _FOR_EVER if self._first_epoch else 0.0
        """When the first lease may begin: tenants of a predecessor register before."""

    @property
    def switching(self) -> str:
        """What is under way, for people."""
        switch = self.switch
        if switch is None:
            return ""
        return f"{switch.request.gang}: {wholes(switch.request.tags)} on {', '.join(switch.devices)} ({switch.stage})"

    # -- events

    def registered(self, report: TenantReport, now: float) -> list[Instruction]:
        """A tenant is there, or says again what it holds."""
        before = self.ledger.tenants.get(report.tenant)
        self._accept(report, now)
        after = self.ledger.tenants.get(report.tenant)
        if after is not None and after is not before:
            if self._first_epoch and before is None:
                self._fence(report.tenant, "a command of the manager before this one may be under way to it", now)
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
        waiting = [queued.request.request_id for queued in self._queue]
        if self.switch is not None:
            waiting.append(self.switch.request.request_id)
        if (known := self._answers.get(request.request_id)) is not None:
            self._out.append(LeaseAnswer(request.request_id, known))
        elif request.request_id not in waiting:
            self._queue.append(_Queued(request, now, now + request.deadline_s))
        return self._go(now)

    def replied(self, reply: MemoryReply, now: float) -> list[Instruction]:
        """A tenant answered a command."""
        self._accept(reply.report, now)
        self._taken_back(reply, now)
        if self.switch is not None:
            self.switch.replied(reply, now)
        return self._go(now)

    def unanswered(self, command_id: str, now: float) -> list[Instruction]:
        """A call of a command ended without an answer."""
        if self.switch is not None:
            self.switch.unanswered(command_id, now)
        return self._go(now)

    def measured(self, key: str, readings: Mapping[str, DeviceReading], now: float) -> list[Instruction]:
        """Devices were read."""
        for device, reading in readings.items():
            if device in self.ledger.devices:
                self.ledger.devices[device].reading = reading
        if self.switch is not None and key == self.switch.request.request_id:
            self.switch.measured(now)
        return self._go(now)

    def unmeasured(self, key: str, reason: str, now: float) -> list[Instruction]:
        """A measurement ended without readings; it is asked for again when that is due."""
        if self.switch is not None and key == self.switch.request.request_id:
            self.switch.unmeasured(reason)
        return self._go(now)

    def died(self, tenant: str, epoch: int, reason: str, now: float) -> list[Instruction]:
        """All processes of an incarnation ended."""
        gone = self.ledger.died(tenant, epoch, now)
        if gone is not None:
            self._note(gone.report, "died", f"{reason}; it held {in_words(gone.held_bytes)}")
            self._fenced.pop(tenant, None)
            self._lost(tenant, now)
        return self._go(now)

    def unreachable(self, tenant: str, epoch: int, reason: str, now: float) -> list[Instruction]:
        """It left the registry without a seen end of its processes: its memory counts, and it gets no commands."""
        known = self.ledger.tenants.get(tenant)
        if known is not None and known.report.epoch == epoch and known.is_usable:
            self._fence(tenant, reason, now)
            self._note(known.report, "fenced", reason)
            self._lost(tenant, now)
        return self._go(now)

    def tick(self, now: float) -> list[Instruction]:
        """Time passed."""
        self._opens_at = min(self._opens_at, now + self._options.settle_s)
        if now >= self._look_at:
            self._look_at = _FOR_EVER
        if self.switch is not None:
            self.switch.tick(now)
        self._ask_fenced(now)
        return self._go(now)

    def wakes_at(self) -> float:
        """When `tick` is due at the latest."""
        due = [self._look_at, *(fenced.due for fenced in self._fenced.values())]
        due += [queued.until for queued in self._queue]
        if self.switch is not None:
            due.append(self.switch.wakes_at())
        return min(due)

    # -- leases

    def _go(self, now: float) -> list[Instruction]:
        """End what is over, begin what can begin, hand out what is to be done."""
        is_over = True
        while is_over or self._begin(now):
            is_over = self.switch is not None and self.switch.stage == "over"
            if is_over:
                self.switch = None
                for tenant in self.ledger.tenants.values():
                    if tenant.fenced:
                        self._fenced.setdefault(tenant.name, _Fenced(now))
        out, self._out = self._out, []
        return out

    def _begin(self, now: float) -> bool:
        """Start the first that waits; True if it began, or one was refused."""
        for queued in self._queue:
            if now >= queued.until:
                self._queue.remove(queued)
                behind = self.switching or "tenants that do not answer"
                reason = f"{queued.request.gang} waited {now - queued.since:.1f} s for its turn behind {behind}"
                self._refuse(queued.request, reason)
                return True
        if self.switch is not None or not self._queue:
            return False
        queued = self._queue[0]
        request = queued.request
        is_known = bool(self.ledger.gang(request.gang))
        if now < max(self._opens_at, queued.since + self._patience_s(queued, is_known=is_known)):
            self._look_at = min(self._look_at, now + 0.1)
            return False
        self._queue.popleft()
        if not is_known:
            self._refuse(request, f"no tenant of gang {request.gang!r} is registered")
            return True
        self.switch = Switch(
            self.ledger, request, self._options, now=now, until_s=queued.until, epoch=self.epoch,
            next_epoch=self._next_epoch, emit=self._emit,
        )  # fmt: skip
        for device in self.switch.devices:
            self._emit(TimelineNote(device, "", "switch", f"{request.gang} asks for {wholes(request.tags)}"))
        return True

    def _patience_s(self, queued: _Queued, *, is_known: bool) -> float:
        """How long a lease waits for members that did not register yet, or for tenants that are being taken back."""
        half = 0.5 * (queued.until - queued.since)
        if not is_known:
            return min(half, self._options.settle_s)
        is_deaf = any(tenant.fenced for tenant in self.ledger.tenants.values())
        return min(half, self._options.death_s) if is_deaf else 0.0

    def _refuse(self, request: LeaseRequest, reason: str) -> None:
        reply = LeaseReply(granted=False, epoch=self.epoch, reason=f"refused: {reason}")
        self._emit(LeaseAnswer(request.request_id, reply))

    # -- tenants

    def _next_epoch(self) -> int:
        self.epoch += 1
        return self.epoch

    def _emit(self, instruction: Instruction) -> None:
        self._out.append(instruction)
        if isinstance(instruction, LeaseAnswer):
            self._answers[instruction.request_id] = instruction.reply
            while len(self._answers) > MAX_ANSWERS:
                self._answers.popitem(last=False)

    def _note(self, report: TenantReport, kind: str, text: str) -> None:
        self._emit(TimelineNote(place_of(report), report.tenant, kind, text))

    def _fence(self, tenant: str, reason: str, now: float) -> None:
        self.ledger.fence(tenant, reason)
        self._fenced.setdefault(tenant, _Fenced(now))

    def _lost(self, tenant: str, now: float) -> None:
        if self.switch is not None:
            self.switch.lost(tenant, now)

    def _accept(self, report: TenantReport, now: float) -> None:
        before = self.ledger.tenants.get(report.tenant)
        old = before.report if before is not None else None
        after = self.ledger.accept(report)
        if after is None:
            return
        if old is not None and after is before and old.state != report.state:
            self._note(report, "state", f"{old.state} -> {report.state}")
        if after.fenced:
            fenced = self._fenced.setdefault(report.tenant, _Fenced(now))
            if fenced.command is None and report.state in STABLE:
                self._take_back(report, fenced, now)

    def _take_back(self, report: TenantReport, fenced: _Fenced, now: float) -> None:
        epoch = self._next_epoch()
        fenced.command = MemoryCommand(
            command_id=f"recover.{epoch}.{report.tenant}",
            epoch=epoch,
            kind="commit" if report.state == "active" else "drain",
            deadline_s=COMMAND_S,
            tenant_epoch=report.epoch,
        )
        fenced.due = now + COMMAND_S
        self._emit(Send(report.tenant, report.epoch, fenced.command))

    def _taken_back(self, reply: MemoryReply, now: float) -> None:
        """Perhaps the answer to such a command; the report is in the books."""
        name = reply.report.tenant
        fenced, known = self._fenced.get(name), self.ledger.tenants.get(name)
        if fenced is None or fenced.command is None or known is None:
            return
        if fenced.command.command_id != reply.command_id:
            return
        fenced.command, fenced.due = None, now + ASK_S
        if reply.accepted and reply.report.state in STABLE:
            known.fenced = ""
            known.promised.clear()
            del self._fenced[name]
            self._note(reply.report, "taken back", f"it is {reply.report.state}")

    def _ask_fenced(self, now: float) -> None:
        for name, fenced in list(self._fenced.items()):
            known = self.ledger.tenants.get(name)
            if known is None or not known.fenced:
                del self._fenced[name]
            elif now >= fenced.due:
                fenced.command, fenced.due = None, now + ASK_S
                self._emit(AskReport(name))
