"""What an outbox tells of its connection, and asks of the session about it."""

from __future__ import annotations

from typing import Protocol


class OutboxEvents(Protocol):
    """What an outbox reports."""

    def greeting(self, sent_units: int) -> bytearray: ...

    def ready(self) -> None: ...

    def turned_away(self, why: str) -> None:
        """The other side holds this incarnation to be over."""
        ...

    def broken(self, why: str) -> None:
        """A connection that was ready is gone."""
        ...

    def failing(self, why: str, since_s: float) -> None:
        """An attempt failed; there has been no connection, and no sign of the other side's host, for `since_s`."""
        ...

    def silence_s(self) -> float:
        """How long ago the peer should have been heard; 0: nobody knows."""
        ...

    def closed(self) -> None: ...
