"""The callee's side of the session: calls of others that this process answers. Sans-IO.

Every call and cast that arrives is answered exactly once, unless its caller is gone or has cancelled it (then only its
credit goes back).

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
from .faults import encode_fault
from .frames import LIMITS, NO_TTL, Buffer, Envelope, FrameLimits, Kind, encoded_bytes
from .links import Arrival, Link, Links

_WRONG = (BadRequest, NoSuchActor, NoSuchMethod, NotPermitted)
_CAST, _REPLY = Kind.CAST, Kind.REPLY  # members of an Enum are looked up in Python


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
        self._replay: ReplayCache[Arrival] = ReplayCache()
        self.num_wrong = 0
        """Calls to actors and handlers that are not here, with wrong types, or beyond the caller's role."""
        self.num_copies = 0

    @property
    def num_replayed(self) -> int:
        return self._replay.num_replayed

    def on_call(self, link: Link, lane: Lane, envelope: Envelope, _num_bytes: int) -> None:
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
        arrival = Arrival(link, lane, envelope, deadline_at, envelope.kind is _CAST)
        if not arrival.is_cast:  # one of a process that has ended is executed all the same
            link.served[corr] = arrival
        if envelope.key and not self._is_first(arrival, now):
            return
        try:
            self._host.deliver(arrival)
        except CallError as error:
            self.fail(arrival, error)

    def _is_first(self, arrival: Arrival, now: float) -> bool:
        is_first, answer = self._replay.begin(arrival.envelope.key, arrival, now)
        if answer is not None:
            self._answer(arrival, Kind.REPLY, *answer)
        return is_first

    def on_cancel(self, link: Link, _lane: Lane, envelope: Envelope, _num_bytes: int) -> None:
        arrival = link.served.pop(envelope.corr, None)
        if arrival is not None:
            self._drop(arrival)
        self._links.send(link, Kind.CREDIT, envelope.corr)

    def on_gone(self, link: Link) -> None:
        for arrival in list(link.served.values()):
            self._drop(arrival)
        link.served.clear()

    def _drop(self, arrival: Arrival) -> None:
        arrival.is_answered = True
        self._host.abandon(arrival)

    def begin(self, arrival: Arrival) -> None:
        """Its handler begins. Raises DeadlineExceeded if its time was over before: then it is not executed."""
        if arrival.deadline_at is not None and self._now() > arrival.deadline_at:
            raise DeadlineExceeded("its deadline passed before it was executed", remedy="it was not executed")
        arrival.has_begun = True

    def reply(self, arrival: Arrival, body: Buffer, frames: tuple[Buffer, ...]) -> None:
        """The handler's result. Raises MessageTooLarge: then it is still unanswered."""
        if arrival.is_answered and not arrival.envelope.key:
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
        """It was refused, or the handler raised."""
        is_refusal = isinstance(error, CallError) and not error.callee and not arrival.has_begun
        self.num_wrong += isinstance(error, _WRONG) and not error.callee
        body = encode_fault(error)
        kind = Kind.NACK if is_refusal else Kind.ERROR
        waiting = self._replay.failed(arrival.envelope.key) if arrival.envelope.key else [arrival]
        for waiter in waiting:
            self._answer(waiter, kind, body)
        self._settle(arrival)

    def refuse_unread(self, link: Link, corr: int, error: CallError) -> None:
        """Refuse a message that could not even be taken as a call."""
        self._links.send(link, Kind.NACK, corr, encode_fault(error))

    def _answer(self, arrival: Arrival, kind: Kind, body: Buffer = b"", frames: tuple[Buffer, ...] = ()) -> None:
        if not arrival.is_answered and not arrival.link.is_down:
            self._send(arrival, kind, body, frames)
        self._settle(arrival)

    def _settle(self, arrival: Arrival) -> None:
        arrival.is_answered = True
        arrival.handle = None
        served, corr = arrival.link.served, arrival.envelope.corr
        if served.get(corr) is arrival:
            del served[corr]

    def _send(self, arrival: Arrival, kind: Kind, body: Buffer, frames: tuple[Buffer, ...]) -> None:
        own, link = self._links.own, arrival.link
        envelope = Envelope(
            kind=kind, src_node=own.node_id, src_epoch=own.epoch, dst_epoch=link.key.epoch,
            corr=arrival.envelope.corr, body=body, frames=frames,
        )  # fmt: skip
        lane = Lane.BULK if encoded_bytes(envelope) > self._limits.bulk_from else Lane.CONTROL
        self._links.hand_over(link, lane, envelope)


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
