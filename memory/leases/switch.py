"""One lease from request to answer, and the transition that carries out one plan. Sans-IO.

    survey    the devices are measured and no tenant gets a command: a refusal here disturbs no tenant
    forward   the plan is carried out; if memory that should be free is not, more tags leave, if there are more
    back      tags restored for the lease leave again, tags that left for it come back, tenants that ran resume

Forward work ends early enough to leave time for the way back before the lease's deadline.

A `Transition` has the steps drain, release, verify, restore, commit. A step ends when all its tenants answered: none
releases before all are quiet, and none restores before all have released and two measurements, 20 ms apart, show the
memory free. Going forward, one refusal or one missed deadline ends it. Falling back, a tenant that does not answer is
skipped and named, and the others continue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ...core.device_memory import CommandKind, Holder, LeaseReply, LeaseRequest, MemoryCommand, MemoryReply, Tag, wholes
from .instructions import Fence, Instruction, LeaseAnswer, Measure, PhaseEnded, Send, TimelineNote
from .lease_ledger import PROOF_GAP_S, LeaseLedger, place_of, short_words, unmeasured_words
from .plan import Shortage, SwitchPlan, asked_bytes, build
from .tenant_states import is_mapped

Phase = Literal["drain", "release", "verify", "restore", "commit", "done", "failed"]
_NEXT: Mapping[Phase, Phase] = {
    "drain": "release",
    "release": "verify",
    "verify": "restore",
    "restore": "commit",
    "commit": "done",
}
_FIRST_POLL_S = 0.05
_LONGEST_POLL_S = 0.4


@dataclass(frozen=True, slots=True)
class TransitionOptions:
    """Times of one transition."""

    phase_s: float = 120.0
    """One step at most; the lease's own deadline cuts it."""
    verify_s: float = 5.0
    """Released memory may show late in the measurement."""
    still_s: float = 1.0
    """A shortage that did not shrink for so long is none that passes."""
    still_with_more_s: float = 0.1
    """The same where something else could leave: released memory usually shows at once. Waiting delays all
    tenants; another plan costs one copy."""
    resend_s: float = 5.0
    """A command that was not answered is repeated, under the same id."""
    restore_attempts: int = 2
    """A restore that met a full device is measured and tried again so often."""


@dataclass(slots=True)
class _Pending:
    command: MemoryCommand
    resend_at: float


