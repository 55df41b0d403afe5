"""How a rollout actor's time is booked: what its groups do, or why there are none.

    most samples wait for their environment: wait-env, function and file
    generating         compute, "generate"; "generate at limit" while no more groups may be taken
    only rewards       wait-data, "reward"
    only handing over  wait-data, "hand over"
    nothing in hand    what the buffer said last: draw (wait-data), staleness (wait-capacity), weights, paused
                       (also for the ledger's disk), or a suspect that it shall have alone (wait-data)

Knows the meter and what it is told. Must not know engines, the buffer or asyncio.
"""

from __future__ import annotations

from ...core.activity import ActivityMeter
from ...core.messages import ActivityKind, DrawBlock
from .group_runner import Load

_BLOCKED: dict[DrawBlock, tuple[ActivityKind, str]] = {
    "": ("wait-data", "draw"),
    "data-exhausted": ("wait-data", "draw"),
    "suspect": ("wait-data", "suspect"),
    "staleness": ("wait-capacity", "draw"),
    "finished": ("wait-capacity", "draw"),
    "weights": ("wait-weights", "adopt"),
    "paused": ("paused", "paused"),
    "disk": ("paused", "disk"),
}


class RolloutTime:
    """Decides the meter's state. See the module's head."""

    def __init__(self, meter: ActivityMeter, *, has_turn: bool = True) -> None:
        self._meter = meter
        self._load = Load()
        self._num_groups = 0
        self._limit = 1
        self._blocked_by: DrawBlock = ""
        self._has_turn = has_turn
        self._is_draining = False
        self._is_at_work = False

    def begin(self) -> None:
        """The actor is up and asks for groups; before, the meter was told by others."""
        self._is_at_work = True
        self._book()

    def load(self, load: Load) -> None:
        """Samples were begun or ended; evaluation's too."""
        self._load = load
        self._book()

    def groups(self, num_groups: int, limit: int) -> None:
        """Groups in hand, and how many there may be."""
        self._num_groups, self._limit = num_groups, limit
        self._book()

    def blocked(self, reason: DrawBlock) -> None:
        """Why the buffer gave nothing; empty: it did, or was not asked yet."""
        self._blocked_by = reason
        self._book()

    def turn(self, has_turn: bool) -> None:
        """The device was given to the engine, or taken from it."""
        self._has_turn = has_turn
        self._book()

    def draining(self) -> None:
        """Nothing new is taken any more."""
        self._is_draining = True
        self._book()

    def _book(self) -> None:
        is_busy = bool(self._load.generating or self._load.rewarding or self._load.waiting)
        if self._is_at_work or is_busy:
            self._meter.switch(*self._state())

    def _state(self) -> tuple[ActivityKind, str]:
        if not self._has_turn:
            return "wait-memory", "the trainer's turn"
        if self._load.waiting > self._load.generating:
            return "wait-env", self._load.place
        if self._load.generating:
            return "compute", "generate at limit" if self._num_groups >= self._limit else "generate"
        if self._load.rewarding:
            return "wait-data", "reward"
        if self._num_groups:
            return "wait-data", "hand over"
        return ("paused", "drained") if self._is_draining else _BLOCKED[self._blocked_by]
