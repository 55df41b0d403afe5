"""When a child process ends or hangs: start it again, start its neighbours too, do without it, or end the run. Pure:
events in, instructions out.

Knows names, strategies, restart budgets and pauses between attempts. Must not know processes, sockets or clocks: the
launcher tells what happened and when, and carries out what is answered. What stands under whom is in
supervision_tree.py, the life of a child in child_states.py.

The rules are those of an OTP supervisor tree; no library offers them without bringing its own processes. A failure is
answered by the child's branch according to its strategy. A branch that has spent its restarts has failed itself, and
the branch above decides (escalation); at the root the run fails. Whoever has to end, ends in reverse start order, one
stage after the other: `End` names the next stage only when the one before is gone.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from .child_states import ChildState, ChildStates, SupervisionError
from .restart_budget import Backoff, RestartBudget
from .supervision_tree import BranchSpec, ChildSpec, Member, SupervisionTree

Health = Literal["suspect", "hung", "recovered"]

HOPELESS: Final[dict[int, str]] = {
    2: "its configuration is wrong",
    5: "its data or a user's function is wrong",
}
"""Exit status -> why another attempt would end the same way."""

BUDGET_SPENT: Final = 4
"""Exit status of a run that ends because a child may not be started again."""


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
    """Whose budget this restart was taken from."""
    rounds: tuple[GangRound, ...] = ()


@dataclass(frozen=True, slots=True)
class End:
    """Tell these children to end, at the same time, and kill those that are still there after their grace."""

    children: tuple[str, ...]
    graces_s: tuple[float, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Kill:
    """These hang: being told would not help."""

    children: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The run goes on without this member; its branch has a quorum."""

    member: str
    reason: str
    num_left: int
    quorum: int


@dataclass(frozen=True, slots=True)
class FailRun:
    """The run is over: `culprit` may not be started again."""

    culprit: str
    reason: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class Done:
    """No process is left and none will be started."""


Instruction = Restart | End | Kill | GiveUp | FailRun | Done


