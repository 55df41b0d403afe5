"""The callee's side of the session: calls of others that this process answers. Sans-IO.

Every call that arrives is answered exactly once (a cast: at most once, if it is refused), unless its caller is gone or
has cancelled it.
"""

from __future__ import annotations

from typing import Any, Protocol

from ..core.clock import Clock
from ..core.errors import CallError, DeadlineExceeded, MessageTooLarge
from ..core.ids import PeerKey
from .credit import cost_of
from .faults import encode_fault
from .frames import LIMITS, NO_TTL, Buffer, Envelope, Kind, Limits, encode
from .links import Link, Links
from .replay import ReplayCache
from .wire import Lane


class Arrival:
    """One call that came in."""

    __slots__ = (
        "allowed", "cost", "deadline_at", "envelope", "handle", "is_answered", "is_cast", "is_taken_up", "lane",
        "num_items", "peer",
    )  # fmt: skip

    def __init__(self, peer: PeerKey, lane: Lane, envelope: Envelope, cost: int, deadline_at: float | None) -> None:
        self.peer = peer
        self.lane = lane
        self.envelope = envelope
        self.cost = cost
        self.deadline_at = deadline_at
        """On this process's monotonic clock."""
        self.is_cast = envelope.kind is Kind.CAST
        self.is_taken_up = False
        self.is_answered = False
        self.handle: Any = None
        """For the host's use."""
        self.allowed = 0
        """Items of a stream that may be sent in all."""
        self.num_items = 0


class Host(Protocol):
    """Who executes calls."""

    def deliver(self, arrival: Arrival) -> None:
        """Queue it for its actor. Raises a CallError to refuse it."""
        ...

    def abandon(self, arrival: Arrival) -> None:
        """Nobody waits for the answer any more."""
        ...

    def demanded(self, arrival: Arrival) -> None:
        """A stream's consumer asks for more: `arrival.allowed` has grown."""
        ...


