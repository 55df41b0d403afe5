"""docs/knobs.md: its table is what the actors declare."""

from __future__ import annotations

import ast
from pathlib import Path

from myxa.core.config import RunConfig
from myxa.core.config.section import walk
from myxa.core.knobs import Tunable
from myxa.launch.commands import knobs

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "knobs.md"
REMEDY = "update it: python -m tests.knobs.test_page"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
HEAD = ("| knob | unit | range | boundary | owner | run file | what it does |", "|---|---|---|---|---|---|---|")
MAKERS = ("_knob", "_algo")


def declared() -> tuple[Tunable, ...]:
    """All knobs that the product has."""
    return knobs.declared(sources=("math", "code"))


def names_declared_in_the_source() -> list[str]:
    """Of every declaration in the package's roles, read without running any of it."""
    names: list[str] = []
    for path in sorted((ROOT / "actors").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in MAKERS:
                arguments = [k.value for k in node.keywords if k.arg == "name"]
                arguments = arguments or (node.args if node.func.id == "_algo" else node.args[:1])
                names += [
                    str(argument.value).rpartition(".")[2]
                    for argument in arguments
                    if isinstance(argument, ast.Constant)
                ]
    return names


def renewed(page: str) -> str:
    before, _, tail = page.partition(BEGIN)
    _, end, after = tail.partition(END)
    assert end, f"docs/knobs.md lacks {BEGIN!r} and {END!r}"
    return before + BEGIN + "\n".join([*HEAD, *map(_row, declared())]) + "\n" + END + after


def _row(tunable: Tunable) -> str:
    guard = f"; above {tunable.guard_factor:g} times the file's only by `--force`" if tunable.guard_factor else ""
    kind = "whole number " if tunable.kind == "int" else ""
    cells = (
        f"`{tunable.name}`", tunable.unit, f"{kind}{tunable.range_text()}{guard}", f"`{tunable.boundary}`",
        f"`{tunable.owner}`", f"`{tunable.key}`" if tunable.key else "", tunable.help,
    )  # fmt: skip
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def test_the_table_is_current() -> None:
    assert renewed(PAGE.read_text()) == PAGE.read_text(), REMEDY


def test_every_knob_that_is_declared_is_in_it_once() -> None:
    names = [tunable.name for tunable in declared()]
    assert len(names) > 30
    assert sorted(names) == sorted(names_declared_in_the_source())
    assert len(set(names)) == len(names)


def test_keys_are_keys_of_the_run_file() -> None:
    keys = {".".join(path) for path, _ in walk(RunConfig)}
    assert {tunable.key for tunable in declared()} - {""} <= keys


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
