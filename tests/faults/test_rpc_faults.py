"""The three ways in which one exchange fails (as in Ray's RPC chaos tests): request lost, answer lost, executed but slow."""

from __future__ import annotations

import asyncio

import pytest
from tests.faults.fault_table import RPC
from tests.faults.network_lab import run_all
from tests.faults.verdict import check, told

CELLS = [(name, kind) for name, fault in RPC.items() for kind in fault.cells]


@pytest.fixture(scope="module")
def lab():
    results, report = asyncio.run(run_all(RPC))
    print(told(results))
    return results, report


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("name", "kind"), CELLS, ids=[f"{name}-{kind}" for name, kind in CELLS])
def test_cell(lab, name, kind):
    results, report = lab
    check(results[name], report.effects, RPC[name], name, kind)


@pytest.mark.timeout(60)
def test_a_lost_answer_is_answered_from_memory(lab):
    """The put came again and was not executed again."""
    _, report = lab
    assert report.replayed["answer lost"] >= 1
    assert report.left == {"pending calls": 1, "parked": 0}
