"""One call under way: what it asks for, where it goes, who waits for it, how far it has come; and its credit.

Credit bounds what may be under way to a peer, per lane: ZeroMQ's high-water mark counts messages, not bytes. One unit
is one small message or `UNIT_BYTES` of a large one. A call holds its units until it is answered, also after its caller
has stopped waiting. The sender alone keeps the count. Answers need no credit.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ...core.errors import MessageTooLarge, MyxaError
from ...core.ids import PeerKey
from ..wire import Endpoints, Lane, Parcel
from .frames import LIMITS, NO_TTL, Buffer, Envelope, Kind, encoded_bytes

WINDOW_UNITS = 1024
UNIT_BYTES = 64 * 1024
"""1024 units: 1024 messages or 64 MiB."""


def cost_of(num_bytes: int) -> int:
    """Units of a message; one larger than the whole window costs the whole window."""
    return 1 if num_bytes <= UNIT_BYTES else min(WINDOW_UNITS, -(-num_bytes // UNIT_BYTES))


class CreditWindow:
    """Units under way on one lane."""

    __slots__ = ("num_units", "unanswered")

    def __init__(self) -> None:
        self.num_units = 0
        self.unanswered: dict[int, int] = {}
        """Number of a call -> its units; also of calls whose callers wait no more."""

    def has_room(self, cost: int) -> bool:
        return self.num_units + cost <= WINDOW_UNITS

    def spend(self, corr: int, cost: int) -> None:
        self.unanswered[corr] = cost
        self.num_units += cost

    def settle(self, corr: int) -> bool:
        """It was answered, or never left; False: it holds nothing here."""
        cost = self.unanswered.pop(corr, 0)
        self.num_units -= cost
        return cost > 0


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """Where a handler is: an incarnation and numbers in its tables."""

    peer: PeerKey
    endpoints: Endpoints
    actor: int
    method: int


Outcome = Envelope | MyxaError
"""The reply, or the error."""


NO_PEER = PeerKey(0, 0)


class PendingCall(msgspec.Struct, eq=False):
    """One call: what is asked for, of whom, and how far it has come."""

    target: str
    method: str
    body: Buffer
    tell: Callable[[Outcome], object]
    """Called at most once."""
    deadline_at: float | None = None
    frames: tuple[Buffer, ...] = ()
    corr: int = 0
    """Its number; 0: it has not begun."""
    peer: PeerKey = NO_PEER
    cost: int = 0
    parcel: Parcel | None = None
    """None: it waits for credit."""
    envelope: Envelope | None = None
    """As it is sent; encoded when there is credit for it, not before."""
    lane: Lane = Lane.CONTROL
    due_at: float | None = None
    """When it ends without an answer: at its deadline, or sooner."""
    doom: str = ""
    """Why there will be no answer, if it is not on its way already."""

    def address(self, corr: int, route: Route, own: PeerKey) -> None:
        """It goes there, under that number. Raises MessageTooLarge."""
        envelope = self.envelope = Envelope(
            kind=Kind.CALL, corr=corr,
            src_node=own.node_id, src_epoch=own.epoch, dst_epoch=route.peer.epoch,
            actor=route.actor, method=route.method, body=self.body, frames=self.frames,
        )  # fmt: skip
        self.peer, self.due_at, num_bytes = route.peer, self.deadline_at, encoded_bytes(envelope)
        self.lane = Lane.BULK if num_bytes > LIMITS.bulk_from else Lane.CONTROL
        self.cost = cost_of(num_bytes)
        if num_bytes > LIMITS.message or len(self.body) > LIMITS.body:
            raise MessageTooLarge(
                f"{self}: {num_bytes} bytes are over the limit of {LIMITS.message} (body: {LIMITS.body})",
                remedy="send it in parts",
            )
        self.corr = corr

    def __str__(self) -> str:
        return f"{self.target}.{self.method}"

    @property
    def was_sent(self) -> bool:
        """It was handed to the network: it may have run."""
        return self.parcel is not None and self.parcel.is_sent


def ttl_ms_of(call: PendingCall, now: float) -> int:
    """What is left of its caller's patience, as it travels."""
    if call.deadline_at is None:
        return NO_TTL
    left_ms = int((call.deadline_at - now) * 1000)
    return 0 if left_ms < 0 else left_ms if left_ms < NO_TTL else NO_TTL - 1
