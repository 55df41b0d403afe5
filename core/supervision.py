"""When a child process ends or hangs: restart it, restart its gang, do without it, or end the run.

Pure: events in, instructions out; times are passed in. The launcher reports what happened and when, and carries out the
instructions. Children belong to roles:

    buffer             one child with its own restart budget
    trainer (gang)     trainer/0, trainer/1, ... share one budget and restart together
    rollout (quorum 2) rollout/0, rollout/1, ... each with its own budget

A child, or a gang, that has spent its restarts is given up while its role has enough others, else the run fails. The
words are OTP's where it has them; training needs gang and quorum beyond them.

A person may remove a child for good (`retire`), restart it (`renew`), or add one (`grow`). Such ends are no failures
and cost no budget; a child that can hand work back (`Drain`) does so before it has to end.

The states of a child:

    waiting ──launch──> starting ──up──> up <──recover/hang──> hung       each with a process ──exit──> exited
                           └──end──> ending <──end──┘ (up, hung, draining)
                                          up ──drain──> draining          hands its work back before it ends
    exited, waiting ──retry──> backing-off ──launch──> starting
    waiting, exited, backing-off ──settle──> stopped
    waiting, exited, backing-off ──give-up──> failed
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

WhenHung = Literal["wait", "kill"]
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
    """Roles that cannot be, or an event that cannot happen in a child's state: the caller is wrong."""


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """Children of one role in start order."""

    name: str
    children: tuple[str, ...]
    is_gang: bool = False
    """All restart together, as one attempt, from one budget; none joins or leaves alone."""
    max_restarts: int = 3
    """Of each child, or of the gang; they are counted from 0 when the newest is `FORGET_S` old."""
    quorum: int = 0
    """With so many left, one that may not be restarted is given up. 0: as many as it began with."""
    when_hung: WhenHung = "wait"
    """wait: a hung child is left alone until it answers again or ends; kill: it is killed, and its role decides."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Start these children after `delay_s`, in this order, each as its attempt (0 was the first start). Void for a
    child for which `on_launch` says no by then: another instruction has overtaken it."""

    children: tuple[str, ...]
    attempts: tuple[int, ...]
    delay_s: float
    reason: str
    budget: str
    """The child, or the gang, from whose budget this restart was taken; empty: a person asked for it."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Have these hand their work back, then say `on_drained` of each, whether or not it could."""

    children: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """Ask these children to end, at the same time, and kill those that are still there after `grace_s`."""

    children: tuple[str, ...]
    grace_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Kill:
    """It hangs: a request to end would not help."""

    child: str
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The run continues without this child; its role has enough others."""

    child: str
    reason: str
    num_left: int
    quorum: int


@dataclass(frozen=True, slots=True)
class Retired:
    """A person removed it for good: it is no child of the run any more."""

    child: str


@dataclass(frozen=True, slots=True)
class FailRun:
    """The run is over: `culprit` may not be started again. Every child has to be ended."""

    culprit: str
    reason: str
    exit_code: int


Instruction = Restart | Drain | End | Kill | GiveUp | Retired | FailRun


MATES_GRACE_S: Final = 0.5
"""Ranks whose mate has failed have nothing to finish, and may hang in a collective with it."""
FORGET_S: Final = 900.0
FIRST_PAUSE_S, LONGEST_PAUSE_S, CALM_S = 1.0, 30.0, 20.0
"""Before a restart: no pause at first, because others wait for the dead child; for repeated failures the first one,
doubled each time up to the longest, minus up to 50 % jitter. A child that ran for `CALM_S` since its last start begins
a new series."""


class RestartBudget:
    """`max_restarts`, counted from 0 when the newest is `FORGET_S` old. That is longer than an attempt may take that
    fails while it loads, so such attempts do not follow each other for ever."""

    def __init__(self, max_restarts: int) -> None:
        self.max_restarts = max_restarts
        self._num_used = 0
        self._num_quick = 0
        """Restarts one soon after the other."""
        self._newest_s = -math.inf

    def num_left(self, now: float) -> int:
        """How many are allowed now."""
        return max(0, self.max_restarts - (self._num_used if now < self._newest_s + FORGET_S else 0))

    def take(self, now: float, jitter: float) -> float:
        """Count a restart; returns the seconds of its pause. `jitter` is in [0, 1)."""
        self._num_used = self._num_used + 1 if now < self._newest_s + FORGET_S else 1
        self._num_quick = self._num_quick + 1 if now < self._newest_s + CALM_S else 0
        full_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._num_quick - 1, 60)) if self._num_quick else 0.0
        pause_s = full_s * (1.0 - 0.5 * jitter)
        self._newest_s = now + pause_s
        return pause_s


HOPELESS: Final[dict[int, str]] = {2: "its configuration is wrong", 5: "its data or a user's function is wrong"}
"""Exit status -> why another attempt would end the same way."""

BUDGET_SPENT: Final = 4
"""Exit status of a run that ends because a child may not be started again."""


def describe_status(status: int) -> str:
    """Words for a process's return code: negative is a signal, as in `subprocess`."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


