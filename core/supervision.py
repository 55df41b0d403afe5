"""When a child process ends or hangs: restart it, restart its gang, do without it, or end the run.

Pure: events in, instructions out; times are passed in. The launcher reports what happened and when, and carries out the
instructions. Children belong to roles:

    buffer             one child with its own restart budget
    trainer (gang)     trainer/0, trainer/1, ... share one budget and restart together
    rollout (quorum 2) rollout/0, rollout/1, ... each with its own budget

A child, or a gang, that has spent its restarts is given up while its role has enough others, else the run fails.
Children end in reverse start order, one role after the other: `End` names the next role only when the one before is
gone. The words are OTP's where it has them; training needs gang and quorum beyond them.

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
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
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
    """Roles that cannot be, or an event that cannot happen in a child's state: the caller is wrong."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What the supervisor must know of one child."""

    name: str
    may_restart: bool = True
    """False: it is never started again, whatever its status."""
    when_hung: WhenHung = "wait"
    """wait: it is left alone until it answers again or ends; kill: it is killed, and its role decides."""


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """Children of one role in start order."""

    name: str
    children: tuple[ChildSpec, ...]
    is_gang: bool = False
    """All restart together, as one attempt, from one budget; none joins or leaves alone."""
    max_restarts: int = 3
    """Restarts that each child, or the gang, may have within `period_s`."""
    period_s: float = 300.0
    quorum: int = 0
    """So many are enough: one that may not be restarted is given up while that many are left. 0: as many as it began
    with."""


MATES_GRACE_S: Final = 0.5
"""Ranks whose mate has failed have nothing to finish, and may hang in a collective with it."""


@dataclass(slots=True, eq=False)
class _Ending:
    """One of them, under way."""

    then: Literal["restart", "renew", "retire", "give up", "over"]
    stages: list[tuple[str, ...]]
    """Not asked to end yet, the next one first."""
    reason: str
    failed: _Child | None = None
    """Whose restart it is; None: it costs nothing."""
    is_gang: bool = False
    current: tuple[str, ...] = ()
    scope: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.scope = frozenset(name for stage in self.stages for name in stage)

    @property
    def grace_s(self) -> float:
        return MATES_GRACE_S if self.then == "restart" and self.is_gang else math.inf

    @property
    def is_gentle(self) -> bool:
        return self.then in ("renew", "retire")


@dataclass(frozen=True, slots=True)
class Restart:
    """Start these children after `delay_s`, in this order, each as its attempt (0 was the first start). Void for a
    child for which `may_launch` says no by then: another instruction has overtaken it."""

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
    """These hang: a request to end would not help."""

    children: tuple[str, ...]
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
    """A person removed them for good: they are no children of the run any more."""

    children: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FailRun:
    """The run is over: `culprit` may not be started again."""

    culprit: str
    reason: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class AllEnded:
    """No process is left and none will be started."""


