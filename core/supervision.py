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
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    grace_s: float = 10.0
    """Between the request to end and the kill."""


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


class ChildStates:
    """The states of all children of a run."""

    def __init__(self, names: Iterable[str]) -> None:
        self._states: dict[str, ChildState] = dict.fromkeys(names, "waiting")

    def __getitem__(self, child: str) -> ChildState:
        if child not in self._states:
            raise SupervisionError(f"no child is named {child!r}; there are {', '.join(self._states)}")
        return self._states[child]

    def __contains__(self, child: str) -> bool:
        return child in self._states

    def add(self, child: str) -> None:
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
        return (self[child], event) in TRANSITIONS

    def is_alive(self, child: str) -> bool:
        return self[child] in ALIVE

    def is_over(self, child: str) -> bool:
        return self[child] in OVER

    def alive(self, among: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for name in among if self._states[name] in ALIVE)


@dataclass(slots=True, eq=False)
class _Ending:
    """One of them, under way."""

    then: Literal["restart", "renew", "retire", "give up", "over"]
    stages: list[tuple[str, ...]]
    """Not asked to end yet, the next one first."""
    reason: str
    budget: str = ""
    """Whose restart it is; empty: it costs nothing."""
    is_gang: bool = False
    current: tuple[str, ...] = ()
    scope: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.scope = frozenset(name for stage in self.stages for name in stage)

    @property
    def grace_s(self) -> float:
        """Ranks whose mate has failed have nothing to finish, and may hang in a collective with it."""
        return 0.5 if self.then == "restart" and self.is_gang else math.inf

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
    """Ask these children to end, at the same time, and kill those that are still there after their grace."""

    children: tuple[str, ...]
    graces_s: tuple[float, ...]
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


class _Role:
    """The children that a role has now, in start order."""

    def __init__(self, spec: RoleSpec) -> None:
        if not spec.children:
            raise SupervisionError(f"role {spec.name} has no children")
        if not 0 <= spec.quorum <= len(spec.children) or (spec.is_gang and spec.quorum):
            raise SupervisionError(f"role {spec.name}: {spec.quorum} of {len(spec.children)} is no quorum")
        if spec.max_restarts < 0 or spec.period_s <= 0:
            raise SupervisionError(f"role {spec.name}: {spec.max_restarts} restarts in {spec.period_s:g} s")
        if spec.is_gang and not all(child.may_restart for child in spec.children):
            raise SupervisionError(f"gang {spec.name}: all its children may be restarted")
        self.spec = spec
        self.children = {child.name: child for child in spec.children}
        self.extra: set[str] = set()
        """Children that came later. The run began without them, so any other child is enough when one is given up."""

    def budget_of(self, child: str) -> str:
        return f"gang {self.spec.name}" if self.spec.is_gang else child

    def needed_without(self, child: str) -> int:
        """So many others must be left when that child is given up."""
        return self.spec.quorum or (1 if child in self.extra else len(self.spec.children))

    def mates(self, child: str) -> tuple[str, ...]:
        return tuple(self.children) if self.spec.is_gang else (child,)


