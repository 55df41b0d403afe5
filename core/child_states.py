"""The life of a supervised child: its states, what can happen to it in each, and which of them have a process.

    waiting ──launch──> starting ──up──> up <──recover/hang──> hung       each with a process ──exit──> exited
                           └──end──> ending <──end──┘ (up, hung, draining)
                                          up ──drain──> draining          hands its work back before it is told to end
    exited, waiting ──retry──> backing-off ──launch──> starting
    waiting, exited, backing-off ──settle──> stopped
    waiting, exited, backing-off ──give-up──> failed

A library of state machines (`transitions`, `python-statemachine`) was considered: a dictionary is all that is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Literal

ChildState = Literal[
    "waiting", "starting", "up", "hung", "draining", "ending", "exited", "backing-off", "failed", "stopped"
]
ChildEvent = Literal["up", "hang", "recover", "drain", "end", "exit", "retry", "launch", "settle", "give-up"]
Health = Literal["suspect", "hung", "recovered", "given up"]

TRANSITIONS: Final[Mapping[tuple[ChildState, ChildEvent], ChildState]] = {
    ("waiting", "launch"): "starting",
    ("waiting", "retry"): "backing-off",  # its group restarts before it was started for the first time
    ("waiting", "settle"): "stopped",
    ("waiting", "give-up"): "failed",
    ("starting", "up"): "up",
    ("starting", "end"): "ending",
    ("starting", "exit"): "exited",
    ("up", "hang"): "hung",
    ("up", "drain"): "draining",
    ("up", "end"): "ending",
    ("up", "exit"): "exited",
    ("hung", "recover"): "up",
    ("hung", "end"): "ending",
    ("hung", "exit"): "exited",
    ("draining", "end"): "ending",
    ("draining", "exit"): "exited",
    ("ending", "up"): "ending",
    ("ending", "end"): "ending",
    ("ending", "exit"): "exited",
    ("exited", "retry"): "backing-off",
    ("exited", "settle"): "stopped",
    ("exited", "give-up"): "failed",
    ("backing-off", "launch"): "starting",
    ("backing-off", "retry"): "backing-off",
    ("backing-off", "settle"): "stopped",
    ("backing-off", "give-up"): "failed",
}
"""(state, event) -> next state. A pair that is missing is a mistake of the caller."""

ALIVE: Final[frozenset[ChildState]] = frozenset({"starting", "up", "hung", "draining", "ending"})
"""States in which a process exists."""

OVER: Final[frozenset[ChildState]] = frozenset({"failed", "stopped"})
"""States without a way out."""


class SupervisionError(ValueError):
    """An event that cannot happen in the child's state: the caller lost track."""


class ChildStates:
    """Where every child of a run stands."""

    def __init__(self, names: Iterable[str]) -> None:
        self._states: dict[str, ChildState] = dict.fromkeys(names, "waiting")

    def __getitem__(self, child: str) -> ChildState:
        if child not in self._states:
            raise SupervisionError(f"no child is named {child!r}; there are {', '.join(self._states)}")
        return self._states[child]

    def add(self, child: str) -> None:
        """One more, which waits to be started."""
        if child in self._states:
            raise SupervisionError(f"{child} is there already")
        self._states[child] = "waiting"

    def remove(self, child: str) -> None:
        """One less; it must have no process and get none any more."""
        if not self.is_over(child):
            raise SupervisionError(f"{child} is {self[child]}: it cannot be forgotten now")
        del self._states[child]

    def move(self, child: str, event: ChildEvent) -> None:
        """Take an event. Raises SupervisionError if it cannot happen now."""
        state = self[child]
        after = TRANSITIONS.get((state, event))
        if after is None:
            raise SupervisionError(f"{child} is {state}: '{event}' cannot happen now")
        self._states[child] = after

    def can(self, child: str, event: ChildEvent) -> bool:
        """Whether that event can happen now."""
        return (self[child], event) in TRANSITIONS

    def is_alive(self, child: str) -> bool:
        """Whether it has a process."""
        return self[child] in ALIVE

    def is_over(self, child: str) -> bool:
        """Whether it will never have a process again."""
        return self[child] in OVER

    def alive(self, among: Iterable[str] | None = None) -> tuple[str, ...]:
        """Children that have a process, in start order (or in the order of `among`)."""
        return tuple(name for name in (self._states if among is None else among) if self._states[name] in ALIVE)
