"""docs/knobs.md: its table is what the actors declare."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from myxa.core.config import RunConfig
from myxa.core.config.section import walk
from myxa.core.errors import ConfigError
from myxa.launch.views.knob_table import declared, render_table, renewed

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "knobs.md"
REMEDY = (
    'update it: python -c "from pathlib import Path; from myxa.launch.views.knob_table import renewed; '
    "p = Path('docs/knobs.md'); p.write_text(renewed(p.read_text()))\""
)
MAKERS = ("_knob",)


def names_declared_in_the_source() -> list[str]:
    """Of every declaration in the package's roles, read without running any of it."""
    found: list[str] = []
    for path in sorted((ROOT / "actors").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in MAKERS:
                given = [*node.args[:1], *(k.value for k in node.keywords if k.arg == "name")]
                found += [str(each.value) for each in given if isinstance(each, ast.Constant)]
    return found


def test_the_table_is_current() -> None:
    page = PAGE.read_text()
    assert render_table() in page, REMEDY
    assert renewed(page) == page, REMEDY


def test_every_knob_that_is_declared_is_in_it_once() -> None:
    names = [tunable.name for tunable in declared()]
    assert len(names) > 30
    assert sorted(names) == sorted(names_declared_in_the_source())
    assert len(set(names)) == len(names)


def test_keys_are_keys_of_the_run_file() -> None:
    keys = {".".join(path) for path, _ in walk(RunConfig)}
    assert {tunable.key for tunable in declared()} - {""} <= keys


def test_a_page_without_a_place_is_refused() -> None:
    with pytest.raises(ConfigError):
        renewed("# Live knobs\n")
