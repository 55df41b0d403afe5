"""The last things that happened on the devices of a node, for people; a ring of fixed size."""

from __future__ import annotations

from collections import deque


class Timeline:
    """(wall seconds, device, tenant, what happened), oldest first."""

    def __init__(self, size: int = 256) -> None:
        self._ring: deque[tuple[float, str, str, str]] = deque(maxlen=size)

    def add(self, wall_s: float, device: str, tenant: str, what: str) -> None:
        """What happened, in a few words."""
        self._ring.append((wall_s, device, tenant, what[:400]))

    @property
    def rows(self) -> tuple[tuple[float, str, str, str], ...]:
        """All of it."""
        return tuple(self._ring)
