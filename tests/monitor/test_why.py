"""What holds a run back, on planted time shares, and what may be changed."""

from __future__ import annotations

from typing import Any

import pytest

from myxa.actors.trainer.train_loop import slowest_tenth
from myxa.core.errors import ConfigError
from myxa.core.messages import RolloutNow
from myxa.launch.views.why import Bound, Facts, describe_rollout, explain, judge, without_start

Shares = dict[str, dict[str, float]]

Kinds = dict[str, float]
HUNGRY: Kinds = {"compute": 0.3, "wait-data": 0.7}
HALF: Kinds = {"compute": 0.5, "wait-data": 0.5}
BUSY: Kinds = {"compute": 1.0}


def two(trainer: Kinds, rollout: Kinds, **more: Kinds) -> Shares:
    """Of a trainer and a rollout actor, and of `trainer_1`."""
    return {"trainer/0": trainer, "rollout/0": rollout, **{name.replace("_", "/"): one for name, one in more.items()}}


ON_REWARD = two(HUNGRY, {"compute": 0.1, "wait-data": 0.9, "wait-data/reward": 0.8, "wait-data/draw": 0.1})
CASES: list[tuple[Bound, Shares]] = [
    ("memory", two({"compute": 0.4, "wait-data": 0.2, "wait-memory": 0.4}, {"compute": 0.2})),
    ("generation", two({"compute": 0.38, "wait-data": 0.62}, {"compute": 0.97, "wait-data": 0.03})),
    ("generation", two(HALF, {"compute": 0.8, "wait-weights": 0.2}, trainer_1={"compute": 0.0, "wait-data": 1.0},
                       rollout_1=BUSY, buffer={"other": 1.0})),
    ("reward", ON_REWARD), ("data", two(HUNGRY, {"compute": 0.1, "wait-data": 0.9, "wait-data/draw": 0.9})),
    ("training", two({"compute": 0.95, "wait-data": 0.05}, {"compute": 0.4, "wait-capacity": 0.6})),
    ("capacity", two(HALF, {"compute": 0.45, "wait-capacity": 0.55})),
    ("weights", two(HALF, {"compute": 0.4, "wait-weights": 0.6})),
    ("weights", two({"compute": 0.5, "wait-data": 0.1, "wait-weights": 0.4}, BUSY)),
    ("capacity", two({"compute": 0.4, "wait-capacity": 0.6}, BUSY)),
    ("concurrency", two(HUNGRY, {"compute": 0.9, "compute/generate at limit": 0.8, "compute/generate": 0.1,
                                 "wait-data": 0.1})),
    ("generation", two({"compute": 0.1, "wait-data": 0.3, "other": 0.6, "other/start": 0.6},
                       {"compute": 0.4, "other": 0.6, "other/start": 0.4, "other/start, engine": 0.2})),
    ("checkpoint", two(BUSY | {"compute/train": 0.5, "compute/checkpoint": 0.2, "compute/copy checkpoint": 0.1}, HALF)),
    ("weights", two(BUSY | {"compute/train": 0.7, "compute/publish": 0.3}, HALF)),
    ("evaluation", two(HUNGRY, BUSY | {"rollouts/engine": 6.0, "rollouts/reward": 2.0, "held-out/rollouts": 5.0})),
    ("generation", two(HUNGRY, BUSY | {"rollouts/engine": 6.0, "rollouts/reward": 2.0, "held-out/rollouts": 3.0})),
    ("data", two(HUNGRY, {"wait-data": 1.0, "wait-data/draw": 1.0, "rollouts/engine": 1.0, "held-out/rollouts": 1.0})),
    ("starting", two({"other": 1.0, "other/start": 0.99}, {"other": 1.0, "other/start": 1.0})),
    ("none", two({"compute": 0.9, "wait-data": 0.1}, {"compute": 0.88, "wait-data": 0.12})),
    ("paused", two({"wait-data": 0.8, "paused": 0.2}, {"paused": 0.95, "compute": 0.05})),
    ("starting", two({"other": 0.8, "compute": 0.2}, BUSY)), ("unknown", {"trainer/0": BUSY}),
    ("unknown", two({}, BUSY)), ("unknown", {}), ("unknown", two({"wait-data": 1.0}, {"other": 1.0})),
]  # fmt: skip
"""Start-up is left out of the shares that are judged."""