class Supervisor:
    """Decides over the children of a run. `roles` are in start order."""

    def __init__(
        self, roles: Sequence[RoleSpec], *, jitter: Callable[[], float], backoff: Backoff | None = None
    ) -> None:
        self._roles = {spec.name: _Role(spec) for spec in roles}
        names = [child.name for spec in roles for child in spec.children]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise SupervisionError(f"children named twice: {', '.join(twice)}")
        self._states = ChildStates(names)
        self._jitter = jitter
        self._backoff = backoff or Backoff()
        self._budgets: dict[str, RestartBudget] = {}
        for role in self._roles.values():
            for name in role.children:
                self._budgets.setdefault(role.budget_of(name), _budget(role.spec))
        self._attempts = dict.fromkeys(names, 0)
        self._unproven: set[str] = set()
        """Started again after a failure, and not seen at work since."""
        self._endings: list[_Ending] = []
        """Their scopes do not overlap: a larger one swallows those within it."""
        self._given_up: set[str] = set()
        self._killed: dict[str, str] = {}
        """Killed since all others had given it up, and not gone yet: in words."""
        self._retiring: set[str] = set()
        self._verdict: FailRun | None = None

    # -- questions ---------------------------------------------------------------------------------------------

    def state(self, child: str) -> ChildState:
        return self._states[child]

    def attempt(self, child: str) -> int:
        """Number of the child's current attempt; 0 is the first."""
        return self._attempts[self._spec(child).name]

    def may_launch(self, child: str, attempt: int) -> bool:
        """Whether it may be started now as that attempt; not if it has left."""
        if child not in self._states:
            return False
        is_current = attempt == self.attempt(child) and self._ending_of(child) is None
        return is_current and self._states.can(child, "launch")

    @property
    def alive(self) -> tuple[str, ...]:
        return self._states.alive(self._names())

    @property
    def verdict(self) -> FailRun | None:
        """Why the run failed, if it did: the first reason only."""
        return self._verdict

    def is_retiring(self, child: str) -> bool:
        return child in self._retiring

    def restarts_left(self, child: str, now: float) -> int:
        """How often it may fail and be started again now."""
        return self._budgets[self._role_of(child).budget_of(child)].left(now)

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
        if name in self._states:
            if not self._states.is_over(name) or self._ending_of(name):
                raise SupervisionError(f"children named twice: {name}")
            self._forget(name)
        role.children[name] = child
        role.extra.add(name)
        self._states.add(name)
        self._attempts[name] = self._attempts.get(name, -1) + 1
        self._budgets[name] = _budget(role.spec)

    def check_retire(self, child: str) -> None:
        """Raises SupervisionError if `retire` would."""
        role = self._role_of(child)
        if role.spec.is_gang:
            raise SupervisionError(f"{child} is a rank of {role.budget_of(child)}: it cannot go alone")

    def retire(self, child: str, reason: str, now: float) -> list[Instruction]:
        """Have it end for good; `Retired` when it is gone. Its end, however it comes, is no failure. May be repeated.
        Raises SupervisionError for a rank of a gang."""
        self.check_retire(child)
        if self._is_over() or child in self._retiring:
            return []
        self._retiring.add(child)
        return self._begin(_Ending("retire", [(child,)], reason), now)

    def renew(self, child: str, reason: str, now: float) -> list[Instruction]:
        """Have it, or its whole gang, end and start again. Raises SupervisionError for one that left or is leaving."""
        role, wider = self._role_of(child), self._ending_of(child)
        if self._states.is_over(child) or child in self._retiring or (wider is not None and wider.then == "give up"):
            raise SupervisionError(f"{child} is {self._states[child]} and leaves: it cannot be restarted")
        if self._is_over():
            return []  # it ends anyway
        return self._begin(_Ending("renew", [role.mates(child)[::-1]], reason, is_gang=role.spec.is_gang), now)

    def on_drained(self, child: str, now: float) -> list[Instruction]:
        """It has handed its work back, or could not. It may be late."""
        ending = self._ending_of(child)
        if ending is None or child not in self._states or self._states[child] != "draining":
            return []
        self._states.move(child, "end")
        return [End((child,), (self._spec(child).grace_s,), ending.reason)]

    # -- events ------------------------------------------------------------------------------------------------

    def on_launch(self, child: str) -> None:
        """The launcher starts the child: for the first time, or as a `Restart` asked. Raises SupervisionError if it
        may not (any more)."""
        if not self.may_launch(child, self.attempt(child)):
            raise SupervisionError(f"{child} is {self._states[child]}: 'launch' cannot happen now")
        self._states.move(child, "launch")

    def on_up(self, child: str) -> None:
        self._states.move(child, "up")

    def on_work(self, child: str, now: float) -> None:
        """The child was seen at its work; to answer is not enough, because it may still load what it will fail on.
        From now on the restarts that led to this grow old. May be repeated, and be late."""
        if child not in self._states or self._states[child] != "up":
            return
        self._unproven.discard(child)
        role = self._role_of(child)
        waits = self._unproven.intersection(role.mates(child))
        if not any(not self._states.is_over(name) for name in waits):
            self._budgets[role.budget_of(child)].prove(now)

    def on_exit(self, child: str, status: int, now: float) -> list[Instruction]:
        spec, role = self._spec(child), self._role_of(child)
        self._states.move(child, "exit")
        who = self._killed.pop(child, child)
        ending = self._ending_of(child)
        if ending is not None:
            return self._advance(ending, now)
        what = f"{who} ended with {describe_status(status)}"
        if status in HOPELESS:
            what = f"{what}: {HOPELESS[status]}, another attempt would end the same way"
            if child in role.extra:
                return self._do_without(child, child, what, now)
            return self._fail(child, what, status, now)
        return self._on_failure(spec, what, now)

    def on_health(self, child: str, health: Health, why: str, now: float) -> list[Instruction]:
        """What the failure detector thinks of it; "given up": for all others it is over, though its process exists, and
        may just be ending by itself, so `on_exit` judges. May be late: of one that is not up it is of no interest."""
        spec, is_lost = self._spec(child), health == "given up"
        if health == "recovered" and self._states[child] == "hung":
            self._states.move(child, "recover")
        if (health == "hung" or is_lost) and self._states[child] == "draining":
            return self.on_drained(child, now)  # it will hand nothing back
        if health == "hung" and self._states[child] == "up":
            self._states.move(child, "hang")
        elif not is_lost or self._states[child] not in ("up", "hung"):
            return []
        if (spec.when_hung == "wait" and not is_lost) or self._ending_of(child) is not None:
            return []
        what = f"{child} is given up by the others ({why})" if is_lost else f"{child} hangs ({why})"
        self._states.move(child, "end")
        kill: list[Instruction] = [Kill((child,), what)]
        if is_lost:
            self._killed[child] = f"{what} and"
        return kill if is_lost else kill + self._on_failure(spec, f"{what}, was killed", now)

    def on_lost(self, culprit: str, children: Sequence[str], reason: str, now: float) -> list[Instruction]:
        """A whole node is gone with these children, or one of them cannot be ended: none can be started again."""
        for child in children:
            if self._states.is_alive(child):
                self._states.move(child, "exit")
            if not self._states.is_over(child):
                self._states.move(child, "settle")
        under_way = list(self._endings)
        done: list[Instruction] = []
        for child in children:
            if not self._is_over() and child not in self._retiring:
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

    def _on_failure(self, spec: ChildSpec, what: str, now: float) -> list[Instruction]:
        """A child failed by itself."""
        child, role = spec.name, self._role_of(spec.name)
        if not spec.may_restart:
            return self._do_without(child, child, f"{what} and is never restarted", now)
        budget = self._budgets[role.budget_of(child)]
        if budget.reserve(now):
            restart = _Ending("restart", [role.mates(child)[::-1]], what, role.budget_of(child), role.spec.is_gang)
            return self._begin(restart, now)
        return self._do_without(child, child, f"{what} and its budget of {budget.words(now)} is spent", now)

    def _do_without(self, child: str, culprit: str, what: str, now: float) -> list[Instruction]:
        """A child will never run again: its role continues without it, or the run fails."""
        role = self._role_of(child)
        if child in self._given_up:
            return []
        stays = [name for name in role.children if name != child and name not in self._given_up | self._retiring]
        needed = role.needed_without(child)
        if role.spec.is_gang or len(stays) < needed:
            return self._fail(culprit, what, BUDGET_SPENT, now)
        self._given_up.add(child)
        news = GiveUp(child, what, len(stays), needed)
        return [news, *self._begin(_Ending("give up", [(child,)], what), now)]

    def _fail(self, culprit: str, reason: str, exit_code: int, now: float) -> list[Instruction]:
        self._verdict = FailRun(culprit, reason, exit_code)
        if culprit in self._states and self._states[culprit] == "exited":
            self._states.move(culprit, "give-up")
        return [self._verdict, *self.stop(reason, now)]

    # -- ending, and what comes after ----------------------------------------------------------------------------

    def _begin(self, ending: _Ending, now: float) -> list[Instruction]:
        for other in [e for e in self._endings if e.scope <= ending.scope]:
            self._endings.remove(other)
            if other.budget:
                self._budgets[other.budget].release()
        self._endings.append(ending)
        return self._advance(ending, now)

    def _advance(self, ending: _Ending, now: float) -> list[Instruction]:
        """Name the next stage, or do what all this was for."""
        orders: list[Instruction] = []
        self._close(ending)
        while not self._states.alive(ending.current):
            if not ending.stages:
                return orders + self._finish(ending, now)
            ending.current = ending.stages.pop(0)
            orders += self._end_stage(ending)
        return orders

    def _end_stage(self, ending: _Ending) -> list[Instruction]:
        """The current stage: who is up and may hand work back does that first."""
        names = [name for name in self._states.alive(ending.current) if self._states[name] != "ending"]
        gentle = tuple(n for n in names if ending.is_gentle and self._states[n] in ("up", "draining"))
        rest = tuple(name for name in names if name not in gentle)
        drained = tuple(name for name in gentle if self._states[name] == "up")
        for name in drained:
            self._states.move(name, "drain")
        for name in rest:
            self._states.move(name, "end")
        graces = tuple(min(ending.grace_s, self._spec(name).grace_s) for name in rest)
        orders: list[Instruction] = [Drain(drained, ending.reason)] if drained else []
        return orders + ([End(rest, graces, ending.reason)] if rest else [])

    def _close(self, ending: _Ending) -> None:
        """Children that have no process and will have none are done with."""
        if ending.then in ("restart", "renew"):
            return
        for name in ending.scope:
            if not self._states.is_alive(name) and not self._states.is_over(name):
                self._states.move(name, "give-up" if ending.then == "give up" else "settle")

    def _finish(self, ending: _Ending, now: float) -> list[Instruction]:
        if ending.then == "over":
            return [AllEnded()]
        self._endings.remove(ending)
        if ending.then == "give up":
            return self._done_if_all_over()
        orders = self._remove_retired(ending.scope & self._retiring)
        children = tuple(n for n in self._names() if n in ending.scope and not self._states.is_over(n))
        if children:
            return [*orders, self._restart(children, ending, now)]
        if ending.budget:
            self._budgets[ending.budget].release()
        return orders + self._done_if_all_over()

    def _restart(self, children: tuple[str, ...], ending: _Ending, now: float) -> Restart:
        delay = 0.0
        if ending.budget:
            delay = self._budgets[ending.budget].spend(now, self._backoff, self._jitter())
            self._unproven.update(children)
        for name in children:
            self._states.move(name, "retry")
            self._attempts[name] += 1
        attempts = tuple(self._attempts[name] for name in children)
        return Restart(children, attempts, delay, ending.reason, ending.budget)

    def _remove_retired(self, names: frozenset[str]) -> list[Instruction]:
        """Those that retire are gone; their names may come again, with higher attempts."""
        order = tuple(name for name in self._names() if name in names)
        for name in order:
            if not self._states.is_over(name):
                self._states.move(name, "settle")
            self._forget(name)
        return [Retired(order)] if order else []

    def _forget(self, child: str) -> None:
        role = self._role_of(child)
        del role.children[child], self._budgets[child]
        for names in (role.extra, self._given_up, self._retiring, self._unproven):
            names.discard(child)
        self._killed.pop(child, None)
        self._states.remove(child)

    def _done_if_all_over(self) -> list[Instruction]:
        return [AllEnded()] if all(self._states.is_over(name) for name in self._names()) else []

    def _ending_of(self, child: str) -> _Ending | None:
        return next((ending for ending in self._endings if child in ending.scope), None)

    def _is_over(self) -> bool:
        return any(ending.then == "over" for ending in self._endings)

    def _names(self) -> list[str]:
        return [name for role in self._roles.values() for name in role.children]

    def _role_of(self, child: str) -> _Role:
        self._states[child]  # raises for an unknown name
        return next(role for role in self._roles.values() if child in role.children)

    def _spec(self, child: str) -> ChildSpec:
        return self._role_of(child).children[child]


def _budget(spec: RoleSpec) -> RestartBudget:
    return RestartBudget(spec.max_restarts, spec.period_s)
