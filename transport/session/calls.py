"""The caller's side of the session: calls under way and how each of them ends. Sans-IO; time comes from a `Clock`.

Every call ends exactly once: a reply, the handler's error, a refusal (not executed), never sent, or outcome unknown.

    WAITING (no credit) -> SENT -> ended            resendable ones also: SENT | WAITING <-> PARKED

A cast has no caller that waits, but it is answered like a call, for its credit. Its callee may refuse it because its
mailbox is full; then the next casts to that callee are refused here for a moment, and the sender sees the refusal.

Deadlines are looked at every `TICK_S`: one `loop.call_later` per call costs more than the call.
"""

from __future__ import annotations

from ...core.clock import Clock
from ...core.errors import (
    CallError,
    DeadlineExceeded,
    Draining,
    MyxaError,
    NoSuchActor,
    NotExecuted,
    NotSent,
    Overloaded,
    PeerDied,
    StaleEpoch,
)
from ..wire import Lane
from .faults import decode_fault
from .frames import LIMITS, Envelope, FrameLimits, Kind
from .links import Link, Links
from .pending import CallOrder, CallSink, CallState, PendingCall, Route, RouteOf, ttl_ms_of

TICK_S = 0.05


LAST_WORDS_S = 1.0  # grace for replies that arrive after the actor's end was reported
_REPLY = Kind.REPLY
_SENT, _PARKED, _ENDED = CallState.SENT, CallState.PARKED, CallState.ENDED  # members of an Enum are looked up in Python
_TRY_ELSEWHERE = (Draining, NoSuchActor, StaleEpoch, PeerDied)
"""Answers to a resendable call that only mean: not from this incarnation."""


