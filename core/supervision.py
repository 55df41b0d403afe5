"""When a child process ends or hangs: restart it, restart its neighbours too, do without it, or end the run.

Pure: events in, instructions out; times are passed in. The launcher reports what happened and when, and carries out the
instructions. The tree of children and branches is in `supervision_tree.py`.

The rules are those of an OTP supervisor tree; no library offers them without bringing its own processes. A failure is
answered by the child's branch according to its strategy. A branch that has spent its restarts has failed itself, and
the branch above decides (escalation); at the root the run fails. Children end in reverse start order, one stage after
the other: `End` names the next stage only when the one before is gone.

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

from .supervision_tree import BranchSpec, ChildSpec, Member, SupervisionError, SupervisionTree, leaves_of

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


class ChildStates:
    """The states of all children of a run."""

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


@dataclass(slots=True, eq=False)
class _Ending:
    """One of them, under way."""

    then: Literal["restart", "renew", "retire", "give up", "over"]
    stages: list[tuple[str, ...]]
    """Not asked to end yet, the next one first."""
    reason: str
    branch: BranchSpec | None = None
    """Whose restart it is."""
    current: tuple[str, ...] = ()
    scope: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.scope = frozenset(name for stage in self.stages for name in stage)

    @property
    def grace_s(self) -> float:
        """Ranks whose mate has failed have nothing to finish, and may hang in a collective with it."""
        is_broken_gang = self.then == "restart" and self.branch is not None and self.branch.strategy == "gang"
        return 0.5 if is_broken_gang else math.inf

    @property
    def is_gentle(self) -> bool:
        """Whether work is handed back first."""
        return self.then in ("renew", "retire")


@dataclass(frozen=True, slots=True)
class GangRound:
    """One common attempt of a gang: its ranks meet under a name that no other attempt has."""

    gang: str
    attempt: int
    rendezvous: str


@dataclass(frozen=True, slots=True)
class Restart:
    """Start these children after `delay_s`, in this order, each as its attempt (0 was the first start). Void for a
    child for which `may_launch` says no by then: another instruction has overtaken it."""

    children: tuple[str, ...]
    attempts: tuple[int, ...]
    delay_s: float
    reason: str
    branch: str
    """Whose budget this restart was taken from; empty: a person asked for it, it costs nothing."""
    rounds: tuple[GangRound, ...] = ()


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
    """The run continues without this member; its branch has a quorum."""

    member: str
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
    last process that it has to wait for is gone: one that is decided meanwhile must not find its place free.

    A restart begins to grow old when it has led to work (`prove`), not when it happened: attempts that take long to
    fail, and never come to work, would be forgotten one after the other and follow each other for ever."""

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
        """How many more are allowed now."""
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
        """A reserved restart will not happen."""
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

    @property
    def has_unproven(self) -> bool:
        """Whether there are restarts that have led to no work yet."""
        return bool(self._unproven)

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


HOPELESS: Final[dict[int, str]] = {
    2: "its configuration is wrong",
    5: "its data or a user's function is wrong",
}
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


