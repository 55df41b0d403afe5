"""What the session asks of the process around it."""

from __future__ import annotations

from typing import Protocol

from ...core.errors import MyxaError
from ...core.ids import PeerKey
from ..wire import Lane
from .pulse import PulseHost
from .serving import Host


class SessionHost(Host, PulseHost, Protocol):
    """What the session asks of its surroundings."""

    def unreachable(self, key: PeerKey, why: str) -> None:
        """A peer was given up."""
        ...

    def fenced(self, error: MyxaError) -> None:
        """Another incarnation has taken this process's place."""
        ...

    def loop_back(self, lane: Lane, data: bytes | bytearray) -> None:
        """Give an envelope back to `Session.received` as from LOOPBACK, in a later turn of the loop."""
        ...

    def crashed(self, error: BaseException) -> None:
        """A bug in this layer; the node cannot be trusted any more."""
        ...
