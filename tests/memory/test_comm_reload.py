"""C1 and C2: groups behind proxies, over real gloo in four processes, through many epochs."""

from __future__ import annotations

from typing import Any

import pytest
from tests.memory.comm_gang import WORLD, run_gangs

from myxa.memory.communicators.proxy_build import load

HEALTHY = "slime_nine,megatron_order,native_families,families,lazily,with_autograd,borders,alone"


@pytest.fixture(scope="module")
def gang(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """All healthy scenarios one after the other in the same four processes."""
    load()  # built once per machine, not by four processes against their deadlines
    return run_gangs([HEALTHY], tmp_path_factory.mktemp("healthy"))["slime_nine"]


@pytest.mark.parametrize(("scenario", "most_groups"), [("slime_nine", 6), ("megatron_order", 12)])
def test_groups_stay_themselves_and_nothing_leaks(gang: list[dict[str, Any]], scenario: str, most_groups: int):
    """20 epochs; the program itself compares identity, names, ranks and every number with what it must be."""
    for rank in range(WORLD):
        facts = gang[rank][scenario]
        assert len(facts["seconds"]) == 20
        assert facts["num_groups"] <= most_groups
        for what in (0, 1):  # a thread that was joined may be seen for a moment still: the least of five counts
            early, late = (min(count[what] for count in part) for part in (facts["counts"][:5], facts["counts"][-5:]))
            assert late == early, f"files and threads: {facts['counts']}"
        files, threads = facts["dropped"]
        live_files, live_threads = facts["counts"][0]
        assert threads < live_threads, "a drop ends the threads of what was dropped"
        assert files < live_files, "a drop closes its sockets"
    assert max(gang[rank][scenario]["num_groups"] for rank in range(WORLD)) == most_groups


def test_callers_see_the_name_they_asked_for_and_the_backend_its_own(gang: list[dict[str, Any]]):
    assert {(gang[rank]["slime_nine"]["backend"], gang[rank]["slime_nine"]["inner"]) for rank in range(WORLD)} == {
        ("myxa_gloo", "gloo")
    }


def test_every_family_of_operations_gives_what_plain_gloo_gives(gang: list[dict[str, Any]]):
    """Equal before and after each of three reloads (compared by the program), and equal to native groups."""
    for rank in range(WORLD):
        ours, theirs = gang[rank]["families"]["families"], gang[rank]["native_families"]["families"]
        assert len(ours) >= 14
        assert ours == theirs


def test_first_operation_builds_where_restore_does_not(gang: list[dict[str, Any]]):
    assert all(gang[rank]["lazily"]["ok"] for rank in range(WORLD))


def test_backward_pass_may_be_what_builds(gang: list[dict[str, Any]]):
    assert all(gang[rank]["with_autograd"]["ok"] for rank in range(WORLD))


def test_group_of_one_copies_for_itself_and_builds_nothing(gang: list[dict[str, Any]]):
    """Equal to plain gloo in every family (compared by the program); NCCL would build a communicator of its own."""
    assert all(gang[rank]["alone"]["num_families"] >= 20 for rank in range(WORLD))


def test_orders_that_make_no_sense_are_refused_by_name(gang: list[dict[str, Any]]):
    facts = gang[0]["borders"]
    assert "no operation between release and restore" in facts["used while released"]
    assert "epoch 2, but epoch 3 was seen" in facts["late release"]
    assert "under which they were released" in facts["same epoch"]
    assert "not some of WORLD" in facts["strangers"]
    assert "two reloadable backends" in facts["two halves"]
    assert "has no live gloo backend now" in facts["method of none"]
    assert "there is no reloadable kind of backend 'mpi'" in facts["unknown kind"]