@dataclass(slots=True, eq=False)
class _Child:
    """One child that a role has now."""

    name: str
    role: _Role
    budget: RestartBudget
    """Its own, or its gang's."""
    came_later: bool = False
    """The run began without it, so any other child is enough when it is given up."""
    state: ChildState = "waiting"
    is_given_up: bool = False
    is_retiring: bool = False
    killed: str = ""
    """Killed since all others had given it up, and not gone yet: in words."""

    @property
    def is_alive(self) -> bool:
        return self.state in ALIVE

    @property
    def is_over(self) -> bool:
        return self.state in OVER

    @property
    def mates(self) -> tuple[str, ...]:
        return tuple(self.role.children) if self.role.spec.is_gang else (self.name,)

    @property
    def budget_name(self) -> str:
        return f"gang {self.role.spec.name}" if self.role.spec.is_gang else self.name

    def move(self, event: ChildEvent) -> None:
        """Take an event. Raises SupervisionError if it cannot happen now."""
        after = TRANSITIONS.get((self.state, event))
        if after is None:
            raise SupervisionError(f"{self.name} is {self.state}: '{event}' cannot happen now")
        self.state = after


class _Role:
    """The children that a role has now, in start order."""

    def __init__(self, spec: RoleSpec) -> None:
        self.spec = spec
        self._gang_budget = RestartBudget(spec.max_restarts)
        self.children: dict[str, _Child] = {}
        for name in spec.children:
            self.add(name)

    def add(self, name: str, *, came_later: bool = False) -> None:
        budget = self._gang_budget if self.spec.is_gang else RestartBudget(self.spec.max_restarts)
        self.children[name] = _Child(name, self, budget, came_later)


@dataclass(frozen=True, slots=True, eq=False)
class _Ending:
    """Children that are on their way to their end, and what comes after it."""

    then: Literal["restart", "renew", "retire"]
    scope: frozenset[str]
    reason: str
    failed: _Child | None = None
    """Whose restart it is; None: it costs nothing."""