class Supervisor:
    """Decides over the children of a run."""

    def __init__(self, root: BranchSpec, *, jitter: Callable[[], float], backoff: Backoff | None = None) -> None:
        self._tree = SupervisionTree(root)
        self._states = ChildStates(self._tree.children)
        self._jitter = jitter
        self._backoff = backoff or Backoff()
        self._budgets = {b.name: RestartBudget(b.max_restarts, b.period_s) for b in self._tree.branches}
        self._attempts = dict.fromkeys(self._tree.children, 0)
        self._unproven: set[str] = set()
        """Started again after a failure, and not seen at work since."""
        self._endings: list[_Ending] = []
        """Their scopes do not overlap: a larger one swallows those within it."""
        self._given_up: set[int] = set()
        self._killed: dict[str, str] = {}
        """Killed since all others had given it up, and not gone yet: in words."""
        self._retiring: set[str] = set()
        self._verdict: FailRun | None = None

    # -- questions ---------------------------------------------------------------------------------------------

    def state(self, child: str) -> ChildState:
        """The state of a child."""
        return self._states[child]

    def attempt(self, child: str) -> int:
        """Number of the child's current attempt; 0 is the first."""
        return self._attempts[self._spec(child).name]

    def may_launch(self, child: str, attempt: int) -> bool:
        """Whether it may be started now as that attempt; not if it has left."""
        if child not in self._tree.children:
            return False
        is_current = attempt == self.attempt(child) and self._ending_of(child) is None
        return is_current and self._states.can(child, "launch")

    def round(self, gang: str) -> GangRound:
        """The gang's current attempt and where it meets."""
        branch = next((b for b in self._tree.branches if b.name == gang and b.strategy == "gang"), None)
        if branch is None:
            raise SupervisionError(f"there is no gang {gang!r}")
        return self._round(branch)

    @property
    def alive(self) -> tuple[str, ...]:
        """Children that have a process, in start order."""
        return self._states.alive()

    @property
    def verdict(self) -> FailRun | None:
        """Why the run failed, if it did: the first reason only."""
        return self._verdict

    def is_retiring(self, child: str) -> bool:
        """Whether it is on its way out for good."""
        return child in self._retiring

    def restarts_left(self, child: str, now: float) -> int:
        """How often it may fail and be started again now."""
        branch = self._tree.above(self._spec(child))
        return self._budgets[branch.name].left(now) if branch is not None else 0

    # -- wishes of a person ------------------------------------------------------------------------------------

    def grow(self, branch: str, member: Member) -> None:
        """One more member of that branch, to be launched as its current `attempt`. A child of its name that is over
        makes room. Raises SupervisionError if the name is in use, the branch is a gang, or the run ends."""
        if self._is_over():
            raise SupervisionError("the run ends")
        names = {spec.name for spec in leaves_of(member)}
        over = [n for n in self._tree.children if n in names and self._states.is_over(n) and not self._ending_of(n)]
        self._tree.check_room(branch, member, without=over)
        for name in over:
            self._forget(name)
        self._tree.add(branch, member)
        for name in self._tree.leaves(member):
            self._states.add(name)
            self._attempts[name] = self._attempts.get(name, -1) + 1
        for each in self._tree.branches:
            self._budgets.setdefault(each.name, RestartBudget(each.max_restarts, each.period_s))

    def check_retire(self, child: str) -> None:
        """Raises SupervisionError if `retire` would."""
        self._tree.member_of(child)

    def retire(self, child: str, reason: str, now: float) -> list[Instruction]:
        """Have it end for good; `Retired` when it is gone. Its end, however it comes, is no failure. May be repeated.
        Raises SupervisionError for a rank of a gang."""
        self._tree.member_of(child)
        if self._is_over() or child in self._retiring:
            return []
        self._retiring.add(child)
        wider = self._ending_of(child)
        if wider is not None and len(wider.scope) > 1:
            return []  # it ends with the others, and stays away when they come back
        return self._begin(_Ending("retire", [(child,)], reason), now)

    def renew(self, child: str, reason: str, now: float) -> list[Instruction]:
        """Have it, or its whole gang, end and start again. Raises SupervisionError for one that left or is leaving."""
        branch = self._tree.above(self._spec(child))
        is_gang = branch is not None and branch.strategy == "gang"
        wider = self._ending_of(child)
        if self._states.is_over(child) or child in self._retiring or (wider is not None and wider.then == "give up"):
            raise SupervisionError(f"{child} is {self._states[child]} and leaves: it cannot be restarted")
        scope = self._tree.leaves(branch) if branch is not None and is_gang else (child,)
        if wider is not None and (self._is_over() or wider.scope > set(scope)):
            return []  # it ends anyway, and starts again with the others if they do
        return self._begin(_Ending("renew", [scope[::-1]], reason), now)

    def on_drained(self, child: str, now: float) -> list[Instruction]:
        """It has handed its work back, or could not. It may be late."""
        ending = self._ending_of(child)
        if ending is None or child not in self._tree.children or self._states[child] != "draining":
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
        """The child answers."""
        self._states.move(child, "up")

    def on_work(self, child: str, now: float) -> None:
        """The child was seen at its work; to answer is not enough, because it may still load what it will fail on.
        From now on the restarts that led to this grow old. May be repeated, and be late."""
        if child not in self._tree.children or self._states[child] != "up":
            return
        self._unproven.discard(child)
        member: Member = self._tree.children[child]
        while (branch := self._tree.above(member)) is not None:
            budget = self._budgets[branch.name]
            if budget.has_unproven and not self._waits_for_work(branch):
                budget.prove(now)
            member = branch

    def _waits_for_work(self, branch: BranchSpec) -> bool:
        return any(not self._states.is_over(name) for name in self._unproven.intersection(self._tree.leaves(branch)))

    def on_exit(self, child: str, status: int, now: float) -> list[Instruction]:
        """The child's process ended."""
        spec = self._spec(child)
        self._states.move(child, "exit")
        who = self._killed.pop(child, child)
        ending = self._ending_of(child)
        if ending is not None:
            return self._advance(ending, now)
        what = f"{who} ended with {describe_status(status)}"
        if status in HOPELESS:
            what = f"{what}: {HOPELESS[status]}, another attempt would end the same way"
            is_extra = self._tree.came_later(spec)
            return self._do_without(spec, child, what, now) if is_extra else self._fail(child, what, status, now)
        if spec.restart == "transient" and status == 0:
            self._states.move(child, "settle")
            return self._done_if_all_over()
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
                done += self._do_without(self._spec(child), culprit, reason, now)
        for ending in under_way:
            if ending in self._endings:
                done += self._advance(ending, now)
        return done

    def stop(self, reason: str, now: float) -> list[Instruction]:
        """End every child, last started first. May be repeated."""
        final = next((e for e in self._endings if e.then == "over"), None)
        if final is not None:
            return self._advance(final, now)
        return self._begin(_Ending("over", list(self._tree.all_stages(self._tree.root)), reason), now)

    # -- judging -----------------------------------------------------------------------------------------------

    def _on_failure(self, child: ChildSpec, what: str, now: float) -> list[Instruction]:
        """A child failed by itself."""
        if child.restart == "temporary":
            return self._do_without(child, child.name, f"{what} and is never restarted", now)
        member: Member = child
        while (branch := self._tree.above(member)) is not None:
            budget = self._budgets[branch.name]
            if budget.reserve(now):
                return self._begin(self._restart(branch, member, what), now)
            if branch.max_restarts or member is child:
                whose = "its" if member is child else f"{branch.name}'s"
                what = f"{what} and {whose} budget of {budget.words(now)} is spent"
            if self._can_do_without(branch, member):
                return self._give_up(branch, member, what, now)
            member = branch
        return self._fail(child.name, what, BUDGET_SPENT, now)

    def _do_without(self, member: Member, culprit: str, what: str, now: float) -> list[Instruction]:
        """A member will never run again: the first branch above with a quorum can do without, or the run fails."""
        while (branch := self._tree.above(member)) is not None:
            if id(member) in self._given_up:
                return []
            if self._can_do_without(branch, member):
                return self._give_up(branch, member, what, now)
            member = branch
        return self._fail(culprit, what, BUDGET_SPENT, now)

    def _can_do_without(self, branch: BranchSpec, member: Member) -> bool:
        return self._tree.needed(branch, member) <= self._num_left(branch, member)

    def _num_left(self, branch: BranchSpec, member: Member) -> int:
        return sum(1 for other in self._tree.members(branch) if other is not member and self._stays(other))

    def _stays(self, member: Member) -> bool:
        return id(member) not in self._given_up and not self._retiring.issuperset(self._tree.leaves(member))

    def _give_up(self, branch: BranchSpec, member: Member, what: str, now: float) -> list[Instruction]:
        self._given_up.add(id(member))
        news = GiveUp(member.name, what, self._num_left(branch, member), self._tree.needed(branch, member))
        return [news, *self._begin(_Ending("give up", list(self._tree.all_stages(member)), what), now)]

    def _fail(self, culprit: str, reason: str, exit_code: int, now: float) -> list[Instruction]:
        self._verdict = FailRun(culprit, reason, exit_code)
        if culprit in self._tree.children and self._states[culprit] == "exited":
            self._states.move(culprit, "give-up")
        return [self._verdict, *self.stop(reason, now)]

    # -- ending, and what comes after ----------------------------------------------------------------------------

    def _restart(self, branch: BranchSpec, failed: Member, what: str) -> _Ending:
        """Whom that concerns; members that were given up stay out of it."""
        members = [member for branch in self._tree.branches for member in self._tree.members(branch)]
        out = {name for each in members if id(each) in self._given_up for name in self._tree.leaves(each)}
        stages = (tuple(n for n in stage if n not in out) for stage in self._tree.stages(branch, failed))
        return _Ending("restart", [stage for stage in stages if stage], what, branch)

    def _begin(self, ending: _Ending, now: float) -> list[Instruction]:
        for other in [e for e in self._endings if e.scope <= ending.scope]:
            self._endings.remove(other)
            if other.branch is not None:
                self._budgets[other.branch.name].release()
        self._endings.append(ending)
        return self._advance(ending, now)

    def _advance(self, ending: _Ending, now: float) -> list[Instruction]:
        """Tell the next stage, or do what all this was for."""
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
        children = tuple(n for n in self._tree.children if n in ending.scope and not self._states.is_over(n))
        if not children:
            if ending.branch is not None:
                self._budgets[ending.branch.name].release()
            return orders + self._done_if_all_over()
        return [*orders, self._restart_children(children, ending, now)]

    def _restart_children(self, children: tuple[str, ...], ending: _Ending, now: float) -> Restart:
        delay, payer = 0.0, ""
        if ending.branch is not None:
            payer = ending.branch.name
            delay = self._budgets[payer].spend(now, self._backoff, self._jitter())
            self._unproven.update(children)
        for name in children:
            self._states.move(name, "retry")
            self._attempts[name] += 1
        attempts = tuple(self._attempts[name] for name in children)
        rounds = tuple(self._round(gang) for gang in self._tree.gangs(frozenset(children)))
        return Restart(children, attempts, delay, ending.reason, payer, rounds)

    def _remove_retired(self, names: frozenset[str]) -> list[Instruction]:
        """Those that retire are gone; their names may come again, with higher attempts."""
        order = tuple(name for name in self._tree.children if name in names)
        for name in order:
            if not self._states.is_over(name):
                self._states.move(name, "settle")
            self._forget(name)
        return [Retired(order)] if order else []

    def _forget(self, child: str) -> None:
        for each in self._tree.remove(child):
            self._given_up.discard(id(each))
            if isinstance(each, BranchSpec):
                del self._budgets[each.name]
        self._retiring.discard(child)
        self._unproven.discard(child)
        self._killed.pop(child, None)
        self._states.remove(child)

    def _done_if_all_over(self) -> list[Instruction]:
        return [AllEnded()] if all(self._states.is_over(name) for name in self._tree.children) else []

    def _round(self, gang: BranchSpec) -> GangRound:
        attempt = self._attempts[self._tree.leaves(gang)[0]]
        return GangRound(gang.name, attempt, f"{gang.name}.{attempt}")

    def _ending_of(self, child: str) -> _Ending | None:
        return next((ending for ending in self._endings if child in ending.scope), None)

    def _is_over(self) -> bool:
        return any(ending.then == "over" for ending in self._endings)

    def _spec(self, child: str) -> ChildSpec:
        self._states[child]  # raises for an unknown name
        return self._tree.children[child]
