"""The callee's side of the session: calls of others that this process answers. Sans-IO.

Every call that arrives is answered exactly once (a cast: at most once, if it is refused), unless its caller is gone or
has cancelled it.

`ReplayCache` remembers keyed puts of this incarnation, so that one sent twice is executed once. Bounded by number,
bytes and age. Survives reconnects, not a restart: over a restart the actor's own ledger decides. A failed put is
forgotten, so that it can be tried again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from ...core.clock import Clock
from ...core.errors import (
    BadRequest,
    CallError,
    DeadlineExceeded,
    MessageTooLarge,
    NoSuchActor,
    NoSuchMethod,
    NotPermitted,
)
from ..wire import Lane
from .credit import cost_of
from .faults import encode_fault
from .frames import HEADER_BYTES, LIMITS, NO_TTL, Buffer, Envelope, FrameLimits, Kind, encode
from .links import Arrival, Link, Links

_WRONG = (BadRequest, NoSuchActor, NoSuchMethod, NotPermitted)
_CAST, _REPLY, _CREDIT = Kind.CAST, Kind.REPLY, Kind.CREDIT  # members of an Enum are looked up in Python


class Host(Protocol):
    """Who executes calls."""

    def deliver(self, arrival: Arrival) -> None:
        """Queue it for its actor. Raises a CallError to refuse it."""
        ...

    def abandon(self, arrival: Arrival) -> None:
        """The caller does not wait for the answer any more."""
        ...


class Serving:
    """All calls that this process answers."""

    def __init__(self, links: Links, host: Host, clock: Clock, limits: FrameLimits = LIMITS) -> None:
        self._links = links
        self._host = host
        self._clock = clock
        self._now = clock.monotonic
        self._limits = limits
        self._small_body = limits.bulk_from - HEADER_BYTES
        self._replay: ReplayCache[Arrival] = ReplayCache()
        self.num_wrong = 0
        """Calls to actors and handlers that are not here, with wrong types, or beyond the caller's role."""
        self.num_copies = 0

    @property
    def num_replayed(self) -> int:
        return self._replay.num_replayed

    def on_call(self, link: Link, lane: Lane, envelope: Envelope, num_bytes: int) -> None:
        corr = envelope.corr
        if not envelope.is_idempotent:
            # Numbers grow along a lane, and what may run only once is never sent again: this is a copy of it.
            newest = link.newest_call
            if corr <= newest[lane]:
                self.num_copies += 1
                return
            newest[lane] = corr
        now, ttl_ms = self._now(), envelope.ttl_ms
        deadline_at = None if ttl_ms == NO_TTL else now + ttl_ms / 1000
        is_cast, cost = envelope.kind is _CAST, cost_of(num_bytes)
        arrival = Arrival(link, lane, envelope, cost, deadline_at, is_cast)
        link.grants[lane].take(cost)
        if not is_cast:
            link.served[corr] = arrival
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

    def on_gone(self, link: Link) -> None:
        for arrival in list(link.served.values()):
            self._drop(arrival)
        link.served.clear()

    def _drop(self, arrival: Arrival) -> None:
        if not arrival.envelope.key:
            arrival.is_answered = True
        self._host.abandon(arrival)
        self.take_up(arrival)

    def take_up(self, arrival: Arrival) -> None:
        """It left the mailbox: its credit goes back to the sender."""
        if arrival.is_taken_up:
            return
        arrival.is_taken_up = True
        link = self._link_to(arrival) if arrival.link.is_down else arrival.link
        if link is not None and link.grants[arrival.lane].give(arrival.cost):
            self._links.send_plain(link, Kind.CREDIT, 0)

    def begin(self, arrival: Arrival) -> None:
        """Its handler begins. Raises DeadlineExceeded if its time was over before: then it is not executed."""
        if arrival.deadline_at is not None and self._now() > arrival.deadline_at:
            raise DeadlineExceeded("its deadline passed before it was executed", remedy="it was not executed")
        self.take_up(arrival)

    def left_s(self, arrival: Arrival) -> float | None:
        """Of its caller's patience; None: no limit."""
        return None if arrival.deadline_at is None else max(0.0, arrival.deadline_at - self._clock.monotonic())

    def reply(self, arrival: Arrival, body: Buffer, frames: tuple[Buffer, ...]) -> None:
        """The handler's result. Raises MessageTooLarge: then it is still unanswered."""
        if arrival.is_answered or arrival.is_cast:
            self._settle(arrival)
            return
        if frames or len(body) > self._limits.bulk_from:
            num_bytes = len(body) + sum(map(len, frames))
            if num_bytes > self._limits.message - (1 << 20) or len(body) > self._limits.body:
                raise MessageTooLarge(f"a reply of {num_bytes} bytes is over the limit", remedy="send it in parts")
        if arrival.envelope.key:
            for waiter in self._replay.answered(arrival.envelope.key, body, frames):
                self._answer(waiter, Kind.REPLY, body, frames)
        else:
            self._answer(arrival, _REPLY, body, frames)

    def fail(self, arrival: Arrival, error: BaseException) -> None:
        """It was refused, or the handler raised. Casts: only a refusal is sent."""
        is_refusal = isinstance(error, CallError) and not error.callee and not arrival.is_taken_up
        self.num_wrong += isinstance(error, _WRONG) and not error.callee
        self.take_up(arrival)
        body = encode_fault(error)
        kind = Kind.NACK if is_refusal else Kind.ERROR
        waiting = self._replay.failed(arrival.envelope.key) if arrival.envelope.key else [arrival]
        for waiter in waiting:
            if not waiter.is_cast or is_refusal:
                self._answer(waiter, kind, body)
        self._settle(arrival)

    def refuse_unread(self, link: Link, corr: int, error: CallError) -> None:
        """Refuse a message that could not even be taken as a call."""
        self._links.send_plain(link, Kind.NACK, corr, encode_fault(error))

    def _answer(self, arrival: Arrival, kind: Kind, body: Buffer = b"", frames: tuple[Buffer, ...] = ()) -> None:
        if not arrival.is_answered and (link := self._link_to(arrival)) is not None:
            self._send(link, arrival, kind, body, frames)
        self._settle(arrival)

    def _link_to(self, arrival: Arrival) -> Link | None:
        """The way to its caller; not the one on which it came, if that was given up and there is another."""
        return self._links.find(arrival.peer) if arrival.link.is_down else arrival.link

    def _settle(self, arrival: Arrival) -> None:
        arrival.is_answered = True
        arrival.handle = None
        link = self._link_to(arrival)
        if link is not None and link.served.get(arrival.envelope.corr) is arrival:
            del link.served[arrival.envelope.corr]

    def _send(self, link: Link, arrival: Arrival, kind: Kind, body: Buffer, frames: tuple[Buffer, ...]) -> None:
        corr = arrival.envelope.corr
        if not frames and len(body) <= self._small_body:
            self._links.send_plain(link, kind, corr, body)
            return
        own = self._links.own
        envelope = Envelope(
            kind=kind, src_node=own.node_id, src_epoch=own.epoch, dst_epoch=arrival.peer.epoch, corr=corr,
            body=body, frames=frames,
        )  # fmt: skip
        data = encode(envelope)
        self._links.send(link, Lane.BULK if len(data) > self._limits.bulk_from else Lane.CONTROL, data)


