"""The caller's side of the session: calls under way and how each of them ends. Sans-IO; time comes from a `Clock`.

Every call ends exactly once: a reply, the handler's error, a refusal (not executed), never sent, or outcome unknown.

    WAITING (no credit) -> SENT -> ended            resendable ones also: SENT | WAITING <-> PARKED
"""

from __future__ import annotations

from collections import OrderedDict, deque

from ..core.clock import Clock
from ..core.errors import (
    CallError,
    DeadlineExceeded,
    Draining,
    MessageTooLarge,
    MyxaError,
    NoSuchActor,
    NotSent,
    Overloaded,
    PeerDied,
    StaleEpoch,
    StreamBroken,
)
from .credit import cost_of
from .faults import decode_fault
from .frames import LIMITS, NO_TTL, Envelope, Kind, Limits, encode
from .links import Link, Links
from .pending import CallSink, CallState, Order, PendingCall, Route, RouteOf
from .wheel import Wheel
from .wire import Lane

MAX_RECENT_CASTS = 1024
_TRY_ELSEWHERE = (Draining, NoSuchActor, StaleEpoch, PeerDied)
"""Answers to a resendable call that only mean: not from this incarnation."""


class Calls:
    """All calls of this process."""

    def __init__(self, links: Links, clock: Clock, limits: Limits = LIMITS) -> None:
        self._links = links
        self._clock = clock
        self._limits = limits
        self._pending: dict[int, PendingCall] = {}
        self._parked: dict[str, list[PendingCall]] = {}
        self._wheel = Wheel(clock.monotonic())
        self._next_corr = 1
        self._recent_casts: OrderedDict[int, str] = OrderedDict()
        self._refused_until: dict[str, float] = {}
        self.num_late = 0
        """Answers to calls that had ended already."""
        self.num_casts_refused = 0

    def __len__(self) -> int:
        return len(self._pending)

    # -- intents

    def submit(self, order: Order, route: Route, sink: CallSink) -> int:
        """Begin a call; returns its number. Raises MessageTooLarge, Overloaded or LaunchError: then it never began."""
        now = self._clock.monotonic()
        if order.kind == "cast" and now < self._refused_until.get(order.target, 0.0):
            left = self._refused_until[order.target] - now
            raise Overloaded(f"{order.target} refused a cast a moment ago: its mailbox is full", retry_after_s=left)
        link = self._links.open(route.peer, route.endpoints)
        call = PendingCall(self._next_corr, order, sink)
        self._address(call, route)
        self._register(call)
        self._push(link, call)
        return call.corr

    def submit_later(self, order: Order, sink: CallSink) -> int:
        """Begin a resendable call to somebody who is away: it is sent when `on_located` says where."""
        call = PendingCall(self._next_corr, order, sink)
        self._register(call)
        self._park(None, call)
        return call.corr

    def _register(self, call: PendingCall) -> None:
        self._next_corr += 1
        self._pending[call.corr] = call
        if call.order.deadline_at is not None:
            self._wheel.set(call.corr, call.order.deadline_at)

    def cancel(self, corr: int) -> None:
        """Nobody waits any more. The callee is told if the call may have reached it."""
        call = self._pending.get(corr)
        if call is not None:
            self._withdraw(call)
            self._end(call, None, tell_sink=False)

    def demand(self, corr: int, total: int) -> None:
        """A stream's consumer can take `total` items in all."""
        call = self._pending.get(corr)
        link = self._links.find(call.peer) if call is not None else None
        if call is not None and link is not None:
            self._tell(link, Kind.CREDIT, corr, actor=total)

    def expire(self) -> None:
        """End every call whose deadline has passed."""
        for corr in self._wheel.due(self._clock.monotonic()):
            call = self._pending[corr]
            never_left = not call.was_sent
            self._withdraw(call)
            reason = f"{call}: no answer by its deadline"
            if never_left:
                reason = f"{call}: its deadline passed while it was {call.state.value}"
                self._end(call, NotSent(reason, remedy="is the callee alive, is it overloaded?"))
            else:
                self._end(call, DeadlineExceeded(reason, remedy="with_deadline() gives it longer"))

    # -- answers

    def on_answer(self, link: Link, _lane: Lane, envelope: Envelope, _num_bytes: int) -> None:
        """REPLY, ERROR, NACK or END. Of a stream: once all items sent before it have come."""
        call = link.pending.get(envelope.corr)
        if call is None:
            self._on_late(link, envelope)
            return
        if call.order.kind == "stream" and envelope.actor > call.next_item:
            call.last = envelope  # it overtook items on the other lane
            return
        if envelope.kind in (Kind.REPLY, Kind.END):
            self._end(call, envelope)
            return
        is_refusal = envelope.kind is Kind.NACK
        error = decode_fault(envelope.body, call.order.target, call.order.method, is_refusal=is_refusal)
        if call.order.is_resendable and isinstance(error, _TRY_ELSEWHERE):
            self._park(link, call)
        else:
            self._end(call, error)

    def on_item(self, link: Link, _lane: Lane, envelope: Envelope, _num_bytes: int) -> None:
        call = link.pending.get(envelope.corr)
        if call is None or call.order.kind != "stream":
            self.num_late += 1
            return
        seq = envelope.actor
        if seq < call.next_item or seq >= call.next_item + 2 * call.order.window + 2:
            self._break(call, f"item {seq} came when {call.next_item} was due")
            return
        call.early[seq] = envelope
        while (ready := call.early.pop(call.next_item, None)) is not None:
            call.next_item += 1
            call.sink.item(ready)
        if call.last is not None:
            self.on_answer(link, Lane.CONTROL, call.last, 0)

    def _on_late(self, link: Link, envelope: Envelope) -> None:
        self.num_late += 1
        target = self._recent_casts.pop(envelope.corr, None)
        if target is not None and envelope.kind is Kind.NACK:
            self.num_casts_refused += 1
            error = decode_fault(envelope.body, target, "cast", is_refusal=True)
            if isinstance(error, Overloaded):
                self._refused_until[target] = self._clock.monotonic() + error.retry_after_s

    # -- what happens to peers

    def on_room(self, link: Link, lane: Lane) -> None:
        """Credit came back."""
        queue = link.waiting[lane]
        while queue and link.windows[lane].has_room(queue[0].cost):
            call = queue.popleft()
            if call.state is CallState.WAITING and call.peer == link.key:
                self._transmit(link, call)

    def on_blip(self, link: Link) -> None:
        """A connection from or to the peer broke and is there again: what was under way may be lost."""
        for call in list(link.pending.values()):
            if call.state is not CallState.SENT or not call.was_sent:
                continue
            if call.order.kind == "stream":
                self._withdraw(call)
                self._break(call, "the connection broke")
            elif call.order.is_resendable:
                call.parcel = None
                call.state = CallState.WAITING
                self._push(link, call)

    def on_gone(self, link: Link, why: str) -> None:
        """The incarnation is over."""
        for call in list(link.pending.values()):
            if call.order.is_resendable:
                self._park(link, call)
            elif call.order.kind == "stream":
                self._break(call, why)
            elif call.was_sent:
                self._end(call, PeerDied(f"{call}: {why} while the call was pending"))
            else:
                self._end(call, NotSent(f"{call}: {why} before the call was sent"))

    def on_located(self, target: str, route_of: RouteOf) -> None:
        """An incarnation of `target` registered: what waited for it goes on."""
        for call in list(self._parked.get(target, ())):
            route = route_of(call.order)
            if route is None:
                return
            if isinstance(route, CallError):
                self._end(call, route)
                continue
            try:
                link = self._links.open(route.peer, route.endpoints)
            except MyxaError as error:
                self._end(call, error)
                continue
            self._unpark(call)
            self._address(call, route)
            call.state = CallState.WAITING
            self._push(link, call)

    @property
    def parked_targets(self) -> tuple[str, ...]:
        return tuple(self._parked)

    def fail_all(self, why: str) -> None:
        """This process closes."""
        for call in list(self._pending.values()):
            kind = PeerDied if call.was_sent else NotSent
            self._end(call, kind(f"{call}: {why}"))

    # -- the way of one call

    def _address(self, call: PendingCall, route: Route) -> None:
        order = call.order
        envelope = Envelope(
            kind=Kind.CAST if order.kind == "cast" else Kind.CALL, corr=call.corr,
            src_node=self._links.own.node_id, src_epoch=self._links.own.epoch, dst_epoch=route.peer.epoch,
            actor=route.actor, method=route.method, is_idempotent=order.is_resendable,
            key=order.key, trace=order.trace, chain=order.chain, body=order.body, frames=order.frames,
        )  # fmt: skip
        call.data = encode(envelope)
        num_bytes = len(call.data)
        if num_bytes > self._limits.message or len(order.body) > self._limits.body:
            raise MessageTooLarge(
                f"{call}: {num_bytes} bytes are over the limit of {self._limits.message} (body: {self._limits.body})",
                remedy="send it in parts, or by shared memory",
            )
        call.lane = Lane.BULK if num_bytes > self._limits.bulk_from else Lane.CONTROL
        call.cost = cost_of(num_bytes)
        call.peer = route.peer

    def _push(self, link: Link, call: PendingCall) -> None:
        link.pending[call.corr] = call
        queue: deque[PendingCall] = link.waiting[call.lane]
        if queue or not link.windows[call.lane].has_room(call.cost):
            queue.append(call)
        else:
            self._transmit(link, call)

    def _transmit(self, link: Link, call: PendingCall) -> None:
        link.windows[call.lane].spend(call.cost)
        call.state = CallState.SENT
        is_last = not call.order.is_resendable
        data = call.data if is_last else bytearray(call.data)
        call.parcel = self._links.send(link, call.lane, data, call.cost, self._ttl_ms(call.order))
        if is_last:
            call.data = bytearray()
        if call.order.kind == "cast":
            self._recent_casts[call.corr] = call.order.target
            if len(self._recent_casts) > MAX_RECENT_CASTS:
                self._recent_casts.popitem(last=False)
            self._end(call, None)

    def _ttl_ms(self, order: Order) -> int:
        if order.deadline_at is None:
            return NO_TTL
        return min(NO_TTL - 1, max(0, int((order.deadline_at - self._clock.monotonic()) * 1000)))

    def _withdraw(self, call: PendingCall) -> None:
        """Keep an unsent call from being sent; tell the callee of a sent one."""
        link = self._links.find(call.peer)
        if link is None:
            return
        parcel = call.parcel
        if parcel is not None and not parcel.is_sent:
            parcel.is_withdrawn = True
            link.windows[call.lane].refund(call.cost)
        elif parcel is not None and call.order.kind != "put":
            self._tell(link, Kind.CANCEL, call.corr)
        elif call.state is CallState.WAITING and call in link.waiting[call.lane]:
            link.waiting[call.lane].remove(call)

    def _park(self, link: Link | None, call: PendingCall) -> None:
        if link is not None:
            link.pending.pop(call.corr, None)
        call.state = CallState.PARKED
        call.parcel = None
        self._parked.setdefault(call.order.target, []).append(call)

    def _unpark(self, call: PendingCall) -> None:
        parked = self._parked.get(call.order.target, [])
        if call in parked:
            parked.remove(call)
            if not parked:
                del self._parked[call.order.target]

    def _break(self, call: PendingCall, why: str) -> None:
        last = call.next_item - 1
        self._end(call, StreamBroken(f"{call} broke after item {last}: {why}", last_seq=last))

    def _end(self, call: PendingCall, outcome: Envelope | MyxaError | None, *, tell_sink: bool = True) -> None:
        call.state = CallState.ENDED
        self._pending.pop(call.corr, None)
        self._wheel.clear(call.corr)
        link = self._links.find(call.peer)
        if link is not None:
            link.pending.pop(call.corr, None)
        self._unpark(call)
        if isinstance(outcome, CallError):
            outcome.callee = call.order.target
        if tell_sink:
            call.sink.done(outcome)

    def _tell(self, link: Link, kind: Kind, corr: int, actor: int = 0) -> None:
        own = self._links.own
        envelope = Envelope(
            kind=kind, src_node=own.node_id, src_epoch=own.epoch, dst_epoch=link.key.epoch, corr=corr, actor=actor
        )
        self._links.send(link, Lane.CONTROL, encode(envelope))
