"""Credit: how much a sender may have under way to a receiver, per lane. Sans-IO.

ZeroMQ's high-water mark counts messages, not bytes, and the kernel hides more of them. Here a receiver gives credit
back when an actor takes a message up. One unit stands for one small message or `UNIT_BYTES` of a large one, so a single
number bounds both; counters are cumulative modulo 2**16 and therefore survive lost and reordered frames.
Answers need no credit: each was allowed by the call that it answers, and waiting for credit there could deadlock.
"""

from __future__ import annotations

WINDOW_UNITS = 1024
UNIT_BYTES = 64 * 1024
"""1024 units: 1024 messages or 64 MiB."""

_MASK = 0xFFFF


def cost_of(num_bytes: int) -> int:
    """Units of a message; one larger than the whole window costs the whole window."""
    return min(WINDOW_UNITS, max(1, -(-num_bytes // UNIT_BYTES)))


class SendWindow:
    """The sender's side of one lane."""

    __slots__ = ("_released", "_sent")

    def __init__(self) -> None:
        self._sent = 0
        self._released = 0

    @property
    def outstanding(self) -> int:
        """Units under way, 0..WINDOW_UNITS."""
        return (self._sent - self._released) & _MASK

    def has_room(self, cost: int) -> bool:
        return self.outstanding + cost <= WINDOW_UNITS

    def spend(self, cost: int) -> None:
        self._sent = (self._sent + cost) & _MASK

    def refund(self, cost: int) -> None:
        """It was never sent after all."""
        self._sent = (self._sent - cost) & _MASK

    def released(self, counter: int) -> bool:
        """Take the receiver's counter; True if it frees room. An old counter has no effect."""
        gained = (counter - self._released) & _MASK
        if not 0 < gained <= self.outstanding:
            return False
        self._released = counter
        return True


class Grant:
    """The receiver's side of one lane."""

    __slots__ = ("_announced", "_released", "held")

    def __init__(self) -> None:
        self.held = 0
        """Units taken and not yet given back."""
        self._released = 0
        self._announced = 0

    def take(self, cost: int) -> bool:
        """A message arrived; False if the sender had no credit for it."""
        self.held += cost
        return self.held <= WINDOW_UNITS

    def give(self, cost: int) -> None:
        """A message was taken up (or refused)."""
        self.held -= cost
        self._released = (self._released + cost) & _MASK

    def resync(self, sent: int) -> None:
        """A new connection begins after `sent` units: what of them is not held here was lost on the way."""
        self._released = (sent - self.held) & _MASK

    def announce(self) -> int:
        """The counter to send."""
        self._announced = self._released
        return self._released

    @property
    def is_due(self) -> bool:
        """So much was given back silently that the sender should be told without waiting for an answer to ride on."""
        return ((self._released - self._announced) & _MASK) >= WINDOW_UNITS // 2
