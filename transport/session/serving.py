"""The callee's side of the session: calls of others that this process answers. Sans-IO.

Every call that arrives is answered exactly once, unless its caller is gone or has cancelled it (then only its
credit goes back).
"""

from __future__ import annotations

from collections import Counter

from ...core.clock import Clock
from ...core.errors import BadRequest, CallError, DeadlineExceeded, MessageTooLarge, NoSuchActor, NoSuchMethod
from ..wire import Lane
from .faults import encode_fault
from .frames import LIMITS, NO_TTL, Buffer, Envelope, Kind, encoded_bytes
from .links import Arrival, Link, Links, SessionHost

_WRONG = (BadRequest, NoSuchActor, NoSuchMethod)


class Serving:
    """All calls that this process answers."""

    def __init__(self, links: Links, host: SessionHost, clock: Clock, counters: Counter[str]) -> None:
        self._links = links
        self._host = host
        self._now = clock.monotonic
        self._counters = counters

    def on_call(self, link: Link, lane: Lane, envelope: Envelope, _num_bytes: int) -> None:
        corr = envelope.corr
        newest = link.newest_call
        if corr <= newest[lane]:  # numbers grow along a lane, and nothing is sent twice: this is a copy
            self._counters["calls_copied"] += 1
            return
        newest[lane] = corr
        now, ttl_ms = self._now(), envelope.ttl_ms
        deadline_at = None if ttl_ms == NO_TTL else now + ttl_ms / 1000
        arrival = Arrival(link, lane, envelope, deadline_at)
        link.served[corr] = arrival
        try:
            self._host.deliver(arrival)
        except CallError as error:
            self.fail(arrival, error)

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
        if arrival.is_answered:
            return
        if frames or len(body) > LIMITS.bulk_from:
            num_bytes = len(body) + sum(map(len, frames))
            if num_bytes > LIMITS.message - (1 << 20) or len(body) > LIMITS.body:
                raise MessageTooLarge(f"a reply of {num_bytes} bytes is over the limit", remedy="send it in parts")
        self._answer(arrival, Kind.REPLY, body, frames)

    def fail(self, arrival: Arrival, error: BaseException) -> None:
        """It was refused, or the handler raised."""
        is_refusal = isinstance(error, CallError) and not error.callee and not arrival.has_begun
        if isinstance(error, _WRONG) and not error.callee:
            self._counters["calls_wrong"] += 1
        self._answer(arrival, Kind.NACK if is_refusal else Kind.ERROR, encode_fault(error))

    def refuse_unread(self, link: Link, corr: int, error: CallError) -> None:
        """Refuse a message that could not even be taken as a call."""
        self._links.send(link, Kind.NACK, corr, encode_fault(error))

    def _answer(self, arrival: Arrival, kind: Kind, body: Buffer = b"", frames: tuple[Buffer, ...] = ()) -> None:
        own, link, corr = self._links.own, arrival.link, arrival.envelope.corr
        if not arrival.is_answered and not link.is_down:
            envelope = Envelope(kind, own.node_id, own.epoch, link.key.epoch, corr, body=body, frames=frames)
            lane = Lane.BULK if encoded_bytes(envelope) > LIMITS.bulk_from else Lane.CONTROL
            self._links.hand_over(link, lane, envelope)
        arrival.is_answered = True
        if link.served.get(corr) is arrival:
            del link.served[corr]
