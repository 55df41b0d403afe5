"""Strategies, restart types, budgets, pauses, quorums and the order of ends, by example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import pytest

from myxa.core.supervision import (
    ALIVE,
    OVER,
    TRANSITIONS,
    AllEnded,
    Backoff,
    End,
    FailRun,
    GangRound,
    GiveUp,
    Instruction,
    Kill,
    Restart,
    RestartBudget,
    Supervisor,
)
from myxa.core.supervision_tree import BranchSpec, ChildSpec, SupervisionError

KILLED = -9
LATE = 1000.0
BACKOFF = Backoff(first_s=1.0, limit_s=8.0)

T = TypeVar("T")
U = TypeVar("U")


def alone(name: str, max_restarts: int = 3, **options) -> BranchSpec:
    """A child with a budget of its own."""
    return BranchSpec(name, (ChildSpec(name, **options),), max_restarts=max_restarts)


def gang(name: str, size: int, max_restarts: int = 3) -> BranchSpec:
    return BranchSpec(name, tuple(ChildSpec(f"{name}/{r}") for r in range(size)), "gang", max_restarts)


def run(*members, **options) -> BranchSpec:
    return BranchSpec("run", members, max_restarts=options.pop("max_restarts", 0), **options)


def make(root: BranchSpec, *, is_launched: bool = True, is_up: bool = True) -> Supervisor:
    supervisor = Supervisor(root, jitter=lambda: 0.0, backoff=BACKOFF)
    for name in supervisor._tree.children if is_launched else ():
        supervisor.on_launch(name)
        if is_up:
            supervisor.on_up(name)
    return supervisor


def launch(supervisor: Supervisor, restart: Restart) -> None:
    for name, attempt in zip(restart.children, restart.attempts, strict=True):
        assert supervisor.may_launch(name, attempt)
        supervisor.on_launch(name)
        supervisor.on_up(name)


def first(instructions: Sequence[Instruction], kind: type[T]) -> T:
    instruction = instructions[0]
    assert isinstance(instruction, kind)
    return instruction


def only(instructions: Sequence[Instruction], kind: type[T]) -> T:
    assert len(instructions) == 1
    return first(instructions, kind)


def both(instructions: Sequence[Instruction], one: type[T], other: type[U]) -> tuple[T, U]:
    assert len(instructions) == 2
    return first(instructions, one), first(instructions[1:], other)


# -- one_for_one -----------------------------------------------------------------------------------------------------


def test_the_first_restart_comes_at_once_then_the_pause_doubles_up_to_its_limit_and_the_lot_takes_at_most_half():
    assert [BACKOFF.delay(n, 0.0) for n in range(6)] == [0, 1, 2, 4, 8, 8]
    assert BACKOFF.delay(2, 0.5) == pytest.approx(1.5)
    assert BACKOFF.delay(2, 0.999999) > 1.0
    assert BACKOFF.delay(5000, 0.0) == 8.0


def test_the_fourth_end_within_the_period_fails_the_run_and_names_the_budget():
    supervisor = make(run(alone("rollout/0"), alone("buffer")))
    for n in range(3):
        restart = only(supervisor.on_exit("rollout/0", 1, 10.0 * n), Restart)
        launch(supervisor, restart)
    fail, end = both(supervisor.on_exit("rollout/0", 1, 40.0), FailRun, End)
    assert (fail.culprit, fail.exit_code) == ("rollout/0", 4)
    assert fail.reason == "rollout/0 ended with exit status 1 and its budget of 3 restarts in 300 s is spent"
    assert end == End(("buffer",), (10.0,), fail.reason)
    assert supervisor.state("rollout/0") == "failed"
    assert supervisor.on_exit("buffer", 0, 41.0) == [AllEnded()]


def test_who_has_lived_for_a_while_is_started_again_at_once_and_the_budget_counts_all_the_same():
    budget, backoff = RestartBudget(5, 300.0), Backoff(first_s=1.0, calm_s=10.0)
    delays: list[float] = []
    for now in (0.0, 5.0, 14.0, 100.0, 110.0):
        assert budget.reserve(now)
        delays.append(budget.spend(now, backoff, 0.0))
    assert delays == [0.0, 1.0, 2.0, 0.0, 0.0], "at 14 it had run for 8 s after a pause of 1"
    assert not budget.reserve(120.0)


def test_restarts_that_led_to_work_do_not_count_a_period_later():
    supervisor = make(run(alone("rollout/0", 1)))
    for n in range(5):
        restart = only(supervisor.on_exit("rollout/0", 1, 310.0 * n), Restart)
        assert restart.delay_s == 0.0, "the first one again comes at once"
        launch(supervisor, restart)
        supervisor.on_work("rollout/0", 310.0 * n + 10.0)
        supervisor.on_work("rollout/0", 310.0 * n + 20.0)  # it may be seen as often as one likes
    _, done = both(supervisor.on_exit("rollout/0", 1, 310.0 * 4 + 309.0), FailRun, AllEnded)
    assert done == AllEnded()


@pytest.mark.parametrize("lasts_s", [120.0, 302.0, 10_000.0])
@pytest.mark.parametrize("answers", [True, False])
def test_attempts_that_take_long_to_fail_and_come_to_no_work_run_out_all_the_same(lasts_s: float, answers: bool):
    supervisor = make(run(alone("rollout/0")), is_up=answers)
    for n in range(1, 4):
        restart = only(supervisor.on_exit("rollout/0", 3, lasts_s * n), Restart)
        supervisor.on_launch("rollout/0")
        if answers:
            supervisor.on_up("rollout/0")  # its process joined; its model loads
        supervisor.on_work("rollout/0" if not answers else "rollout/9", lasts_s * n)  # of nobody, and too late: nothing
        assert restart.attempts == (n,)
    fail, _ = both(supervisor.on_exit("rollout/0", 3, lasts_s * 4), FailRun, AllEnded)
    told = "3 restarts in 300 s is" if 3 * lasts_s < 300 else "3 restarts that come to no work is"
    assert f"its budget of {told} spent" in fail.reason


def test_a_gang_has_come_to_work_when_all_its_ranks_have():
    supervisor = make(run(gang("trainer", 2, max_restarts=1)))
    supervisor.on_exit("trainer/0", 1, 0.0)
    launch(supervisor, only(supervisor.on_exit("trainer/1", 1, 0.0), Restart))
    supervisor.on_work("trainer/0", 1.0)
    assert supervisor.restarts_left("trainer/0", 1000.0) == 0, "rank 1 has not been seen"
    supervisor.on_work("trainer/1", 1000.0)
    assert supervisor.restarts_left("trainer/0", 1299.0) == 0
    assert supervisor.restarts_left("trainer/0", 1300.0) == 1


# -- all, the rest, a gang ---------------------------------------------------------------------------------------------


def test_one_for_all_ends_the_others_one_by_one_backwards_and_starts_all_in_order():
    supervisor = make(BranchSpec("b", tuple(ChildSpec(n, grace_s=g) for n, g in zip("abcd", (1, 2, 3, 4), strict=True)), "one_for_all"))  # fmt: skip
    assert supervisor.on_exit("b", 1, 0.0) == [End(("d",), (4,), "b ended with exit status 1")]
    assert supervisor.on_exit("d", 0, 0.1) == [End(("c",), (3,), "b ended with exit status 1")]
    assert supervisor.on_exit("a", 7, 0.2) == [], "it ended before it was told; it starts again with the others"
    restart = only(supervisor.on_exit("c", 0, 0.3), Restart)
    assert restart == Restart(("a", "b", "c", "d"), (1, 1, 1, 1), 0.0, "b ended with exit status 1", "b")
    launch(supervisor, restart)


def test_rest_for_one_leaves_those_that_were_started_before():
    supervisor = make(BranchSpec("b", tuple(ChildSpec(n) for n in "abcd"), "rest_for_one"))
    end = only(supervisor.on_exit("b", KILLED, 0.0), End)
    assert end.children == ("d",)
    supervisor.on_exit("d", 0, 0.0)
    restart = only(supervisor.on_exit("c", 0, 0.0), Restart)
    assert restart.children == ("b", "c", "d")
    assert supervisor.state("a") == "up"
    launch(supervisor, restart)
    assert [supervisor.attempt(n) for n in "abcd"] == [0, 1, 1, 1]
    restart = only(supervisor.on_exit("d", 1, 1.0), Restart)
    assert (restart.children, restart.attempts) == (("d",), (2,)), "nobody was started after it"


def test_a_gang_ends_together_and_starts_again_together_at_a_new_meeting_place():
    supervisor = make(run(alone("buffer"), gang("trainer", 3)))
    assert supervisor.round("trainer") == GangRound("trainer", 0, "trainer.0")
    end = only(supervisor.on_exit("trainer/1", KILLED, 5.0), End)
    assert end.children == ("trainer/2", "trainer/0"), "at the same time: each waits for the others"
    assert not supervisor.may_launch("trainer/1", 0)
    assert supervisor.on_exit("trainer/0", 1, 5.1) == []
    restart = only(supervisor.on_exit("trainer/2", -15, 5.2), Restart)
    assert restart == Restart(
        ("trainer/0", "trainer/1", "trainer/2"), (1, 1, 1), 0.0, "trainer/1 ended with signal SIGKILL",
        "trainer", (GangRound("trainer", 1, "trainer.1"),),
    ), "the cause is the first end, not the last"  # fmt: skip
    assert supervisor.state("buffer") == "up"
    assert supervisor.round("trainer").rendezvous == "trainer.1"


# -- escalation, restart types, quorum ---------------------------------------------------------------------------------


def test_a_branch_that_spent_its_budget_is_restarted_as_a_whole_by_the_one_above():
    inner = BranchSpec("inner", (ChildSpec("b"), ChildSpec("c")), max_restarts=1)
    supervisor = make(run(ChildSpec("a"), inner, strategy="rest_for_one", max_restarts=1))
    restart = only(supervisor.on_exit("c", 1, 0.0), Restart)
    launch(supervisor, restart)
    end = only(supervisor.on_exit("c", 1, 1.0), End)
    assert end.children == ("b",)
    restart = only(supervisor.on_exit("b", 0, 1.1), Restart)
    assert (restart.children, restart.attempts) == (("b", "c"), (1, 2))
    launch(supervisor, restart)
    fail, end = both(supervisor.on_exit("c", 1, 2.0), FailRun, End)
    assert "its budget of 1 restarts in 300 s is spent and run's budget of 1 restarts" in fail.reason
    assert end.children == ("b",)
    assert first(supervisor.on_exit("b", 0, 2.1), End).children == ("a",)


def test_transient_children_may_finish_and_temporary_ones_are_never_started_again():
    supervisor = make(
        BranchSpec("b", (ChildSpec("t", "transient"), ChildSpec("u", "transient"), ChildSpec("x")), quorum=1)
    )
    assert supervisor.on_exit("t", 0, 0.0) == []
    assert supervisor.state("t") == "stopped"
    assert isinstance(supervisor.on_exit("u", 3, 0.0)[0], Restart)
    never = make(run(alone("coordinator", restart="temporary")))
    fail, done = both(never.on_exit("coordinator", 0, 1.0), FailRun, AllEnded)
    assert (fail.exit_code, done) == (4, AllEnded())
    assert fail.reason == "coordinator ended with exit status 0 and is never restarted"


def rollouts(quorum: int, size: int = 3, **options) -> BranchSpec:
    members = tuple(alone(f"rollout/{i}", 1, **options) for i in range(size))
    return BranchSpec("rollout", members, max_restarts=0, quorum=quorum)


def test_a_run_goes_on_without_a_child_while_enough_others_are_left():
    supervisor = make(run(alone("buffer"), rollouts(2)))
    launch(supervisor, first(supervisor.on_exit("rollout/1", 1, 0.0), Restart))
    news = only(supervisor.on_exit("rollout/1", 1, 1.0), GiveUp)
    reason = "rollout/1 ended with exit status 1 and its budget of 1 restarts in 300 s is spent"
    assert news == GiveUp("rollout/1", reason, 2, 2)
    assert supervisor.state("rollout/1") == "failed"
    launch(supervisor, first(supervisor.on_exit("rollout/0", 1, 2.0), Restart))
    fail, end = both(supervisor.on_exit("rollout/0", 1, 3.0), FailRun, End)
    assert fail.culprit == "rollout/0"
    assert end.children == ("rollout/2",)


def test_a_quorum_also_covers_children_that_are_never_restarted_and_lost_nodes():
    supervisor = make(run(alone("buffer"), rollouts(1, restart="temporary")))
    assert isinstance(supervisor.on_exit("rollout/2", KILLED, 0.0)[0], GiveUp)
    assert supervisor.on_lost("launcher/1", ["rollout/1"], "launcher/1 is gone", 1.0) == [
        GiveUp("rollout/1", "launcher/1 is gone", 1, 1)
    ]
    fail, end = both(supervisor.on_lost("launcher/2", ["rollout/0"], "launcher/2 is gone", 2.0), FailRun, End)
    assert fail == FailRun("launcher/2", "launcher/2 is gone", 4)
    assert end.children == ("buffer",)


# -- hung ----------------------------------------------------------------------------------------------------------------


def test_a_hung_child_is_a_state_of_its_own_and_may_recover():
    supervisor = make(run(alone("rollout/0")))
    assert supervisor.on_health("rollout/0", "suspect", "no beat for 3 s", 1.0) == []
    assert supervisor.state("rollout/0") == "up"
    assert supervisor.on_health("rollout/0", "hung", "no beat for 14 s", 2.0) == []
    assert supervisor.state("rollout/0") == "hung"
    assert supervisor.alive == ("rollout/0",)
    supervisor.on_health("rollout/0", "recovered", "", 3.0)
    assert supervisor.state("rollout/0") == "up"
    supervisor.on_health("rollout/0", "hung", "", 4.0)
    assert isinstance(supervisor.on_exit("rollout/0", 1, 5.0)[0], Restart)
    assert supervisor.on_health("rollout/0", "hung", "late news", 6.0) == []
    assert supervisor.on_health("rollout/0", "recovered", "late news", 6.0) == []


def test_a_hung_child_is_killed_if_that_is_wanted_and_then_its_restart_rule_decides():
    supervisor = make(run(alone("rollout/0", 1, when_hung="kill")))
    assert supervisor.on_health("rollout/0", "hung", "no beat for 14 s", 2.0) == [
        Kill(("rollout/0",), "rollout/0 hangs (no beat for 14 s)")
    ]
    assert supervisor.on_health("rollout/0", "hung", "still", 2.5) == [], "once"
    restart = only(supervisor.on_exit("rollout/0", KILLED, 3.0), Restart)
    assert restart.reason == "rollout/0 hangs (no beat for 14 s), was killed"
    launch(supervisor, restart)
    _, fail = both(supervisor.on_health("rollout/0", "hung", "again", 4.0), Kill, FailRun)
    assert fail.reason.endswith("was killed and its budget of 1 restarts in 300 s is spent")
    assert supervisor.on_exit("rollout/0", KILLED, 5.0) == [AllEnded()]


def test_one_that_all_others_gave_up_is_ended_whatever_is_wanted_of_hung_ones():
    supervisor = make(run(alone("rollout/0", 3)))
    assert supervisor.on_health("rollout/0", "given up", "the connection is lost", 2.0) == [
        Kill(("rollout/0",), "rollout/0 is given up by the others (the connection is lost)")
    ]
    assert supervisor.on_health("rollout/0", "given up", "late news", 2.5) == []
    restart = only(supervisor.on_exit("rollout/0", KILLED, 3.0), Restart)
    told = "rollout/0 is given up by the others (the connection is lost) and ended with signal SIGKILL"
    assert restart.reason == told
    launch(supervisor, restart)
    supervisor.on_health("rollout/0", "hung", "no beat", 4.0)
    only(supervisor.on_health("rollout/0", "given up", "the connection is lost", 5.0), Kill)


@pytest.mark.parametrize("status", [2, 5])
def test_one_that_was_given_up_while_it_ended_by_itself_is_judged_by_how_it_ended(status: int):
    supervisor = make(run(alone("rollout/0", 3), alone("buffer")))
    only(supervisor.on_health("rollout/0", "given up", "it failed", 2.0), Kill)
    fail, _ = both(supervisor.on_exit("rollout/0", status, 3.0), FailRun, End)
    assert fail.exit_code == status and "another attempt would end the same way" in fail.reason


def test_a_hung_rank_takes_its_gang_with_it():
    members = tuple(ChildSpec(f"trainer/{r}", when_hung="kill") for r in range(2))
    supervisor = make(run(BranchSpec("trainer", members, "gang")))
    kill, end = both(supervisor.on_health("trainer/0", "hung", "in a collective", 1.0), Kill, End)
    assert (kill.children, end.children) == (("trainer/0",), ("trainer/1",))


# -- ends ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [2, 5])
def test_a_wrong_configuration_or_wrong_data_is_not_tried_again(status: int):
    supervisor = make(run(rollouts(1, 1)))
    fail, _ = supervisor.on_exit("rollout/0", status, 1.0)
    assert isinstance(fail, FailRun)
    assert fail.exit_code == status


def test_stop_ends_role_by_role_last_started_first_and_starts_none_again():
    supervisor = make(run(alone("buffer"), gang("trainer", 2), rollouts(0)))
    supervisor.on_exit("rollout/1", 1, 1.0)
    end = only(supervisor.stop("asked to", 2.0), End)
    assert end.children == ("rollout/2", "rollout/0")
    assert supervisor.state("rollout/1") == "stopped", "it was waiting for its restart"
    assert not supervisor.may_launch("rollout/1", 1)
    assert supervisor.stop("asked again", 2.0) == []
    assert supervisor.on_exit("rollout/0", 1, 3.0) == []
    assert first(supervisor.on_exit("rollout/2", 0, 3.0), End).children == ("trainer/1", "trainer/0")
    supervisor.on_exit("trainer/1", 0, 3.0)
    assert first(supervisor.on_exit("trainer/0", 0, 3.0), End).children == ("buffer",)
    assert supervisor.on_exit("buffer", 0, 3.0) == [AllEnded()]
    assert supervisor.stop("once more", 4.0) == [AllEnded()]


def test_events_that_cannot_happen_and_names_that_nobody_has_are_refused():
    supervisor = make(run(ChildSpec("a")), is_up=False)
    with pytest.raises(SupervisionError, match="'launch' cannot happen"):
        supervisor.on_launch("a")
    for event in (lambda: supervisor.on_exit("b", 1, 0.0), lambda: supervisor.on_health("b", "hung", "", 0.0)):
        with pytest.raises(SupervisionError, match="no child is named 'b'"):
            event()
    with pytest.raises(SupervisionError, match="there is no gang 'a'"):
        supervisor.round("a")


@pytest.mark.parametrize(
    ("tree", "complaint"),
    [
        (run(ChildSpec("a"), ChildSpec("a")), "children named twice: a"),
        (run(alone("a"), BranchSpec("a", (ChildSpec("b"),))), "branches named twice: a"),
        (run(), "branch run has no members"),
        (run(ChildSpec("a"), quorum=2), "2 of 1 members is no quorum"),
        (run(ChildSpec("a"), max_restarts=-1), "-1 restarts"),
        (run(BranchSpec("g", (ChildSpec("a", "transient"),), "gang")), "gang g"),
        (run(BranchSpec("g", (ChildSpec("a"),), "gang", quorum=1)), "gang g"),
    ],
)  # fmt: skip
def test_trees_that_make_no_sense_are_refused(tree: BranchSpec, complaint: str):
    with pytest.raises(SupervisionError, match=complaint):
        make(tree)


def test_every_state_but_the_last_two_has_a_way_out_and_every_process_can_end():
    assert {state for state, _ in TRANSITIONS} == (set(TRANSITIONS.values()) | {"waiting"}) - OVER
    assert set(TRANSITIONS.values()) >= OVER
    assert {state for state, event in TRANSITIONS if event == "exit"} == ALIVE
