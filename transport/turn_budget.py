"""How much a node may take in before the loop's other work gets its turn.

Shared by the inboxes of a node. A message costs some microseconds of decoding, and whatever runs before its handler's
first await; a burst of thousands would hold a host's loop up for tens of milliseconds without a bound in time.
"""

from __future__ import annotations

import sys
import time

from ..core.errors import ConfigError

_monotonic = time.monotonic
TURN_S = 0.001
"""Default: what a host that streams tokens does not notice."""


class TurnBudget:
    """Asked after each message; when it is over, the rest waits for the next turn of the loop."""

    __slots__ = ("_num_inboxes", "is_spent", "max_taken", "num_taken", "turn_s", "until")

    UNLIMITED = sys.maxsize

    def __init__(self, turn_s: float = TURN_S) -> None:
        """`turn_s`: of one turn of the loop, for all inboxes together. Raises ConfigError if nothing fits into it."""
        if not turn_s > 0:
            raise ConfigError(f"in a turn of {turn_s} s no message is taken in", remedy="turn_budget_s is above 0")
        self.turn_s = turn_s
        self.num_taken = 0
        """Messages taken in since the node attached."""
        self.max_taken = self.UNLIMITED
        """`num_taken` at which no more are taken for now; for hosts that poll by hand."""
        self.is_spent = False
        """The inbox whose turn it is has to stop, as of the last look at the clock."""
        self._num_inboxes = 0
        self.until = 0.0
        """When the part of the inbox whose turn it is ends."""

    def add_inbox(self) -> None:
        """One more shares the time; each overruns its part by one message at most."""
        self._num_inboxes += 1

    def begin(self) -> bool:
        """An inbox has its turn; False: it may take nothing now."""
        self.until = time.monotonic() + self.turn_s / max(1, self._num_inboxes)
        self.is_spent = False
        return self.num_taken < self.max_taken

    def resume(self, until: float) -> bool:
        """An inbox goes on with what is left of its part; False: it may take nothing now."""
        self.until = until
        self.is_spent = False
        return self.num_taken < self.max_taken

    def note_taken(self) -> bool:
        """A message was taken in. True: the inbox whose turn it is has to stop."""
        self.num_taken = num_taken = self.num_taken + 1
        self.is_spent = is_spent = _monotonic() >= self.until or num_taken >= self.max_taken
        return is_spent

    def look(self) -> None:
        """Time has passed with something that is no message yet: see whether the turn is over."""
        self.is_spent = _monotonic() >= self.until or self.num_taken >= self.max_taken
