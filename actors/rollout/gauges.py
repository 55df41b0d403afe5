"""How the time of a rollout actor is booked:

most samples wait for their environment    wait-env, function and file
generating                                 compute, "generate"; "generate at limit" while the actor is full
only rewards                               wait-data, "reward"
only handing over                          wait-data, "hand over"
no groups                                  the buffer's last answer: draw (wait-data), staleness (wait-capacity),
                                           weights, paused (also for the ledger's disk), or a suspect group that
                                           must run alone (wait-data)
"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.activity import ActivityMeter
from ...core.messages import ActivityKind, DrawBlock


@dataclass(slots=True)
class GroupLoad:
    """What an actor's groups are doing, for the time accounting: who is waited for."""

    generating: int = 0
    rewarding: int = 0
    waiting: int = 0
    """Samples whose workflow does anything but wait for the model."""
    place: str = ""
    """Where most of these are: function and file."""


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
        self._load = GroupLoad()
        self._num_groups = 0
        self._limit = 1
        self._blocked_by: DrawBlock = ""
        self._has_turn = has_turn
        self._is_draining = False
        self._is_at_work = False

    def begin(self) -> None:
        """The actor is up and asks for groups; before, other code set the meter."""
        self._is_at_work = True
        self._book()

    def load(self, load: GroupLoad) -> None:
        self._load = load
        self._book()

    def groups(self, num_groups: int, limit: int) -> None:
        """Groups that the actor holds, and how many it may hold."""
        self._num_groups, self._limit = num_groups, limit
        self._book()

    def blocked(self, reason: DrawBlock) -> None:
        """Why the buffer gave nothing; empty: it did, or was not asked yet."""
        self._blocked_by = reason
        self._book()

    def turn(self, has_turn: bool) -> None:
        self._has_turn = has_turn
        self._book()

    def draining(self) -> None:
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
