"""The caller's side of the session: calls under way and how each of them ends. Sans-IO; time comes from a `Clock`.

Every call ends exactly once: a reply, the handler's error, a refusal (not executed), never sent, or outcome unknown.

    waits for credit -> handed to the transport -> ended

Deadlines are looked at every `tick_s`: one `loop.call_later` per call costs more than the call.
"""

from __future__ import annotations

from collections import Counter

from ...core.clock import Clock
from ...core.errors import CallError, DeadlineExceeded, NotSent, PeerDied
from ...core.timeouts import TIMEOUTS
from ..wire import Lane
from .faults import decode_fault
from .frames import Envelope, Kind
from .links import Link, Links
from .pending import Outcome, PendingCall, Route, ttl_ms_of


class Calls:
    """All calls of this process."""

    def __init__(self, links: Links, clock: Clock, counters: Counter[str]) -> None:
        self._links = links
        self._now = clock.monotonic
        self._counters = counters
        self._pending: dict[int, PendingCall] = {}
        self._next_corr = 1

    def __len__(self) -> int:
        return len(self._pending)

    def submit(self, call: PendingCall, route: Route) -> int:
        """Begin a call; returns its number. If it raises (too large, overloaded, no way), it never began."""
        link = self._links.open(route.peer, route.endpoints)
        call.address(self._next_corr, route, self._links.own)
        self._next_corr += 1
        self._pending[call.corr] = link.pending[call.corr] = call
        queue = link.waiting[call.lane]
        if queue or not link.windows[call.lane].has_room(call.cost):
            queue.append(call)
        else:
            self._transmit(link, call)
        return call.corr

    def cancel(self, corr: int) -> None:
        """The caller does not wait any more. The callee gets a CANCEL if the call may have reached it."""
        call = self._pending.get(corr)
        if call is not None:
            self._withdraw(call)
            self._forget(call)

    def expire(self) -> None:
        now = self._now()
        for call in [c for c in self._pending.values() if c.due_at is not None and c.due_at <= now]:
            state = "waiting for credit" if call.parcel is None else "handed to the transport"
            self._withdraw(call)
            if call.doom:
                self._end_of(call, call.doom)
            elif call.was_sent:
                reason = f"{call}: no answer by its deadline"
                self._end(call, DeadlineExceeded(reason, remedy="with_deadline() gives it longer"))
            else:
                reason = f"{call}: its deadline passed while it was {state}"
                self._end(call, NotSent(reason, remedy="is the callee alive, is it overloaded?"))

    def on_answer(self, link: Link, _lane: Lane, envelope: Envelope, _num_bytes: int) -> None:
        call = link.pending.get(envelope.corr)
        self.settle(link, envelope.corr)
        if call is None:
            self._counters["late_answers"] += 1
        elif envelope.kind is Kind.REPLY:
            self._end(call, envelope)
        else:
            is_refusal = envelope.kind is Kind.NACK
            self._end(call, decode_fault(envelope.body, call.target, call.method, is_refusal=is_refusal))

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
            if call.corr in link.pending:
                self._transmit(link, call)

    def on_blip(self, link: Link) -> None:
        """A connection broke and is there again: what was under way on it may be lost. A call that may be lost waits
        for its deadline; for what has no waiter any more, the credit is asked back."""
        for window in link.windows:
            for corr in window.unanswered:
                if corr not in link.pending:
                    self._links.send(link, Kind.CANCEL, corr)

    def on_actor_gone(self, target: str, why: str) -> None:
        """An actor ended in a process that continues. It answered what it had; lost answers are not waited for."""
        until = self._now() + TIMEOUTS.wire.last_words_s
        for call in self._pending.values():
            if call.target == target and (call.deadline_at is None or call.deadline_at > until):
                call.doom, call.due_at = why, until

    def _end_of(self, call: PendingCall, why: str) -> None:
        died = PeerDied(f"{call}: {why} while the call was pending")
        self._end(call, died if call.was_sent else NotSent(f"{call}: {why} before the call was sent"))

    def fail_all(self, why: str, calls: dict[int, PendingCall] | None = None) -> None:
        for call in list((self._pending if calls is None else calls).values()):
            self._end_of(call, why)

    def _transmit(self, link: Link, call: PendingCall) -> None:
        envelope = call.envelope
        assert envelope is not None
        link.windows[call.lane].spend(call.corr, call.cost)
        call.parcel = self._links.hand_over(link, call.lane, envelope, ttl_ms_of(call, self._now()))
        call.envelope = None  # the parcel has it

    def _withdraw(self, call: PendingCall) -> None:
        """Keep an unsent call from being sent; notify the callee of a sent one."""
        link, parcel = self._links.find(call.peer), call.parcel
        if link is None:
            return
        if parcel is not None and not parcel.is_sent:
            parcel.is_withdrawn = True
            self.settle(link, call.corr)
        elif parcel is not None:
            self._links.send(link, Kind.CANCEL, call.corr)
        elif call in link.waiting[call.lane]:
            link.waiting[call.lane].remove(call)

    def _forget(self, call: PendingCall) -> None:
        self._pending.pop(call.corr, None)
        if (link := self._links.find(call.peer)) is not None:
            link.pending.pop(call.corr, None)

    def _end(self, call: PendingCall, outcome: Outcome) -> None:
        self._forget(call)
        if type(outcome) is not Envelope and isinstance(outcome, CallError):
            outcome.callee = call.target
        call.tell(outcome)