class Serving:
    """All calls that this process answers."""

    def __init__(self, links: Links, host: Host, clock: Clock, limits: Limits = LIMITS) -> None:
        self._links = links
        self._host = host
        self._clock = clock
        self._limits = limits
        self._replay: ReplayCache[Arrival] = ReplayCache()

    @property
    def num_replayed(self) -> int:
        """Puts that came again and were not executed again."""
        return self._replay.num_replayed

    # -- what comes in

    def on_call(self, link: Link, lane: Lane, envelope: Envelope, num_bytes: int) -> None:
        """CALL or CAST, addressed to this incarnation."""
        now = self._clock.monotonic()
        deadline_at = None if envelope.ttl_ms == NO_TTL else now + envelope.ttl_ms / 1000
        arrival = Arrival(link.key, lane, envelope, cost_of(num_bytes), deadline_at)
        link.grants[lane].take(arrival.cost)
        if not arrival.is_cast:
            link.served[envelope.corr] = arrival
        if envelope.key and not self._is_first(arrival, now):
            return
        try:
            self._host.deliver(arrival)
        except CallError as error:
            self.fail(arrival, error)

    def _is_first(self, arrival: Arrival, now: float) -> bool:
        is_first, answer = self._replay.begin(arrival.envelope.key, arrival, now)
        if not is_first:
            self.take_up(arrival)
        if answer is not None:
            self._answer(arrival, Kind.REPLY, *answer)
        return is_first

    def on_cancel(self, link: Link, _lane: Lane, envelope: Envelope, _num_bytes: int) -> None:
        arrival = link.served.pop(envelope.corr, None)
        if arrival is not None:
            self._drop(arrival)

    def on_demand(self, link: Link, _lane: Lane, envelope: Envelope, _num_bytes: int) -> None:
        arrival = link.served.get(envelope.corr)
        if arrival is not None and envelope.actor > arrival.allowed:
            arrival.allowed = envelope.actor
            self._host.demanded(arrival)

    def on_gone(self, link: Link) -> None:
        """The caller is over; nobody waits for its calls."""
        for arrival in list(link.served.values()):
            self._drop(arrival)
        link.served.clear()

    def _drop(self, arrival: Arrival) -> None:
        if not arrival.envelope.key:
            arrival.is_answered = True
        self._host.abandon(arrival)
        self.take_up(arrival)

    # -- what the host says

    def take_up(self, arrival: Arrival) -> None:
        """It left the mailbox: its credit goes back to the sender."""
        if arrival.is_taken_up:
            return
        arrival.is_taken_up = True
        link = self._links.find(arrival.peer)
        if link is None:
            return
        grant = link.grants[arrival.lane]
        grant.give(arrival.cost)
        if grant.is_due:
            self._links.send(link, Lane.CONTROL, self._encode(arrival, Kind.CREDIT, corr=0))

    def check_deadline(self, arrival: Arrival) -> None:
        """Raises DeadlineExceeded if its time was over before it began: then it is not executed."""
        if arrival.deadline_at is not None and self._clock.monotonic() > arrival.deadline_at:
            raise DeadlineExceeded("its deadline passed before it was executed", remedy="it was not executed")

    def reply(self, arrival: Arrival, body: Buffer, frames: tuple[Buffer, ...]) -> None:
        """The handler's result. Raises MessageTooLarge: then it is still unanswered."""
        if arrival.is_answered or arrival.is_cast:
            self._settle(arrival)
            return
        self._check_size(body, frames)
        if arrival.envelope.key:
            for waiter in self._replay.answered(arrival.envelope.key, body, frames):
                self._answer(waiter, Kind.REPLY, body, frames)
        else:
            self._answer(arrival, Kind.REPLY, body, frames)

    def fail(self, arrival: Arrival, error: BaseException) -> None:
        """It was refused, or the handler raised. Casts: only a refusal is told."""
        is_refusal = isinstance(error, CallError) and not error.callee and not arrival.is_taken_up
        self.take_up(arrival)
        body = encode_fault(error)
        kind = Kind.NACK if is_refusal else Kind.ERROR
        waiting = self._replay.failed(arrival.envelope.key) if arrival.envelope.key else [arrival]
        for waiter in waiting:
            if not waiter.is_cast or is_refusal:
                self._answer(waiter, kind, body, actor=waiter.num_items)
        self._settle(arrival)

    def item(self, arrival: Arrival, body: Buffer, frames: tuple[Buffer, ...]) -> None:
        """Next item of a stream; the host has seen that `num_items < allowed`. Raises MessageTooLarge."""
        link = self._links.find(arrival.peer)
        if arrival.is_answered or link is None:
            return
        self._check_size(body, frames)
        self._send(link, self._encode(arrival, Kind.ITEM, body, frames, actor=arrival.num_items))
        arrival.num_items += 1

    def end(self, arrival: Arrival) -> None:
        """No more items."""
        self._answer(arrival, Kind.END, actor=arrival.num_items)

    def refuse_unread(self, link: Link, corr: int, error: CallError) -> None:
        """Refuse a message that could not even be taken as a call."""
        own = self._links.own
        envelope = Envelope(
            kind=Kind.NACK, src_node=own.node_id, src_epoch=own.epoch, dst_epoch=link.key.epoch, corr=corr,
            body=encode_fault(error),
        )  # fmt: skip
        self._links.send(link, Lane.CONTROL, encode(envelope))

    def _answer(
        self, arrival: Arrival, kind: Kind, body: Buffer = b"", frames: tuple[Buffer, ...] = (), *, actor: int = 0
    ) -> None:
        link = self._links.find(arrival.peer)
        if link is not None and not arrival.is_answered:
            self._send(link, self._encode(arrival, kind, body, frames, actor=actor))
        arrival.is_answered = True
        self._settle(arrival)

    def _settle(self, arrival: Arrival) -> None:
        link = self._links.find(arrival.peer)
        if link is not None and link.served.get(arrival.envelope.corr) is arrival:
            del link.served[arrival.envelope.corr]

    def _encode(
        self,
        arrival: Arrival,
        kind: Kind,
        body: Buffer = b"",
        frames: tuple[Buffer, ...] = (),
        *,
        actor: int = 0,
        corr: int | None = None,
    ) -> bytearray:
        own = self._links.own
        envelope = Envelope(
            kind=kind, src_node=own.node_id, src_epoch=own.epoch, dst_epoch=arrival.peer.epoch,
            corr=arrival.envelope.corr if corr is None else corr, actor=actor, body=body, frames=frames,
        )  # fmt: skip
        return encode(envelope)

    def _send(self, link: Link, data: bytearray) -> None:
        lane = Lane.BULK if len(data) > self._limits.bulk_from else Lane.CONTROL
        self._links.send(link, lane, data)

    def _check_size(self, body: Buffer, frames: tuple[Buffer, ...]) -> None:
        num_bytes = len(body) + sum(map(len, frames))
        if num_bytes > self._limits.message - (1 << 20) or len(body) > self._limits.body:
            raise MessageTooLarge(f"a reply of {num_bytes} bytes is over the limit", remedy="send it in parts")
