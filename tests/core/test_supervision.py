"""Restart policies, budgets and pauses, by example and by random histories."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from myxa.core.supervision import (
    ALIVE,
    TRANSITIONS,
    Backoff,
    ChildSpec,
    Done,
    End,
    FailRun,
    Restart,
    SupervisionError,
    Supervisor,
    describe_status,
)

KILLED = -9


def make(*children: ChildSpec, is_launched: bool = True) -> Supervisor:
    supervisor = Supervisor(children, lot=lambda: 0.0, backoff=Backoff(first_s=1.0, limit_s=8.0, period_s=300.0))
    for child in children if is_launched else ():
        supervisor.on_launch(child.name, 0.0)
    return supervisor


def all_up(supervisor: Supervisor, *names: str) -> None:
    for name in names:
        supervisor.on_up(name, 0.0)


def test_one_child_is_restarted_with_a_new_attempt_and_its_siblings_go_on():
    supervisor = make(ChildSpec("rollout/0"), ChildSpec("rollout/1"))
    all_up(supervisor, "rollout/0", "rollout/1")
    assert supervisor.on_exit("rollout/1", KILLED, 10.0) == [
        Restart(("rollout/1",), 1.0, 1, "rollout/1 ended with signal SIGKILL")
    ]
    assert supervisor.state("rollout/1") == "backing-off"
    supervisor.on_launch("rollout/1", 11.0)
    assert supervisor.attempt("rollout/1") == 1
    assert supervisor.state("rollout/0") == "up"
    assert supervisor.attempt("rollout/0") == 0


def test_the_pause_doubles_up_to_its_limit_and_the_lot_takes_at_most_half_away():
    backoff = Backoff(first_s=1.0, limit_s=8.0)
    assert [backoff.delay(n, 0.0) for n in range(6)] == [1, 2, 4, 8, 8, 8]
    assert backoff.delay(1, 0.5) == pytest.approx(1.5)
    assert backoff.delay(1, 0.999999) > 1.0
    assert backoff.delay(5000, 0.0) == 8.0


def test_the_fourth_end_within_the_period_fails_the_run_and_names_the_budget():
    supervisor = make(ChildSpec("rollout/0", max_restarts=3), ChildSpec("buffer"))
    for n in range(3):
        (restart,) = supervisor.on_exit("rollout/0", 1, 10.0 * n)
        assert isinstance(restart, Restart)
        supervisor.on_launch("rollout/0", 10.0 * n)
    fail, end = supervisor.on_exit("rollout/0", 1, 40.0)
    assert isinstance(fail, FailRun)
    assert (fail.culprit, fail.exit_code) == ("rollout/0", 4)
    assert "3 restarts in 300 s" in fail.reason
    assert end == End(("buffer",), fail.reason)
    assert supervisor.state("rollout/0") == "failed"
    assert supervisor.on_exit("buffer", 0, 41.0) == [Done()]


def test_restarts_older_than_the_period_do_not_count():
    supervisor = make(ChildSpec("rollout/0", max_restarts=1))
    for n in range(5):
        (restart,) = supervisor.on_exit("rollout/0", 1, 300.0 * n)
        assert isinstance(restart, Restart)
        assert restart.delay_s == 1.0, "the pause starts small again"
        supervisor.on_launch("rollout/0", 300.0 * n)
    (fail, done) = supervisor.on_exit("rollout/0", 1, 300.0 * 4 + 299.0)
    assert isinstance(fail, FailRun)
    assert done == Done()


def test_a_gang_ends_together_and_starts_again_together():
    gang = [ChildSpec(f"trainer/{r}", "gang", "trainer") for r in range(3)]
    supervisor = make(ChildSpec("buffer"), *gang)
    all_up(supervisor, "buffer", "trainer/0", "trainer/1", "trainer/2")
    (end,) = supervisor.on_exit("trainer/1", KILLED, 5.0)
    assert isinstance(end, End)
    assert end.children == ("trainer/2", "trainer/0")
    assert supervisor.on_exit("trainer/0", 1, 5.1) == []
    (restart,) = supervisor.on_exit("trainer/2", -15, 5.2)
    assert restart == Restart(("trainer/0", "trainer/1", "trainer/2"), 1.0, 1, "trainer/1 ended with signal SIGKILL"), (
        "the cause is the first end, not the last"
    )
    assert supervisor.state("buffer") == "up"
    assert {supervisor.attempt(f"trainer/{r}") for r in range(3)} == {1}


def test_a_gang_spends_one_budget_per_restart_not_one_per_member():
    gang = [ChildSpec(f"trainer/{r}", "gang", "trainer", max_restarts=2) for r in range(2)]
    supervisor = make(*gang)
    for n in range(2):
        supervisor.on_exit("trainer/0", 1, float(n))
        (restart,) = supervisor.on_exit("trainer/1", 1, float(n))
        assert isinstance(restart, Restart)
        assert restart.attempt == n + 1
        for r in range(2):
            supervisor.on_launch(f"trainer/{r}", float(n))
    assert isinstance(supervisor.on_exit("trainer/0", 1, 3.0)[0], FailRun)


def test_a_gang_member_that_ends_before_the_others_are_started_again_delays_them_all():
    gang = [ChildSpec(f"trainer/{r}", "gang", "trainer") for r in range(2)]
    supervisor = make(*gang)
    supervisor.on_exit("trainer/0", 1, 0.0)
    supervisor.on_exit("trainer/1", 1, 0.0)
    supervisor.on_launch("trainer/0", 1.0)
    (restart,) = supervisor.on_exit("trainer/0", 1, 1.1)
    assert isinstance(restart, Restart)
    assert (restart.children, restart.attempt) == (("trainer/0", "trainer/1"), 2)
    assert {supervisor.state(name) for name in restart.children} == {"backing-off"}


def test_never_means_never():
    supervisor = make(ChildSpec("coordinator", "never"))
    fail, done = supervisor.on_exit("coordinator", 0, 1.0)
    assert isinstance(fail, FailRun)
    assert fail.exit_code == 4
    assert "exit status 0" in fail.reason
    assert done == Done()


@pytest.mark.parametrize("status", [2, 5])
def test_a_wrong_configuration_or_wrong_data_is_not_tried_again(status: int):
    supervisor = make(ChildSpec("rollout/0"))
    fail, _ = supervisor.on_exit("rollout/0", status, 1.0)
    assert isinstance(fail, FailRun)
    assert fail.exit_code == status


def test_stop_ends_children_last_started_first_and_starts_none_again():
    supervisor = make(ChildSpec("coordinator"), ChildSpec("buffer"), ChildSpec("rollout/0"))
    all_up(supervisor, "coordinator", "buffer")
    (restart,) = supervisor.on_exit("rollout/0", 1, 1.0)
    assert isinstance(restart, Restart)
    assert supervisor.stop("asked to", 2.0) == [End(("buffer", "coordinator"), "asked to")]
    assert supervisor.state("rollout/0") == "stopped", "it was waiting for its restart"
    assert supervisor.on_exit("coordinator", 1, 3.0) == []
    assert supervisor.on_exit("buffer", 0, 3.0) == [Done()]


def test_children_that_were_never_started_are_not_waited_for():
    supervisor = make(ChildSpec("a"), ChildSpec("b"), is_launched=False)
    assert supervisor.alive == ()
    supervisor.on_launch("a", 0.0)
    assert supervisor.stop("asked to", 1.0) == [End(("a",), "asked to")]
    assert supervisor.state("b") == "stopped"
    assert supervisor.on_exit("a", 0, 2.0) == [Done()]
    assert make(ChildSpec("a"), is_launched=False).stop("asked to", 1.0) == [Done()]


def test_only_the_first_failure_is_the_verdict():
    supervisor = make(ChildSpec("a", "never"), ChildSpec("b", "never"))
    supervisor.on_exit("a", 5, 1.0)
    assert supervisor.on_exit("b", 1, 1.0) == [Done()]
    assert supervisor.verdict is not None
    assert (supervisor.verdict.culprit, supervisor.verdict.exit_code) == ("a", 5)


def test_a_lost_node_fails_the_run_and_names_the_node():
    supervisor = make(ChildSpec("buffer"), ChildSpec("rollout/0"), ChildSpec("rollout/1"))
    all_up(supervisor, "buffer", "rollout/0", "rollout/1")
    fail, end = supervisor.on_lost("launcher/1", ["rollout/0", "rollout/1"], "launcher/1 is gone", 1.0)
    assert fail == FailRun("launcher/1", "launcher/1 is gone", 4)
    assert end == End(("buffer",), "launcher/1 is gone")


def test_events_that_cannot_happen_and_names_that_nobody_has_are_refused():
    supervisor = make(ChildSpec("a"))
    with pytest.raises(SupervisionError, match="'launch' cannot happen"):
        supervisor.on_launch("a", 0.0)
    with pytest.raises(SupervisionError, match="no child is named 'b'"):
        supervisor.on_exit("b", 1, 0.0)
    with pytest.raises(SupervisionError, match="named twice: a"):
        make(ChildSpec("a"), ChildSpec("a"))


def test_statuses_have_words():
    assert describe_status(3) == "exit status 3"
    assert describe_status(-11) == "signal SIGSEGV"
    assert describe_status(-99) == "signal 99"


def test_every_state_but_the_last_two_has_a_way_out():
    sources = {state for state, _ in TRANSITIONS}
    assert {"stopped", "failed"} == set(TRANSITIONS.values()) - sources


CHILDREN = (
    ChildSpec("coordinator", "never"),
    ChildSpec("buffer", "one", max_restarts=2),
    ChildSpec("trainer/0", "gang", "trainer", max_restarts=2),
    ChildSpec("trainer/1", "gang", "trainer", max_restarts=2),
    ChildSpec("trainer/2", "gang", "trainer", max_restarts=2),
    ChildSpec("rollout/0", "one", max_restarts=3),
    ChildSpec("rollout/1", "one", max_restarts=0),
)
GANG = ("trainer/0", "trainer/1", "trainer/2")
PERIOD_S = 300.0


class Histories(RuleBasedStateMachine):
    """A launcher that carries out what it is told, over children that end whenever they like."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.supervisor = Supervisor(CHILDREN, lot=lambda: 0.5, backoff=Backoff(period_s=PERIOD_S))
        self.processes: dict[str, int] = {}  # name -> attempt
        self.told: set[str] = set()
        self.waiting: dict[str, int] = {child.name: 0 for child in CHILDREN}
        self.restarts: dict[str, list[float]] = defaultdict(list)
        self.is_over = False
        self.is_done = False

    def carry_out(self, instructions: list[Restart | End | FailRun | Done]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Restart):
                assert not self.is_over, "nothing is started after the end was decided"
                assert not set(instruction.children) & set(self.processes), "no child runs twice"
                assert instruction.delay_s > 0
                self.restarts[instruction.children[0]].append(self.now)
                if set(instruction.children) & set(GANG):
                    assert instruction.children == GANG
                self.waiting.update(dict.fromkeys(instruction.children, instruction.attempt))
            elif isinstance(instruction, End):
                assert set(instruction.children) <= set(self.processes)
                self.told.update(instruction.children)
            elif isinstance(instruction, FailRun):
                assert not self.is_over
                assert instruction.exit_code in (2, 4, 5)
                self.is_over = True
            else:
                assert not self.processes
                self.is_done = True

    @rule(seconds=st.floats(0.0, 400.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.processes)
    @rule(data=st.data(), status=st.sampled_from([0, 1, 2, 5, -9, -15]))
    def a_process_ends(self, data: st.DataObject, status: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.processes)))
        del self.processes[name]
        self.told.discard(name)
        self.carry_out(self.supervisor.on_exit(name, status, self.now))

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def a_process_answers(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.processes)))
        if self.supervisor.state(name) == "starting":
            self.carry_out(self.supervisor.on_up(name, self.now))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def a_pause_is_over(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.waiting)))
        attempt = self.waiting.pop(name)
        if self.supervisor.state(name) in ("waiting", "backing-off"):
            self.carry_out(self.supervisor.on_launch(name, self.now))
            self.processes[name] = attempt

    @rule()
    def somebody_stops_the_run(self) -> None:
        self.is_over = True
        self.waiting.clear()
        self.carry_out(self.supervisor.stop("asked to", self.now))

    @invariant()
    def the_supervisor_knows_what_runs(self) -> None:
        assert set(self.supervisor.alive) == set(self.processes)
        for name, attempt in self.processes.items():
            assert self.supervisor.state(name) in ALIVE
            assert self.supervisor.attempt(name) >= attempt

    @invariant()
    def no_budget_is_exceeded_in_any_period(self) -> None:
        budgets = {child.name: child.max_restarts for child in CHILDREN}
        for name, times in self.restarts.items():
            for start in times:
                within = [t for t in times if start <= t < start + PERIOD_S]
                assert len(within) <= budgets[name]

    @invariant()
    def an_end_without_processes_is_announced(self) -> None:
        if self.is_over and not self.processes:
            assert self.is_done


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
