"""The fault matrix on real sockets and processes: encrypted tcp through a proxy that breaks on command, exchanges of which
one half is lost (as in Ray's RPC chaos tests), signals, limits of the kernel."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.faults.depot import Depot, DepotContract, pair
from tests.faults.fault_lab import check, told
from tests.faults.fault_table import NETWORK, PROCESS, RPC, Fault
from tests.faults.network_lab import NetworkLab
from tests.faults.process_lab import ProcessLab

from myxa.core.refs import with_deadline

pytestmark = pytest.mark.timeout(90)

TABLES: dict[str, tuple[Mapping[str, Fault], Callable[..., Any]]] = {
    "network": (NETWORK, NetworkLab.run_all),
    "rpc": (RPC, NetworkLab.run_all),
    "process": (PROCESS, ProcessLab.run_all),
}


def rows(table: str, *, is_soak: bool = False) -> dict[str, Fault]:
    return {name: fault for name, fault in TABLES[table][0].items() if fault.is_soak == is_soak}


@cache
def lab(table: str) -> tuple[Any, Any]:
    """All rows of a table at the same time: results and what the caller still holds."""
    results, report = asyncio.run(TABLES[table][1](rows(table)))
    print(told(results))
    return results, report


CELLS = [(table, name, kind) for table in TABLES for name, fault in rows(table).items() for kind in fault.cells]


@pytest.mark.parametrize(("table", "name", "kind"), CELLS, ids=["-".join(cell) for cell in CELLS])
def test_cell(table: str, name: str, kind: str) -> None:
    results, report = lab(table)
    check(results[name], report.effects, rows(table)[name], name, kind)


@pytest.mark.parametrize("table", TABLES)
def test_nothing_is_left_over(table: str) -> None:
    """No call is pending but the mirror's; and what was to happen did."""
    _, report = lab(table)
    assert report.left == 1
    if table == "network":
        for name in ("reset of requests", "half-close, callee", "half-close, caller", "cut"):
            assert report.reconnected[name] > 2, name


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("table", ["network", "process"])
def test_the_long_ones(table: str) -> None:
    results, report = asyncio.run(TABLES[table][1](rows(table, is_soak=True)))
    print(told(results))
    for name, fault in rows(table, is_soak=True).items():
        for kind in fault.cells:
            check(results[name], report.effects, fault, name, kind)
    assert report.left == 1


async def test_calls_work_in_both_directions_after_one_side_gave_the_other_up(tmp_path: Path, caplog: Any) -> None:
    """What broke was one direction, and the other side has noticed nothing."""
    caplog.set_level(logging.CRITICAL, "myxa")
    async with pair(tmp_path) as (near, far):
        await near.start(Depot(tmp_path / "near"), "near-depot")
        await far.wait_for("near-depot", timeout_s=20)
        there = with_deadline(near.ref(DepotContract, "depot"), 10.0)
        back = with_deadline(far.ref(DepotContract, "near-depot"), 10.0)
        await there.whoami()
        await back.whoami()
        for first, second in ((there, back), (back, there)):
            near._session.unreachable(far._key, "the test says so")
            await first.whoami()
            await second.whoami()
