"""Holds what happened against what is promised."""

from __future__ import annotations

from collections.abc import Mapping

from tests.faults.fault_table import SLACK_S, Fault
from tests.faults.operations import Result


def check(
    found: dict[str, Result] | BaseException, effects: Mapping[tuple[str, str], int], fault: Fault, name: str, kind: str
) -> None:
    """AssertionError if that cell is not as the table says."""
    if isinstance(found, BaseException):
        raise AssertionError(f"the row {name!r} did not come to its end") from found
    cell, result = fault.cells[kind], found[kind]
    assert result.outcome in cell.outcomes, f"{name}, {kind}: {result}"
    assert result.took_s <= cell.within_s + SLACK_S, f"{name}, {kind}: {result}"
    if kind != "join":
        num = effects.get((kind, result.token), 0)
        assert cell.num_effects[0] <= num <= cell.num_effects[1], f"{name}, {kind}: {result}, took effect {num} times"


def check_all(
    results: Mapping[str, dict[str, Result] | BaseException],
    effects: Mapping[tuple[str, str], int],
    faults: Mapping[str, Fault],
) -> None:
    """AssertionError if any cell of these rows is not as the table says."""
    for name, fault in faults.items():
        for kind in fault.cells:
            check(results[name], effects, fault, name, kind)


def told(results: Mapping[str, dict[str, Result] | BaseException]) -> str:
    """Everything that happened, for whoever reads a failure."""
    lines: list[str] = []
    for name, found in results.items():
        rows = found.items() if isinstance(found, dict) else [("", found)]
        lines += [f"{name:22} {kind:11} {result!s:.160}" for kind, result in rows]
    return "\n".join(lines)
