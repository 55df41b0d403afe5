"""docs/reliability.md says what the tests hold the runtime to, and names tests that exist."""

from __future__ import annotations

import ast
import re

from fault_table import NETWORK, OPERATIONS, PAGE, PROCESS, RPC, filled

ROOT = PAGE.parent.parent
REFERENCE = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_the_tables_are_those_of_the_tests():
    page = PAGE.read_text()
    assert page == filled(page), "run: python tests/faults/fault_table.py"


def test_every_fault_meets_every_operation_that_it_can_meet():
    for faults in (NETWORK, RPC, PROCESS):
        for fault in faults.values():
            assert set(fault.cells) >= set(OPERATIONS) - {"join"}, fault.what


def test_every_test_that_the_page_names_exists():
    named = REFERENCE.findall(PAGE.read_text())
    assert len(named) > 30
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in functions, f"{path} has no {name}"


def test_no_row_of_the_pitfalls_is_without_a_test():
    table = PAGE.read_text().split("## Pitfalls")[1]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 23
    assert all(REFERENCE.search(row) for row in rows), [row for row in rows if not REFERENCE.search(row)]
