"""One lease from request to answer: survey, plan, forward, and the way back when it cannot be had. Sans-IO.

    survey    the devices are measured; nobody was told anything: a refusal here disturbs nobody
    forward   the plan is carried out; if memory that was to be free is not, more is made to leave, if there is more
    back      what was restored for the lease leaves again, what left for it comes back, who ran goes on

Forward work ends early enough to leave time for the way back before the lease's deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from ...core.device_memory import Holder, LeaseReply, LeaseRequest, MemoryReply, Tag, wholes
from .book import Book
from .instructions import Answer, Fence, Instruction, Measure, PhaseEnded, Told
from .plan import Shortage, SwitchPlan, build
from .refusal import unmeasured_words
from .tenant_states import is_mapped
from .transition import Tally, Transition, TransitionOptions

FORWARD_SHARE = 0.7
"""Of a lease's time; the rest is kept for the way back."""
_SURVEY_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class SwitchOptions:
    """Times and limits of a switch."""

    transition: TransitionOptions = field(default_factory=TransitionOptions)
    settle_s: float = 2.0
    """A shortage that may pass is looked at again for so long before anybody is disturbed or refused."""
    ghost_s: float = 15.0
    """The same, where the memory of a dead process is about to become free."""
    max_plans: int = 4
    """Plans of one lease: the first, and further ones when the measurement shows that more has to leave."""
    host_limit_bytes: int = 0
    """Of all host copies; 0: no limit."""


class Switch:
    """See the module's head. Over when `answer` is set."""

    def __init__(
        self,
        book: Book,
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
        self._book = book
        self.request = request
        self.devices = devices
        self._started = now
        self._until_s = until_s
        self._forward_until = now + FORWARD_SHARE * (until_s - now)
        self._next_epoch = next_epoch
        self._options = options
        self._emit = emit
        self._tally = Tally()
        self.stage: Literal["survey", "forward", "back", "over"] = "survey"
        self._run: Transition | None = None
        self._told: list[Transition] = []
        self._num_plans = 0
        self._failure = ""
        self._trouble = ""
        self._holders: tuple[Holder, ...] = ()
        self._measure_due = 0.0
        self._epoch = epoch
        self._was_active = {t.name for t in book.tenants.values() if t.report.state == "active"}
        self._was_mapped: dict[str, set[Tag]] = {
            t.name: {tag.tag for tag in t.report.tags if is_mapped(tag)} for t in book.tenants.values()
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
        """Readings that somebody else asked for are in the books."""
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
        if not all(self._book.is_settled(device) for device in self.devices) and now < self._forward_until:
            self._survey_again(now, 4 * _SURVEY_POLL_S)
            return
        plan = build(self._book, self.request, host_limit_bytes=self._options.host_limit_bytes)
        if isinstance(plan, Shortage):
            patience = self._options.ghost_s if self._book.ghosts_on(self.devices) else self._options.settle_s
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
            self._book,
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
        self._told.append(self._run)
        self._run.start(now)
        self._follow(now)

    def _has_more(self) -> bool:
        """Whether another plan, built on what was measured last, would make something of others leave."""
        if self._num_plans >= self._options.max_plans:
            return False
        plan = build(self._book, self.request, host_limit_bytes=self._options.host_limit_bytes)
        if isinstance(plan, Shortage):
            return False
        return any(self._book.tenants[name].report.gang != self.request.gang for name in plan.release)

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
        """What is still missing? Nothing, as a rule. But a member may have come while the switch went on, and a
        measurement may know of memory that the books do not, so that more has to leave."""
        plan = build(self._book, self.request, host_limit_bytes=self._options.host_limit_bytes)
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
        self._emit(Told(device, "", "fallback", f"{self.request.gang}: {self._failure}"))
        if not self._holders:
            self._holders = tuple(h for d in sorted(self.devices) for h in self._book.holders(d))
        self._begin(self._way_back(), now, until_s=self._until_s, is_fallback=True)

    def _way_back(self) -> SwitchPlan:
        """Undo what was told, as far as the tenants still live."""
        drain: set[str] = set()
        release: dict[str, set[Tag]] = {}
        restore: dict[str, set[Tag]] = {}
        touched: set[str] = set()
        for run in self._told:
            drain |= run.told["commit"].keys()
            for name, tags in run.told["restore"].items():
                release.setdefault(name, set()).update(tags - self._was_mapped.get(name, set()) - self._kept(name))
            for name, tags in run.told["release"].items():
                restore.setdefault(name, set()).update(tags & self._was_mapped.get(name, set()))
            for names in run.told.values():
                touched |= names.keys()
        return SwitchPlan(
            drain=tuple(sorted(drain)),
            release={name: self._ordered(name, tags) for name, tags in sorted(release.items())},
            restore={name: self._ordered(name, tags) for name, tags in sorted(restore.items()) if tags},
            commit=tuple(sorted(touched & self._was_active)),
        )

    def _kept(self, name: str) -> set[Tag]:
        """Tags that cannot leave once they are there."""
        tenant = self._book.tenants.get(name)
        return set() if tenant is None else {tag.tag for tag in tenant.report.tags if tag.policy == "keep"}

    def _ordered(self, name: str, tags: set[Tag]) -> tuple[Tag, ...]:
        tenant = self._book.tenants.get(name)
        if tenant is None:
            return ()
        return tuple(tag.tag for tag in tenant.report.tags if tag.tag in tags)

    def _end_back(self, run: Transition, now: float) -> None:
        silent = {name for each in self._told for name in each.silent} & run.silent
        for name in sorted(silent):
            tenant = self._book.tenants.get(name)
            if tenant is not None and tenant.is_usable:
                reason = f"it did not answer to {self.request.request_id}, nor to the way back"
                self._book.fence(name, reason)
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
            self._emit(Told(device, "", kind, text))
        self._emit(PhaseEnded(self.request.request_id, "switch", self._started, now, tuple(sorted(self.devices))))
        self._emit(Answer(self.request.request_id, reply))
