"""The seam between the session (what to say) and a transport (how bytes get there).

A transport moves envelopes to named incarnations, keeps them while a connection is being made, begins each connection
with the session's greeting, and says when connections come and go. It does not interpret calls.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from enum import IntEnum
from typing import Protocol

import msgspec

from ..core.ids import PeerKey
from .session.guard import PeerGuard


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
    curve: str = ""

    def __str__(self) -> str:
        return self.inproc or self.tcp[0] or self.ipc[0] or "nowhere"


class Parcel(msgspec.Struct, eq=False, gc=False):
    """An envelope on its way, and how far it got."""

    data: bytes | bytearray
    is_sent: bool = False
    """Handed to the network: from now on the outcome may be unknown."""
    is_withdrawn: bool = False
    """Must not be sent any more."""


class InboundSink(Protocol):
    """What a transport reports to."""

    def greeting(self, peer: PeerKey, lane: Lane) -> bytes | bytearray:
        """First envelope of a new connection."""
        ...

    def received(self, source: bytes, lane: Lane, data: memoryview) -> None:
        """One envelope from the connection `source`; the memory is the sink's from now on."""
        ...

    def is_known(self, source: bytes, lane: Lane) -> bool:
        """That connection has said who it is: what it sends may be kept until it is whole."""
        ...

    def overflowed(self, source: bytes, lane: Lane, head: bytes, total: int) -> None:
        """There is no memory for an envelope of `total` bytes that begins like this; it was given up."""
        ...

    def malformed(self, source: bytes, lane: Lane, reason: str) -> None:
        """Something that is no envelope."""
        ...

    def connected(self, peer: PeerKey, lane: Lane) -> None: ...

    def lost(self, peer: PeerKey, lane: Lane, why: str) -> None:
        """The connection broke; it is being made again. What was sent may be gone."""
        ...

    def silence_s(self, peer: PeerKey) -> float:
        """How long ago that peer should have been heard and was not; 0: it was, or it is not watched."""
        ...

    def unreachable(self, peer: PeerKey, why: str) -> None:
        """The peer could not be reached for a while. Trying stops when the peer is disconnected."""
        ...

    def crashed(self, error: BaseException) -> None:
        """An error in the sink itself came up through the transport: a bug, to be logged as an error."""
        ...


class Transport(Protocol):
    """Moves envelopes."""

    socket_dir: str = ""
    """Where nodes of this host put their ipc sockets; empty: there are none."""
    key_file: str = ""
    guard: PeerGuard | None = None
    """Of a process that listens on tcp."""
    counters: Counter[str]
    """What was refused."""
    endpoints: Endpoints

    def start(self, sink: InboundSink) -> None:
        """Report to `sink` from now on; may be called again with another one."""
        ...

    def joined(self) -> None:
        """The registry knows our own key now; from here on we speak under it."""

    def follow(self, members: Mapping[str, tuple[PeerKey, str]]) -> None:
        """Who may speak: public keys, and the incarnation and name of each. A transport that can tell connections apart
        by proof takes note of it."""

    def objection(self, lane: Lane, peer: PeerKey, name: str) -> str:
        """Why the connection whose message is being handled may not speak as `peer`; "" if it may."""
        del lane, peer, name
        return ""

    def connect(self, peer: PeerKey, endpoints: Endpoints) -> None:
        """Begin to connect; sending may begin at once. Known peers get new endpoints. Raises LaunchError for none."""
        ...

    def send(self, peer: PeerKey, lane: Lane, parcel: Parcel) -> None:
        """Queue; parcels of one lane leave in order. A peer that is not connected (any more): silently not sent."""
        ...

    def flush(self) -> None:
        """Hand the queued control lane to the network now, for the loop may be blocked next. Waits a moment."""
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


_Z85 = re.compile(r"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")


def is_public_key(text: str) -> bool:
    """Whether it looks like the public half of a CURVE pair."""
    return _Z85.fullmatch(text) is not None
