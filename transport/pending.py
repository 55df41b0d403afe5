"""One call under way: what it asks for, where it goes, who waits for it, how far it has come."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

import msgspec

from ..core.errors import CallError, MyxaError
from ..core.handlers import HandlerKind
from ..core.ids import PeerKey
from .frames import Buffer, Envelope
from .wire import Endpoints, Lane, Parcel


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """Where a handler is: an incarnation and numbers in its tables."""

    peer: PeerKey
    endpoints: Endpoints
    actor: int
    method: int


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be called, with which bytes."""

    target: str
    method: str
    schema: str
    """Fingerprint of the handler's types."""
    kind: HandlerKind
    body: Buffer
    frames: tuple[Buffer, ...] = ()
    deadline_at: float | None = None
    is_resendable: bool = False
    key: bytes = b""
    chain: tuple[str, ...] = ()
    trace: bytes = b""
    window: int = 0


class CallSink(Protocol):
    """Who waits for a call. Called at most once with `done`, and never after it."""

    def done(self, outcome: Envelope | MyxaError | None) -> None:
        """The reply (END for a stream), the error, or None for a cast that is on its way."""
        ...

    def item(self, envelope: Envelope) -> None:
        """Next item of a stream, in order."""
        ...


class CallState(Enum):
    """How far a call has come."""

    WAITING = "waiting for credit"
    SENT = "handed to the transport"
    PARKED = "waiting for the callee's next incarnation"
    ENDED = "ended"


class PendingCall:
    """One call under way."""

    __slots__ = (
        "corr", "cost", "data", "early", "lane", "last", "next_item", "order", "parcel", "peer", "sink", "state",
    )  # fmt: skip

    def __init__(self, corr: int, order: Order, sink: CallSink) -> None:
        self.corr = corr
        self.order = order
        self.sink = sink
        self.state = CallState.WAITING
        self.peer = PeerKey(0, 0)
        self.data = bytearray()
        self.lane = Lane.CONTROL
        self.cost = 0
        self.parcel: Parcel | None = None
        self.next_item = 0
        self.early: dict[int, Envelope] = {}
        """Items that overtook others on another lane."""
        self.last: Envelope | None = None
        """The end, or the error, that overtook items."""

    def __str__(self) -> str:
        return f"{self.order.target}.{self.order.method}"

    @property
    def was_sent(self) -> bool:
        return self.parcel is not None and self.parcel.is_sent


class RouteOf(Protocol):
    """Finds where an order has to go now."""

    def __call__(self, order: Order) -> Route | CallError | None: ...