class Supervisor:
    """Over the children of a run. `roles` in start order; `grace_s`: from the request to end to the kill."""

    def __init__(self, roles: Sequence[RoleSpec], *, jitter: Callable[[], float], grace_s: float = 10.0) -> None:
        self._roles = {spec.name: _Role(spec) for spec in roles}
        self._grace_s = grace_s
        self._jitter = jitter
        self._attempts = {name: 0 for spec in roles for name in spec.children}
        """Also of children that left, whose names may come again."""
        self._endings: list[_Ending] = []
        """Their scopes do not overlap: a larger one swallows those within it."""
        self.is_over = False
        """Whether the run ends: then nothing is started, and no end is a failure."""

    # -- questions ---------------------------------------------------------------------------------------------

    def state(self, name: str) -> ChildState:
        return self._child(name).state

    def attempt(self, name: str) -> int:
        """Number of the child's current attempt; 0 is the first."""
        return self._attempts[self._child(name).name]

    @property
    def alive(self) -> tuple[str, ...]:
        return _names(child for child in self._all() if child.is_alive)

    def is_retiring(self, name: str) -> bool:
        child = self._find(name)
        return child is not None and child.is_retiring

    def restarts_left(self, name: str, now: float) -> int:
        """How often it may fail and be started again now."""
        return self._child(name).budget.num_left(now)

    # -- wishes of a person ------------------------------------------------------------------------------------

    def grow(self, role_name: str, name: str) -> None:
        """One more child, as its current `attempt`. Raises SupervisionError for a name in use, a gang, a run's end."""
        if self.is_over:
            raise SupervisionError("the run ends")
        role = self._roles.get(role_name)
        if role is None:
            raise SupervisionError(f"there is no role {role_name!r}")
        if role.spec.is_gang:
            raise SupervisionError(f"{role_name} is a gang: no child can join it later")
        if (earlier := self._find(name)) is not None:
            if not earlier.is_over or self._ending_of(name):
                raise SupervisionError(f"children named twice: {name}")
            del earlier.role.children[name]
        role.add(name, came_later=True)
        self._attempts[name] = self._attempts.get(name, -1) + 1

    def check_retire(self, name: str) -> None:
        """Raises SupervisionError if `retire` would."""
        child = self._child(name)
        if child.role.spec.is_gang:
            raise SupervisionError(f"{name} is a rank of {child.budget_name}: it cannot go alone")

    def retire(self, name: str, reason: str, now: float) -> list[Instruction]:
        """It ends for good, which is no failure; `Retired` when it is gone. Raises SupervisionError for a rank."""
        self.check_retire(name)
        child = self._child(name)
        if self.is_over or child.is_retiring:
            return []
        child.is_retiring = True
        return self._begin(_Ending("retire", frozenset({name}), reason), now)

    def renew(self, name: str, reason: str, now: float) -> list[Instruction]:
        """Have it, or its whole gang, end and start again. Raises SupervisionError for one that left or is leaving."""
        child = self._child(name)
        if child.is_over or child.is_retiring or child.is_given_up:
            raise SupervisionError(f"{name} is {child.state} and leaves: it cannot be restarted")
        if self.is_over:
            return []  # it ends anyway
        return self._begin(_Ending("renew", frozenset(child.mates), reason), now)

    def on_drained(self, name: str) -> list[Instruction]:
        """It has handed its work back, or could not. It may be late."""
        ending, child = self._ending_of(name), self._find(name)
        if ending is None or child is None or child.state != "draining":
            return []
        child.move("end")
        return [End((name,), self._grace_s, ending.reason)]

    # -- events ------------------------------------------------------------------------------------------------

    def on_launch(self, name: str, attempt: int) -> bool:
        """The child is started as that attempt, first or as a `Restart` asked. False: it may not be any more, since it
        has left, or another instruction has overtaken this start."""
        child = self._find(name)
        if self.is_over or child is None or attempt != self._attempts[name] or self._ending_of(name) is not None:
            return False
        if may := (child.state, "launch") in TRANSITIONS:
            child.move("launch")
        return may

    def on_up(self, name: str) -> None:
        self._child(name).move("up")

    def on_exit(self, name: str, status: int, now: float) -> list[Instruction]:
        child = self._child(name)
        child.move("exit")
        subject, child.killed = child.killed or name, ""
        if self.is_over or child.is_given_up:
            child.move("give-up" if child.is_given_up else "settle")
        ending = self._ending_of(name)
        if ending is not None:
            return self._advance(ending, now)
        if child.is_over:
            return []
        cause = f"{subject} ended with {describe_status(status)}"
        if status not in HOPELESS:
            return self._on_failure(child, cause, now)
        cause = f"{cause}: {HOPELESS[status]}, another attempt would end the same way"
        return self._do_without(child, name, cause) if child.came_later else self._fail(name, cause, status)

    def on_health(self, name: str, health: Health, why: str, now: float) -> list[Instruction]:
        """What the failure detector thinks of it; "given up": for all others it is over, though its process exists, and
        may just be ending by itself, so `on_exit` judges. May be late: of one that is not up it is of no interest."""
        child = self._child(name)
        if health == "recovered" and child.state == "hung":
            child.move("recover")
        if health not in ("hung", "given up") or self.is_over:
            return []
        if child.state == "draining":
            return self.on_drained(name)  # it will hand nothing back
        if child.state not in ("up", "hung") or (health, child.state) == ("hung", "hung"):
            return []
        if health == "hung":
            child.move("hang")
            if child.role.spec.when_hung == "wait":
                return []
        cause = f"{name} hangs ({why})" if health == "hung" else f"{name} is given up by the others ({why})"
        child.move("end")
        if health == "given up":
            child.killed = f"{cause} and"
            return [Kill(name, cause)]
        return [Kill(name, cause), *self._on_failure(child, f"{cause}, was killed", now)]

    def on_lost(self, culprit: str, children: Sequence[str], reason: str, now: float) -> list[Instruction]:
        """A whole node is gone with these children, or one of them cannot be ended: none can be started again."""
        lost = [self._child(name) for name in children]
        for child in lost:
            if child.is_alive:
                child.move("exit")
            if not child.is_over:
                child.move("settle")
        orders: list[Instruction] = []
        for child in lost:
            if not child.is_retiring:
                orders += self._do_without(child, culprit, reason)
        for ending in list(self._endings):
            orders += self._advance(ending, now)
        return orders

    def stop(self) -> None:
        """The run ends: every child has to be ended. May be repeated."""
        self.is_over = True
        self._endings.clear()
        for child in self._all():
            if not child.is_alive and not child.is_over:
                child.move("settle")

    def end_role(self, role: str) -> tuple[str, ...]:
        """The children of a role that have to be ended now, since the run ends; last started first."""
        alive = [child for child in reversed(self._roles[role].children.values()) if child.is_alive]
        for child in alive:
            if child.state != "ending":
                child.move("end")
        return _names(alive)

    @property
    def roles(self) -> tuple[str, ...]:
        """In start order."""
        return tuple(self._roles)

    # -- judging -----------------------------------------------------------------------------------------------

    def _on_failure(self, child: _Child, cause: str, now: float) -> list[Instruction]:
        if child.budget.num_left(now):
            return self._begin(_Ending("restart", frozenset(child.mates), cause, child), now)
        max_restarts = child.budget.max_restarts
        spent = f"its budget of {max_restarts} restarts is spent" if max_restarts else "is never restarted"
        return self._do_without(child, child.name, f"{cause} and {spent}")

    def _do_without(self, child: _Child, culprit: str, cause: str) -> list[Instruction]:
        """A child will never run again: its role continues without it, or the run fails."""
        if child.is_given_up or self.is_over:
            return []
        role = child.role.spec
        staying = [mate for mate in child.role.children.values() if not (mate.is_given_up or mate.is_retiring)]
        num_left = len(staying) - (child in staying)
        needed = role.quorum or (1 if child.came_later else len(child.role.children))
        if role.is_gang or num_left < needed:
            return self._fail(culprit, cause, BUDGET_SPENT)
        child.is_given_up = True
        if not child.is_alive and not child.is_over:
            child.move("give-up")
        return [GiveUp(child.name, cause, num_left, needed)]

    def _fail(self, culprit: str, reason: str, exit_code: int) -> list[Instruction]:
        child = self._find(culprit)
        if child is not None and child.state == "exited":
            child.move("give-up")
        self.stop()
        return [FailRun(culprit, reason, exit_code)]

    # -- ending, and what comes after ----------------------------------------------------------------------------

    def _begin(self, ending: _Ending, now: float) -> list[Instruction]:
        for swallowed in [other for other in self._endings if other.scope <= ending.scope]:
            self._endings.remove(swallowed)
        self._endings.append(ending)
        is_gentle, drained, ended = ending.then != "restart", list[_Child](), list[_Child]()
        for child in reversed(self._all(ending.scope)):
            if is_gentle and child.state == "up":  # it may have work to hand back
                child.move("drain")
                drained.append(child)
            elif child.is_alive and child.state != "ending" and not (is_gentle and child.state == "draining"):
                child.move("end")
                ended.append(child)
        grace_s = min(MATES_GRACE_S, self._grace_s) if not is_gentle else self._grace_s
        orders: list[Instruction] = [Drain(_names(drained), ending.reason)] if drained else []
        orders += [End(_names(ended), grace_s, ending.reason)] if ended else []
        return orders + self._advance(ending, now)

    def _advance(self, ending: _Ending, now: float) -> list[Instruction]:
        """Do what all this was for, once none has a process any more."""
        children = self._all(ending.scope)
        if any(child.is_alive for child in children):
            return []
        self._endings.remove(ending)
        orders: list[Instruction] = []
        for child in children:
            if child.is_retiring:  # its name may come again, with higher attempts
                if not child.is_over:
                    child.move("settle")
                del child.role.children[child.name]
                orders.append(Retired(child.name))
        again = [child for child in children if not child.is_over]
        return [*orders, self._restart(again, ending, now)] if again else orders

    def _restart(self, children: Sequence[_Child], ending: _Ending, now: float) -> Restart:
        delay_s, budget = 0.0, ""
        if ending.failed is not None:
            budget = ending.failed.budget_name
            delay_s = ending.failed.budget.take(now, self._jitter())
        for child in children:
            child.move("retry")
            self._attempts[child.name] += 1
        attempts = tuple(self._attempts[child.name] for child in children)
        return Restart(_names(children), attempts, delay_s, ending.reason, budget)

    def _ending_of(self, name: str) -> _Ending | None:
        return next((ending for ending in self._endings if name in ending.scope), None)

    def _all(self, among: Collection[str] | None = None) -> list[_Child]:
        """Those that there are, in start order."""
        children = (child for role in self._roles.values() for child in role.children.values())
        return [child for child in children if among is None or child.name in among]

    def _find(self, name: str) -> _Child | None:
        return next((child for child in self._all() if child.name == name), None)

    def _child(self, name: str) -> _Child:
        child = self._find(name)
        if child is None:
            raise SupervisionError(f"no child is named {name!r}; there are {', '.join(_names(self._all()))}")
        return child


def _names(children: Iterable[_Child]) -> tuple[str, ...]:
    return tuple(child.name for child in children)
