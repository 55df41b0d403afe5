"""When a child process ends or hangs: start it again, start its neighbours too, do without it, or end the run. Pure:
events in, instructions out.

Knows names, strategies, restart budgets and pauses between attempts. Must not know processes, sockets or clocks: the
launcher tells what happened and when, and carries out what is answered. What stands under whom is in
supervision_tree.py, the life of a child in child_states.py.

The rules are those of an OTP supervisor tree; no library offers them without bringing its own processes. A failure is
answered by the child's branch according to its strategy. A branch that has spent its restarts has failed itself, and
the branch above decides (escalation); at the root the run fails. Whoever has to end, ends in reverse start order, one
stage after the other: `End` names the next stage only when the one before is gone.

A person may have a child end for good (`retire`), be started anew (`renew`), or add one (`grow`). Such ends are no
failures and cost no budget; who can hand work back (`Drain`) does so before it is told to end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .child_states import ChildState, ChildStates, Health, SupervisionError
from .exit_status import BUDGET_SPENT, HOPELESS, describe_status
from .restart_budget import Backoff, RestartBudget
from .supervision_ending import Ending
from .supervision_orders import Done, Drain, End, FailRun, GangRound, GiveUp, Instruction, Kill, Restart, Retired
from .supervision_tree import BranchSpec, ChildSpec, Member, SupervisionTree, leaves_of


class Supervisor:
    """Decides over the children of a run."""

    def __init__(self, root: BranchSpec, *, lot: Callable[[], float], backoff: Backoff | None = None) -> None:
        self._tree = SupervisionTree(root)
        self._states = ChildStates(self._tree.children)
        self._lot = lot
        self._backoff = backoff or Backoff()
        self._budgets = {b.name: RestartBudget(b.max_restarts, b.period_s) for b in self._tree.branches}
        self._attempts = dict.fromkeys(self._tree.children, 0)
        self._unproven: set[str] = set()
        """Started again after a failure, and not seen at work since."""
        self._endings: list[Ending] = []
        """Their scopes do not overlap: a larger one swallows those within it."""
        self._given_up: set[int] = set()
        self._condemned: dict[str, str] = {}
        """Killed since all others had given it up, and not gone yet: in words."""
        self._retiring: set[str] = set()
        self._verdict: FailRun | None = None

    # -- questions ---------------------------------------------------------------------------------------------

    def state(self, child: str) -> ChildState:
        """Where a child stands."""
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
        self._tree.seat(child)

    def retire(self, child: str, reason: str, now: float) -> list[Instruction]:
        """Have it end for good; `Retired` when it is gone. Its end, however it comes, is no failure. May be repeated.
        Raises SupervisionError for a rank of a gang."""
        self._tree.seat(child)
        if self._is_over() or child in self._retiring:
            return []
        self._retiring.add(child)
        wider = self._ending_of(child)
        if wider is not None and len(wider.scope) > 1:
            return []  # it ends with the others, and stays away when they come back
        return self._begin(Ending("retire", [(child,)], reason), now)

    def renew(self, child: str, reason: str, now: float) -> list[Instruction]:
        """Have it, or its whole gang, end and start again. Raises SupervisionError for one that left or is leaving."""
        branch = self._tree.above(self._spec(child))
        is_gang = branch is not None and branch.strategy == "gang"
        wider = self._ending_of(child)
        if self._states.is_over(child) or child in self._retiring or (wider is not None and wider.then == "give up"):
            raise SupervisionError(f"{child} is {self._states[child]} and leaves: it cannot be started anew")
        scope = self._tree.leaves(branch) if branch is not None and is_gang else (child,)
        if wider is not None and (self._is_over() or wider.scope > set(scope)):
            return []  # it ends anyway, and starts again with the others if they do
        return self._begin(Ending("renew", [scope[::-1]], reason), now)

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
        """The child does what it is there for, as somebody has seen; to answer is not enough, for it may still load
        what it will fail of. From now on the restarts that led to this grow old. May be repeated, and be late."""
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
        who = self._condemned.pop(child, child)
        ending = self._ending_of(child)
        if ending is not None:
            return self._go_on(ending, now)
        what = f"{who} ended with {describe_status(status)}"
        if status in HOPELESS:
            what = f"{what}: {HOPELESS[status]}, another attempt would end the same way"
            is_extra = self._tree.came_later(spec)
            return self._do_without(spec, child, what, now) if is_extra else self._fail(child, what, status, now)
        if spec.restart == "transient" and status == 0:
            self._states.move(child, "settle")
            return self._farewell()
        return self._mourn(spec, what, now)

    def on_health(self, child: str, health: Health, why: str, now: float) -> list[Instruction]:
        """What the failure detector thinks of it; "given up": for all others it is over, though its process lives, and
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
            self._condemned[child] = f"{what} and"
        return kill if is_lost else kill + self._mourn(spec, f"{what}, was killed", now)

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
                done += self._go_on(ending, now)
        return done

    def stop(self, reason: str, now: float) -> list[Instruction]:
        """End every child, last started first. May be repeated."""
        final = next((e for e in self._endings if e.then == "over"), None)
        if final is not None:
            return self._go_on(final, now)
        return self._begin(Ending("over", list(self._tree.all_stages(self._tree.root)), reason), now)

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
        return [news, *self._begin(Ending("give up", list(self._tree.all_stages(member)), what), now)]

    def _fail(self, culprit: str, reason: str, exit_code: int, now: float) -> list[Instruction]:
        self._verdict = FailRun(culprit, reason, exit_code)
        if culprit in self._tree.children and self._states[culprit] == "exited":
            self._states.move(culprit, "give-up")
        return [self._verdict, *self.stop(reason, now)]

    # -- ending, and what comes after ----------------------------------------------------------------------------

    def _restart(self, branch: BranchSpec, failed: Member, what: str) -> Ending:
        """Whom that concerns; members that were given up stay out of it."""
        members = [member for branch in self._tree.branches for member in self._tree.members(branch)]
        out = {name for each in members if id(each) in self._given_up for name in self._tree.leaves(each)}
        stages = (tuple(n for n in stage if n not in out) for stage in self._tree.stages(branch, failed))
        return Ending("restart", [stage for stage in stages if stage], what, branch)

    def _begin(self, ending: Ending, now: float) -> list[Instruction]:
        for other in [e for e in self._endings if e.scope <= ending.scope]:
            self._endings.remove(other)
            if other.branch is not None:
                self._budgets[other.branch.name].release()
        self._endings.append(ending)
        return self._go_on(ending, now)

    def _go_on(self, ending: Ending, now: float) -> list[Instruction]:
        """Tell the next stage, or do what all this was for."""
        told: list[Instruction] = []
        self._close(ending)
        while not self._states.alive(ending.current):
            if not ending.stages:
                return told + self._finish(ending, now)
            ending.current = ending.stages.pop(0)
            told += self._tell(ending)
        return told

    def _tell(self, ending: Ending) -> list[Instruction]:
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
        told: list[Instruction] = [Drain(drained, ending.reason)] if drained else []
        return told + ([End(rest, graces, ending.reason)] if rest else [])

    def _close(self, ending: Ending) -> None:
        """Children that have no process and will have none are done with."""
        if ending.then in ("restart", "renew"):
            return
        for name in ending.scope:
            if not self._states.is_alive(name) and not self._states.is_over(name):
                self._states.move(name, "give-up" if ending.then == "give up" else "settle")

    def _finish(self, ending: Ending, now: float) -> list[Instruction]:
        if ending.then == "over":
            return [Done()]
        self._endings.remove(ending)
        if ending.then == "give up":
            return self._farewell()
        told = self._let_go(ending.scope & self._retiring)
        children = tuple(n for n in self._tree.children if n in ending.scope and not self._states.is_over(n))
        if not children:
            if ending.branch is not None:
                self._budgets[ending.branch.name].release()
            return told + self._farewell()
        return [*told, self._again(children, ending, now)]

    def _again(self, children: tuple[str, ...], ending: Ending, now: float) -> Restart:
        delay, payer = 0.0, ""
        if ending.branch is not None:
            payer = ending.branch.name
            delay = self._budgets[payer].spend(now, self._backoff, self._lot())
            self._unproven.update(children)
        for name in children:
            self._states.move(name, "retry")
            self._attempts[name] += 1
        attempts = tuple(self._attempts[name] for name in children)
        rounds = tuple(self._round(gang) for gang in self._tree.gangs(frozenset(children)))
        return Restart(children, attempts, delay, ending.reason, payer, rounds)

    def _let_go(self, names: frozenset[str]) -> list[Instruction]:
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
        self._condemned.pop(child, None)
        self._states.remove(child)

    def _farewell(self) -> list[Instruction]:
        return [Done()] if all(self._states.is_over(name) for name in self._tree.children) else []

    def _round(self, gang: BranchSpec) -> GangRound:
        attempt = self._attempts[self._tree.leaves(gang)[0]]
        return GangRound(gang.name, attempt, f"{gang.name}.{attempt}")

    def _ending_of(self, child: str) -> Ending | None:
        return next((ending for ending in self._endings if child in ending.scope), None)

    def _is_over(self) -> bool:
        return any(ending.then == "over" for ending in self._endings)

    def _spec(self, child: str) -> ChildSpec:
        self._states[child]  # raises for a name that nobody has
        return self._tree.children[child]
