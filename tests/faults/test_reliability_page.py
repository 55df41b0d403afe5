"""tests/faults/README.md and docs/walk-call.md say what the tests assert, and name tests that exist."""

from __future__ import annotations

import ast
import re

import pytest
from tests.faults.fault_table import CALL_PAGE, NETWORK, OPERATIONS, PAGE, PROCESS, RPC, filled

ROOT = CALL_PAGE.parent.parent
RELIABILITY = ROOT / "docs" / "reliability.md"
REFERENCE = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@pytest.mark.parametrize("page", [PAGE, CALL_PAGE], ids=lambda page: page.name)
def test_the_tables_are_those_of_the_tests(page):
    assert page.read_text() == filled(page), "run: python -m tests.faults.fault_table"


def test_every_fault_meets_every_operation_that_it_can_meet():
    for faults in (NETWORK, RPC, PROCESS):
        for fault in faults.values():
            assert set(fault.cells) >= set(OPERATIONS) - {"join"}, fault.what


@pytest.mark.parametrize(("page", "least"), [(PAGE, 30), (RELIABILITY, 10)], ids=["faults", "reliability"])
def test_every_test_that_the_page_names_exists(page, least):
    named = REFERENCE.findall(page.read_text())
    assert len(named) > least
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in functions, f"{path} has no {name}"


def test_no_row_of_the_pitfalls_is_without_a_test():
    table = PAGE.read_text().split("## Pitfalls")[1]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 23
    assert all(REFERENCE.search(row) for row in rows), [row for row in rows if not REFERENCE.search(row)]