@dataclass(slots=True)
class SwitchCost:
    """What it took, for the lease's reply."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])
    copied_bytes: int = 0
    dropped_bytes: int = 0


class Transition:
    """The steps of one plan. `outcome` is "" until it is over."""

    def __init__(
        self,
        ledger: LeaseLedger,
        plan: SwitchPlan,
        *,
        key: str,
        epoch: int,
        until_s: float,
        options: TransitionOptions,
        emit: Callable[[Instruction], None],
        tally: SwitchCost,
        is_fallback: bool = False,
    ) -> None:
        self._ledger = ledger
        self.plan = plan
        self.key = key
        self.epoch = epoch
        self._until_s = until_s
        self._options = options
        self._emit = emit
        self._tally = tally
        self._is_fallback = is_fallback
        self.has_more: Callable[[], bool] = bool
        """Whether another plan could make something else leave."""
        self.phase: Phase = "drain"
        self.reason = ""
        self.trouble = ""
        """Why the last measurement brought no readings."""
        self.is_short = False
        """It failed because memory that was to be free is not."""
        self.silent: set[str] = set()
        """TimelineNote something, and never answered."""
        self.sent: dict[CommandKind, dict[str, set[Tag]]] = {"drain": {}, "release": {}, "restore": {}, "commit": {}}
        self._unwilling: set[str] = set()
        self._pending: dict[str, _Pending] = {}
        self._attempt = 0
        self._phase_started = 0.0
        self._phase_until = 0.0
        self._proof_since: float | None = None
        self._proof_asked: dict[str, int] = {}
        self._least_short = 0
        self._shrank_at: float | None = None
        self._poll_s = _FIRST_POLL_S
        self._measure_due = 0.0
        self._epochs = {name: t.report.epoch for name, t in ledger.tenants.items()}

    @property
    def outcome(self) -> Literal["", "done", "failed"]:
        """How it ended."""
        return self.phase if self.phase in ("done", "failed") else ""

    def start(self, now: float) -> None:
        """Enter the first step that has something to do."""
        self._enter("drain", now)

    # -- events

    def replied(self, reply: MemoryReply, now: float) -> None:
        """A tenant answered; its report is in the books already."""
        name = reply.report.tenant
        pending = self._pending.get(name)
        if pending is None or pending.command.command_id != reply.command_id:
            return
        del self._pending[name]
        self._tally.copied_bytes += reply.copied_bytes
        self._tally.dropped_bytes += reply.dropped_bytes
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
                pending.resend_at = min(pending.resend_at, now + PROOF_GAP_S * 10)

    def measured(self, now: float) -> None:
        """The readings of its devices are in the books."""
        if self.phase != "verify":
            return
        asked = asked_bytes(self._ledger, self.plan.restore)
        short = self._short(asked)
        if not short:
            if self._proof_since is None or asked != self._proof_asked:
                self._proof_since, self._proof_asked = now, asked
            elif now - self._proof_since >= PROOF_GAP_S:
                self._leave(now)
                return
            self._measure(now, PROOF_GAP_S)
            return
        self._proof_since = None
        if now >= self._phase_until or not self._is_shrinking(sum(short.values()), now):
            device = max(short, key=lambda d: short[d])
            self.is_short = True
            holders, measured = self._ledger.holders(device), self._ledger.measured_words(device)
            self._stop(short_words(short[device], device, holders, measured), now)
            return
        self._measure(now, self._poll_s)
        self._poll_s = min(2 * self._poll_s, _LONGEST_POLL_S)

    def _is_shrinking(self, num_bytes: int, now: float) -> bool:
        """Whether the shortage became smaller lately. Falling back there is nothing else to do but wait."""
        if self._shrank_at is None or num_bytes < self._least_short:
            self._least_short, self._shrank_at = num_bytes, now
        still_s = now - self._shrank_at
        if self._is_fallback or still_s < self._options.still_with_more_s:
            return True
        return still_s < self._options.still_s and not self.has_more()

    def noticed(self) -> None:
        """Readings for another request are in the books: a short one breaks a proof."""
        if self.phase == "verify" and self._short(asked_bytes(self._ledger, self.plan.restore)):
            self._proof_since = None

    def _short(self, asked: Mapping[str, int]) -> dict[str, int]:
        room = {device: self._ledger.room(device, besides=self.plan.restore) for device in asked}
        return {device: n - room[device] for device, n in asked.items() if room[device] < n}

    def lost(self, name: str, now: float) -> None:
        """A tenant died, was fenced or restarted."""
        self._pending.pop(name, None)
        is_needed = name in self.plan.restore or name in self.plan.commit
        if self.outcome or name not in self.plan.touched:
            return
        if is_needed and not self._is_fallback:
            self._stop(f"{name} was lost while the switch was in its {self.phase} step", now)
            return
        self._leave_if_ready(now)

    def tick(self, now: float) -> None:
        """Repeat what is due; end what is late."""
        if self.outcome:
            return
        if now >= self._phase_until and self.phase != "verify":
            self._late(now)
            return
        for name, pending in list(self._pending.items()):
            if now >= pending.resend_at:
                pending.resend_at = now + self._options.resend_s
                self._send(name, pending.command)
        if self.phase == "verify" and now >= self._measure_due:
            if now >= self._phase_until + _LONGEST_POLL_S * 2:
                self._stop(unmeasured_words(asked_bytes(self._ledger, self.plan.restore), self.trouble), now)
            else:
                self._measure(now, 0.0)

    def wakes_at(self) -> float:
        """When `tick` has something to do."""
        if self.phase == "verify":
            return self._measure_due
        return min([self._phase_until, *(p.resend_at for p in self._pending.values())])

    # -- steps

    def _enter(self, phase: Phase, now: float) -> None:
        self.phase = phase
        self._phase_started = now
        left = max(self._until_s - now, 0.0)
        # Falling back, each step may use half of what is left, so that time is left for the last ones.
        limit = self._options.verify_s if phase == "verify" else self._options.phase_s
        self._phase_until = now + min(limit, left / 2 if self._is_fallback and phase != "commit" else left)
        if phase in ("done", "failed"):
            return
        if phase == "verify":
            self._proof_since, self._poll_s, self._shrank_at = None, _FIRST_POLL_S, None
            if asked_bytes(self._ledger, self.plan.restore):
                self._measure(now, 0.0)
            else:
                self._leave(now)
            return
        for name, tags in self._targets(phase).items():
            self._command(phase, name, tags, now)
        self._leave_if_ready(now)

    def _targets(self, phase: Phase) -> Mapping[str, tuple[Tag, ...]]:
        none: tuple[Tag, ...] = ()
        sets: dict[Phase, Mapping[str, tuple[Tag, ...]]] = {
            "drain": dict.fromkeys(self.plan.drain, none),
            "release": self.plan.release,
            "restore": self.plan.restore,
            "commit": dict.fromkeys(self.plan.commit, none),
        }
        return {name: tags for name, tags in sets[phase].items() if self._is_there(name)}

    def _is_there(self, name: str) -> bool:
        tenant = self._ledger.tenants.get(name)
        if tenant is None or not tenant.is_usable or name in self._unwilling:
            return False
        return tenant.report.epoch == self._epochs.get(name)

    def _command(self, phase: Phase, name: str, tags: tuple[Tag, ...], now: float) -> None:
        if phase not in ("drain", "release", "restore", "commit"):
            return
        tenant = self._ledger.tenants[name]
        if phase == "restore":
            tenant.promised.update({t.tag: t.num_bytes for t in tenant.report.tags if t.tag in tags})
        suffix = f".{self._attempt}" if self._attempt else ""
        command = MemoryCommand(
            command_id=f"{self.key}.{self.epoch}.{phase}.{name}{suffix}",
            epoch=self.epoch,
            kind=phase,
            tags=tags,
            deadline_s=max(self._phase_until - now, 0.05),
            tenant_epoch=self._epochs[name],
        )
        self.sent[phase].setdefault(name, set()).update(tags)
        self._pending[name] = _Pending(command, now + self._options.resend_s)
        self._send(name, command)

    def _send(self, name: str, command: MemoryCommand) -> None:
        self._emit(Send(name, self._epochs[name], command))

    def _leave_if_ready(self, now: float) -> None:
        if not self._pending and self.phase not in ("verify", "done", "failed"):
            self._leave(now)

    def _leave(self, now: float) -> None:
        self._close_phase(now)
        self._enter(_NEXT[self.phase], now)

    def _close_phase(self, now: float) -> None:
        spent = now - self._phase_started
        name = f"fallback_{self.phase}" if self._is_fallback else self.phase
        self._tally.seconds[name] = self._tally.seconds.get(name, 0.0) + spent
        touched = [self._ledger.tenants[name] for name in self.plan.touched if name in self._ledger.tenants]
        devices = {device for tenant in touched for device in tenant.report.devices}
        self._emit(PhaseEnded(self.key, name, self._phase_started, now, tuple(sorted(devices))))

    def _measure(self, now: float, after_s: float) -> None:
        devices = tuple(sorted(asked_bytes(self._ledger, self.plan.restore)))
        self._measure_due = now + after_s + 1.0
        self._emit(Measure(self.key, devices, after_s))

    # -- what goes wrong

    def _refused(self, name: str, reason: str, now: float) -> None:
        place = place_of(self._ledger.tenants[name].report) if name in self._ledger.tenants else ""
        self._emit(TimelineNote(place, name, "refused", f"{self.phase}: {reason}"))
        if self._is_fallback:
            self._unwilling.add(name)
            self._leave_if_ready(now)
        elif self.phase == "restore" and self._attempt + 1 < self._options.restore_attempts:
            self._again(now)
        else:
            self._stop(f"{name} refused to {self.phase}: {reason}", now)

    def _again(self, now: float) -> None:
        """A third party took what was measured free: measure, and try once more. What is promised to members that did
        not answer yet stays promised."""
        self._attempt += 1
        self._pending.clear()
        self._close_phase(now)
        self._enter("verify", now)

    def _late(self, now: float) -> None:
        late = sorted(self._pending)
        self.silent.update(late)
        self._pending.clear()
        if self._is_fallback:
            self._unwilling.update(late)
            self._leave_if_ready(now)
        else:
            waited = now - self._phase_started
            self._stop(f"{', '.join(late) or 'no tenant'} did not {self.phase} within {waited:.1f} s", now)

    def _stop(self, reason: str, now: float) -> None:
        if self._is_fallback and self.phase == "verify":
            self._unwilling.update(self.plan.restore)  # their memory is not there: they stay quiet
            self._close_phase(now)
            self._enter("commit", now)
            return
        self.reason = self.reason or reason
        self._close_phase(now)
        self._pending.clear()
        self.phase = "failed"


FORWARD_SHARE = 0.7
"""Of a lease's time; the rest is kept for the way back."""
_SURVEY_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class SwitchOptions:
    """Times and limits of a switch."""

    transition: TransitionOptions = field(default_factory=TransitionOptions)
    settle_s: float = 2.0
    """A shortage that may pass is looked at again for so long before anybody is disturbed or refused."""
    unproven_s: float = 15.0
    """The same, where the memory of a dead process is about to become free."""
    max_plans: int = 4
    """Plans of one lease: the first, and further ones when the measurement shows that more has to leave."""
    host_limit_bytes: int = 0
    """Of all host copies; 0: no limit."""