@pytest.mark.parametrize(("bound", "shares"), CASES)
def test_planted_cases(bound: Bound, shares: Shares) -> None:
    verdict = judge(shares, Facts())
    assert verdict.bound == bound
    if bound in {"generation", "concurrency", "reward", "data", "training", "weights", "capacity"}:
        assert verdict.remedy
        assert verdict.share >= 0.25


def test_the_sentence_names_who_waits_how_long_and_for_what() -> None:
    sentence = judge(ON_REWARD, Facts()).sentence
    for word in ("trainer/0", "70 %", "reward", "rollout/0", "80 %"):
        assert word in sentence


def test_a_trainer_that_waits_for_the_first_evaluation_is_not_said_to_start() -> None:
    first = {"other": 1.0, "other/start": 0.1, "other/start, first engine": 0.9}
    evaluates = BUSY | {"rollouts/engine": 1.0, "held-out/rollouts": 1.0}
    assert "waits for the evaluation of the first weights" in judge(two(first, evaluates), Facts()).sentence
    assert "trainer/0 is starting" in judge(two(first, BUSY), Facts()).sentence


def test_the_leader_is_asked_and_not_the_ranks_that_wait_for_it() -> None:
    ranks: Shares = {f"trainer/{rank}": {"wait-data": 1.0} for rank in range(1, 12)}
    shares = ranks | two(BUSY, {"wait-capacity": 1.0})
    assert judge(shares, Facts()).bound == "training"


def test_more_requests_are_no_remedy_for_engines_that_are_full() -> None:
    shares = two(HUNGRY, {"compute": 0.9, "compute/generate at limit": 0.9, "wait-data": 0.1})
    assert judge(shares, Facts()).bound == "concurrency"
    assert judge(shares, Facts(gauges={"rollout/0": {"rollout/waiting": 1.0}})).bound == "generation"


@pytest.mark.parametrize(
    ("gauges", "is_full"),
    [
        ({"rollout/0": {"rollout/running": 4, "rollout/waiting": 0, "rollout/max_running": 64}}, False),
        ({"rollout/0": {"rollout/running": 64, "rollout/waiting": 0, "rollout/max_running": 64}}, True),
        ({"rollout/0": {"rollout/running": 4, "rollout/waiting": 2}}, True),
        ({"rollout/0": {"rollout/running": 4, "rollout/max_running": 0}}, False),
        ({"rollout/0": {"rollout/running": 8, "rollout/max_running": 8}, "rollout/1": {"rollout/max_running": 8}},
         False),
        ({"buffer": {"rollout/waiting": 5}}, False),
        ({}, False),
    ],
)  # fmt: skip
def test_engines_are_full_when_requests_wait_or_none_has_a_place_left(gauges: Shares, is_full: bool) -> None:
    assert Facts(gauges=gauges).engines_are_full is is_full


THROWN_AWAY = two({"compute": 0.05, "wait-data": 0.95}, {"compute": 0.97, "wait-data": 0.03})


def newest(**told: float) -> Shares:
    return {"buffer": {f"buffer/newest/{name}": value for name, value in told.items()}}


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"groups": 256, "left_out": 1, "flat": 1, "all_wrong": 1, "reward_min": 0, "reward_max": 0},
         "the filter leaves out 100 % of the newest 256 groups: the reward is always 0"),
        ({"groups": 64, "left_out": 1, "flat": 1, "all_right": 1, "reward_min": 1, "reward_max": 1}, "always 1"),
        (
            {"groups": 100, "left_out": 0.9, "flat": 0.9, "all_wrong": 0.8, "all_right": 0.1, "reward_max": 1},
            "90 % of the newest 100 groups: the answers of a group all get the same reward (all wrong 80 %, all right 10 %)",
        ),
        ({"groups": 100, "left_out": 0.9, "flat": 0.1, "reward_max": 1}, "see algo.group_filter"),
    ],
)  # fmt: skip
def test_f2_a_filter_that_leaves_nothing_is_named_and_not_generation(told: dict[str, float], says: str) -> None:
    """F2."""
    verdict = judge(THROWN_AWAY, Facts(gauges=newest(**told)))
    assert verdict.bound == "filter"
    assert says in verdict.sentence
    assert "generation" not in verdict.sentence
    assert "`myxa samples`" in verdict.remedy


