"""When queued envelopes leave: while messages are being taken in, their answers are held back and leave together.

A message of the network costs as much as several of ours, so what one batch of calls brings about should go back as one
batch too. Outside of that, an outbox decides for itself (`sending/outbox.py`).
"""

from __future__ import annotations

from collections.abc import Callable


class Departures:
    """Shared by the inboxes and outboxes of a process."""

    __slots__ = ("due", "is_holding", "num_intakes")

    def __init__(self) -> None:
        self.is_holding = False
        """Messages are being taken in now."""
        self.num_intakes = 0
        """How often messages were taken in; counts on while they are."""
        self.due: list[Callable[[], None]] = []
        """To be called when the messages have been taken in."""

    def hold(self) -> None:
        """From now on whoever has something to send calls `add` instead."""
        self.is_holding = True
        self.num_intakes += 1

    def add(self, flush: Callable[[], None]) -> None:
        """Call it when the messages have been taken in."""
        self.due.append(flush)

    def release(self) -> None:
        """They have, or enough of them."""
        self.is_holding = False
        while self.due:
            flush = self.due.pop()
            try:
                flush()
            except BaseException:
                self.release()  # one that fails must not keep the others' answers back
                raise
