"""Peers that this process is cut off from on purpose, and until when: as if the network between two were gone.

Each side sends on connections that it made itself, so both must be told for nothing to pass in either direction; where
only one is, the other is heard and not answered. Meanwhile connections break and cannot be made, as for want of a
network; everything above learns of it as it would then. What was on its way already still arrives. For drills only.
"""

from __future__ import annotations

from ..core.clock import Clock, SystemClock
from ..core.ids import PeerKey


class Cuts:
    """By node, over all its incarnations."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock: Clock = clock or SystemClock()
        self._until: dict[int, float] = {}

    def make(self, node_id: int, for_s: float) -> None:
        """From now on, for so long; 0 ends it."""
        self._until[node_id] = self._clock.monotonic() + for_s

    def why_not(self, peer: PeerKey) -> str:
        """Why it cannot be reached now; "" if it can."""
        left_s = self._until.get(peer.node_id, 0.0) - self._clock.monotonic()
        if left_s <= 0:
            self._until.pop(peer.node_id, None)
            return ""
        return f"cut off on purpose, for {left_s:.1f} s more"
