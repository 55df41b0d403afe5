"""Random trees of children that end, hang and are lost whenever they like, a person who has some retire, start anew or
join, and a launcher that does what it is told."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from myxa.core.supervision import (
    ALIVE,
    AllEnded,
    Backoff,
    Drain,
    End,
    FailRun,
    GiveUp,
    Health,
    Instruction,
    Kill,
    Restart,
    Retired,
    Supervisor,
)
from myxa.core.supervision_tree import (
    BranchSpec,
    ChildSpec,
    Member,
    RestartType,
    Strategy,
    SupervisionError,
    SupervisionTree,
    WhenHung,
)

PERIOD_S = 300.0
RESTART_TYPES: tuple[RestartType, ...] = ("permanent", "permanent", "transient", "temporary")
WHEN_HUNG: tuple[WhenHung, ...] = ("wait", "kill")
STRATEGIES: tuple[Strategy, ...] = ("one_for_one", "one_for_all", "rest_for_one", "gang")
HEALTHS: tuple[Health, ...] = ("suspect", "hung", "hung", "recovered", "given up")


@st.composite
def trees(draw: st.DrawFn) -> BranchSpec:
    """Two or three branches of one to four children each, some with a branch of their own, under a root."""
    numbers = iter(range(100))

    def child(restart: RestartType | None = None) -> ChildSpec:
        types = st.sampled_from(RESTART_TYPES)
        hung = st.sampled_from(WHEN_HUNG)
        return ChildSpec(f"c{next(numbers)}", restart or draw(types), draw(hung), draw(st.floats(0, 20)))

    def branch(depth: int) -> BranchSpec:
        strategy = draw(st.sampled_from(STRATEGIES))
        size = draw(st.integers(1, 4))
        if strategy == "gang":
            members = tuple(child("permanent") for _ in range(size))
        else:
            deep = [depth > 0 and draw(st.booleans()) for _ in range(size)]
            members = tuple(branch(depth - 1) if is_deep else child() for is_deep in deep)
        quorum = 0 if strategy == "gang" else draw(st.integers(0, size))
        return BranchSpec(
            f"b{next(numbers)}", members, strategy, draw(st.integers(0, 3)), PERIOD_S, quorum
        )  # fmt: skip

    members = tuple(branch(1) for _ in range(draw(st.integers(1, 3))))
    strategy = draw(st.sampled_from(STRATEGIES[:-1]))
    return BranchSpec("root", members, strategy, draw(st.integers(0, 2)), PERIOD_S)


class Histories(RuleBasedStateMachine):
    """Keeps its own account of processes, restarts and ends, and compares."""

    @initialize(root=trees())
    def begin(self, root: BranchSpec) -> None:
        self.now = 0.0
        self.tree = SupervisionTree(root)
        self.supervisor = Supervisor(root, jitter=lambda: 0.5, backoff=Backoff())
        self.order = list(self.tree.children)
        self.processes: dict[str, int] = {}  # name -> attempt
        self.told: set[str] = set()
        self.pauses: list[tuple[str, int]] = [(name, 0) for name in self.order]
        self.attempts = dict.fromkeys(self.order, 0)
        self.restarts: dict[str, list[float]] = defaultdict(list)
        self.gone: set[str] = set()
        self.leaving: set[str] = set()
        """Asked to retire, and still there."""
        self.retired: set[str] = set()
        self.given_up: set[str] = set()
        self.draining: list[str] = []
        self.num_joined = 100
        self.is_over = self.is_done = False

    def carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Restart():
                    self.check_restart(instruction)
                    self.pauses += zip(instruction.children, instruction.attempts, strict=True)
                case Drain():
                    assert set(instruction.children) <= set(self.processes)
                    assert not set(instruction.children) & self.told, "whoever was told to end has nothing to hand back"
                    self.draining += instruction.children
                case Retired():
                    assert not set(instruction.children) & set(self.processes)
                    assert set(instruction.children) <= self.leaving, "only who was asked to"
                    for name in instruction.children:
                        self.forget(name)
                    self.retired.update(instruction.children)
                case End():
                    self.check_end(instruction)
                    self.told.update(instruction.children)
                case Kill():
                    assert set(instruction.children) <= set(self.processes)
                    self.told.update(instruction.children)
                case GiveUp():
                    assert not self.is_over
                    assert instruction.num_left >= instruction.quorum > 0
                    self.given_up.add(instruction.member)
                    (branch,) = (b for b in self.tree.branches if instruction.member in self.names_in(b))
                    began_so = instruction.member in {each.name for each in branch.members}
                    extra = branch.quorum or 1
                    assert instruction.quorum in ((branch.enough, extra) if began_so else (extra,)), "names come again"
                    assert instruction.num_left == len([m for m in self.tree.members(branch) if self.stays(m)])
                case FailRun():
                    assert not self.is_over
                    assert instruction.exit_code in (2, 4, 5)
                    self.is_over = True
                case AllEnded():
                    assert not self.processes
                    self.is_done = True

    def names_in(self, branch: BranchSpec) -> list[str]:
        return [member.name for member in self.tree.members(branch)]

    def stays(self, member: Member) -> bool:
        return member.name not in self.given_up and not set(self.tree.leaves(member)) <= self.leaving

    def forget(self, name: str) -> None:
        self.given_up -= {each.name for each in self.tree.remove(name)}
        self.leaving.discard(name)
        self.order = list(self.tree.children)

    def check_restart(self, restart: Restart) -> None:
        assert not self.is_over, "nothing is started after the end was decided"
        assert not set(restart.children) & set(self.processes), "nobody runs twice"
        assert not set(restart.children) & self.gone, "who was given up, finished or lost is not started again"
        assert not set(restart.children) & (self.retired | self.leaving), "nor is who was asked to leave"
        assert restart.branch or not restart.delay_s, "a restart that somebody wished costs nothing"
        assert list(restart.children) == [n for n in self.order if n in restart.children], "in start order"
        for name, attempt in zip(restart.children, restart.attempts, strict=True):
            assert attempt == self.attempts[name] + 1
            self.attempts[name] = attempt
        met = {r.gang: r for r in restart.rounds}
        for gang in (b for b in self.tree.branches if b.strategy == "gang"):
            ranks = self.tree.leaves(gang)
            if not set(ranks) & set(restart.children):
                continue
            assert set(ranks) <= set(restart.children), "a gang starts as a whole"
            assert len({self.attempts[r] for r in ranks}) == 1, "as one attempt"
            assert met[gang.name].rendezvous == f"{gang.name}.{self.attempts[ranks[0]]}"
        if restart.branch:
            self.restarts[restart.branch].append(self.now)

    def check_end(self, end: End) -> None:
        assert set(end.children) <= set(self.processes)
        assert not set(end.children) & self.told, "told once"
        for name, grace_s in zip(end.children, end.graces_s, strict=True):
            own_s = self.tree.children[name].grace_s
            branch = self.tree.above(self.tree.children[name])
            is_rank = branch is not None and branch.strategy == "gang"
            assert grace_s == own_s or (is_rank and grace_s == min(0.5, own_s)), "mates of a broken gang end quickly"
        if not self.is_over:  # it ends one branch, which says nothing of the others
            return
        stages = self.tree.all_stages(self.tree.root)  # those of one branch end together
        first = min(place for place, stage in enumerate(stages) if set(stage) & set(end.children))
        later = {name for stage in stages[:first] for name in stage}
        assert not later & set(self.processes), f"{end} while {later & set(self.processes)} run"

    # -- what happens

    @rule(seconds=st.floats(0.0, 400.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.pauses)
    @rule(data=st.data())
    def a_pause_is_over(self, data: st.DataObject) -> None:
        name, attempt = self.pauses.pop(data.draw(st.integers(0, len(self.pauses) - 1)))
        if self.supervisor.may_launch(name, attempt):
            assert name not in self.processes
            self.supervisor.on_launch(name)
            self.processes[name] = attempt

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def a_process_answers(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.processes)))
        if self.supervisor.state(name) == "starting":
            self.supervisor.on_up(name)

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def somebody_is_seen_at_work(self, data: st.DataObject) -> None:
        self.supervisor.on_work(data.draw(st.sampled_from([*self.order, "nobody"])), self.now)

    @precondition(lambda self: self.processes)
    @rule(data=st.data(), status=st.sampled_from([0, 0, 1, 1, 1, -9, 2, 5]))
    def a_process_ends(self, data: st.DataObject, status: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.processes)))
        is_free = name not in self.told
        del self.processes[name]
        self.told.discard(name)
        instructions = self.supervisor.on_exit(name, status, self.now)
        if name in self.leaving:
            assert not [i for i in instructions if isinstance(i, FailRun | GiveUp)], "it was to leave: no failure"
        retired = {n for i in instructions if isinstance(i, Retired) for n in i.children}
        if is_free and name not in retired and self.supervisor.state(name) in ("failed", "stopped"):
            self.gone.add(name)
        self.carry_out(instructions)

    @precondition(lambda self: self.processes)
    @rule(data=st.data(), health=st.sampled_from(HEALTHS))
    def the_detector_speaks(self, data: st.DataObject, health: Health) -> None:
        name = data.draw(st.sampled_from(self.order))
        self.carry_out(self.supervisor.on_health(name, health, "no beat", self.now))

    @precondition(lambda self: self.processes and self.order)
    @rule(data=st.data())
    def a_node_is_lost(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(self.order), unique=True, max_size=2))
        for name in names:
            self.processes.pop(name, None)
            self.told.discard(name)
        self.gone.update(names)
        instructions = self.supervisor.on_lost("launcher/1", names, "launcher/1 is gone", self.now)
        if set(names) <= self.leaving:
            assert not [i for i in instructions if isinstance(i, FailRun | GiveUp)], "they were to leave: no failure"
        self.carry_out(instructions)

    # -- what a person does

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def somebody_has_one_retire(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.order))
        try:
            self.tree.member_of(name)
        except SupervisionError:
            assert "gang" in {b.strategy for b in self.tree.branches if name in self.names_in(b)}
            return
        if not self.is_over:
            self.leaving.add(name)
        self.carry_out(self.supervisor.retire(name, "somebody wished it", self.now))

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def somebody_has_one_started_anew(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.order))
        try:
            instructions = self.supervisor.renew(name, "somebody wished it", self.now)
            self.carry_out(instructions)
            if not self.is_over and not self.processes:
                assert self.supervisor.state(name) == "backing-off", "it comes again"
        except SupervisionError:
            assert name in self.gone | self.leaving or self.supervisor.state(name) != "up" or self.given_up

    @precondition(lambda self: self.draining)
    @rule(data=st.data())
    def work_is_handed_back(self, data: st.DataObject) -> None:
        name = self.draining.pop(data.draw(st.integers(0, len(self.draining) - 1)))
        self.carry_out(self.supervisor.on_drained(name, self.now))

    @precondition(lambda self: self.order and not self.is_over)
    @rule(data=st.data(), is_alone=st.booleans(), restart=st.sampled_from(RESTART_TYPES))
    def somebody_has_one_join(self, data: st.DataObject, is_alone: bool, restart: RestartType) -> None:
        branch = data.draw(st.sampled_from([b.name for b in self.tree.branches]))
        known = sorted(self.retired | self.gone)
        number = self.num_joined = self.num_joined + 1
        name = data.draw(st.sampled_from(known)) if known and data.draw(st.booleans()) else f"c{number}"
        child = ChildSpec(name, restart)
        member = BranchSpec(f"b{number}", (child,), max_restarts=1, period_s=PERIOD_S) if is_alone else child
        before = self.supervisor.alive
        try:
            self.supervisor.grow(branch, member)
        except SupervisionError:
            assert self.supervisor.alive == before
            assert set(self.supervisor._tree.children) == set(self.order), "nothing was changed"
            assert self.tree.branch(branch).strategy == "gang" or name in self.tree.children
            return
        if name in self.tree.children:
            self.forget(name)
        self.retired.discard(name)
        self.gone.discard(name)
        self.tree.add(branch, member)
        self.order = list(self.tree.children)
        self.attempts[name] = self.attempts.get(name, -1) + 1
        assert self.supervisor.attempt(name) == self.attempts[name], "no attempt comes twice"
        self.pauses.append((name, self.attempts[name]))
        self.is_done = False

    @rule(is_meant=st.integers(0, 9))
    def somebody_stops_the_run(self, is_meant: int) -> None:
        if is_meant == 0:
            self.is_over = True
            self.carry_out(self.supervisor.stop("asked to", self.now))

    # -- what always holds

    @invariant()
    def the_supervisor_knows_what_runs(self) -> None:
        if not hasattr(self, "supervisor"):
            return
        assert set(self.supervisor.alive) == set(self.processes)
        assert not self.retired & set(self.processes), "who retired does not come back by itself"
        for name, attempt in self.processes.items():
            assert self.supervisor.state(name) in ALIVE
            assert self.supervisor.attempt(name) == attempt, "the attempt is that of the process"

    @invariant()
    def who_is_to_leave_leaves(self) -> None:
        if hasattr(self, "supervisor") and not self.processes and not self.is_over:
            assert not {n for n in self.leaving if n not in self.gone and self.supervisor.state(n) != "failed"}

    @invariant()
    def no_budget_is_exceeded_in_any_period(self) -> None:
        if not hasattr(self, "supervisor"):
            return
        budgets = {branch.name: branch.max_restarts for branch in self.tree.branches}
        # of a branch that was made for one child who left, nothing is known any more
        for branch, times in self.restarts.items():
            if branch not in budgets:
                continue
            for start in times:
                assert len([t for t in times if start <= t < start + PERIOD_S]) <= budgets[branch]

    @invariant()
    def an_end_without_processes_is_announced(self) -> None:
        if getattr(self, "is_over", False) and not self.processes:
            assert self.is_done


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
