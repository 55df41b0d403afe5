"""One lease from request to answer. Sans-IO: events in, instructions out, time as an argument.

    survey    the devices are measured and no tenant gets a command: a refusal here disturbs no tenant
    forward   a plan is carried out; if memory that should be free is not, more tags leave, if there are more
    back      tags restored for the lease leave again, tags that left for it come back, tenants that ran resume

Forward work ends early enough to leave time for the way back before the lease's deadline.

A plan has the steps drain, release, verify, restore, commit. A step ends when all its tenants answered: none releases
before all are quiet, and none restores before all have released and a measurement shows the memory free. Going forward,
one refusal or one missed deadline ends the plan. Falling back, a tenant that does not answer is skipped and named, and
the others continue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from ...core.device_memory import CommandKind, LeaseReply, LeaseRequest, MemoryCommand, MemoryReply, Tag, wholes
from .lease_ledger import (
    LeaseLedger,
    Shortage,
    SwitchPlan,
    asked_bytes,
    build,
    is_mapped,
    place_of,
    unmeasured_words,
)


@dataclass(frozen=True, slots=True)
class Send:
    """A command to that incarnation of a tenant; journalled before it goes. Comes back as `replied` or `unanswered`."""

    tenant: str
    tenant_epoch: int
    command: MemoryCommand


@dataclass(frozen=True, slots=True)
class Measure:
    """Read these devices, `after_s` from now. Comes back as `measured` or `unmeasured` under the same key."""

    key: str
    devices: tuple[str, ...]
    after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AskReport:
    """Have a tenant report. Comes back as `reported`, or not at all."""

    tenant: str


@dataclass(frozen=True, slots=True)
class LeaseAnswer:
    """The end of a lease request."""

    request_id: str
    reply: LeaseReply


@dataclass(frozen=True, slots=True)
class TimelineNote:
    """Something for the timeline and the event log."""

    device: str
    tenant: str
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class PhaseEnded:
    """A stretch of a switch, for the trace and for `memory/*` metrics."""

    switch: str
    phase: str
    started_s: float
    ended_s: float
    devices: tuple[str, ...] = ()


Instruction = Send | Measure | AskReport | LeaseAnswer | TimelineNote | PhaseEnded
"""What the manager's actor does; it comes back with events."""


@dataclass(frozen=True, slots=True)
class ArbiterOptions:
    """Limits and times of one manager."""

    reserve_bytes: int = 1 << 30
    """Of each device, never promised."""
    margin_bytes: int = 64 << 20
    """Free on a device beyond what is asked."""
    phase_s: float = 120.0
    """One step at most; the lease's own deadline cuts it."""
    verify_s: float = 5.0
    """Released memory may show late in the measurement."""
    still_s: float = 1.0
    """A shortage that did not shrink for so long is none that passes."""
    resend_s: float = 5.0
    """A command that was not answered is repeated, under the same id."""
    settle_s: float = 2.0
    """A shortage that may pass is looked at again for so long before anybody is disturbed or refused."""
    death_s: float = 15.0
    """The same after a death, or while a fenced tenant is being taken back: memory is about to become free."""
    max_plans: int = 4
    """Plans of one lease: the first, and further ones when the measurement shows that more has to leave."""


Phase = Literal["drain", "release", "verify", "restore", "commit", "done"]
_PHASES: tuple[Phase, ...] = get_args(Phase)
_SURVEY_POLL_S = 0.05
_FIRST_POLL_S = 0.05
_AGAIN_S = 0.2
"""Before a command whose call ended without an answer is repeated."""
_LONGEST_POLL_S = 0.4
FORWARD_SHARE = 0.7
"""Of a lease's time; the rest is kept for the way back."""


@dataclass(slots=True)
class _Pending:
    command: MemoryCommand
    resend_at: float


@dataclass(slots=True)
class _Wait:
    """For room for a restore, in the measurements."""

    least_short: int = 0
    shrank_at: float | None = None
    poll_s: float = _FIRST_POLL_S


