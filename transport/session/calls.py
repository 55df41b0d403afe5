"""The caller's side of the session: calls under way and how each of them ends. Sans-IO; time comes from a `Clock`.

Every call ends exactly once: a reply, the handler's error, a refusal (not executed), never sent, or outcome unknown.

    WAITING (no credit) -> SENT -> ended            resendable ones also: SENT | WAITING <-> PARKED

A cast has no caller that waits, but its callee may refuse it because its mailbox is full. The refusal comes late, so
`RefusedCasts` refuses the next casts to that callee here for a moment, and the sender sees the refusal.

Deadlines are in a hashed timer wheel (`Wheel`): setting and clearing is O(1), and a finished call leaves nothing.
A heap would keep it until its deadline, and one `loop.call_later` per call costs more than the call.
"""

from __future__ import annotations

from collections import OrderedDict

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
from .frames import LIMITS, Envelope, FrameLimits, Kind, encode
from .links import Link, Links
from .pending import CallOrder, CallSink, CallState, PendingCall, Route, RouteOf, ttl_ms_of

TICK_S = 0.05


class Wheel:
    """Numbers with due times, in slots of `TICK_S`."""

    def __init__(self, now: float) -> None:
        self._slots: dict[int, set[int]] = {}
        self._slot_of: dict[int, int] = {}
        self._next = int(now / TICK_S)

    def __len__(self) -> int:
        return len(self._slot_of)

    def set(self, number: int, due_at: float) -> None:
        """Due at the first tick not before `due_at`; setting again moves it."""
        self.clear(number)
        slot = max(int(due_at / TICK_S) + 1, self._next)
        self._slot_of[number] = slot
        self._slots.setdefault(slot, set()).add(number)

    def clear(self, number: int) -> None:
        slot = self._slot_of.pop(number, None)
        if slot is not None:
            numbers = self._slots[slot]
            numbers.discard(number)
            if not numbers:
                del self._slots[slot]

    def due(self, now: float) -> list[int]:
        """Take out everything that is due, in order of due time."""
        current = int(now / TICK_S)
        if current < self._next:
            return []
        slots = range(self._next, current + 1)
        if len(slots) <= len(self._slots):
            ready = [slot for slot in slots if slot in self._slots]
        else:
            ready = sorted(slot for slot in self._slots if slot <= current)
        self._next = current + 1
        numbers: list[int] = []
        for slot in ready:
            for number in sorted(self._slots.pop(slot)):
                del self._slot_of[number]
                numbers.append(number)
        return numbers


