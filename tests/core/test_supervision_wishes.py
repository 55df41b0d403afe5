"""What a person may ask of a live run: one more child, one less, a restarted one. By example."""

from __future__ import annotations

import pytest

from myxa.core.supervision import (
    Backoff,
    Drain,
    End,
    FailRun,
    GangRound,
    GiveUp,
    Restart,
    Retired,
    Supervisor,
)
from myxa.core.supervision_tree import BranchSpec, ChildSpec, SupervisionError

KILLED = -9
WISH = "somebody wished it"


def alone(name: str, max_restarts: int = 1) -> BranchSpec:
    return BranchSpec(name, (ChildSpec(name, grace_s=7.0),), max_restarts=max_restarts)


def run(num_rollouts: int = 2, quorum: int = 0) -> Supervisor:
    rollouts = tuple(alone(f"rollout/{i}") for i in range(num_rollouts))
    trainer = BranchSpec("gang trainer", (ChildSpec("trainer/0"), ChildSpec("trainer/1")), "gang", 1)
    tree = BranchSpec(
        "run", (alone("buffer"), trainer, BranchSpec("role rollout", rollouts, max_restarts=0, quorum=quorum)),
        max_restarts=0,
    )  # fmt: skip
    supervisor = Supervisor(tree, jitter=lambda: 0.0, backoff=Backoff(first_s=1.0))
    for name in ("buffer", "trainer/0", "trainer/1", *(f"rollout/{i}" for i in range(num_rollouts))):
        up(supervisor, name)
    return supervisor


def up(supervisor: Supervisor, name: str) -> None:
    supervisor.on_launch(name)
    supervisor.on_up(name)


def join(supervisor: Supervisor, name: str) -> None:
    supervisor.grow("role rollout", alone(name))
    up(supervisor, name)


# -- retire ------------------------------------------------------------------------------------------------------------


def test_who_retires_hands_back_its_work_then_ends_and_is_no_child_any_more():
    supervisor = run()
    assert supervisor.retire("rollout/1", WISH, 1.0) == [Drain(("rollout/1",), WISH)]
    assert (supervisor.state("rollout/1"), supervisor.is_retiring("rollout/1")) == ("draining", True)
    assert supervisor.retire("rollout/1", WISH, 1.0) == [], "once is enough"
    assert supervisor.on_drained("rollout/1", 2.0) == [End(("rollout/1",), (7.0,), WISH)]
    assert supervisor.on_drained("rollout/1", 2.0) == []
    assert supervisor.on_exit("rollout/1", 0, 3.0) == [Retired(("rollout/1",))]
    assert "rollout/1" not in supervisor.alive
    with pytest.raises(SupervisionError, match="no child is named 'rollout/1'"):
        supervisor.state("rollout/1")
    assert not supervisor.may_launch("rollout/1", 0)
    assert supervisor.on_drained("rollout/1", 4.0) == [], "it may be late"


def test_who_hangs_or_has_not_begun_is_told_to_end_at_once():
    supervisor = run()
    supervisor.on_health("rollout/0", "hung", "no beat", 0.0)
    assert supervisor.retire("rollout/0", WISH, 1.0) == [End(("rollout/0",), (7.0,), WISH)]
    supervisor.grow("role rollout", alone("rollout/2"))
    supervisor.on_launch("rollout/2")
    assert supervisor.retire("rollout/2", WISH, 1.0) == [End(("rollout/2",), (7.0,), WISH)]
    supervisor.grow("role rollout", alone("rollout/3"))
    assert supervisor.retire("rollout/3", WISH, 1.0) == [Retired(("rollout/3",))], "it was never started"


def test_a_rank_of_a_gang_cannot_go_and_none_can_come():
    supervisor = run()
    with pytest.raises(SupervisionError, match="trainer/1 is a rank of gang trainer"):
        supervisor.retire("trainer/1", WISH, 1.0)
    with pytest.raises(SupervisionError, match="gang"):
        supervisor.grow("gang trainer", ChildSpec("trainer/2"))


# -- grow --------------------------------------------------------------------------------------------------------------


def test_a_name_that_comes_again_has_a_higher_attempt_and_a_fresh_budget():
    supervisor = run()
    supervisor.on_exit("rollout/1", 1, 0.0)
    up(supervisor, "rollout/1")
    assert supervisor.restarts_left("rollout/1", 0.0) == 0
    supervisor.retire("rollout/1", WISH, 1.0)
    supervisor.on_exit("rollout/1", 0, 1.0)
    join(supervisor, "rollout/1")
    assert supervisor.attempt("rollout/1") == 2, "log files of attempts 0 and 1 are there"
    assert supervisor.restarts_left("rollout/1", 1.0) == 1


def test_the_run_does_without_an_extra_one_that_fails_for_good_also_where_all_must_be():
    supervisor = run()
    join(supervisor, "rollout/2")
    (news,) = supervisor.on_exit("rollout/2", 2, 1.0)
    assert isinstance(news, GiveUp)
    assert (news.num_left, news.quorum) == (2, 1), "anybody"
    assert isinstance(supervisor.on_exit("rollout/0", 2, 2.0)[0], FailRun), "one of the first"


def test_an_extra_one_is_not_needed_where_others_left_by_wish_and_the_last_one_always_is():
    supervisor = run()
    join(supervisor, "rollout/2")
    supervisor.retire("rollout/1", WISH, 1.0)
    supervisor.on_exit("rollout/1", 0, 1.0)
    (news,) = supervisor.on_lost("launcher/1", ["rollout/2"], "its node is gone", 2.0)
    assert isinstance(news, GiveUp)
    assert (news.num_left, news.quorum) == (1, 1), "two began, but somebody wished that one goes"
    join(supervisor, "rollout/3")
    supervisor.retire("rollout/0", WISH, 3.0)
    supervisor.on_exit("rollout/0", 0, 3.0)
    assert isinstance(supervisor.on_lost("launcher/2", ["rollout/3"], "gone", 4.0)[0], FailRun)


# -- renew -------------------------------------------------------------------------------------------------------------


def test_a_wished_restart_drains_first_and_spends_nothing():
    supervisor = run()
    for number in range(1, 4):
        assert supervisor.renew("rollout/0", WISH, 1.0) == [Drain(("rollout/0",), WISH)]
        supervisor.on_drained("rollout/0", 1.0)
        restart = Restart(("rollout/0",), (number,), 0.0, WISH, "")
        assert supervisor.on_exit("rollout/0", 0, 1.0) == [restart]
        assert supervisor.restarts_left("rollout/0", 1.0) == 1
        up(supervisor, "rollout/0")
    assert supervisor.state("rollout/1") == "up"


def test_a_gang_restarts_as_a_whole():
    supervisor = run()
    assert supervisor.renew("trainer/0", WISH, 1.0) == [Drain(("trainer/1", "trainer/0"), WISH)]
    supervisor.on_drained("trainer/0", 1.0)
    supervisor.on_drained("trainer/1", 1.0)
    assert supervisor.on_exit("trainer/1", 0, 2.0) == []
    rounds = (GangRound("gang trainer", 1, "gang trainer.1"),)
    assert supervisor.on_exit("trainer/0", 0, 2.0) == [
        Restart(("trainer/0", "trainer/1"), (1, 1), 0.0, WISH, "", rounds)
    ]


def test_nobody_joins_a_run_that_ends():
    supervisor = run()
    supervisor.stop("over", 1.0)
    with pytest.raises(SupervisionError, match="the run ends"):
        supervisor.grow("role rollout", alone("rollout/2"))
    assert supervisor.retire("rollout/0", WISH, 1.0) == []
