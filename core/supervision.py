"""When a child process ends: start it again, start its gang again, or end the run. Pure: events in, instructions out.

Knows names, policies, restart budgets and pauses between attempts. Must not know processes, sockets or clocks: the
launcher tells what happened and when, and carries out what is answered.

The rules are those of an OTP supervisor (intensity per period) with a growing pause; no library offers them without
bringing its own processes, and a table of a dozen rows is easier to trust than one.

    waiting ──launch──> starting ──up──> up      both ──exit──> exited ──retry──> backing-off ──launch──> starting
                           └──end──> ending <──end──┘   ending ──exit──> exited ──settle──> stopped
    waiting, backing-off ──settle──> stopped                             exited ──give-up──> failed
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

ChildState = Literal["waiting", "starting", "up", "ending", "exited", "backing-off", "failed", "stopped"]
ChildEvent = Literal["up", "end", "exit", "retry", "launch", "settle", "give-up"]
RestartPolicy = Literal["one", "gang", "never"]

TRANSITIONS: Final[Mapping[tuple[ChildState, ChildEvent], ChildState]] = {
    ("waiting", "launch"): "starting",
    ("waiting", "settle"): "stopped",
    ("starting", "up"): "up",
    ("starting", "end"): "ending",
    ("starting", "exit"): "exited",
    ("up", "end"): "ending",
    ("up", "exit"): "exited",
    ("ending", "up"): "ending",
    ("ending", "end"): "ending",
    ("ending", "exit"): "exited",
    ("exited", "retry"): "backing-off",
    ("exited", "settle"): "stopped",
    ("exited", "give-up"): "failed",
    ("backing-off", "launch"): "starting",
    ("backing-off", "settle"): "stopped",
}
"""(state, event) -> next state. A pair that is missing is a mistake of the caller."""

ALIVE: Final[frozenset[ChildState]] = frozenset({"starting", "up", "ending"})
"""States in which a process exists."""

HOPELESS: Final[Mapping[int, str]] = {
    2: "its configuration is wrong",
    5: "its data or a user's function is wrong",
}
"""Exit status -> why another attempt would end the same way."""

BUDGET_SPENT: Final = 4
"""Exit status of a run that ends because a child may not be started again."""


class SupervisionError(ValueError):
    """An event that cannot happen in the child's state: the caller lost track."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What the supervisor must know of one child."""

    name: str
    policy: RestartPolicy = "one"
    unit: str = ""
    """Children with policy "gang" and the same unit restart together. Empty: a unit of its own."""
    max_restarts: int = 3
    """Restarts of its unit allowed within one period."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pause before the n-th restart within a period: `first_s * 2^(n-1)`, at most `limit_s`, less up to half by lot."""

    first_s: float = 0.5
    limit_s: float = 30.0
    period_s: float = 300.0

    def delay(self, restarts: int, lot: float) -> float:
        """Seconds before the restart that follows `restarts` earlier ones; `lot` is in [0, 1)."""
        full = min(self.limit_s, self.first_s * 2.0 ** min(restarts, 60))
        return full * (1.0 - 0.5 * lot)


@dataclass(frozen=True, slots=True)
class Restart:
    """Start these children after `delay_s`, all of them as attempt `attempt` (0 was the first start). Replaces an
    earlier `Restart` of the same children that was not carried out yet."""

    children: tuple[str, ...]
    delay_s: float
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """Tell these children to end, in this order."""

    children: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class FailRun:
    """The run is over: `culprit` may not be started again."""

    culprit: str
    reason: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class Done:
    """No process is left and none will be started."""


Instruction = Restart | End | FailRun | Done


@dataclass(slots=True)
class _Unit:
    """Children that share one fate, one budget and one count of attempts."""

    members: tuple[str, ...]
    max_restarts: int
    attempt: int = 0
    restarts: deque[float] = field(default_factory=lambda: deque[float]())
    reason: str = ""
    """Why it is being restarted, while it is."""


