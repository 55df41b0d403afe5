"""The sentence that says what holds a run back, on planted time shares."""

from __future__ import annotations

from typing import get_args

import pytest

from myxa.launch.views.bottleneck import REMEDIES, Bound, Filtered, bottleneck, engines_look_full, judge

Shares = dict[str, dict[str, float]]

CASES: list[tuple[Bound, Shares]] = [
    ("memory", {"trainer/0": {"compute": 0.4, "wait-data": 0.2, "wait-memory": 0.4}, "rollout/0": {"compute": 0.2}}),
    (
        "generation",
        {"trainer/0": {"compute": 0.38, "wait-data": 0.62}, "rollout/0": {"compute": 0.97, "wait-data": 0.03}},
    ),
    (
        "generation",
        {
            "trainer/0": {"compute": 0.5, "wait-data": 0.5},
            "trainer/1": {"compute": 0.0, "wait-data": 1.0},
            "rollout/0": {"compute": 0.8, "wait-weights": 0.2},
            "rollout/1": {"compute": 1.0},
            "buffer": {"other": 1.0},
        },
    ),
    (
        "reward",
        {
            "trainer/0": {"compute": 0.3, "wait-data": 0.7},
            "rollout/0": {"compute": 0.1, "wait-data": 0.9, "wait-data/reward": 0.8, "wait-data/draw": 0.1},
        },
    ),
    (
        "data",
        {
            "trainer/0": {"compute": 0.3, "wait-data": 0.7},
            "rollout/0": {"compute": 0.1, "wait-data": 0.9, "wait-data/draw": 0.9},
        },
    ),
    (
        "training",
        {"trainer/0": {"compute": 0.95, "wait-data": 0.05}, "rollout/0": {"compute": 0.4, "wait-capacity": 0.6}},
    ),
    (
        "capacity",
        {"trainer/0": {"compute": 0.5, "wait-data": 0.5}, "rollout/0": {"compute": 0.45, "wait-capacity": 0.55}},
    ),
    ("weights", {"trainer/0": {"compute": 0.5, "wait-data": 0.5}, "rollout/0": {"compute": 0.4, "wait-weights": 0.6}}),
    ("weights", {"trainer/0": {"compute": 0.5, "wait-data": 0.1, "wait-weights": 0.4}, "rollout/0": {"compute": 1.0}}),
    ("capacity", {"trainer/0": {"compute": 0.4, "wait-capacity": 0.6}, "rollout/0": {"compute": 1.0}}),
    (
        "concurrency",
        {
            "trainer/0": {"compute": 0.3, "wait-data": 0.7},
            "rollout/0": {"compute": 0.9, "compute/generate at limit": 0.8, "compute/generate": 0.1, "wait-data": 0.1},
        },
    ),
    (
        "guard",
        {
            "trainer/0": {"compute": 0.5, "wait-data": 0.1, "wait-weights": 0.4, "wait-weights/canary": 0.35},
            "rollout/0": {"compute": 1.0},
        },
    ),
    (
        "generation",
        {
            "trainer/0": {"compute": 0.1, "wait-data": 0.3, "other": 0.6, "other/start": 0.6},
            "rollout/0": {"compute": 0.4, "other": 0.6, "other/start": 0.4, "other/start, engine": 0.2},
        },
    ),
    ("starting", {"trainer/0": {"other": 1.0, "other/start": 0.99}, "rollout/0": {"other": 1.0, "other/start": 1.0}}),
    ("none", {"trainer/0": {"compute": 0.9, "wait-data": 0.1}, "rollout/0": {"compute": 0.88, "wait-data": 0.12}}),
    ("paused", {"trainer/0": {"wait-data": 0.8, "paused": 0.2}, "rollout/0": {"paused": 0.95, "compute": 0.05}}),
    ("starting", {"trainer/0": {"other": 0.8, "compute": 0.2}, "rollout/0": {"compute": 1.0}}),
    ("unknown", {"trainer/0": {"compute": 1.0}}),
    ("unknown", {"rollout/0": {"compute": 1.0}, "trainer/0": {}}),
    ("unknown", {}),
    ("unknown", {"trainer/0": {"wait-data": 1.0}, "rollout/0": {"other": 1.0}}),
]  # start-up is left out of the shares that are judged


@pytest.mark.parametrize(("bound", "shares"), CASES)
def test_planted_cases(bound: Bound, shares: Shares) -> None:
    verdict = judge(shares)
    assert verdict.bound == bound
    assert bottleneck(shares) == verdict.sentence
    if bound in {"generation", "concurrency", "reward", "data", "training", "weights", "guard", "capacity"}:
        assert verdict.remedy
        assert verdict.share >= 0.25


def test_the_sentence_names_who_waits_how_long_and_for_what() -> None:
    shares = {
        "trainer/0": {"compute": 0.3, "wait-data": 0.7},
        "rollout/0": {"compute": 0.1, "wait-data": 0.9, "wait-data/reward": 0.8, "wait-data/draw": 0.1},
    }
    sentence = judge(shares).sentence
    for word in ("trainer/0", "70 %", "reward", "rollout/0", "80 %"):
        assert word in sentence


def test_the_leader_is_asked_and_not_the_ranks_that_wait_for_it() -> None:
    ranks: Shares = {f"trainer/{rank}": {"wait-data": 1.0} for rank in range(1, 12)}
    shares = {**ranks, "trainer/0": {"compute": 1.0}, "rollout/0": {"wait-capacity": 1.0}}
    assert judge(shares).bound == "training"


def test_more_requests_are_no_remedy_for_engines_that_are_full() -> None:
    shares = {
        "trainer/0": {"compute": 0.3, "wait-data": 0.7},
        "rollout/0": {"compute": 0.9, "compute/generate at limit": 0.9, "wait-data": 0.1},
    }
    assert judge(shares).bound == "concurrency"
    assert judge(shares, engines_are_full=True).bound == "generation"


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
    assert engines_look_full(gauges) is is_full


THROWN_AWAY: Shares = {
    "trainer/0": {"compute": 0.05, "wait-data": 0.95},
    "rollout/0": {"compute": 0.97, "wait-data": 0.03},
}


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
    verdict = judge(THROWN_AWAY, filtered=Filtered.of(newest(**told)))
    assert verdict.bound == "filter"
    assert says in verdict.sentence
    assert "generation" not in verdict.sentence
    assert "`myxa samples`" in verdict.remedy


@pytest.mark.parametrize("told", [{}, {"groups": 8, "left_out": 1}, {"groups": 256, "left_out": 0.5, "flat": 0.5}])
def test_a_filter_that_leaves_enough_is_not_to_blame(told: dict[str, float]) -> None:
    assert judge(THROWN_AWAY, filtered=Filtered.of(newest(**told))).bound == "generation"


def test_every_remedy_of_the_table_belongs_to_a_verdict() -> None:
    assert set(REMEDIES) <= set(get_args(Bound))
    for bound in set(get_args(Bound)) - {"unknown", "starting", "none", "environment", "disk"}:
        assert "`myxa " in REMEDIES[bound] or "algo." in REMEDIES[bound], bound
