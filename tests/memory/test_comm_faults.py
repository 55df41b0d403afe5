"""C3: a rank keeps the old epoch, or dies: every survivor errors by its deadline, and a smaller gang goes on."""

from __future__ import annotations

from typing import Any

import pytest
from tests.memory.comm_gang import PATIENCE_S, run_gangs

from myxa.memory.communicators.proxy_build import load

SLACK_S = 10.0
"""On a busy machine; alone it is some hundredths of a second."""
SURVIVORS = (0, 1, 2)

Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def gangs(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """By scenario, by rank. All at once: most of what they do is waiting for somebody who does not come."""
    load()
    dying = ["dies_before_first_op", "dies_within_first_op", "dies_in_an_operation"]
    found = run_gangs(["keeps_old_epoch", *dying], tmp_path_factory.mktemp("faults"), dying=dying)
    return {name: [each.get(name, {}) for each in by_rank] for name, by_rank in found.items()}


def told_in_time(facts: dict[str, Any], what: str) -> str:
    assert facts[f"{what}_s"] <= PATIENCE_S + SLACK_S
    assert "rank 3" in facts[what]
    return facts[what]


def test_release_without_one_names_it_and_takes_nothing_away(gangs: Results):
    for rank in SURVIVORS:
        text = told_in_time(gangs["keeps_old_epoch"][rank], "release")
        assert "rank 3 (at epoch 0) did not come to 'release under epoch 1'" in text


def test_operation_with_a_rank_of_another_epoch_names_group_rank_and_epochs(gangs: Results):
    for rank in SURVIVORS:
        facts = gangs["keeps_old_epoch"][rank]
        text = told_in_time(facts, "world")
        assert "gloo group 0 of ranks [0, 1, 2, 3] could not be built under epoch 2" in text
        assert "rank 3 (at epoch 0)" in text
        assert "could not be built under epoch 2" in facts["again"], "a second try meets what the first one left"
        assert "while communicators are broken" in facts["gate"]


def test_rank_of_the_old_epoch_gets_an_error_too(gangs: Results):
    assert (
        "Connection closed" in gangs["keeps_old_epoch"][3]["old"] or "Timed out" in gangs["keeps_old_epoch"][3]["old"]
    )


@pytest.mark.parametrize(
    ("scenario", "point"),
    [("dies_before_first_op", "restore"), ("dies_before_first_op", "world"), ("dies_within_first_op", "world")],
)
def test_death_between_drop_and_first_operation(gangs: Results, scenario: str, point: str):
    for rank in SURVIVORS:
        assert "rank 3" in told_in_time(gangs[scenario][rank], point)


def test_death_within_an_operation_is_followed_by_an_abort_that_ends(gangs: Results):
    for rank in SURVIVORS:
        facts = gangs["dies_in_an_operation"][rank]
        told_in_time(facts, "release")
        assert facts["abort_s"] < SLACK_S