class Calls:
    """All calls of this process."""

    def __init__(self, links: Links, clock: Clock, limits: FrameLimits = LIMITS) -> None:
        self._links = links
        self._now = clock.monotonic
        self._limits = limits
        self._pending: dict[int, PendingCall] = {}
        self._parked: dict[str, list[PendingCall]] = {}
        self._next_corr = 1
        self._refused_until: dict[str, float] = {}
        """Callees that refused a cast a moment ago."""
        self.num_casts_refused = 0
        self.num_late = 0

    def __len__(self) -> int:
        return len(self._pending)

    def submit(self, order: CallOrder, route: Route, sink: CallSink) -> int:
        """Begin a call; returns its number. If it raises (too large, overloaded, draining, no way), it never began."""
        now = self._now()
        if order.kind == "cast" and (left_s := self._refused_until.get(order.target, 0.0) - now) > 0:
            raise Overloaded(f"{order.target} refused a cast a moment ago: its mailbox is full", retry_after_s=left_s)
        try:
            link = self._links.open(route.peer, route.endpoints)
        except StaleEpoch:
            if not order.is_resendable:
                raise
            return self.submit_later(order, sink)  # the directory has not heard of the next incarnation yet
        if link.drains_until and link is not self._links.itself:
            if order.is_resendable:
                return self.submit_later(order, sink)
            left_s = max(0.0, link.drains_until - now)
            raise Draining(f"{order.target}: its process is shutting down and takes no calls", retry_after_s=left_s)
        call = PendingCall(self._next_corr, order, sink, due_at=order.deadline_at)
        call.address(route, self._links.own, self._limits)
        self._next_corr += 1
        self._pending[call.corr] = call
        self._push(link, call)
        return call.corr

    def submit_later(self, order: CallOrder, sink: CallSink) -> int:
        """Begin a resendable call to an absent actor: it is sent when `on_located` says where."""
        call = PendingCall(self._next_corr, order, sink, due_at=order.deadline_at)
        self._pending[call.corr] = call
        self._next_corr += 1
        self._park(None, call)
        return call.corr

    def cancel(self, corr: int) -> None:
        """The caller does not wait any more. The callee gets a CANCEL if the call may have reached it."""
        call = self._pending.get(corr)
        if call is not None:
            self._withdraw(call)
            self._end(call, None, tell=False)

    def expire(self) -> None:
        now = self._now()
        for call in [c for c in self._pending.values() if c.due_at is not None and c.due_at <= now]:
            never_left = not call.may_have_run
            self._withdraw(call)
            if call.doom:
                self._end_of(call, call.doom)
                continue
            reason = f"{call}: no answer by its deadline"
            if never_left:
                reason = f"{call}: its deadline passed while it was {call.state.value}"
                self._end(call, NotSent(reason, remedy="is the callee alive, is it overloaded?"))
            else:
                self._end(call, DeadlineExceeded(reason, remedy="with_deadline() gives it longer"))

    def on_answer(self, link: Link, _lane: Lane, envelope: Envelope, _num_bytes: int) -> None:
        call = link.pending.get(envelope.corr)
        self.settle(link, envelope.corr)
        if call is None:
            self.num_late += 1
        elif envelope.kind is _REPLY:
            self._end(call, envelope)
        else:
            self._on_error(link, call, envelope)

    def _on_error(self, link: Link, call: PendingCall, envelope: Envelope) -> None:
        order, is_refusal = call.order, envelope.kind is Kind.NACK
        error = decode_fault(envelope.body, order.target, order.method, is_refusal=is_refusal)
        if order.kind == "cast" and is_refusal:
            self.num_casts_refused += 1
            if isinstance(error, Overloaded):
                self._refused_until[order.target] = self._now() + error.retry_after_s
        if order.is_resendable and isinstance(error, _TRY_ELSEWHERE):
            self._park(link, call)
        else:
            self._end(call, error)

    def on_credit(self, link: Link, _lane: Lane, envelope: Envelope, _num_bytes: int) -> None:
        self.settle(link, envelope.corr)

    def settle(self, link: Link, corr: int) -> None:
        """That call holds no credit any more; those that wait for it may go."""
        for lane in Lane:
            if link.windows[lane].settle(corr):
                if link.waiting[lane]:
                    self.on_room(link, lane)
                return

    def on_room(self, link: Link, lane: Lane) -> None:
        queue = link.waiting[lane]
        while queue and link.windows[lane].has_room(queue[0].cost):
            call = queue.popleft()
            if call.state is CallState.WAITING and call.peer == link.key:
                self._transmit(link, call)

    def on_blip(self, link: Link, lane: Lane | None = None) -> None:
        """A connection broke and is there again: what was under way on it may be lost. Our requests, if it was ours to
        send on `lane`; answers to anything, if it was theirs (None)."""
        sent = [c for c in link.pending.values() if c.state is CallState.SENT and c.was_sent]
        for call in [c for c in sent if lane in (None, c.lane)]:
            if call.order.is_resendable:  # it may run again, or the callee knows its key
                self.settle(link, call.corr)
                call.parcel, call.state = None, CallState.WAITING
                self._push(link, call)
            elif call.is_told:
                self.settle(link, call.corr)
                self._end(call, None)
        for window in link.windows:
            for corr in window.unanswered:
                if corr not in link.pending:
                    self._links.send(link, Kind.CANCEL, corr)

    def on_refused(self, link: Link, error: NotExecuted) -> None:
        """The other side takes nothing from us, and never did."""
        for call in list(link.pending.values()):
            self._withdraw(call)
            self._end(call, type(error)(f"{call}: {error.message}", remedy=error.remedy))

    def on_gone(self, link: Link, why: str) -> None:
        """The incarnation is over."""
        for call in list(link.pending.values()):
            if call.order.is_resendable:
                self._park(link, call)
            else:
                self._end_of(call, why)

    def on_actor_gone(self, target: str, why: str) -> None:
        """An actor ended in a process that continues. It answered what it had; lost answers are not waited for."""
        until = self._now() + LAST_WORDS_S
        for call in self._pending.values():
            is_later = call.order.deadline_at is None or call.order.deadline_at > until
            if call.order.target == target and not call.order.is_resendable and is_later:
                call.doom, call.due_at = why, until

    def _end_of(self, call: PendingCall, why: str) -> None:
        """Its callee is over."""
        if not call.may_have_run:
            self._end(call, NotSent(f"{call}: {why} before the call was sent"))
        else:
            self._end(call, PeerDied(f"{call}: {why} while the call was pending"))

    def on_located(self, target: str, route_of: RouteOf) -> None:
        for call in list(self._parked.get(target, ())):
            route = route_of(call.order)
            if route is None:
                return
            if isinstance(route, CallError):
                self._end(call, route)
                continue
            try:
                link = self._links.open(route.peer, route.endpoints)
            except StaleEpoch:
                return  # what the directory says is over; it will hear of the next
            except MyxaError as error:
                self._end(call, error)
                continue
            if link.drains_until:
                return
            self._unpark(call)
            call.address(route, self._links.own, self._limits)
            call.state = CallState.WAITING
            self._push(link, call)

    @property
    def parked_targets(self) -> tuple[str, ...]:
        return tuple(self._parked)

    def fail_all(self, why: str) -> None:
        for call in list(self._pending.values()):
            self._end_of(call, why)

    def _push(self, link: Link, call: PendingCall) -> None:
        link.pending[call.corr] = call
        queue = link.waiting[call.lane]
        if queue or not link.windows[call.lane].has_room(call.cost):
            queue.append(call)
        else:
            self._transmit(link, call)

    def _transmit(self, link: Link, call: PendingCall) -> None:
        envelope, order = call.envelope, call.order
        assert envelope is not None
        link.windows[call.lane].spend(call.corr, call.cost)
        call.state = _SENT
        call.num_sent += 1
        call.parcel = self._links.hand_over(link, call.lane, envelope, ttl_ms_of(order, self._now()))
        if not order.is_resendable:
            call.envelope = None  # the parcel has it
        if order.kind == "cast":
            call.is_told = True
            call.sink.done(None)

    def _withdraw(self, call: PendingCall) -> None:
        """Keep an unsent call from being sent; notify the callee of a sent one."""
        link, parcel = self._links.find(call.peer), call.parcel
        if link is None or call.is_told:
            return
        if parcel is not None and not parcel.is_sent:
            parcel.is_withdrawn = True
            self.settle(link, call.corr)
        elif parcel is not None:
            self._links.send(link, Kind.CANCEL, call.corr)
        elif call.state is CallState.WAITING and call in link.waiting[call.lane]:
            link.waiting[call.lane].remove(call)

    def _park(self, link: Link | None, call: PendingCall) -> None:
        if link is not None:
            link.pending.pop(call.corr, None)
        call.state = CallState.PARKED
        if call.parcel is not None and not call.parcel.is_sent:
            call.num_sent -= 1
        call.parcel = None
        self._parked.setdefault(call.order.target, []).append(call)

    def _unpark(self, call: PendingCall) -> None:
        parked = self._parked.get(call.order.target, [])
        if call in parked:
            parked.remove(call)
            if not parked:
                del self._parked[call.order.target]

    def _end(self, call: PendingCall, outcome: Envelope | MyxaError | None, *, tell: bool = True) -> None:
        if call.state is _PARKED:
            self._unpark(call)
        call.state = _ENDED
        corr = call.corr
        self._pending.pop(corr, None)
        if (link := self._links.find(call.peer)) is not None:
            link.pending.pop(corr, None)
        if type(outcome) is not Envelope and isinstance(outcome, CallError):
            outcome.callee = call.order.target
        if tell and not call.is_told:
            call.sink.done(outcome)
