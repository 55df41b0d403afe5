"""Mean rewards of the newest groups of each source, those that the filter left out among them. Pure."""

from __future__ import annotations

from collections import deque

KEPT = 256


class RecentRewards:
    """Of the last groups that were finished since the buffer started."""

    def __init__(self) -> None:
        self._rewards: dict[str, deque[float]] = {}

    def add(self, source: str, reward: float) -> None:
        """A group was finished with that mean reward."""
        self._rewards.setdefault(source, deque(maxlen=KEPT)).append(reward)

    def mean(self, source: str) -> float | None:
        """None: no group of that source was finished yet."""
        rewards = self._rewards.get(source)
        return sum(rewards) / len(rewards) if rewards else None
