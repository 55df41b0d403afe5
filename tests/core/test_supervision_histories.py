"""Random roles whose children end, hang and are lost at any time, a person who has some retire, restart or join, and a
launcher that carries out what it is told."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from myxa.core.supervision import (
    ALIVE,
    FORGET_S,
    MATES_GRACE_S,
    Drain,
    End,
    FailRun,
    GiveUp,
    Health,
    Instruction,
    Kill,
    Restart,
    Retired,
    RoleSpec,
    SupervisionError,
    Supervisor,
    WhenHung,
)

HEALTHS: tuple[Health, ...] = ("suspect", "hung", "hung", "recovered", "given up")

HUNG: tuple[WhenHung, ...] = ("wait", "kill")
GRACE_S = 10.0


@st.composite
def roles_drawn(draw: st.DrawFn) -> list[RoleSpec]:
    """One to four roles of one to four children each."""
    numbers = iter(range(100))

    def role(name: str) -> RoleSpec:
        is_gang, size = draw(st.booleans()), draw(st.integers(1, 4))
        children = tuple(f"c{next(numbers)}" for _ in range(size))
        quorum = 0 if is_gang else draw(st.integers(0, size))
        return RoleSpec(name, children, is_gang, draw(st.integers(0, 3)), quorum, draw(st.sampled_from(HUNG)))

    return [role(f"r{number}") for number in range(draw(st.integers(1, 4)))]


class Histories(RuleBasedStateMachine):
    """Keeps its own account of processes, restarts and ends, and compares."""

    @initialize(roles=roles_drawn())
    def begin(self, roles: list[RoleSpec]) -> None:
        self.now = 0.0
        self.roles = {role.name: role for role in roles}
        self.members = {role.name: list(role.children) for role in roles}
        self.extra: set[str] = set()
        self.supervisor = Supervisor(roles, jitter=lambda: 0.5, grace_s=GRACE_S)
        self.processes: dict[str, int] = {}  # name -> attempt
        self.told: set[str] = set()
        self.pauses: list[tuple[str, int]] = [(name, 0) for name in self.order]
        self.attempts = dict.fromkeys(self.order, 0)
        self.restarts: dict[str, int] = defaultdict(int)
        """Of each budget, as long as the newest one is not old."""
        self.newest: dict[str, float] = {}
        self.gone: set[str] = set()
        self.leaving: set[str] = set()
        """Asked to retire, and still there."""
        self.retired: set[str] = set()
        self.given_up: set[str] = set()
        self.draining: list[str] = []
        self.num_joined = 100
        self.is_over = False

    @property
    def order(self) -> list[str]:
        return [name for names in self.members.values() for name in names]

    def role_of(self, name: str) -> RoleSpec:
        return next(role for role in self.roles.values() if name in self.members[role.name])

    def carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Restart():
                    self.check_restart(instruction)
                    self.pauses += zip(instruction.children, instruction.attempts, strict=True)
                case Drain():
                    assert set(instruction.children) <= set(self.processes)
                    assert not set(instruction.children) & self.told, "it has nothing to hand back any more"
                    self.draining += instruction.children
                case Retired():
                    assert instruction.child not in self.processes
                    assert instruction.child in self.leaving, "only those that were asked to"
                    self.forget(instruction.child)
                    self.retired.add(instruction.child)
                case End():
                    self.check_end(instruction)
                    self.told.update(instruction.children)
                case Kill():
                    assert instruction.child in self.processes
                    self.told.add(instruction.child)
                case GiveUp():
                    assert not self.is_over
                    assert instruction.num_left >= instruction.quorum > 0
                    name, role = instruction.child, self.role_of(instruction.child)
                    self.given_up.add(name)
                    needed = role.quorum or (1 if name in self.extra else len(role.children))
                    assert not role.is_gang and instruction.quorum == needed
                    others = set(self.members[role.name]) - self.given_up - self.leaving
                    assert instruction.num_left == len(others)
                case FailRun():
                    assert not self.is_over
                    assert instruction.exit_code in (2, 4, 5)
                    self.is_over = True

    def forget(self, name: str) -> None:
        self.members[self.role_of(name).name].remove(name)
        for names in (self.given_up, self.leaving, self.extra):
            names.discard(name)

    def check_restart(self, restart: Restart) -> None:
        assert not self.is_over, "nothing is started after the end was decided"
        assert not set(restart.children) & set(self.processes), "none runs twice"
        assert not set(restart.children) & self.gone, "who was given up, finished or lost is not started again"
        assert not set(restart.children) & (self.retired | self.leaving), "nor is who was asked to leave"
        assert restart.budget or not restart.delay_s, "a wished restart costs nothing"
        assert list(restart.children) == [n for n in self.order if n in restart.children], "in start order"
        for name, attempt in zip(restart.children, restart.attempts, strict=True):
            assert attempt == self.attempts[name] + 1
            self.attempts[name] = attempt
        for role in self.roles.values():
            ranks = self.members[role.name]
            if role.is_gang and set(ranks) & set(restart.children):
                assert set(ranks) <= set(restart.children), "a gang starts as a whole"
                assert len({self.attempts[rank] for rank in ranks}) == 1, "as one attempt"
        if restart.budget:
            newest = self.newest.get(restart.budget, -FORGET_S)
            self.restarts[restart.budget] = self.restarts[restart.budget] + 1 if self.now < newest + FORGET_S else 1
            self.newest[restart.budget] = self.now + restart.delay_s

    def check_end(self, end: End) -> None:
        assert set(end.children) <= set(self.processes)
        assert not set(end.children) & self.told, "told once"
        for name in end.children:
            is_quick = end.grace_s == MATES_GRACE_S and self.role_of(name).is_gang
            assert end.grace_s == GRACE_S or is_quick, "mates of a broken gang end quickly"
        assert not self.is_over

    # -- what happens

    @rule(seconds=st.one_of(st.floats(0.0, 400.0), st.just(FORGET_S)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.pauses)
    @rule(data=st.data())
    def a_pause_is_over(self, data: st.DataObject) -> None:
        name, attempt = self.pauses.pop(data.draw(st.integers(0, len(self.pauses) - 1)))
        if self.supervisor.on_launch(name, attempt):
            assert name not in self.processes
            self.processes[name] = attempt

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def a_process_answers(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.processes)))
        if self.supervisor.state(name) == "starting":
            self.supervisor.on_up(name)

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
        retired = {i.child for i in instructions if isinstance(i, Retired)}
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
    def one_is_to_retire(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.order))
        if self.role_of(name).is_gang:
            return
        if not self.is_over:
            self.leaving.add(name)
        self.carry_out(self.supervisor.retire(name, "a person wished it", self.now))

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def one_is_to_restart(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.order))
        try:
            instructions = self.supervisor.renew(name, "a person wished it", self.now)
            self.carry_out(instructions)
            if not self.is_over and not self.processes:
                assert self.supervisor.state(name) == "backing-off", "it comes again"
        except SupervisionError:
            assert name in self.gone | self.leaving or self.supervisor.state(name) != "up" or self.given_up

    @precondition(lambda self: self.draining)
    @rule(data=st.data())
    def work_is_handed_back(self, data: st.DataObject) -> None:
        name = self.draining.pop(data.draw(st.integers(0, len(self.draining) - 1)))
        self.carry_out(self.supervisor.on_drained(name))

    @precondition(lambda self: self.order and not self.is_over)
    @rule(data=st.data())
    def one_more_joins(self, data: st.DataObject) -> None:
        role = data.draw(st.sampled_from(sorted(self.roles)))
        known = sorted(self.retired | self.gone)
        self.num_joined += 1
        name = data.draw(st.sampled_from(known)) if known and data.draw(st.booleans()) else f"c{self.num_joined}"
        before = self.supervisor.alive
        if name in self.order and self.role_of(name).is_gang:
            return  # names of roles differ
        try:
            self.supervisor.grow(role, name)
        except SupervisionError:
            assert self.supervisor.alive == before
            assert self.roles[role].is_gang or name in self.order
            return
        if name in self.order:
            self.forget(name)
        self.retired.discard(name)
        self.gone.discard(name)
        self.members[role].append(name)
        self.extra.add(name)
        self.restarts.pop(name, None)
        self.newest.pop(name, None)
        self.attempts[name] = self.attempts.get(name, -1) + 1
        assert self.supervisor.attempt(name) == self.attempts[name], "no attempt comes twice"
        self.pauses.append((name, self.attempts[name]))

    @rule(is_meant=st.integers(0, 9))
    def a_person_stops_the_run(self, is_meant: int) -> None:
        if is_meant == 0:
            self.is_over = True
            self.supervisor.stop()

    @precondition(lambda self: self.is_over)
    @rule(data=st.data())
    def a_role_is_ended(self, data: st.DataObject) -> None:
        role = data.draw(st.sampled_from(sorted(self.roles)))
        ends = self.supervisor.end_role(role)
        assert ends == tuple(name for name in reversed(self.members[role]) if name in self.processes)
        self.told.update(ends)

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
    def no_budget_is_exceeded(self) -> None:
        if not hasattr(self, "supervisor"):
            return
        for budget, count in self.restarts.items():
            role = self.roles.get(budget.removeprefix("gang "))
            if role is None and budget not in self.order:  # nothing is known any more of a child that left
                continue
            assert count <= (role or self.role_of(budget)).max_restarts

    @invariant()
    def nothing_waits_in_a_run_that_ends(self) -> None:
        if getattr(self, "is_over", False):
            states = {self.supervisor.state(name) for name in self.order}
            assert states <= {*ALIVE, "failed", "stopped"}


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)