@pytest.mark.parametrize("told", [{}, {"groups": 8, "left_out": 1}, {"groups": 256, "left_out": 0.5, "flat": 0.5}])
def test_a_filter_that_leaves_enough_is_not_to_blame(told: dict[str, float]) -> None:
    assert judge(THROWN_AWAY, Facts(gauges=newest(**told))).bound == "generation"


STARVED: Shares = {
    "trainer/0": {"compute": 0.2, "wait-data": 0.5, "wait-data/claim": 0.5, "other": 0.3, "other/start": 0.3},
    "rollout/0": {"compute": 0.9, "compute/generate at limit": 0.9, "wait-data": 0.1, "wait-data/reward": 0.06},
    "rollout/1": {"compute": 0.9, "compute/generate at limit": 0.9, "wait-data": 0.1},
    "buffer": {"wait-data": 0.99, "compute": 0.01},
}


def test_why_is_one_record_for_people_and_programs() -> None:
    reason = explain(STARVED, Facts(), window_s=60)
    assert reason.bound == judge(STARVED, Facts()).bound == "concurrency"
    assert "trainer/0 waits for data 71 % of the time" in reason.sentence
    assert reason.remedy.startswith("`myxa set concurrency=N`: ")
    assert reason.shares["trainer/0"]["compute"] == pytest.approx(0.2857)
    assert reason.shares["trainer/0"]["other"] == 0.0
    other = explain(
        {**STARVED, **{f"rollout/{i}": {"wait-data": 1, "wait-data/reward": 1} for i in range(2)}}, Facts(), window_s=60
    )
    assert other.remedy.startswith("reward.workers spreads the function over processes")


def test_why_of_one_actor_says_what_it_does_beside_the_run() -> None:
    reason = explain(STARVED, Facts(), target="rollout/0")
    assert reason.sentence.startswith(
        "rollout/0: compute 90 % (generate at limit 90 %), wait-data 10 % (reward 6 %); the run: "
    )
    assert "concurrency is the bottleneck" in reason.sentence and set(reason.shares) == {"rollout/0"}
    assert set(explain(STARVED, Facts(), target="rollout").shares) == {
        name for name in STARVED if name.startswith("rollout/")
    }
    starting = {"rollout/2": {"other": 1.0, "other/start": 1.0}}
    assert "rollout/2: it is starting" in explain(starting, Facts(), target="rollout/*").sentence
    with pytest.raises(ConfigError, match="no actor of this run is called 'rolout'"):
        explain(STARVED, Facts(), target="rolout")


def test_a_reward_whose_calls_are_all_messages_is_not_told_to_be_cheaper() -> None:
    calls = {"rewards/queue": 5.0, "rewards/function": 0.1, "rewards/messages": 0.9, "rollouts/reward": 3.0,
             "rollouts/generate": 1.0}  # fmt: skip
    shares = {**ON_REWARD, "rollout/0": ON_REWARD["rollout/0"] | calls}
    reason = explain(shares, Facts())
    assert reason.bound == "reward" and "90 % of a call" in reason.sentence
    assert "built-in" in reason.remedy and "reward.workers" not in reason.remedy
    assert reason.rollouts == pytest.approx(
        {"reward queue": 0.625, "generate": 0.25, "reward messages": 0.1125, "reward function": 0.0125}
    )
    assert "rewards/queue" not in reason.shares["rollout/0"]
    slow = {**shares, "rollout/0": shares["rollout/0"] | {"rewards/function": 2.0}}
    assert "reward.workers" in explain(slow, Facts()).remedy