Instruction = Restart | Drain | End | Kill | GiveUp | Retired | FailRun | AllEnded


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pause before a restart: none at first, because others wait for the dead child; for repeated failures `first_s`,
    doubled each time up to `limit_s`, minus up to 50 % jitter."""

    first_s: float = 1.0
    limit_s: float = 30.0
    calm_s: float = 20.0
    """A child that ran for so long since its last start begins a new series of failures."""

    def delay(self, restarts: int, jitter: float) -> float:
        """Seconds before the restart that follows `restarts` earlier ones, one soon after the other; `jitter` is in
        [0, 1)."""
        if restarts == 0:
            return 0.0
        full = min(self.limit_s, self.first_s * 2.0 ** min(restarts - 1, 60))
        return full * (1.0 - 0.5 * jitter)


class RestartBudget:
    """At most `max_restarts` in any `period_s` seconds. A restart is reserved when it is decided and spent when the
    last process that it has to wait for is gone: one that is decided meanwhile must not find its place free. A restart
    begins to grow old when it has led to work (`prove`), not when it happened: attempts that take long to fail, and
    never come to work, would be forgotten one after the other and follow each other for ever."""

    def __init__(self, max_restarts: int, period_s: float) -> None:
        self.max_restarts = max_restarts
        self.period_s = period_s
        self._proven: deque[float] = deque()
        """When restarts that led to work did so."""
        self._unproven: list[float] = []
        """When the others happened."""
        self._num_reserved = 0
        self._streak = 0
        """Restarts one soon after the other."""
        self._calm_at = 0.0

    def __str__(self) -> str:
        return f"{self.max_restarts} restarts in {self.period_s:g} s"

    def words(self, now: float) -> str:
        """Which bound it is that was reached."""
        is_slow = bool(self._unproven) and now - self._unproven[0] >= self.period_s
        return f"{self.max_restarts} restarts that come to no work" if is_slow else str(self)

    def left(self, now: float) -> int:
        self._forget(now)
        return max(0, self.max_restarts - self._num_counted)

    def reserve(self, now: float) -> bool:
        """Whether one more is allowed; then it is reserved."""
        self._forget(now)
        if self._num_counted >= self.max_restarts:
            return False
        self._num_reserved += 1
        return True

    def release(self) -> None:
        self._num_reserved -= 1

    def spend(self, now: float, backoff: Backoff, jitter: float) -> float:
        """A reserved restart happens; returns the pause before it in seconds."""
        self._forget(now)
        self._num_reserved -= 1
        has_before = bool(self._proven or self._unproven)
        self._streak = self._streak + 1 if has_before and now < self._calm_at else 0
        self._unproven.append(now)
        delay_s = backoff.delay(self._streak, jitter)
        self._calm_at = now + delay_s + backoff.calm_s
        return delay_s

    def prove(self, now: float) -> None:
        """What was started again is at work: its restarts count for `period_s` from now on."""
        self._proven.extend(now for _ in self._unproven)
        self._unproven.clear()

    @property
    def _num_counted(self) -> int:
        return len(self._proven) + len(self._unproven) + self._num_reserved

    def _forget(self, now: float) -> None:
        while self._proven and now - self._proven[0] >= self.period_s:
            self._proven.popleft()


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

    spec: ChildSpec
    role: _Role
    budget: RestartBudget
    """Its own, or its gang's."""
    came_later: bool = False
    """The run began without it, so any other child is enough when it is given up."""
    state: ChildState = "waiting"
    is_unproven: bool = False
    """Started again after a failure, and not seen at work since."""
    is_given_up: bool = False
    is_retiring: bool = False
    killed: str = ""
    """Killed since all others had given it up, and not gone yet: in words."""

    @property
    def name(self) -> str:
        return self.spec.name

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
        self._gang_budget = self._budget()
        self.children: dict[str, _Child] = {}
        for child in spec.children:
            self.add(child)

    def add(self, child: ChildSpec, *, came_later: bool = False) -> None:
        budget = self._gang_budget if self.spec.is_gang else self._budget()
        self.children[child.name] = _Child(child, self, budget, came_later)

    def _budget(self) -> RestartBudget:
        return RestartBudget(self.spec.max_restarts, self.spec.period_s)