class Switch:
    """One lease from request to answer."""

    def __init__(
        self,
        ledger: LeaseLedger,
        request: LeaseRequest,
        *,
        devices: frozenset[str],
        now: float,
        until_s: float,
        epoch: int,
        next_epoch: Callable[[], int],
        options: SwitchOptions,
        emit: Callable[[Instruction], None],
    ) -> None:
        self._ledger = ledger
        self.request = request
        self.devices = devices
        self._started = now
        self._until_s = until_s
        self._forward_until = now + FORWARD_SHARE * (until_s - now)
        self._next_epoch = next_epoch
        self._options = options
        self._emit = emit
        self._tally = SwitchCost()
        self.stage: Literal["survey", "forward", "back", "over"] = "survey"
        self._run: Transition | None = None
        self._runs: list[Transition] = []
        self._num_plans = 0
        self._failure = ""
        self._trouble = ""
        self._holders: tuple[Holder, ...] = ()
        self._measure_due = 0.0
        self._epoch = epoch
        self._was_active = {t.name for t in ledger.tenants.values() if t.report.state == "active"}
        self._was_mapped: dict[str, set[Tag]] = {
            t.name: {tag.tag for tag in t.report.tags if is_mapped(tag)} for t in ledger.tenants.values()
        }

    @property
    def is_over(self) -> bool:
        """The answer was given."""
        return self.stage == "over"

    @property
    def is_moving(self) -> bool:
        """Bytes come or go at this moment."""
        return self._run is not None and self._run.phase != "verify"

    def start(self) -> None:
        """Measure first."""
        self._survey_again(self._started, 0.0)

    # -- events

    def measured(self, now: float) -> None:
        """The readings are in the books."""
        if self.stage == "survey":
            self._plan(now)
        elif self._run is not None:
            self._run.measured(now)
        self._follow(now)

    def unmeasured(self, reason: str) -> None:
        """No readings came; what a refusal for want of them will say."""
        self._trouble = reason
        if self._run is not None:
            self._run.trouble = reason

    def noticed(self) -> None:
        """Readings for another request are in the books."""
        if self._run is not None:
            self._run.noticed()

    def replied(self, reply: MemoryReply, now: float) -> None:
        """A tenant answered; its report is in the books."""
        if self._run is not None:
            self._run.replied(reply, now)
        self._follow(now)

    def unanswered(self, command_id: str, now: float) -> None:
        """A call ended without an answer."""
        if self._run is not None:
            self._run.unanswered(command_id, now)

    def lost(self, name: str, now: float) -> None:
        """A tenant died, was fenced or restarted."""
        if self._run is not None:
            self._run.lost(name, now)
        self._follow(now)

    def tick(self, now: float) -> None:
        """Time passed."""
        if self.stage == "survey" and now >= self._measure_due:
            if now >= self._forward_until:
                self._refuse(unmeasured_words(self.devices, self._trouble), now)
            else:
                self._survey_again(now, 0.0)
        elif self._run is not None:
            self._run.tick(now)
        self._follow(now)

    def wakes_at(self) -> float:
        """When `tick` has something to do."""
        if self.stage == "survey" or self._run is None:
            return self._measure_due
        return self._run.wakes_at()

    # -- survey

    def _survey_again(self, now: float, after_s: float) -> None:
        self._measure_due = now + after_s + 1.0
        self._emit(Measure(self.request.request_id, tuple(sorted(self.devices)), after_s))

    def _plan(self, now: float) -> None:
        if not all(self._ledger.is_settled(device) for device in self.devices) and now < self._forward_until:
            self._survey_again(now, 4 * _SURVEY_POLL_S)
            return
        plan = build(self._ledger, self.request, host_limit_bytes=self._options.host_limit_bytes)
        if isinstance(plan, Shortage):
            patience = self._options.unproven_s if self._ledger.unproven_on(self.devices) else self._options.settle_s
            if plan.may_pass and now < min(self._started + patience, self._forward_until):
                self._survey_again(now, _SURVEY_POLL_S)
                return
            self._holders = plan.holders
            self._refuse(plan.reason, now)
            return
        if plan.is_empty:
            self._grant(now)
            return
        self._forward(plan, now)

    def _forward(self, plan: SwitchPlan, now: float) -> None:
        self.stage = "forward"
        self._num_plans += 1
        self._begin(plan, now, until_s=self._forward_until, is_fallback=False)

    def _begin(self, plan: SwitchPlan, now: float, *, until_s: float, is_fallback: bool) -> None:
        self._epoch = self._next_epoch()
        self._run = Transition(
            self._ledger,
            plan,
            key=self.request.request_id,
            epoch=self._epoch,
            until_s=until_s,
            options=self._options.transition,
            emit=self._emit,
            tally=self._tally,
            is_fallback=is_fallback,
        )
        self._run.has_more = self._has_more
        self._runs.append(self._run)
        self._run.start(now)
        self._follow(now)

    def _has_more(self) -> bool:
        """Whether another plan, built on what was measured last, would make something of others leave."""
        if self._num_plans >= self._options.max_plans:
            return False
        plan = build(self._ledger, self.request, host_limit_bytes=self._options.host_limit_bytes)
        if isinstance(plan, Shortage):
            return False
        return any(self._ledger.tenants[name].report.gang != self.request.gang for name in plan.release)

    # -- ends

    def _follow(self, now: float) -> None:
        """What the end of a transition leads to."""
        run = self._run
        if run is None or not run.outcome or self.stage == "over":
            return
        self._run = None
        if self.stage == "back":
            self._end_back(run, now)
        elif run.outcome == "done" or (run.is_short and self._num_plans < self._options.max_plans):
            self._look_again(run.reason, now)
        else:
            self._failure = run.reason
            self._go_back(now)

    def _look_again(self, reason: str, now: float) -> None:
        """What is still missing? Nothing, as a rule. But a member may have come during the switch, and a
        measurement may show memory that the books do not have, so that more has to leave."""
        plan = build(self._ledger, self.request, host_limit_bytes=self._options.host_limit_bytes)
        if isinstance(plan, Shortage):
            self._holders = plan.holders
            self._failure = reason or plan.reason
            self._go_back(now)
        elif plan.is_empty:
            self._grant(now)
        elif self._num_plans < self._options.max_plans:
            self._forward(plan, now)
        else:
            self._failure = reason or f"members of {self.request.gang} keep changing"
            self._go_back(now)

    def _go_back(self, now: float) -> None:
        self.stage = "back"
        device = min(self.devices, default="")
        self._emit(TimelineNote(device, "", "fallback", f"{self.request.gang}: {self._failure}"))
        if not self._holders:
            self._holders = tuple(h for d in sorted(self.devices) for h in self._ledger.holders(d))
        self._begin(self._way_back(), now, until_s=self._until_s, is_fallback=True)

    def _way_back(self) -> SwitchPlan:
        """Undo the commands, as far as the tenants still live."""
        drain: set[str] = set()
        release: dict[str, set[Tag]] = {}
        restore: dict[str, set[Tag]] = {}
        touched: set[str] = set()
        for run in self._runs:
            drain |= run.sent["commit"].keys()
            for name, tags in run.sent["restore"].items():
                release.setdefault(name, set()).update(tags - self._was_mapped.get(name, set()) - self._kept(name))
            for name, tags in run.sent["release"].items():
                restore.setdefault(name, set()).update(tags & self._was_mapped.get(name, set()))
            for names in run.sent.values():
                touched |= names.keys()
        return SwitchPlan(
            drain=tuple(sorted(drain)),
            release={name: self._ordered(name, tags) for name, tags in sorted(release.items())},
            restore={name: self._ordered(name, tags) for name, tags in sorted(restore.items()) if tags},
            commit=tuple(sorted(touched & self._was_active)),
        )

    def _kept(self, name: str) -> set[Tag]:
        """Tags that cannot leave once they are there."""
        tenant = self._ledger.tenants.get(name)
        return set() if tenant is None else {tag.tag for tag in tenant.report.tags if tag.policy == "keep"}

    def _ordered(self, name: str, tags: set[Tag]) -> tuple[Tag, ...]:
        tenant = self._ledger.tenants.get(name)
        if tenant is None:
            return ()
        return tuple(tag.tag for tag in tenant.report.tags if tag.tag in tags)

    def _end_back(self, run: Transition, now: float) -> None:
        silent = {name for each in self._runs for name in each.silent} & run.silent
        for name in sorted(silent):
            tenant = self._ledger.tenants.get(name)
            if tenant is not None and tenant.is_usable:
                reason = f"it did not answer to {self.request.request_id}, nor to the way back"
                self._ledger.fence(name, reason)
                self._emit(Fence(name, tenant.report.epoch, reason))
        self._refuse(self._failure, now)

    def _grant(self, now: float) -> None:
        self._answer(self._reply(granted=True), now)

    def _refuse(self, reason: str, now: float) -> None:
        reason = reason if reason.startswith("refused") else f"refused: {reason}"
        self._answer(self._reply(granted=False, reason=reason), now)

    def _reply(self, *, granted: bool, reason: str = "") -> LeaseReply:
        return LeaseReply(
            granted=granted,
            epoch=self._epoch,
            reason=reason,
            holders=() if granted else self._holders,
            seconds=dict(self._tally.seconds),
            copied_bytes=self._tally.copied_bytes,
            dropped_bytes=self._tally.dropped_bytes,
        )

    def _answer(self, reply: LeaseReply, now: float) -> None:
        self.stage = "over"
        self._run = None
        kind = "granted" if reply.granted else "refused"
        text = f"{self.request.gang}: {wholes(self.request.tags)}" + (f": {reply.reason}" if reply.reason else "")
        for device in sorted(self.devices) or [""]:
            self._emit(TimelineNote(device, "", kind, text))
        self._emit(PhaseEnded(self.request.request_id, "switch", self._started, now, tuple(sorted(self.devices))))
        self._emit(LeaseAnswer(self.request.request_id, reply))