LAST_WORDS_S = 1.0  # grace for replies that arrive after the actor's end was reported
_CALL, _CAST, _REPLY = Kind.CALL, Kind.CAST, Kind.REPLY
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
        self._wheel = Wheel(clock.monotonic())
        self._next_corr = 1
        self._next_enrolled = 1
        """Calls from this number on were begun since the last tick: most end before the next, and are never timed."""
        self._casts = RefusedCasts()
        self.num_late = 0

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def num_casts_refused(self) -> int:
        return self._casts.num_refused

    def submit(self, order: CallOrder, route: Route, sink: CallSink) -> int:
        """Begin a call; returns its number. If it raises (too large, overloaded, draining, no way), it never began."""
        now = self._now()
        if order.kind == "cast":
            self._casts.check(order.target, now)
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
        call = PendingCall(self._next_corr, order, sink)
        call.address(route, self._links.own, self._limits)
        self._next_corr += 1
        self._pending[call.corr] = call
        self._push(link, call)
        return call.corr

    def submit_later(self, order: CallOrder, sink: CallSink) -> int:
        """Begin a resendable call to an absent actor: it is sent when `on_located` says where."""
        call = self._pending[self._next_corr] = PendingCall(self._next_corr, order, sink)
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
        self._enrol()
        for corr in self._wheel.due(self._now()):
            call = self._pending[corr]
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

    def _enrol(self) -> None:
        for corr, call in reversed(self._pending.items()):  # numbers grow
            if corr < self._next_enrolled:
                break
            if call.order.deadline_at is not None:
                call.is_timed = True
                self._wheel.set(corr, call.order.deadline_at)
        self._next_enrolled = self._next_corr

    def on_answer(self, link: Link, _lane: Lane, envelope: Envelope, _num_bytes: int) -> None:
        corr = envelope.corr
        call = link.pending.get(corr)
        if call is None:
            self._on_late(link, envelope)
            return
        if envelope.kind is _REPLY:
            self._end(call, envelope)
            return
        is_refusal = envelope.kind is Kind.NACK
        error = decode_fault(envelope.body, call.order.target, call.order.method, is_refusal=is_refusal)
        if call.order.is_resendable and isinstance(error, _TRY_ELSEWHERE):
            self._park(link, call)
        else:
            self._end(call, error)

    def _on_late(self, link: Link, envelope: Envelope) -> None:
        self.num_late += 1
        target = self._casts.target_of(envelope.corr)
        if target is not None and envelope.kind is Kind.NACK:
            error = decode_fault(envelope.body, target, "cast", is_refusal=True)
            self._casts.refused(target, error, self._now())

    def on_room(self, link: Link, lane: Lane) -> None:
        queue = link.waiting[lane]
        while queue and link.windows[lane].has_room(queue[0].cost):
            call = queue.popleft()
            if call.state is CallState.WAITING and call.peer == link.key:
                self._transmit(link, call)

    def on_blip(self, link: Link, lane: Lane | None = None) -> None:
        """A connection broke and is there again: what was under way on it may be lost. Our requests, if it was ours to
        send on `lane`; answers to anything, if it was theirs (None)."""
        for call in list(link.pending.values()):
            is_under_way = call.state is CallState.SENT and call.was_sent and lane in (None, call.lane)
            if is_under_way and call.order.is_resendable:
                self.send_again(link, call)

    def send_again(self, link: Link, call: PendingCall) -> None:
        """It, or the answer to it, may be lost; it may run again, or the callee knows its key."""
        call.parcel = None
        call.state = CallState.WAITING
        self._push(link, call)

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
        self._enrol()
        until = self._now() + LAST_WORDS_S
        for call in self._pending.values():
            is_later = call.order.deadline_at is None or call.order.deadline_at > until
            if call.order.target == target and not call.order.is_resendable and is_later:
                call.doom, call.is_timed = why, True
                self._wheel.set(call.corr, until)

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
        link.windows[call.lane].spend(call.cost)
        order, whole = call.order, call.whole
        call.state = _SENT
        call.num_sent += 1
        ttl_ms = ttl_ms_of(order, self._now())
        if whole is not None:
            call.parcel = self._links.send(link, call.lane, encode(whole), call.cost, ttl_ms)
            if not order.is_resendable:
                call.whole = None  # the parcel has it
        elif (route := call.route) is not None:
            kind, is_idempotent = _CAST if order.kind == "cast" else _CALL, order.is_resendable
            call.parcel = self._links.send_plain(
                link, kind, call.corr, order.body, route.actor, route.method, is_idempotent, call.cost, ttl_ms
            )
        if order.kind == "cast":
            self._casts.sent(call.corr, order.target)
            self._end(call, None)

    def _withdraw(self, call: PendingCall) -> None:
        """Keep an unsent call from being sent; notify the callee of a sent one."""
        link = self._links.find(call.peer)
        if link is None:
            return
        parcel = call.parcel
        if parcel is not None and not parcel.is_sent:
            parcel.is_withdrawn = True
            link.windows[call.lane].refund(call.cost)
        elif parcel is not None and call.order.kind != "put":
            self._links.send_plain(link, Kind.CANCEL, call.corr)
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
        if call.is_timed:
            self._wheel.clear(corr)
        if (link := self._links.find(call.peer)) is not None:
            link.pending.pop(corr, None)
        if type(outcome) is not Envelope and isinstance(outcome, CallError):
            outcome.callee = call.order.target
        if tell:
            call.sink.done(outcome)


MAX_RECENT = 1024


class RefusedCasts:
    """Of all callees of a process."""

    def __init__(self) -> None:
        self._recent: OrderedDict[int, str] = OrderedDict()
        self._refused_until: dict[str, float] = {}
        self.num_refused = 0

    def check(self, target: str, now: float) -> None:
        """Raises Overloaded if `target` refused a cast a moment ago."""
        left_s = self._refused_until.get(target, 0.0) - now
        if left_s > 0:
            raise Overloaded(f"{target} refused a cast a moment ago: its mailbox is full", retry_after_s=left_s)

    def sent(self, corr: int, target: str) -> None:
        """A cast is on its way."""
        self._recent[corr] = target
        if len(self._recent) > MAX_RECENT:
            self._recent.popitem(last=False)

    def target_of(self, corr: int) -> str | None:
        """Whose refusal it is that came with that number, once; None: of no cast that is remembered."""
        return self._recent.pop(corr, None)

    def refused(self, target: str, error: Exception, now: float) -> None:
        self.num_refused += 1
        if isinstance(error, Overloaded):
            self._refused_until[target] = now + error.retry_after_s
