"""Mends what a connection lost without breaking, so that nobody waits for it for ever. Sans-IO.

    a put, or the answer to it      the put is sent again; the callee answers from what it remembers
    an item or the end of a stream  the consumer asks how far the stream is; if that much does not come, it is broken
    a stream's demand               the same question carries it again
    a CANCEL                        the callee asks whether anybody still waits
    a call, with its credit         a sender without credit says what it has sent; what did not arrive is given back

Other lost calls and answers end by their deadline. Works at leisure (`EVERY_S`) and only on what stands still, from
the outside: nothing of it is on the way of a call. All questions are CREDIT envelopes, told apart by `method`.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import IntEnum

from ...core.clock import Clock
from ..wire import Lane
from . import credit
from .calls import Calls
from .frames import Envelope, Kind, encode
from .links import Link, Links, LinkState
from .pending import CallState, PendingCall
from .serving import Serving

EVERY_S = 1.0
PATIENCE_S = 5.0
"""Something that stands still for so long is looked into; a put is sent again after so long, then twice as long, ..."""
MAX_PATIENCE_S = 60.0
SLOW_BYTES_PER_S = 10e6
"""A large put is given the time that it takes at this rate."""
STILL_WANTED_S = 20.0
"""How often a callee asks whether somebody still waits for a call that runs long."""
MAX_ANSWERS = 5
"""So many answers, one every `EVERY_S`, say that there were more items, and none came: the stream is broken."""


class Question(IntEnum):
    """`method` of a CREDIT envelope; `actor` is the number."""

    DEMAND = 0
    """Of a stream, how many items may come in all; corr 0: only the counters in the header."""
    HOW_FAR = 1
    """To the callee: the demand again, and how many items were there?"""
    SO_FAR = 2
    """To the caller: so many items were there. Does anybody still wait?"""
    SENT = 3
    """So many units were sent on this lane before this."""


class _Watched:
    """A stream that stands still."""

    __slots__ = ("asked_at", "at_item", "num_answers")

    def __init__(self, at_item: int, now: float) -> None:
        self.at_item = at_item
        self.asked_at = now
        self.num_answers = 0
        """Answers that say there were more items."""


class Repair:
    """One session's."""

    def __init__(self, links: Links, calls: Calls, serving: Serving, clock: Clock) -> None:
        self._links = links
        self._calls = calls
        self._serving = serving
        self._clock = clock
        self._next_at = clock.monotonic() + EVERY_S
        self._streams: dict[int, _Watched] = {}
        self._since: dict[Hashable, tuple[object, float]] = {}
        self._seen: dict[Hashable, tuple[object, float]] = {}
        self.num_sent_again = 0
        """Puts that were sent again on a living connection."""

    def tick(self) -> None:
        """Time has passed."""
        now = self._clock.monotonic()
        if now < self._next_at:
            return
        self._next_at = now + EVERY_S
        self._since, self._seen = self._seen, {}
        streams = self._streams
        self._streams = {}
        for link in self._links.all():
            if link.state is LinkState.UP and link is not self._links.itself:
                for call in list(link.pending.values()):
                    self._look_at_call(link, call, streams.get(call.corr), now)
                self._look_at_served(link, now)
                self._look_at_credit(link, now)

    def on_credit(self, link: Link, lane: Lane, envelope: Envelope, num_bytes: int) -> None:
        """CREDIT: a demand, or one of the questions."""
        if envelope.method == Question.DEMAND:
            self._serving.on_demand(link, lane, envelope, num_bytes)
        elif envelope.method == Question.HOW_FAR:
            self._serving.on_demand(link, lane, envelope, num_bytes)
            self._on_how_far(link, envelope)
        elif envelope.method == Question.SO_FAR:
            self._on_so_far(link, envelope)
        elif envelope.method == Question.SENT:
            link.grants[lane].resync(envelope.actor)
            self._ask(link, Lane.CONTROL, Question.DEMAND, 0, 0)  # the counters ride on it

    # -- looking

    def _look_at_call(self, link: Link, call: PendingCall, watched: _Watched | None, now: float) -> None:
        if call.state is not CallState.SENT or not call.was_sent:
            return
        if call.order.kind == "put":
            under_way_s = call.cost * credit.UNIT_BYTES / SLOW_BYTES_PER_S
            patience_s = min(MAX_PATIENCE_S, (PATIENCE_S + under_way_s) * 2 ** (call.num_sent - 1))
            if self._stood_still_s(("put", call.corr), call.num_sent, now) >= patience_s:
                self.num_sent_again += 1
                self._calls.send_again(link, call)
        elif call.order.kind == "stream":
            self._look_at_stream(link, call, watched, now)

    def _look_at_stream(self, link: Link, call: PendingCall, watched: _Watched | None, now: float) -> None:
        if watched is None or watched.at_item != call.next_item:
            watched = _Watched(call.next_item, now)
        self._streams[call.corr] = watched
        if watched.num_answers >= MAX_ANSWERS:
            self._calls.give_up_stream(call, "an item was lost on the way")
        elif now - watched.asked_at >= (EVERY_S if watched.num_answers else PATIENCE_S):
            watched.asked_at = now
            if call.last is not None:
                watched.num_answers += 1  # its end is here and says how many there were
            else:
                self._ask(link, Lane.CONTROL, Question.HOW_FAR, call.corr, call.demanded or call.order.window)

    def _look_at_served(self, link: Link, now: float) -> None:
        for corr, arrival in link.served.items():
            key = ("served", link.key, corr)
            if self._stood_still_s(key, arrival, now) >= STILL_WANTED_S:
                self._seen[key] = (arrival, now)
                self._ask(link, Lane.CONTROL, Question.SO_FAR, corr, arrival.num_items)

    def _look_at_credit(self, link: Link, now: float) -> None:
        for lane in Lane:
            window = link.windows[lane]
            key = ("credit", link.key, lane)
            is_short = link.waiting[lane] or not window.has_room(credit.WINDOW_UNITS // 2)
            if is_short and self._stood_still_s(key, window.counters, now) >= PATIENCE_S:
                self._seen[key] = (window.counters, now)
                self._ask(link, lane, Question.SENT, 0, window.counters[0])

    def _stood_still_s(self, key: Hashable, mark: object, now: float) -> float:
        """For how long it has been seen with that mark."""
        known = self._since.get(key)
        if known is None or known[0] != mark:
            known = (mark, now)
        self._seen[key] = known
        return now - known[1]

    # -- asking and answering

    def _on_how_far(self, link: Link, envelope: Envelope) -> None:
        arrival = link.served.get(envelope.corr)
        if arrival is None:
            self._serving.refuse_unknown_stream(link, envelope.corr)
        else:
            self._ask(link, Lane.CONTROL, Question.SO_FAR, envelope.corr, arrival.num_items)

    def _on_so_far(self, link: Link, envelope: Envelope) -> None:
        call = link.pending.get(envelope.corr)
        watched = self._streams.get(envelope.corr)
        if call is None:
            self._send(link, Lane.CONTROL, Kind.CANCEL, envelope.corr)  # it has not heard the first
        elif watched is not None and call.next_item < envelope.actor:
            watched.num_answers += 1

    def _ask(self, link: Link, lane: Lane, question: Question, corr: int, number: int) -> None:
        self._send(link, lane, Kind.CREDIT, corr, question, number)

    def _send(self, link: Link, lane: Lane, kind: Kind, corr: int, method: int = 0, number: int = 0) -> None:
        own = self._links.own
        envelope = Envelope(
            kind=kind, src_node=own.node_id, src_epoch=own.epoch, dst_epoch=link.key.epoch, corr=corr, method=method,
            actor=number,
        )  # fmt: skip
        self._links.send(link, lane, encode(envelope))