W = TypeVar("W")

MAX_KEYS = 10_000
MAX_BYTES = 64 << 20
MAX_AGE_S = 600.0


@dataclass(slots=True)
class _Entry(Generic[W]):
    began_at: float
    waiting: list[W] = field(default_factory=lambda: list[W]())
    answer: tuple[Buffer, tuple[Buffer, ...]] | None = None
    num_bytes: int = 0


class ReplayCache(Generic[W]):
    """Key -> running (with who waits for it) or answered (with the answer)."""

    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, _Entry[W]] = OrderedDict()
        self._num_bytes = 0
        self.num_replayed = 0

    def __len__(self) -> int:
        return len(self._entries)

    def begin(self, key: bytes, waiter: W, now: float) -> tuple[bool, tuple[Buffer, tuple[Buffer, ...]] | None]:
        """(execute it?, answer if it is known). Neither: it runs already, and `waiter` is answered with the others."""
        entry = self._entries.get(key)
        if entry is None:
            self._entries[key] = _Entry(now, [waiter])
            self._trim(now)
            return True, None
        self.num_replayed += 1
        if entry.answer is None:
            entry.waiting.append(waiter)
        return False, entry.answer

    def answered(self, key: bytes, body: Buffer, frames: tuple[Buffer, ...]) -> list[W]:
        """It is done; everybody who waits for this answer."""
        entry = self._entries.get(key)
        if entry is None:
            return []
        entry.answer = (bytes(body), tuple(bytes(f) for f in frames))
        entry.num_bytes = len(body) + sum(map(len, frames))
        self._num_bytes += entry.num_bytes
        waiting, entry.waiting = entry.waiting, []
        return waiting

    def failed(self, key: bytes) -> list[W]:
        """It had no effect that can be relied on: forget it; everybody who waits for it."""
        entry = self._entries.pop(key, None)
        return entry.waiting if entry is not None else []

    def _trim(self, now: float) -> None:
        while self._entries:
            key, oldest = next(iter(self._entries.items()))
            too_many = len(self._entries) > MAX_KEYS or self._num_bytes > MAX_BYTES
            if oldest.answer is None or not (too_many or now - oldest.began_at > MAX_AGE_S):
                return
            self._num_bytes -= oldest.num_bytes
            del self._entries[key]