@pytest.mark.parametrize(
    ("bound", "trainer", "rollout"),
    [("generation", HUNGRY, {"compute": 0.9, "wait-data": 0.1}), ("training", BUSY, {"compute": 0.4, "wait-capacity": 0.6})],
)  # fmt: skip
def test_no_actor_is_to_be_added_on_a_host_whose_processors_are_taken(
    bound: Bound, trainer: Kinds, rollout: Kinds
) -> None:
    taken, free = {"cpu/ran": 0.6, "cpu/waited": 0.4}, {"cpu/ran": 1.5, "cpu/waited": 0.1}
    culprit = "trainer/0" if bound == "training" else "rollout/0"
    for waits in (taken, free):
        shares = two(trainer | free, rollout | free)
        shares[culprit] = shares[culprit] | waits
        verdict = judge(shares, Facts())
        assert verdict.bound == bound
        assert (f"{culprit} waits for a processor 40 %" in verdict.sentence) is (waits is taken)
        assert ("more cores" in verdict.remedy) is (waits is taken)
        assert ("myxa scale" in verdict.remedy) is (bound == "generation" and waits is free)


def test_single_steps_that_take_most_of_the_time_are_named_and_not_the_average() -> None:
    shares = two({"compute": 0.92, "wait-data": 0.08}, {"compute": 0.5, "wait-capacity": 0.5})
    steps = slowest_tenth([1.0] * 45 + [9.0] * 5)
    verdict = judge(shares, Facts(gauges={"trainer/0": steps}))
    assert verdict.bound == "training" and "a tenth of its newest steps takes 50 %" in verdict.sentence
    assert "max_tokens_per_microbatch" not in verdict.remedy and "train/step_s" in verdict.remedy
    even = judge(shares, Facts(gauges={"trainer/0": slowest_tenth([1.0, 1.3] * 25)}))
    assert "max_tokens_per_microbatch" in even.remedy
    assert slowest_tenth([1.0] * 19) == slowest_tenth([0.0] * 50) == {}


WAITING: Shares = {
    "trainer/0": {"compute": 0.2, "wait-data": 0.8},
    "rollout/0": {"compute": 0.3, "wait-env": 0.7, "wait-env/tool search": 0.6, "rollouts/tool": 6.0,
                  "rollouts/generate": 2.0, "rollouts/reward": 0.0},
    "rollout/1": {"compute": 0.3, "wait-env": 0.7, "wait-env/tool search": 0.6, "rollouts/engine": 2.0},
}  # fmt: skip


def now(actor: str, doing: str, since_s: float, **more: Any) -> RolloutNow:
    place: dict[str, Any] = {
        "group_id": 4,
        "index": 1,
        "row": 7,
        "source": "/d/a.jsonl",
        "is_held_out": False,
        "turn": 3,
    }
    return RolloutNow(actor=actor, doing=doing, since_s=since_s, began_s=99.0, **(place | more))


def test_why_tells_what_rollouts_wait_for_and_names_the_slowest() -> None:
    under_way = [now("rollout/0", "generate", 99.0), now("rollout/0", "tool search", 3.0), now("rollout/1", "", 98.0),
                 now("rollout/1", "agent", 12.5, is_held_out=True, turn=0)]  # fmt: skip
    reason = explain(WAITING, Facts(), under_way=under_way)
    assert reason.bound == "environment"
    assert "2 rollout actors wait for tool search 70 %" in reason.sentence
    assert list(reason.rollouts.items()) == [("tool", 0.6), ("generate", 0.2), ("engine", 0.2)]
    (slowest,) = reason.under_way
    text = "rollout/1, held-out prompt 4.1 (row 7 of a.jsonl): has waited 12.5 s for agent"
    assert describe_rollout(slowest) == text
    of_one = explain(WAITING, Facts(), target="rollout/0", under_way=under_way)
    assert [one.doing for one in of_one.under_way] == ["tool search", "generate"], "what generates comes last"
    assert describe_rollout(of_one.under_way[0]).endswith("has waited 3 s for tool search, at turn 3")
    assert of_one.rollouts == {"tool": 0.75, "generate": 0.25}


def test_start_up_is_left_out_of_an_actors_time() -> None:
    for kinds, other in (
        ({"other": 0.5, "other/start": 0.5, "compute": 0.5}, 0.0),
        ({"other": 0.5, "other/start": 0.4, "compute": 0.5}, 1 / 6),
        ({"other": 0.5, "other/lead": 0.5, "compute": 0.5}, 0.5),
    ):
        assert without_start(kinds)["other"] == pytest.approx(other, abs=1e-9)
