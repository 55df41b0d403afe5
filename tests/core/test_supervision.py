"""Restarts, budgets, pauses, gangs, quorums, what a person wishes, and the order of ends: by example."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from myxa.core.supervision import (
    ALIVE,
    FORGET_S,
    OVER,
    TRANSITIONS,
    Drain,
    End,
    FailRun,
    GiveUp,
    Instruction,
    Kill,
    Restart,
    RestartBudget,
    Retired,
    RoleSpec,
    SupervisionError,
    Supervisor,
    describe_status,
)

KILLED = -9
WISH = "a person wished it"


def alone(name: str, max_restarts: int = 3, **options: Any) -> RoleSpec:
    return RoleSpec(name, (name,), max_restarts=max_restarts, **options)


def gang(size: int = 2, max_restarts: int = 3, **options: Any) -> RoleSpec:
    ranks = tuple(f"trainer/{rank}" for rank in range(size))
    return RoleSpec("trainer", ranks, is_gang=True, max_restarts=max_restarts, **options)


def rollouts(size: int = 2, quorum: int = 0, max_restarts: int = 1, **options: Any) -> RoleSpec:
    children = tuple(f"rollout/{index}" for index in range(size))
    return RoleSpec("rollout", children, max_restarts=max_restarts, quorum=quorum, **options)


def make(*roles: RoleSpec, is_up: bool = True) -> Supervisor:
    supervisor = Supervisor(roles, jitter=lambda: 0.0)
    for role in roles:
        for child in role.children:
            assert supervisor.on_launch(child, 0)
            if is_up:
                supervisor.on_up(child)
    return supervisor


def launch(supervisor: Supervisor, instructions: Sequence[Instruction], *, is_up: bool = True) -> Restart:
    """Carry out the only one: a restart."""
    (restart,) = instructions
    assert isinstance(restart, Restart)
    for name, attempt in zip(restart.children, restart.attempts, strict=True):
        assert supervisor.on_launch(name, attempt)
        assert not supervisor.on_launch(name, attempt), "it runs"
        if is_up:
            supervisor.on_up(name)
    return restart


def join(supervisor: Supervisor, name: str) -> None:
    supervisor.grow("rollout", name)
    assert supervisor.on_launch(name, supervisor.attempt(name))
    supervisor.on_up(name)


def kinds(instructions: Sequence[Instruction]) -> list[str]:
    return [type(each).__name__ for each in instructions]


# -- restarts and their budgets ----------------------------------------------------------------------------------------


def test_a_child_is_restarted_with_a_new_attempt_and_the_others_go_on():
    supervisor = make(rollouts(2, max_restarts=3))
    instructions = supervisor.on_exit("rollout/1", KILLED, 10.0)
    assert instructions == [Restart(("rollout/1",), (1,), 0.0, "rollout/1 ended with signal SIGKILL", "rollout/1")]
    assert supervisor.state("rollout/1") == "backing-off"
    launch(supervisor, instructions)
    assert (supervisor.attempt("rollout/1"), supervisor.attempt("rollout/0")) == (1, 0)
    assert supervisor.state("rollout/0") == "up"


def test_the_first_restart_is_immediate_then_the_pause_doubles_up_to_its_limit_with_jitter():
    budget, pauses = RestartBudget(20), list[float]()
    for now in (0.0, 5.0, 14.0, 100.0, 110.0):
        pauses.append(budget.take(now, 0.0))
    assert pauses == [0.0, 1.0, 2.0, 0.0, 1.0], "at 100 it had run for more than 20 s after its pause"
    pauses = [budget.take(110.0, 0.0) for _ in range(6)]
    assert pauses == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert budget.take(110.0, 0.5) == pytest.approx(22.5)


def test_a_spent_budget_fails_the_run_and_is_named():
    supervisor = make(alone("buffer"), rollouts(1, max_restarts=3))
    for n in range(3):
        launch(supervisor, supervisor.on_exit("rollout/0", 1, 10.0 * n))
    reason = "rollout/0 ended with exit status 1 and its budget of 3 restarts is spent"
    assert supervisor.on_exit("rollout/0", 1, 40.0) == [FailRun("rollout/0", reason, 4)]
    assert (supervisor.state("rollout/0"), supervisor.is_over) == ("failed", True)
    assert supervisor.end_role("buffer") == ("buffer",)
    assert supervisor.on_exit("buffer", 1, 41.0) == []
    assert supervisor.alive == ()


def test_a_budget_begins_anew_a_while_after_the_newest_restart():
    supervisor = make(rollouts(1, max_restarts=1))
    for n in range(5):
        restart = launch(supervisor, supervisor.on_exit("rollout/0", 1, FORGET_S * n))
        assert restart.delay_s == 0.0
        assert [supervisor.restarts_left("rollout/0", FORGET_S * n + s) for s in (0.0, FORGET_S - 1, FORGET_S)] == [
            0,
            0,
            1,
        ]
    assert kinds(supervisor.on_exit("rollout/0", 1, FORGET_S * 4 + FORGET_S - 1)) == ["FailRun"]


@pytest.mark.parametrize("is_up", [True, False])
def test_attempts_that_take_long_to_load_and_then_fail_do_not_follow_each_other_for_ever(is_up: bool):
    supervisor = make(rollouts(1, max_restarts=3), is_up=is_up)
    for n in range(1, 4):
        restart = launch(supervisor, supervisor.on_exit("rollout/0", 3, (FORGET_S - 100) * n), is_up=is_up)
        assert restart.attempts == (n,)
    assert kinds(supervisor.on_exit("rollout/0", 3, (FORGET_S - 100) * 4)) == ["FailRun"]


def test_a_gang_spends_one_budget_and_a_restart_that_does_not_happen_costs_nothing():
    supervisor = make(gang(2, max_restarts=1))
    supervisor.on_exit("trainer/0", 1, 0.0)
    assert supervisor.restarts_left("trainer/1", 0.0) == 1, "it waits for its mate"
    launch(supervisor, supervisor.on_exit("trainer/1", 1, 1.0))
    assert [supervisor.restarts_left(f"trainer/{rank}", 1.0) for rank in range(2)] == [0, 0]
    supervisor = make(gang(2, max_restarts=1))
    supervisor.on_exit("trainer/0", 1, 0.0)
    supervisor.renew("trainer/0", WISH, 1.0)
    assert launch(supervisor, supervisor.on_exit("trainer/1", 1, 2.0)).budget == ""
    assert supervisor.restarts_left("trainer/0", 2.0) == 1, "a person's wish took its place"


# -- gangs and quorums -------------------------------------------------------------------------------------------------


def test_a_gang_ends_together_and_restarts_as_one_attempt():
    supervisor = make(alone("buffer"), gang(3))
    reason = "trainer/1 ended with signal SIGKILL"
    assert supervisor.on_exit("trainer/1", KILLED, 5.0) == [End(("trainer/2", "trainer/0"), 0.5, reason)]
    assert not supervisor.on_launch("trainer/1", 0)
    assert supervisor.on_exit("trainer/0", 1, 5.1) == []
    restart = launch(supervisor, supervisor.on_exit("trainer/2", -15, 5.2))
    ranks = ("trainer/0", "trainer/1", "trainer/2")
    assert restart == Restart(ranks, (1, 1, 1), 0.0, reason, "gang trainer"), "the cause is the first end"
    assert supervisor.state("buffer") == "up"


def test_a_run_continues_without_a_child_while_enough_others_are_left():
    supervisor = make(alone("buffer"), rollouts(3, quorum=2))
    launch(supervisor, supervisor.on_exit("rollout/1", 1, 0.0))
    reason = "rollout/1 ended with exit status 1 and its budget of 1 restarts is spent"
    assert supervisor.on_exit("rollout/1", 1, 1.0) == [GiveUp("rollout/1", reason, 2, 2)]
    assert supervisor.state("rollout/1") == "failed"
    launch(supervisor, supervisor.on_exit("rollout/0", 1, 2.0))
    (fail,) = supervisor.on_exit("rollout/0", 1, 3.0)
    assert isinstance(fail, FailRun) and fail.culprit == "rollout/0"
    assert supervisor.end_role("rollout") == ("rollout/2",)


def test_a_quorum_covers_children_that_are_never_restarted_and_lost_nodes():
    supervisor = make(alone("buffer"), rollouts(3, quorum=1, max_restarts=0))
    assert kinds(supervisor.on_exit("rollout/2", KILLED, 0.0)) == ["GiveUp"]
    lost = supervisor.on_lost("launcher/1", ["rollout/1"], "launcher/1 is gone", 1.0)
    assert lost == [GiveUp("rollout/1", "launcher/1 is gone", 1, 1)]
    lost = supervisor.on_lost("launcher/2", ["rollout/0"], "launcher/2 is gone", 2.0)
    assert lost == [FailRun("launcher/2", "launcher/2 is gone", 4)]


def test_a_child_that_is_never_restarted_fails_the_run_by_any_end():
    reason = "coordinator ended with exit status 0 and is never restarted"
    supervisor = make(alone("coordinator", max_restarts=0))
    assert supervisor.on_exit("coordinator", 0, 1.0) == [FailRun("coordinator", reason, 4)]


# -- hung children -----------------------------------------------------------------------------------------------------


def test_a_hung_child_is_a_state_of_its_own_and_may_recover():
    supervisor = make(rollouts(1))
    assert supervisor.on_health("rollout/0", "suspect", "no beat for 3 s", 1.0) == []
    assert supervisor.state("rollout/0") == "up"
    assert supervisor.on_health("rollout/0", "hung", "no beat for 14 s", 2.0) == []
    assert (supervisor.state("rollout/0"), supervisor.alive) == ("hung", ("rollout/0",))
    supervisor.on_health("rollout/0", "recovered", "", 3.0)
    assert supervisor.state("rollout/0") == "up"
    supervisor.on_health("rollout/0", "hung", "", 4.0)
    assert kinds(supervisor.on_exit("rollout/0", 1, 5.0)) == ["Restart"]
    assert supervisor.on_health("rollout/0", "hung", "late", 6.0) == []
    assert supervisor.on_health("rollout/0", "recovered", "late", 6.0) == []


def test_a_hung_child_is_killed_where_the_run_file_says_so_and_its_budget_decides():
    supervisor = make(rollouts(1, when_hung="kill"))
    kill = Kill("rollout/0", "rollout/0 hangs (no beat for 14 s)")
    assert supervisor.on_health("rollout/0", "hung", "no beat for 14 s", 2.0) == [kill]
    assert supervisor.on_health("rollout/0", "hung", "still", 2.5) == [], "once"
    restart = launch(supervisor, supervisor.on_exit("rollout/0", KILLED, 3.0))
    assert restart.reason == "rollout/0 hangs (no beat for 14 s), was killed"
    _, fail = supervisor.on_health("rollout/0", "hung", "again", 4.0)
    assert isinstance(fail, FailRun)
    assert "was killed and its budget of 1 restarts" in fail.reason
    assert supervisor.on_exit("rollout/0", KILLED, 5.0) == []
    assert supervisor.alive == ()


def test_one_that_all_others_gave_up_is_killed_whatever_the_run_file_says_of_hung_ones():
    supervisor = make(rollouts(1, max_restarts=3))
    kill = Kill("rollout/0", "rollout/0 is given up by the others (the connection is lost)")
    assert supervisor.on_health("rollout/0", "given up", "the connection is lost", 2.0) == [kill]
    assert supervisor.on_health("rollout/0", "given up", "late", 2.5) == []
    restart = launch(supervisor, supervisor.on_exit("rollout/0", KILLED, 3.0))
    assert restart.reason == f"{kill.reason} and ended with signal SIGKILL"
    supervisor.on_health("rollout/0", "hung", "no beat", 4.0)
    assert kinds(supervisor.on_health("rollout/0", "given up", "lost", 5.0)) == ["Kill"]


@pytest.mark.parametrize("status", [2, 5])
@pytest.mark.parametrize("is_given_up", [True, False])
def test_a_wrong_configuration_or_wrong_data_is_not_tried_again(status: int, is_given_up: bool):
    """Even where the others have given it up while it ended by itself, and where others would be enough."""
    supervisor = make(rollouts(2, quorum=1))
    if is_given_up:
        supervisor.on_health("rollout/0", "given up", "it failed", 2.0)
    (fail,) = supervisor.on_exit("rollout/0", status, 3.0)
    assert isinstance(fail, FailRun)
    assert fail.exit_code == status and "another attempt would end the same way" in fail.reason


def test_one_that_was_given_up_may_be_stopped_retire_or_be_lost_meanwhile():
    def given_up() -> Supervisor:
        supervisor = make(rollouts(2, quorum=1))
        supervisor.on_health("rollout/0", "given up", "the connection is lost", 2.0)
        return supervisor

    supervisor = given_up()
    supervisor.stop()
    assert supervisor.end_role("rollout") == ("rollout/1", "rollout/0")
    assert supervisor.on_exit("rollout/0", KILLED, 4.0) == []
    supervisor = given_up()
    assert supervisor.retire("rollout/0", WISH, 3.0) == []
    assert supervisor.on_exit("rollout/0", 2, 4.0) == [Retired("rollout/0")]
    supervisor = given_up()
    supervisor.on_lost("rollout/0", ("rollout/0",), "it survives SIGKILL", 3.0)
    assert supervisor.state("rollout/0") == "stopped" and supervisor.state("rollout/1") == "up"


def test_a_rank_that_hangs_or_was_given_up_takes_its_gang_with_it():
    supervisor = make(gang(when_hung="kill"))
    kill, end = supervisor.on_health("trainer/0", "hung", "in a collective", 1.0)
    assert isinstance(kill, Kill) and isinstance(end, End)
    assert (kill.child, end.children) == ("trainer/0", ("trainer/1",))
    supervisor = make(gang())
    assert kinds(supervisor.on_health("trainer/0", "given up", "the connection is lost", 1.0)) == ["Kill"]
    assert kinds(supervisor.on_exit("trainer/0", KILLED, 2.0)) == ["End"]
    assert launch(supervisor, supervisor.on_exit("trainer/1", 0, 3.0)).children == ("trainer/0", "trainer/1")


# -- the end of the run ------------------------------------------------------------------------------------------------


def test_a_run_that_ends_names_what_to_end_last_started_first_and_starts_none_again():
    supervisor = make(alone("buffer"), gang(), rollouts(3))
    supervisor.on_exit("rollout/1", 1, 1.0)
    supervisor.stop()
    supervisor.stop()
    assert supervisor.roles == ("buffer", "trainer", "rollout")
    assert supervisor.state("rollout/1") == "stopped", "it was waiting for its restart"
    assert not supervisor.on_launch("rollout/1", 1)
    assert supervisor.end_role("rollout") == ("rollout/2", "rollout/0")
    assert supervisor.end_role("trainer") == ("trainer/1", "trainer/0")
    for name, status in {"rollout/0": 1, "rollout/2": 0, "trainer/1": 2, "trainer/0": KILLED}.items():
        assert supervisor.on_exit(name, status, 3.0) == []
    assert supervisor.alive == ("buffer",)


def test_the_end_of_the_run_waits_for_no_child_that_hands_back_work():
    supervisor = make(alone("buffer"), rollouts(2))
    supervisor.retire("rollout/1", WISH, 1.0)
    supervisor.renew("rollout/0", WISH, 1.0)
    supervisor.stop()
    assert supervisor.end_role("rollout") == ("rollout/1", "rollout/0")
    assert supervisor.on_drained("rollout/1") == []


# -- what a person asks for --------------------------------------------------------------------------------------------


def test_a_child_that_retires_hands_back_its_work_then_ends_and_is_no_child_any_more():
    supervisor = make(rollouts(2))
    assert supervisor.retire("rollout/1", WISH, 1.0) == [Drain(("rollout/1",), WISH)]
    assert (supervisor.state("rollout/1"), supervisor.is_retiring("rollout/1")) == ("draining", True)
    assert supervisor.retire("rollout/1", WISH, 1.0) == [], "once is enough"
    assert supervisor.on_drained("rollout/1") == [End(("rollout/1",), 10.0, WISH)]
    assert supervisor.on_drained("rollout/1") == []
    assert supervisor.on_exit("rollout/1", 0, 3.0) == [Retired("rollout/1")]
    assert supervisor.alive == ("rollout/0",)
    with pytest.raises(SupervisionError, match="no child is named 'rollout/1'"):
        supervisor.state("rollout/1")
    assert not supervisor.on_launch("rollout/1", 0)
    assert supervisor.on_drained("rollout/1") == [], "it may be late"


def test_a_child_that_hangs_or_has_not_begun_is_asked_to_end_at_once():
    supervisor = make(rollouts(2))
    supervisor.on_health("rollout/0", "hung", "no beat", 0.0)
    assert supervisor.retire("rollout/0", WISH, 1.0) == [End(("rollout/0",), 10.0, WISH)]
    supervisor.retire("rollout/1", WISH, 1.0)
    assert supervisor.on_health("rollout/1", "suspect", "no beat", 2.0) == []
    ends = supervisor.on_health("rollout/1", "hung", "no beat", 12.0)
    assert ends == [End(("rollout/1",), 10.0, WISH)], "it was handing back its work"
    supervisor.grow("rollout", "rollout/2")
    assert supervisor.on_launch("rollout/2", 0)
    assert supervisor.retire("rollout/2", WISH, 1.0) == [End(("rollout/2",), 10.0, WISH)]
    supervisor.grow("rollout", "rollout/3")
    assert supervisor.retire("rollout/3", WISH, 1.0) == [Retired("rollout/3")], "it was never started"


def test_a_child_that_comes_later_is_as_any_other_and_its_name_may_come_again():
    supervisor = make(rollouts(2))
    join(supervisor, "rollout/2")
    restart = launch(supervisor, supervisor.on_exit("rollout/2", KILLED, 1.0))
    assert (restart.attempts, restart.budget) == ((1,), "rollout/2")
    assert supervisor.restarts_left("rollout/2", 1.0) == 0
    supervisor.retire("rollout/2", WISH, 1.0)
    supervisor.on_exit("rollout/2", 0, 1.0)
    join(supervisor, "rollout/2")
    assert supervisor.attempt("rollout/2") == 2, "log files of attempts 0 and 1 are there"
    assert supervisor.restarts_left("rollout/2", 1.0) == 1
    supervisor.stop()
    assert supervisor.end_role("rollout") == ("rollout/2", "rollout/1", "rollout/0")
    assert supervisor.retire("rollout/0", WISH, 1.0) == []


REFUSED: dict[str, tuple[Callable[[Supervisor], Any], str]] = {
    "a rank goes": (lambda s: s.retire("trainer/1", WISH, 1.0), "trainer/1 is a rank of gang trainer"),
    "a rank comes": (lambda s: s.grow("trainer", "trainer/2"), "trainer is a gang"),
    "a name in use": (lambda s: s.grow("rollout", "rollout/1"), "named twice: rollout/1"),
    "a role that is none": (lambda s: s.grow("judge", "judge/0"), "there is no role 'judge'"),
    "an end of an unknown child": (lambda s: s.on_exit("b", 1, 0.0), "no child is named 'b'"),
    "a hang of an unknown child": (lambda s: s.on_health("b", "hung", "", 0.0), "no child is named 'b'"),
    "one that joins a run that ends": (
        lambda s: (s.stop(), s.grow("rollout", "rollout/2")), "the run ends",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused_and_changes_nothing(what: str):
    supervisor = make(gang(), rollouts(2))
    wish, words = REFUSED[what]
    before = supervisor.alive
    with pytest.raises(SupervisionError, match=words):
        wish(supervisor)
    assert supervisor.alive == before


def test_a_wished_restart_drains_first_and_spends_nothing():
    supervisor = make(gang(), rollouts(2))
    for number in range(1, 4):
        assert supervisor.renew("rollout/0", WISH, 1.0) == [Drain(("rollout/0",), WISH)]
        supervisor.on_drained("rollout/0")
        restart = launch(supervisor, supervisor.on_exit("rollout/0", KILLED if number == 3 else 0, 1.0))
        assert restart == Restart(("rollout/0",), (number,), 0.0, WISH, "")
        assert supervisor.restarts_left("rollout/0", 1.0) == 1
    assert supervisor.renew("trainer/0", WISH, 1.0) == [Drain(("trainer/1", "trainer/0"), WISH)]
    supervisor.on_drained("trainer/0")
    supervisor.on_drained("trainer/1")
    assert supervisor.on_exit("trainer/1", 0, 2.0) == []
    assert supervisor.on_exit("trainer/0", 0, 2.0) == [Restart(("trainer/0", "trainer/1"), (1, 1), 0.0, WISH, "")]


# -- words and states --------------------------------------------------------------------------------------------------


def test_statuses_have_words_and_every_state_but_the_last_two_has_a_way_out():
    assert [describe_status(status) for status in (3, -11, -99)] == ["exit status 3", "signal SIGSEGV", "signal 99"]
    assert {state for state, _ in TRANSITIONS} == (set(TRANSITIONS.values()) | {"waiting"}) - OVER
    assert set(TRANSITIONS.values()) >= OVER
    assert {state for state, event in TRANSITIONS if event == "exit"} == ALIVE