class Switch:
    """See the module's head."""

    def __init__(
        self,
        ledger: LeaseLedger,
        request: LeaseRequest,
        options: ArbiterOptions,
        *,
        now: float,
        until_s: float,
        epoch: int,
        next_epoch: Callable[[], int],
        emit: Callable[[Instruction], None],
    ) -> None:
        """Begins with a measurement."""
        self._ledger = ledger
        self.request = request
        self._options = options
        self.devices = tuple(sorted({d for t in ledger.tenants.values() for d in t.report.devices}))
        self._started = now
        self._until_s = until_s
        self._forward_until = now + FORWARD_SHARE * (until_s - now)
        self._epoch = epoch
        self._next_epoch = next_epoch
        self._emit = emit
        self.stage: Literal["survey", "forward", "back", "over"] = "survey"
        self._seconds: dict[str, float] = {}
        self._copied_bytes = self._dropped_bytes = 0
        self._failure = ""
        self._trouble = ""
        """Why the last measurement brought no readings."""
        self._was_active = {t.name for t in ledger.tenants.values() if t.report.state == "active"}
        self._was_mapped = {t.name: {g.tag for g in t.report.tags if is_mapped(g)} for t in ledger.tenants.values()}
        self._sent: dict[CommandKind, dict[str, set[Tag]]] = {"drain": {}, "release": {}, "restore": {}, "commit": {}}
        """By all plans so far."""
        self._num_plans = 0
        self._plan = SwitchPlan()
        self._phase: Phase = "done"
        self._phase_started = self._phase_until = 0.0
        self._epochs: dict[str, int] = {}
        self._pending: dict[str, _Pending] = {}
        self._unwilling: set[str] = set()
        self._silent: set[str] = set()
        """On the way back."""
        self._wait = _Wait()
        self._measure_due = 0.0
        self._survey_again(now, 0.0)

    # -- events

    def measured(self, now: float) -> None:
        """The readings are in the books."""
        if self.stage == "survey":
            self._plan_after_survey(now)
        elif self._phase == "verify":
            self._verify(now)

    def unmeasured(self, reason: str) -> None:
        """No readings came; what a refusal for want of them will say."""
        self._trouble = reason

    def replied(self, reply: MemoryReply, now: float) -> None:
        """A tenant answered; its report is in the books already."""
        name = reply.report.tenant
        pending = self._pending.get(name)
        if pending is None or pending.command.command_id != reply.command_id:
            return
        del self._pending[name]
        self._copied_bytes += reply.copied_bytes
        self._dropped_bytes += reply.dropped_bytes
        tenant = self._ledger.tenants.get(name)
        if tenant is not None:
            tenant.promised.clear()  # whatever an older command promised has happened, or never will
        if reply.accepted:
            self._leave_if_ready(now)
        else:
            self._refused(name, reply.reason, now)

    def unanswered(self, command_id: str, now: float) -> None:
        """A call ended without an answer: once more, unless its tenant is gone."""
        for pending in self._pending.values():
            if pending.command.command_id == command_id:
                pending.resend_at = min(pending.resend_at, now + _AGAIN_S)

    def lost(self, name: str, now: float) -> None:
        """A tenant died, was fenced or restarted."""
        self._pending.pop(name, None)
        if self.stage not in ("forward", "back") or name not in self._plan.touched:
            return
        if self.stage == "forward" and (name in self._plan.restore or name in self._plan.commit):
            self._stop(f"{name} was lost while the switch was in its {self._phase} step", now)
        else:
            self._leave_if_ready(now)

    def tick(self, now: float) -> None:
        """Repeat what is due; end what is late."""
        if self.stage == "survey":
            if now >= self._measure_due:
                if now >= self._forward_until:
                    self._refuse(unmeasured_words(self.devices, self._trouble), now)
                else:
                    self._survey_again(now, 0.0)
        elif self._phase == "verify":
            if now >= self._measure_due:
                if now >= self._phase_until + _LONGEST_POLL_S * 2:
                    self._stop(unmeasured_words(self._asked(), self._trouble), now)
                else:
                    self._measure(sorted(self._asked()), now, 0.0)
        elif now >= self._phase_until:
            self._late(now)
        else:
            for name, pending in list(self._pending.items()):
                if now >= pending.resend_at:
                    pending.resend_at = now + self._options.resend_s
                    self._emit(Send(name, self._epochs[name], pending.command))

    def wakes_at(self) -> float:
        """When `tick` has something to do."""
        if self.stage == "survey" or self._phase == "verify":
            return self._measure_due
        return min([self._phase_until, *(p.resend_at for p in self._pending.values())])

    # -- survey and plans

    def _survey_again(self, now: float, after_s: float) -> None:
        self._measure(self.devices, now, after_s)

    def _measure(self, devices: Iterable[str], now: float, after_s: float) -> None:
        self._measure_due = now + after_s + 1.0
        self._emit(Measure(self.request.request_id, tuple(devices), after_s))

    def _plan_after_survey(self, now: float) -> None:
        if not all(self._ledger.is_settled(device) for device in self.devices) and now < self._forward_until:
            self._survey_again(now, 4 * _SURVEY_POLL_S)
            return
        plan = build(self._ledger, self.request)
        if not isinstance(plan, Shortage):
            self._carry_out(plan, now)
            return
        options = self._options
        is_dying = self._ledger.died_since(self.devices, now - options.death_s)
        patience = options.death_s if is_dying else options.settle_s
        if plan.may_pass and now < min(self._started + patience, self._forward_until):
            self._survey_again(now, _SURVEY_POLL_S)
            return
        self._refuse(plan.reason, now)

    def _plan_again(self, reason: str, now: float) -> None:
        """What is still missing? Nothing, as a rule. But a member may have come during the switch, and a
        measurement may show memory that the books do not have, so that more has to leave."""
        plan = build(self._ledger, self.request)
        if isinstance(plan, Shortage):
            self._go_back(reason or plan.reason, now)
        elif plan.is_empty or self._num_plans < self._options.max_plans:
            self._carry_out(plan, now)
        else:
            self._go_back(reason or f"members of {self.request.gang} keep changing", now)

    def _carry_out(self, plan: SwitchPlan, now: float) -> None:
        if plan.is_empty:
            self._answer(granted=True, reason="", now=now)
            return
        self._num_plans += 1
        self._begin("forward", plan, now)

    def _begin(self, stage: Literal["forward", "back"], plan: SwitchPlan, now: float) -> None:
        self.stage = stage
        self._plan = plan
        self._epoch = self._next_epoch()
        self._epochs = {name: t.report.epoch for name, t in self._ledger.tenants.items()}
        self._pending.clear()
        self._enter("drain", now)

    def _go_back(self, reason: str, now: float) -> None:
        self._failure = reason
        self._emit(TimelineNote(min(self.devices, default=""), "", "fallback", f"{self.request.gang}: {reason}"))
        self._begin("back", self._way_back(), now)

    def _way_back(self) -> SwitchPlan:
        """Undo the commands, as far as the tenants still live."""
        release: dict[str, set[Tag]] = {}
        for name, tags in self._sent["restore"].items():
            tenant = self._ledger.tenants.get(name)
            kept = {tag.tag for tag in tenant.report.tags if tag.policy == "keep"} if tenant is not None else set[Tag]()
            release[name] = tags - self._was_mapped.get(name, set()) - kept
        restore = {name: tags & self._was_mapped.get(name, set()) for name, tags in self._sent["release"].items()}
        touched = {name for names in self._sent.values() for name in names}
        return SwitchPlan(
            drain=tuple(sorted(self._sent["commit"])),
            release={name: self._ordered(name, tags) for name, tags in sorted(release.items())},
            restore={name: self._ordered(name, tags) for name, tags in sorted(restore.items()) if tags},
            commit=tuple(sorted(touched & self._was_active)),
        )

    def _ordered(self, name: str, tags: set[Tag]) -> tuple[Tag, ...]:
        tenant = self._ledger.tenants.get(name)
        return () if tenant is None else tuple(tag.tag for tag in tenant.report.tags if tag.tag in tags)

    # -- steps

    def _enter(self, phase: Phase, now: float) -> None:
        self._phase, self._phase_started = phase, now
        if phase == "done":
            self._done(now)
            return
        is_back = self.stage == "back"
        left = max((self._until_s if is_back else self._forward_until) - now, 0.0)
        # Falling back, each step may use half of what is left, so that time is left for the last ones.
        limit = self._options.verify_s if phase == "verify" else self._options.phase_s
        self._phase_until = now + min(limit, left / 2 if is_back and phase != "commit" else left)
        if phase == "verify":
            self._wait = _Wait()
            if asked := self._asked():
                self._measure(sorted(asked), now, 0.0)
            else:
                self._leave(now)
            return
        none: tuple[Tag, ...] = ()
        sets: dict[CommandKind, Mapping[str, tuple[Tag, ...]]] = {
            "drain": dict.fromkeys(self._plan.drain, none),
            "release": self._plan.release,
            "restore": self._plan.restore,
            "commit": dict.fromkeys(self._plan.commit, none),
        }
        for name, tags in sets[phase].items():
            if self._is_there(name):
                self._command(phase, name, tags, now)
        self._leave_if_ready(now)

    def _is_there(self, name: str) -> bool:
        tenant = self._ledger.tenants.get(name)
        if tenant is None or not tenant.is_usable or name in self._unwilling:
            return False
        return tenant.report.epoch == self._epochs.get(name)

    def _command(self, phase: CommandKind, name: str, tags: tuple[Tag, ...], now: float) -> None:
        tenant = self._ledger.tenants[name]
        if phase == "restore":
            tenant.promised.update({t.tag: t.num_bytes for t in tenant.report.tags if t.tag in tags})
        command = MemoryCommand(
            command_id=f"{self.request.request_id}.{self._epoch}.{phase}.{name}",
            epoch=self._epoch,
            kind=phase,
            tags=tags,
            deadline_s=max(self._phase_until - now, 0.05),
            tenant_epoch=self._epochs[name],
        )
        self._sent[phase].setdefault(name, set()).update(tags)
        self._pending[name] = _Pending(command, now + self._options.resend_s)
        self._emit(Send(name, self._epochs[name], command))

    def _leave_if_ready(self, now: float) -> None:
        if not self._pending and self._phase not in ("verify", "done"):
            self._leave(now)

    def _leave(self, now: float) -> None:
        self._close_phase(now)
        self._enter(_PHASES[_PHASES.index(self._phase) + 1], now)

    def _close_phase(self, now: float) -> None:
        name = f"fallback_{self._phase}" if self.stage == "back" else self._phase
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._phase_started
        touched = [self._ledger.tenants[name] for name in self._plan.touched if name in self._ledger.tenants]
        devices = sorted({device for tenant in touched for device in tenant.report.devices})
        self._emit(PhaseEnded(self.request.request_id, name, self._phase_started, now, tuple(devices)))

    # -- until memory is free

    def _asked(self) -> dict[str, int]:
        return asked_bytes(self._ledger, self._plan.restore)

    def _short(self, asked: Mapping[str, int]) -> dict[str, int]:
        room = {device: self._ledger.room(device, besides=self._plan.restore) for device in asked}
        return {device: n - room[device] for device, n in asked.items() if room[device] < n}

    def _verify(self, now: float) -> None:
        asked, wait = self._asked(), self._wait
        short = self._short(asked)
        if not short:
            self._leave(now)
            return
        if now >= self._phase_until or not self._is_shrinking(sum(short.values()), now):
            device = max(short, key=lambda d: short[d])
            self._stop(self._ledger.short_words(device, short[device]), now, is_short=True)
            return
        self._measure(sorted(asked), now, wait.poll_s)
        wait.poll_s = min(2 * wait.poll_s, _LONGEST_POLL_S)

    def _is_shrinking(self, num_bytes: int, now: float) -> bool:
        """Whether the shortage became smaller lately. Falling back there is nothing else to do but wait."""
        wait = self._wait
        if wait.shrank_at is None or num_bytes < wait.least_short:
            wait.least_short, wait.shrank_at = num_bytes, now
        return self.stage == "back" or now - wait.shrank_at < self._options.still_s

    # -- what goes wrong

    def _refused(self, name: str, reason: str, now: float) -> None:
        place = place_of(self._ledger.tenants[name].report) if name in self._ledger.tenants else ""
        self._emit(TimelineNote(place, name, "refused", f"{self._phase}: {reason}"))
        if self.stage == "back":
            self._unwilling.add(name)
            self._leave_if_ready(now)
        else:
            self._stop(f"{name} refused to {self._phase}: {reason}", now)

    def _late(self, now: float) -> None:
        late = sorted(self._pending)
        self._pending.clear()
        if self.stage == "back":
            self._silent.update(late)
            self._unwilling.update(late)
            self._leave_if_ready(now)
        else:
            waited = now - self._phase_started
            self._stop(f"{', '.join(late) or 'no tenant'} did not {self._phase} within {waited:.1f} s", now)

    def _stop(self, reason: str, now: float, *, is_short: bool = False) -> None:
        self._close_phase(now)
        self._pending.clear()
        if self.stage == "back":
            self._unwilling.update(self._plan.restore)  # their memory is not there: they stay quiet
            self._enter("commit", now)
        elif is_short and self._num_plans < self._options.max_plans:
            self._plan_again(reason, now)
        else:
            self._go_back(reason, now)

    # -- ends

    def _done(self, now: float) -> None:
        if self.stage == "forward":
            self._plan_again("", now)
            return
        for name in sorted(self._silent):
            tenant = self._ledger.tenants.get(name)
            if tenant is not None and tenant.is_usable:
                reason = f"it did not answer to {self.request.request_id}, nor to the way back"
                self._ledger.fence(name, reason)
                self._emit(TimelineNote(place_of(tenant.report), name, "fenced", reason))
        self._refuse(self._failure, now)

    def _refuse(self, reason: str, now: float) -> None:
        self._answer(granted=False, reason=reason if reason.startswith("refused") else f"refused: {reason}", now=now)

    def _answer(self, *, granted: bool, reason: str, now: float) -> None:
        self.stage = "over"
        request = self.request
        reply = LeaseReply(
            granted=granted,
            epoch=self._epoch,
            reason=reason,
            seconds=self._seconds,
            copied_bytes=self._copied_bytes,
            dropped_bytes=self._dropped_bytes,
        )
        text = f"{request.gang}: {wholes(request.tags)}" + (f": {reason}" if reason else "")
        for device in self.devices or ("",):
            self._emit(TimelineNote(device, "", "granted" if granted else "refused", text))
        self._emit(PhaseEnded(request.request_id, "switch", self._started, now, self.devices))
        self._emit(LeaseAnswer(request.request_id, reply))
