"""The network rows of the fault matrix, on real sockets: encrypted tcp through a proxy that breaks on command."""

from __future__ import annotations

import asyncio

import pytest
from tests.faults.fault_table import NETWORK
from tests.faults.network_lab import run_all
from tests.faults.verdict import check, check_all, told

DEFAULT = {name: fault for name, fault in NETWORK.items() if not fault.is_soak}
SOAK = {name: fault for name, fault in NETWORK.items() if fault.is_soak}
CELLS = [(name, kind) for name, fault in DEFAULT.items() for kind in fault.cells]


@pytest.fixture(scope="module")
def lab():
    results, report = asyncio.run(run_all(DEFAULT))
    print(told(results))
    return results, report


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("name", "kind"), CELLS, ids=[f"{name}-{kind}" for name, kind in CELLS])
def test_cell(lab, name, kind):
    results, report = lab
    check(results[name], report.effects, NETWORK[name], name, kind)


@pytest.mark.timeout(90)
def test_nothing_is_left_over(lab):
    """No call is pending, no put waits for anybody; and the connections were really broken."""
    _, report = lab
    assert report.left == {"pending calls": 1, "parked": 0}
    for name in ("reset of requests", "half-close, callee", "half-close, caller", "cut"):
        assert report.reconnected[name] > 2, name


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_the_long_ones():
    results, report = asyncio.run(run_all(SOAK))
    print(told(results))
    check_all(results, report.effects, SOAK)
    assert report.left == {"pending calls": 1, "parked": 0}
