"""The seam between the session (what to say) and a transport (how bytes get there).

A transport moves envelopes to named incarnations, keeps them while a connection is being made, begins each connection
with the session's greeting, and says when connections come and go. It knows nothing of calls.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

import msgspec

from ..core.ids import PeerKey


class Lane(IntEnum):
    """Two connections per peer, so that small messages never wait behind large ones."""

    CONTROL = 0
    BULK = 1


class Endpoints(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a node listens; empty: not that way. One pair (control, bulk) per kind."""

    node_rank: int = 0
    inproc: str = ""
    ipc: tuple[str, str] = ("", "")
    tcp: tuple[str, str] = ("", "")

    def __str__(self) -> str:
        return self.inproc or self.tcp[0] or self.ipc[0] or "nowhere"


class Parcel:
    """An envelope on its way, and how far it got."""

    __slots__ = ("cost", "data", "is_sent", "is_withdrawn")

    def __init__(self, data: bytearray, cost: int = 0) -> None:
        self.data = data
        self.cost = cost
        """Credit units."""
        self.is_sent = False
        """Handed to the network: from now on the outcome may be unknown."""
        self.is_withdrawn = False
        """Must not be sent any more."""


class Sink(Protocol):
    """What a transport reports to."""

    def greeting(self, peer: PeerKey, lane: Lane, sent_units: int) -> bytearray:
        """First envelope of a new connection. `sent_units`: credit spent on that lane before it."""
        ...

    def received(self, source: bytes, lane: Lane, data: memoryview) -> None:
        """One envelope from the connection `source`; the memory is the sink's from now on."""
        ...

    def malformed(self, source: bytes, lane: Lane, reason: str) -> None:
        """Something that is no envelope."""
        ...

    def connected(self, peer: PeerKey, lane: Lane) -> None: ...

    def lost(self, peer: PeerKey, lane: Lane, why: str) -> None:
        """The connection broke; it is being made again. What was sent may be gone."""
        ...

    def unreachable(self, peer: PeerKey, why: str) -> None:
        """Nobody could be reached for a while. Trying stops when the peer is disconnected."""
        ...

    def crashed(self, error: BaseException) -> None:
        """An error in the sink itself came up through the transport: a bug, to be told loudly."""
        ...


class Transport(Protocol):
    """Moves envelopes."""

    @property
    def endpoints(self) -> Endpoints:
        """To be published."""
        ...

    def start(self, sink: Sink) -> None:
        """Report to `sink` from now on; may be called again with another one."""
        ...

    def connect(self, peer: PeerKey, endpoints: Endpoints) -> None:
        """Begin to connect; sending may begin at once. Again for a known peer: only its endpoints are taken note of.

        Raises LaunchError if no endpoint can be used.
        """
        ...

    def send(self, peer: PeerKey, lane: Lane, parcel: Parcel) -> None:
        """Queue; parcels of one lane leave in order. A peer that is not connected (any more): silently not sent."""
        ...

    def disconnect(self, peer: PeerKey, linger_s: float) -> None:
        """Forget the peer; what is queued may still leave within `linger_s`."""
        ...

    def forget(self, source: bytes, lane: Lane) -> None:
        """That incoming connection is over: drop what is half received from it."""
        ...

    async def close(self, linger_s: float) -> None:
        """Release everything; never raises."""
        ...