class Supervisor:
    """Decides over the children of a run. `roles` are in start order, `grace_s` is what a child has between the request
    to end and the kill."""

    def __init__(
        self,
        roles: Sequence[RoleSpec],
        *,
        jitter: Callable[[], float],
        grace_s: float = 10.0,
        backoff: Backoff | None = None,
    ) -> None:
        self._roles = {spec.name: _Role(spec) for spec in roles}
        names = [child.name for spec in roles for child in spec.children]
        self._grace_s = grace_s
        self._jitter = jitter
        self._backoff = backoff or Backoff()
        self._attempts = dict.fromkeys(names, 0)
        """Also of children that left, whose names may come again."""
        self._endings: list[_Ending] = []
        """Their scopes do not overlap: a larger one swallows those within it."""
        self._verdict: FailRun | None = None

    # -- questions ---------------------------------------------------------------------------------------------

    def state(self, child: str) -> ChildState:
        return self._child(child).state

    def attempt(self, child: str) -> int:
        """Number of the child's current attempt; 0 is the first."""
        return self._attempts[self._child(child).name]

    def may_launch(self, child: str, attempt: int) -> bool:
        """Whether it may be started now as that attempt; not if it has left."""
        found = self._find(child)
        if found is None or attempt != self._attempts[child] or self._ending_of(child) is not None:
            return False
        return (found.state, "launch") in TRANSITIONS

    @property
    def alive(self) -> tuple[str, ...]:
        return tuple(child.name for child in self._all() if child.is_alive)

    @property
    def verdict(self) -> FailRun | None:
        """Why the run failed, if it did: the first reason only."""
        return self._verdict

    def is_retiring(self, child: str) -> bool:
        found = self._find(child)
        return found is not None and found.is_retiring

    def restarts_left(self, child: str, now: float) -> int:
        """How often it may fail and be started again now."""
        return self._child(child).budget.left(now)

    # -- wishes of a person ------------------------------------------------------------------------------------

    def grow(self, role_name: str, child: ChildSpec) -> None:
        """One more child of that role, to be launched as its current `attempt`. A child of its name that is over makes
        room. Raises SupervisionError if the name is in use, the role is a gang, or the run ends."""
        if self._is_over():
            raise SupervisionError("the run ends")
        role, name = self._roles.get(role_name), child.name
        if role is None:
            raise SupervisionError(f"there is no role {role_name!r}")
        if role.spec.is_gang:
            raise SupervisionError(f"{role_name} is a gang: no child can join it later")
        if (known := self._find(name)) is not None:
            if not known.is_over or self._ending_of(name):
                raise SupervisionError(f"children named twice: {name}")
            del known.role.children[name]
        role.add(child, came_later=True)
        self._attempts[name] = self._attempts.get(name, -1) + 1

    def check_retire(self, child: str) -> None:
        """Raises SupervisionError if `retire` would."""
        found = self._child(child)
        if found.role.spec.is_gang:
            raise SupervisionError(f"{child} is a rank of {found.budget_name}: it cannot go alone")

    def retire(self, child: str, reason: str, now: float) -> list[Instruction]:
        """Have it end for good; `Retired` when it is gone. Its end, however it comes, is no failure. May be repeated.
        Raises SupervisionError for a rank of a gang."""
        self.check_retire(child)
        found = self._child(child)
        if self._is_over() or found.is_retiring:
            return []
        found.is_retiring = True
        return self._begin(_Ending("retire", [(child,)], reason), now)

    def renew(self, child: str, reason: str, now: float) -> list[Instruction]:
        """Have it, or its whole gang, end and start again. Raises SupervisionError for one that left or is leaving."""
        found, wider = self._child(child), self._ending_of(child)
        if found.is_over or found.is_retiring or (wider is not None and wider.then == "give up"):
            raise SupervisionError(f"{child} is {found.state} and leaves: it cannot be restarted")
        if self._is_over():
            return []  # it ends anyway
        return self._begin(_Ending("renew", [found.mates[::-1]], reason, is_gang=found.role.spec.is_gang), now)

    def on_drained(self, child: str, now: float) -> list[Instruction]:
        """It has handed its work back, or could not. It may be late."""
        ending, found = self._ending_of(child), self._find(child)
        if ending is None or found is None or found.state != "draining":
            return []
        found.move("end")
        return [End((child,), self._grace_s, ending.reason)]

    # -- events ------------------------------------------------------------------------------------------------

    def on_launch(self, child: str) -> None:
        """The launcher starts the child: for the first time, or as a `Restart` asked. Raises SupervisionError if it
        may not (any more)."""
        if not self.may_launch(child, self.attempt(child)):
            raise SupervisionError(f"{child} is {self.state(child)}: 'launch' cannot happen now")
        self._child(child).move("launch")

    def on_up(self, child: str) -> None:
        self._child(child).move("up")

    def on_work(self, child: str, now: float) -> None:
        """The child was seen at its work; to answer is not enough, because it may still load what it will fail on.
        From now on the restarts that led to this grow old. May be repeated, and be late."""
        found = self._find(child)
        if found is None or found.state != "up":
            return
        found.is_unproven = False
        mates = (found.role.children[name] for name in found.mates)
        if not any(mate.is_unproven and not mate.is_over for mate in mates):
            found.budget.prove(now)

    def on_exit(self, child: str, status: int, now: float) -> list[Instruction]:
        found = self._child(child)
        found.move("exit")
        who, found.killed = found.killed or child, ""
        ending = self._ending_of(child)
        if ending is not None:
            return self._advance(ending, now)
        what = f"{who} ended with {describe_status(status)}"
        if status in HOPELESS:
            what = f"{what}: {HOPELESS[status]}, another attempt would end the same way"
            if found.came_later:
                return self._do_without(found, child, what, now)
            return self._fail(child, what, status, now)
        return self._on_failure(found, what, now)

    def on_health(self, child: str, health: Health, why: str, now: float) -> list[Instruction]:
        """What the failure detector thinks of it; "given up": for all others it is over, though its process exists, and
        may just be ending by itself, so `on_exit` judges. May be late: of one that is not up it is of no interest."""
        found, is_lost = self._child(child), health == "given up"
        if health == "recovered" and found.state == "hung":
            found.move("recover")
        if (health == "hung" or is_lost) and found.state == "draining":
            return self.on_drained(child, now)  # it will hand nothing back
        if health == "hung" and found.state == "up":
            found.move("hang")
        elif not is_lost or found.state not in ("up", "hung"):
            return []
        if (found.spec.when_hung == "wait" and not is_lost) or self._ending_of(child) is not None:
            return []
        what = f"{child} is given up by the others ({why})" if is_lost else f"{child} hangs ({why})"
        found.move("end")
        kill: list[Instruction] = [Kill((child,), what)]
        if is_lost:
            found.killed = f"{what} and"
        return kill if is_lost else kill + self._on_failure(found, f"{what}, was killed", now)

    def on_lost(self, culprit: str, children: Sequence[str], reason: str, now: float) -> list[Instruction]:
        """A whole node is gone with these children, or one of them cannot be ended: none can be started again."""
        lost = [self._child(name) for name in children]
        for child in lost:
            if child.is_alive:
                child.move("exit")
            if not child.is_over:
                child.move("settle")
        under_way = list(self._endings)
        done: list[Instruction] = []
        for child in lost:
            if not self._is_over() and not child.is_retiring:
                done += self._do_without(child, culprit, reason, now)
        for ending in under_way:
            if ending in self._endings:
                done += self._advance(ending, now)
        return done

    def stop(self, reason: str, now: float) -> list[Instruction]:
        """End every child, last started first. May be repeated."""
        final = next((e for e in self._endings if e.then == "over"), None)
        if final is not None:
            return self._advance(final, now)
        stages = [tuple(role.children)[::-1] for role in reversed(self._roles.values())]
        return self._begin(_Ending("over", stages, reason), now)

    # -- judging -----------------------------------------------------------------------------------------------

    def _on_failure(self, child: _Child, what: str, now: float) -> list[Instruction]:
        """A child failed by itself."""
        if not child.spec.may_restart:
            return self._do_without(child, child.name, f"{what} and is never restarted", now)
        if child.budget.reserve(now):
            return self._begin(_Ending("restart", [child.mates[::-1]], what, child, child.role.spec.is_gang), now)
        spent = f"{what} and its budget of {child.budget.words(now)} is spent"
        return self._do_without(child, child.name, spent, now)

    def _do_without(self, child: _Child, culprit: str, what: str, now: float) -> list[Instruction]:
        """A child will never run again: its role continues without it, or the run fails."""
        if child.is_given_up:
            return []
        role = child.role.spec
        stays = [one for one in child.role.children.values() if not (one.is_given_up or one.is_retiring)]
        num_left = len(stays) - (child in stays)
        needed = role.quorum or (1 if child.came_later else len(role.children))
        if role.is_gang or num_left < needed:
            return self._fail(culprit, what, BUDGET_SPENT, now)
        child.is_given_up = True
        news = GiveUp(child.name, what, num_left, needed)
        return [news, *self._begin(_Ending("give up", [(child.name,)], what), now)]

    def _fail(self, culprit: str, reason: str, exit_code: int, now: float) -> list[Instruction]:
        self._verdict = FailRun(culprit, reason, exit_code)
        found = self._find(culprit)
        if found is not None and found.state == "exited":
            found.move("give-up")
        return [self._verdict, *self.stop(reason, now)]

    # -- ending, and what comes after ----------------------------------------------------------------------------

    def _begin(self, ending: _Ending, now: float) -> list[Instruction]:
        for other in [e for e in self._endings if e.scope <= ending.scope]:
            self._endings.remove(other)
            if other.failed is not None:
                other.failed.budget.release()
        self._endings.append(ending)
        return self._advance(ending, now)

    def _advance(self, ending: _Ending, now: float) -> list[Instruction]:
        """Name the next stage, or do what all this was for."""
        orders: list[Instruction] = []
        self._close(ending)
        while not any(child.is_alive for child in self._all(ending.current)):
            if not ending.stages:
                return orders + self._finish(ending, now)
            ending.current = ending.stages.pop(0)
            orders += self._end_stage(ending)
        return orders

    def _end_stage(self, ending: _Ending) -> list[Instruction]:
        """The current stage: who is up and may hand work back does that first."""
        found = (self._find(name) for name in ending.current)
        children = [one for one in found if one is not None and one.is_alive and one.state != "ending"]
        drained = [one for one in children if ending.is_gentle and one.state == "up"]
        rest = [one for one in children if not (ending.is_gentle and one.state in ("up", "draining"))]
        for child in drained:
            child.move("drain")
        for child in rest:
            child.move("end")
        grace_s = min(ending.grace_s, self._grace_s)
        orders: list[Instruction] = [Drain(_names(drained), ending.reason)] if drained else []
        return orders + ([End(_names(rest), grace_s, ending.reason)] if rest else [])

    def _close(self, ending: _Ending) -> None:
        """Children that have no process and will have none are done with."""
        if ending.then in ("restart", "renew"):
            return
        for child in self._all(ending.scope):
            if not child.is_alive and not child.is_over:
                child.move("give-up" if ending.then == "give up" else "settle")

    def _finish(self, ending: _Ending, now: float) -> list[Instruction]:
        if ending.then == "over":
            return [AllEnded()]
        self._endings.remove(ending)
        if ending.then == "give up":
            return self._done_if_all_over()
        orders = self._remove_retired(ending.scope)
        children = [child for child in self._all(ending.scope) if not child.is_over]
        if children:
            return [*orders, self._restart(children, ending, now)]
        if ending.failed is not None:
            ending.failed.budget.release()
        return orders + self._done_if_all_over()

    def _restart(self, children: Sequence[_Child], ending: _Ending, now: float) -> Restart:
        delay, budget = 0.0, ""
        if ending.failed is not None:
            budget = ending.failed.budget_name
            delay = ending.failed.budget.spend(now, self._backoff, self._jitter())
        for child in children:
            child.is_unproven |= bool(budget)
            child.move("retry")
            self._attempts[child.name] += 1
        attempts = tuple(self._attempts[child.name] for child in children)
        return Restart(_names(children), attempts, delay, ending.reason, budget)

    def _remove_retired(self, scope: Collection[str]) -> list[Instruction]:
        """Those that retire are gone; their names may come again, with higher attempts."""
        gone = [child for child in self._all(scope) if child.is_retiring]
        for child in gone:
            if not child.is_over:
                child.move("settle")
            del child.role.children[child.name]
        return [Retired(_names(gone))] if gone else []

    def _done_if_all_over(self) -> list[Instruction]:
        return [AllEnded()] if all(child.is_over for child in self._all()) else []

    def _ending_of(self, child: str) -> _Ending | None:
        return next((ending for ending in self._endings if child in ending.scope), None)

    def _is_over(self) -> bool:
        return any(ending.then == "over" for ending in self._endings)

    def _all(self, among: Collection[str] | None = None) -> list[_Child]:
        """Those that there are, in start order."""
        every = (child for role in self._roles.values() for child in role.children.values())
        return [child for child in every if among is None or child.name in among]

    def _find(self, name: str) -> _Child | None:
        return next((child for child in self._all() if child.name == name), None)

    def _child(self, name: str) -> _Child:
        found = self._find(name)
        if found is None:
            raise SupervisionError(f"no child is named {name!r}; there are {', '.join(_names(self._all()))}")
        return found


def _names(children: Sequence[_Child]) -> tuple[str, ...]:
    return tuple(child.name for child in children)
