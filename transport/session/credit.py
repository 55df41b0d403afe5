"""Credit: how much a sender may have under way to a receiver, per lane. Sans-IO.

ZeroMQ's high-water mark counts messages, not bytes, and the kernel hides more of them. Here a receiver gives credit
back when an actor takes a message up. One unit is one small message or `UNIT_BYTES` of a large one, so a single
number bounds both; counters are cumulative modulo 2**16 and therefore survive lost and reordered frames.
Answers need no credit: each was allowed by the call that it answers, and waiting for credit there could deadlock.
"""

from __future__ import annotations

WINDOW_UNITS = 1024
UNIT_BYTES = 64 * 1024
"""1024 units: 1024 messages or 64 MiB."""

_MASK = 0xFFFF
DUE_UNITS = WINDOW_UNITS // 2
"""So many units given back silently are announced in a separate envelope."""
_OLD = (_MASK + 1) // 2
"""A counter that seems to be so far ahead is behind."""


def cost_of(num_bytes: int) -> int:
    """Units of a message; one larger than the whole window costs the whole window."""
    return 1 if num_bytes <= UNIT_BYTES else min(WINDOW_UNITS, -(-num_bytes // UNIT_BYTES))


class SendWindow:
    """The sender's side of one lane."""

    __slots__ = ("num_back", "num_sent")

    def __init__(self) -> None:
        self.num_sent = 0
        self.num_back = 0

    @property
    def outstanding(self) -> int:
        return (self.num_sent - self.num_back) & _MASK

    @property
    def counters(self) -> tuple[int, int]:
        """Units sent and units given back so far, both modulo 2**16."""
        return self.num_sent, self.num_back

    def has_room(self, cost: int) -> bool:
        return (self.num_sent - self.num_back & _MASK) + cost <= WINDOW_UNITS

    def spend(self, cost: int) -> None:
        self.num_sent = (self.num_sent + cost) & _MASK

    def refund(self, cost: int) -> None:
        self.num_sent = (self.num_sent - cost) & _MASK

    def released(self, counter: int) -> bool:
        """Take the receiver's counter; True if it frees room. An old counter has no effect."""
        gained = (counter - self.num_back) & _MASK
        if not 0 < gained <= (self.num_sent - self.num_back & _MASK):
            return 0 < gained < _OLD and self._all_released()
        self.num_back = counter
        return True

    def _all_released(self) -> bool:
        """The receiver gave back more than was sent: it counted a copy. To ignore it would stop a full window."""
        has_gained = self.num_back != self.num_sent
        self.num_back = self.num_sent
        return has_gained


class Grant:
    """The receiver's side of one lane."""

    __slots__ = ("announced", "held", "released")

    def __init__(self) -> None:
        self.held = 0
        """Units taken and not yet given back."""
        self.released = 0
        self.announced = 0

    def take(self, cost: int) -> bool:
        """A message arrived; False if the sender had no credit for it."""
        self.held += cost
        return self.held <= WINDOW_UNITS

    def give(self, cost: int) -> bool:
        """A message was taken up (or refused); True if the sender should get the counter now, see `is_due`."""
        self.held -= cost
        self.released = released = (self.released + cost) & _MASK
        return ((released - self.announced) & _MASK) >= DUE_UNITS

    def resync(self, sent: int) -> None:
        """A new connection begins after `sent` units: what of them is not held here was lost on the way."""
        self.released = (sent - self.held) & _MASK

    def announce(self) -> int:
        self.announced = self.released
        return self.released

    @property
    def is_due(self) -> bool:
        """So much was given back silently that the counter should be sent without waiting for an answer to carry it."""
        return ((self.released - self.announced) & _MASK) >= DUE_UNITS