def describe_status(status: int) -> str:
    """Words for a process's return code: negative is a signal, as in `subprocess`."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


class Supervisor:
    """Decides over the children of a run. Start order is the order of `children`."""

    def __init__(
        self, children: Sequence[ChildSpec], *, lot: Callable[[], float], backoff: Backoff | None = None
    ) -> None:
        names = [child.name for child in children]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise SupervisionError(f"children named twice: {', '.join(twice)}")
        self._lot = lot
        self._backoff = backoff or Backoff()
        self._specs = {child.name: child for child in children}
        self._states: dict[str, ChildState] = dict.fromkeys(names, "waiting")
        self._units: dict[str, _Unit] = {}
        self._is_stopping = False
        self._verdict: FailRun | None = None
        for unit, members in _gather(children).items():
            budget = min(self._specs[name].max_restarts for name in members)
            self._units[unit] = _Unit(members=members, max_restarts=budget)

    # -- questions ---------------------------------------------------------------------------------------------

    def state(self, child: str) -> ChildState:
        """Where a child stands."""
        return self._states[self._known(child)]

    def attempt(self, child: str) -> int:
        """Number of the child's current attempt; 0 is the first."""
        return self._unit_of(child).attempt

    @property
    def alive(self) -> tuple[str, ...]:
        """Children that have a process, in start order."""
        return tuple(name for name, state in self._states.items() if state in ALIVE)

    @property
    def verdict(self) -> FailRun | None:
        """Why the run failed, if it did: the first reason only."""
        return self._verdict

    # -- events ------------------------------------------------------------------------------------------------

    def on_up(self, child: str, now: float) -> list[Instruction]:
        """The child answers."""
        del now
        self._move(child, "up")
        return []

    def on_launch(self, child: str, now: float) -> list[Instruction]:
        """The launcher starts the child: for the first time, or as a `Restart` asked."""
        del now
        self._move(child, "launch")
        return []

    def on_exit(self, child: str, status: int, now: float) -> list[Instruction]:
        """The child's process ended. Nobody but `stop` or a gang's restart asks a child to end, so any other end,
        exit status 0 included, is a failure."""
        was_asked = self._states[self._known(child)] == "ending"
        self._move(child, "exit")
        if self._is_stopping or self._verdict is not None:
            self._move(child, "settle")
            return self._farewell()
        unit = self._unit_of(child)
        if was_asked:
            return self._revive(unit, now)
        return self._mourn(child, unit, status, now)

    def on_lost(self, culprit: str, children: Sequence[str], reason: str, now: float) -> list[Instruction]:
        """A whole node is gone with these children; nothing can be started there again."""
        del now
        for child in children:
            if self._states[self._known(child)] in ALIVE:
                self._move(child, "exit")
            if self._states[child] in ("waiting", "exited", "backing-off"):
                self._move(child, "settle")
        if self._is_stopping or self._verdict is not None:
            return self._farewell()
        return self._fail(culprit, reason, BUDGET_SPENT)

    def stop(self, reason: str, now: float) -> list[Instruction]:
        """End every child, last started first. May be repeated."""
        del now
        self._is_stopping = True
        return self._end_all(reason)

    # -- rules -------------------------------------------------------------------------------------------------

    def _mourn(self, child: str, unit: _Unit, status: int, now: float) -> list[Instruction]:
        """A child ended by itself: judge, then end what is left of its unit or restart it."""
        what = f"{child} ended with {describe_status(status)}"
        if status in HOPELESS:
            return self._fail(child, f"{what}: {HOPELESS[status]}, another attempt would end the same way", status)
        if self._specs[child].policy == "never":
            return self._fail(child, f"{what} and is never restarted", BUDGET_SPENT)
        while unit.restarts and now - unit.restarts[0] >= self._backoff.period_s:
            unit.restarts.popleft()
        if len(unit.restarts) >= unit.max_restarts:
            budget = f"{unit.max_restarts} restarts in {self._backoff.period_s:g} s"
            return self._fail(child, f"{what} and its budget of {budget} is spent", BUDGET_SPENT)
        unit.reason = what
        mates = tuple(name for name in reversed(unit.members) if self._states[name] in ("starting", "up"))
        for name in mates:
            self._move(name, "end")
        ends: list[Instruction] = [End(mates, f"{what}; its gang starts again together")] if mates else []
        return ends + self._revive(unit, now)

    def _revive(self, unit: _Unit, now: float) -> list[Instruction]:
        """Restart the unit once all its members are gone."""
        if any(self._states[name] in ALIVE for name in unit.members):
            return []
        for name in unit.members:
            if self._states[name] == "exited":  # others still wait for the restart before this one
                self._move(name, "retry")
        delay = self._backoff.delay(len(unit.restarts), self._lot())
        unit.restarts.append(now)
        unit.attempt += 1
        reason, unit.reason = unit.reason, ""
        return [Restart(unit.members, delay, unit.attempt, reason)]

    def _fail(self, culprit: str, reason: str, exit_code: int) -> list[Instruction]:
        self._verdict = FailRun(culprit, reason, exit_code)
        if self._states.get(culprit) == "exited":
            self._move(culprit, "give-up")
        return [self._verdict, *self._end_all(reason)]

    def _end_all(self, reason: str) -> list[Instruction]:
        told = tuple(name for name in reversed(self._states) if self._states[name] in ALIVE)
        for name in told:
            self._move(name, "end")
        for name, state in self._states.items():
            if state in ("waiting", "exited", "backing-off"):
                self._move(name, "settle")
        ends: list[Instruction] = [End(told, reason)] if told else []
        return ends + self._farewell()

    def _farewell(self) -> list[Instruction]:
        return [] if self.alive else [Done()]

    def _move(self, child: str, event: ChildEvent) -> None:
        state = self._states[self._known(child)]
        after = TRANSITIONS.get((state, event))
        if after is None:
            raise SupervisionError(f"{child} is {state}: '{event}' cannot happen now")
        self._states[child] = after

    def _unit_of(self, child: str) -> _Unit:
        return self._units[_unit_key(self._specs[self._known(child)])]

    def _known(self, child: str) -> str:
        if child not in self._specs:
            raise SupervisionError(f"no child is named {child!r}; there are {', '.join(self._specs)}")
        return child


def _unit_key(child: ChildSpec) -> str:
    if child.policy == "gang" and child.unit:
        return f"gang {child.unit}"
    return f"child {child.name}"


def _gather(children: Sequence[ChildSpec]) -> dict[str, tuple[str, ...]]:
    gathered: dict[str, tuple[str, ...]] = {}
    for child in children:
        key = _unit_key(child)
        gathered[key] = (*gathered.get(key, ()), child.name)
    return gathered
