"""tests/faults/README.md and docs/reliability.md name tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from tests.faults.fault_table import NETWORK, OPERATIONS, PROCESS, RPC

ROOT = Path(__file__).parents[2]
PAGE, RELIABILITY = Path(__file__).parent / "README.md", ROOT / "docs" / "reliability.md"
REFERENCE = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_every_fault_meets_every_operation_that_it_can_meet():
    for fault in (*NETWORK.values(), *RPC.values(), *PROCESS.values()):
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
