"""One plan carried out in steps: drain, release, verify, restore, commit. Sans-IO: events in, instructions out.

A step ends when all its tenants answered, so nobody releases before all are quiet and nobody restores before all have
released and two measurements, 20 ms apart, show the memory free. Going forward, one refusal or one missed deadline
ends it; falling back, who does not answer is left behind and named, and the rest goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ...core.device_memory import CommandKind, MemoryCommand, MemoryReply, Tag
from .book import PROOF_GAP_S, Book
from .instructions import Instruction, Measure, PhaseEnded, Send, Told
from .plan import SwitchPlan, asked_bytes
from .refusal import place_of, short_words, unmeasured_words

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
    """The same where something else could leave: what a gang let go of shows at once, as a rule, and waiting for it
    costs everybody's time, more leaving one copy."""
    resend_s: float = 5.0
    """A command that was not answered is repeated, under the same id."""
    restore_attempts: int = 2
    """A restore that met a full device is measured and tried again so often."""


@dataclass(slots=True)
class _Pending:
    command: MemoryCommand
    resend_at: float


@dataclass(slots=True)
class Tally:
    """What it took, for the lease's reply."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])
    copied_bytes: int = 0
    dropped_bytes: int = 0


class Transition:
    """See the module's head. `outcome` is "" until it is over."""

    def __init__(
        self,
        book: Book,
        plan: SwitchPlan,
        *,
        key: str,
        epoch: int,
        until_s: float,
        options: TransitionOptions,
        emit: Callable[[Instruction], None],
        tally: Tally,
        is_fallback: bool = False,
    ) -> None:
        self._book = book
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
        """Told something, and never answered."""
        self.told: dict[CommandKind, dict[str, set[Tag]]] = {"drain": {}, "release": {}, "restore": {}, "commit": {}}
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
        self._epochs = {name: t.report.epoch for name, t in book.tenants.items()}

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
        tenant = self._book.tenants.get(name)
        if tenant is not None:
            tenant.promised.clear()  # whatever an older command promised has happened, or never will
        if reply.accepted:
            self._go_on(now)
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
        asked = asked_bytes(self._book, self.plan.restore)
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
            holders, measured = self._book.holders(device), self._book.measured_words(device)
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
        """Somebody else's readings are in the books: one that is short breaks a proof."""
        if self.phase == "verify" and self._short(asked_bytes(self._book, self.plan.restore)):
            self._proof_since = None

    def _short(self, asked: Mapping[str, int]) -> dict[str, int]:
        room = {device: self._book.room(device, besides=self.plan.restore) for device in asked}
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
        self._go_on(now)

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
                self._stop(unmeasured_words(asked_bytes(self._book, self.plan.restore), self.trouble), now)
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
        # Falling back, each step may use half of what is left, so that the last ones have their turn.
        limit = self._options.verify_s if phase == "verify" else self._options.phase_s
        self._phase_until = now + min(limit, left / 2 if self._is_fallback and phase != "commit" else left)
        if phase in ("done", "failed"):
            return
        if phase == "verify":
            self._proof_since, self._poll_s, self._shrank_at = None, _FIRST_POLL_S, None
            if asked_bytes(self._book, self.plan.restore):
                self._measure(now, 0.0)
            else:
                self._leave(now)
            return
        for name, tags in self._targets(phase).items():
            self._command(phase, name, tags, now)
        self._go_on(now)

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
        tenant = self._book.tenants.get(name)
        if tenant is None or not tenant.is_usable or name in self._unwilling:
            return False
        return tenant.report.epoch == self._epochs.get(name)

    def _command(self, phase: Phase, name: str, tags: tuple[Tag, ...], now: float) -> None:
        if phase not in ("drain", "release", "restore", "commit"):
            return
        tenant = self._book.tenants[name]
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
        self.told[phase].setdefault(name, set()).update(tags)
        self._pending[name] = _Pending(command, now + self._options.resend_s)
        self._send(name, command)

    def _send(self, name: str, command: MemoryCommand) -> None:
        self._emit(Send(name, self._epochs[name], command))

    def _go_on(self, now: float) -> None:
        if not self._pending and self.phase not in ("verify", "done", "failed"):
            self._leave(now)

    def _leave(self, now: float) -> None:
        self._close_phase(now)
        self._enter(_NEXT[self.phase], now)

    def _close_phase(self, now: float) -> None:
        spent = now - self._phase_started
        name = f"fallback_{self.phase}" if self._is_fallback else self.phase
        self._tally.seconds[name] = self._tally.seconds.get(name, 0.0) + spent
        touched = [self._book.tenants[name] for name in self.plan.touched if name in self._book.tenants]
        devices = {device for tenant in touched for device in tenant.report.devices}
        self._emit(PhaseEnded(self.key, name, self._phase_started, now, tuple(sorted(devices))))

    def _measure(self, now: float, after_s: float) -> None:
        devices = tuple(sorted(asked_bytes(self._book, self.plan.restore)))
        self._measure_due = now + after_s + 1.0
        self._emit(Measure(self.key, devices, after_s))

    # -- what goes wrong

    def _refused(self, name: str, reason: str, now: float) -> None:
        place = place_of(self._book.tenants[name].report) if name in self._book.tenants else ""
        self._emit(Told(place, name, "refused", f"{self.phase}: {reason}"))
        if self._is_fallback:
            self._unwilling.add(name)
            self._go_on(now)
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
            self._go_on(now)
        else:
            waited = now - self._phase_started
            self._stop(f"{', '.join(late) or 'nobody'} did not {self.phase} within {waited:.1f} s", now)

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
