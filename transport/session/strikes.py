"""Who sends nonsense: strikes per connection within a minute, and bans that end. Sans-IO; bounded whatever comes.

Memory is bounded because connections are cheap to make: the oldest are forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict, deque

MAX_STRIKES = 100
WINDOW_S = 60.0
BAN_S = 60.0
MAX_SOURCES = 4096


class Strikes:
    """Of all connections of one process."""

    def __init__(self) -> None:
        self._strikes: OrderedDict[bytes, deque[float]] = OrderedDict()
        self._banned: OrderedDict[bytes, float] = OrderedDict()
        self.has_bans = False
        """Whether asking for a ban is worth it."""
        self.num_bans = 0

    def __len__(self) -> int:
        return len(self._strikes) + len(self._banned)

    def strike(self, source: bytes, now: float) -> bool:
        """One more; True if this one was too many: the source is banned from now on."""
        times = self._strikes.get(source)
        if times is None:
            times = self._strikes[source] = deque(maxlen=MAX_STRIKES + 1)
            if len(self._strikes) > MAX_SOURCES:
                self._strikes.popitem(last=False)
        times.append(now)
        if len(times) <= MAX_STRIKES or now - times[0] > WINDOW_S:
            return False
        del self._strikes[source]
        self._banned[source] = now + BAN_S
        self._banned.move_to_end(source)
        if len(self._banned) > MAX_SOURCES:
            self._banned.popitem(last=False)
        self.num_bans += 1
        self.has_bans = True
        return True

    def is_banned(self, source: bytes, now: float) -> bool:
        """Whether it is not listened to."""
        while self._banned and next(iter(self._banned.values())) <= now:  # the oldest ban ends first
            self._banned.popitem(last=False)
        self.has_bans = bool(self._banned)
        return source in self._banned

    def forgive(self, source: bytes) -> None:
        """That connection is over."""
        self._strikes.pop(source, None)