@dataclass(slots=True, eq=False)
class _Ending:
    """Children that have to be gone before something is done."""

    then: Literal["restart", "give up", "over"]
    stages: list[tuple[str, ...]]
    """Not told yet, the next one first."""
    reason: str
    branch: BranchSpec | None = None
    """Whose restart it is."""
    current: tuple[str, ...] = ()
    scope: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.scope = frozenset(name for stage in self.stages for name in stage)


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

    def __init__(self, root: BranchSpec, *, lot: Callable[[], float], backoff: Backoff | None = None) -> None:
        self._tree = SupervisionTree(root)
        self._states = ChildStates(self._tree.children)
        self._lot = lot
        self._backoff = backoff or Backoff()
        self._budgets = {b.name: RestartBudget(b.max_restarts, b.period_s) for b in self._tree.branches}
        self._attempts = dict.fromkeys(self._tree.children, 0)
        self._endings: list[_Ending] = []
        """Their scopes do not overlap: a larger one swallows those within it."""
        self._given_up: set[int] = set()
        self._verdict: FailRun | None = None

    # -- questions ---------------------------------------------------------------------------------------------

    def state(self, child: str) -> ChildState:
        """Where a child stands."""
        return self._states[child]

    def attempt(self, child: str) -> int:
        """Number of the child's current attempt; 0 is the first."""
        return self._attempts[self._spec(child).name]

    def may_launch(self, child: str, attempt: int) -> bool:
        """Whether it may be started now as that attempt."""
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

    def on_exit(self, child: str, status: int, now: float) -> list[Instruction]:
        """The child's process ended."""
        spec = self._spec(child)
        self._states.move(child, "exit")
        ending = self._ending_of(child)
        if ending is not None:
            return self._go_on(ending, now)
        what = f"{child} ended with {describe_status(status)}"
        if status in HOPELESS:
            what = f"{what}: {HOPELESS[status]}, another attempt would end the same way"
            return self._fail(child, what, status, now)
        if spec.restart == "transient" and status == 0:
            self._states.move(child, "settle")
            return self._farewell()
        return self._mourn(spec, what, now)

    def on_health(self, child: str, health: Health, why: str, now: float) -> list[Instruction]:
        """What the failure detector thinks of it. It may be late: of a child that is not up it is of no interest."""
        spec = self._spec(child)
        if health == "recovered" and self._states[child] == "hung":
            self._states.move(child, "recover")
        if health != "hung" or self._states[child] != "up":
            return []
        self._states.move(child, "hang")
        if spec.when_hung == "wait" or self._ending_of(child) is not None:
            return []
        what = f"{child} hangs ({why})"
        self._states.move(child, "end")
        kill: list[Instruction] = [Kill((child,), what)]
        return kill + self._mourn(spec, f"{what}, was killed", now)

    def on_lost(self, culprit: str, children: Sequence[str], reason: str, now: float) -> list[Instruction]:
        """A whole node is gone with these children; none of them can be started again."""
        for child in children:
            if self._states.is_alive(child):
                self._states.move(child, "exit")
            if not self._states.is_over(child):
                self._states.move(child, "settle")
        under_way = list(self._endings)
        done: list[Instruction] = []
        for child in children:
            if not self._is_over():
                done += self._do_without(self._spec(child), culprit, reason, now)
        for ending in under_way:
            if ending in self._endings:
                done += self._go_on(ending, now)
        return done

    def stop(self, reason: str, now: float) -> list[Instruction]:
        """End every child, last started first. May be repeated."""
        final = next((e for e in self._endings if e.then == "over"), None)
        if final is not None:
            return self._go_on(final, now)
        return self._begin(_Ending("over", list(self._tree.all_stages(self._tree.root)), reason), now)

    # -- judging -----------------------------------------------------------------------------------------------

    def _mourn(self, child: ChildSpec, what: str, now: float) -> list[Instruction]:
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
                what = f"{what} and {whose} budget of {budget} is spent"
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
        return 0 < branch.quorum <= self._num_left(branch, member)

    def _num_left(self, branch: BranchSpec, member: Member) -> int:
        return sum(1 for other in branch.members if other is not member and id(other) not in self._given_up)

    def _give_up(self, branch: BranchSpec, member: Member, what: str, now: float) -> list[Instruction]:
        self._given_up.add(id(member))
        news = GiveUp(member.name, what, self._num_left(branch, member), branch.quorum)
        return [news, *self._begin(_Ending("give up", list(self._tree.all_stages(member)), what), now)]

    def _fail(self, culprit: str, reason: str, exit_code: int, now: float) -> list[Instruction]:
        self._verdict = FailRun(culprit, reason, exit_code)
        if culprit in self._tree.children and self._states[culprit] == "exited":
            self._states.move(culprit, "give-up")
        return [self._verdict, *self.stop(reason, now)]

    # -- ending, and what comes after ----------------------------------------------------------------------------

    def _restart(self, branch: BranchSpec, failed: Member, what: str) -> _Ending:
        """Whom that concerns; members that were given up stay out of it."""
        members = [member for branch in self._tree.branches for member in branch.members]
        out = {name for each in members if id(each) in self._given_up for name in self._tree.leaves(each)}
        stages = (tuple(n for n in stage if n not in out) for stage in self._tree.stages(branch, failed))
        return _Ending("restart", [stage for stage in stages if stage], what, branch)

    def _begin(self, ending: _Ending, now: float) -> list[Instruction]:
        for other in [e for e in self._endings if e.scope <= ending.scope]:
            self._endings.remove(other)
            if other.branch is not None:
                self._budgets[other.branch.name].release()
        self._endings.append(ending)
        return self._go_on(ending, now)

    def _go_on(self, ending: _Ending, now: float) -> list[Instruction]:
        """Tell the next stage, or do what all this was for."""
        told: list[Instruction] = []
        self._close(ending)
        while not self._states.alive(ending.current):
            if not ending.stages:
                return told + self._finish(ending, now)
            ending.current = ending.stages.pop(0)
            names = tuple(name for name in self._states.alive(ending.current) if self._states[name] != "ending")
            for name in names:
                self._states.move(name, "end")
            if names:
                graces = tuple(self._spec(name).grace_s for name in names)
                told.append(End(names, graces, ending.reason))
        return told

    def _close(self, ending: _Ending) -> None:
        """Children that have no process and will have none are done with."""
        if ending.then == "restart":
            return
        for name in ending.scope:
            if not self._states.is_alive(name) and not self._states.is_over(name):
                self._states.move(name, "give-up" if ending.then == "give up" else "settle")

    def _finish(self, ending: _Ending, now: float) -> list[Instruction]:
        if ending.then == "over":
            return [Done()]
        self._endings.remove(ending)
        if ending.branch is None:
            return self._farewell()
        children = tuple(n for n in self._tree.children if n in ending.scope and not self._states.is_over(n))
        if not children:
            self._budgets[ending.branch.name].release()
            return self._farewell()
        delay = self._backoff.delay(self._budgets[ending.branch.name].spend(now), self._lot())
        for name in children:
            self._states.move(name, "retry")
            self._attempts[name] += 1
        attempts = tuple(self._attempts[name] for name in children)
        rounds = tuple(self._round(gang) for gang in self._tree.gangs(frozenset(children)))
        return [Restart(children, attempts, delay, ending.reason, ending.branch.name, rounds)]

    def _farewell(self) -> list[Instruction]:
        return [Done()] if all(self._states.is_over(name) for name in self._tree.children) else []

    def _round(self, gang: BranchSpec) -> GangRound:
        attempt = self._attempts[self._tree.leaves(gang)[0]]
        return GangRound(gang.name, attempt, f"{gang.name}.{attempt}")

    def _ending_of(self, child: str) -> _Ending | None:
        return next((ending for ending in self._endings if child in ending.scope), None)

    def _is_over(self) -> bool:
        return any(ending.then == "over" for ending in self._endings)

    def _spec(self, child: str) -> ChildSpec:
        self._states[child]  # raises for a name that nobody has
        return self._tree.children[child]
