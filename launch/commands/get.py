"""`myxa get`: knobs and their values."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .knob_words import shown
from .output import Verbs, add_run_flags, show, table
from .which_run import client_of

if TYPE_CHECKING:
    from rich.console import RenderableType

QUIET = "process"
"""Owner of knobs that every process has; they are many and alike, and only shown when asked for."""


def add(verbs: Verbs) -> None:
    """The command and its flags."""
    parser = verbs.add_parser("get", help="knobs with their values, limits and owners")
    parser.add_argument("names", nargs="*", metavar="NAME", help="knobs; none: all but those of every process")
    parser.add_argument("--all", action="store_true", help="every knob of every actor")
    add_run_flags(parser)
    parser.set_defaults(run=_get)


def _get(options: argparse.Namespace) -> int:
    found = client_of(options).ask("get", names=options.names)
    show(options, found, lambda told: _page(told, every=options.all or bool(options.names)))
    return 0


def _page(found: dict[str, Any], *, every: bool) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    rows = [row for row in _rows(found) if every or row[0] != QUIET]
    columns = ("knob", "value", "unit", "range", "at", "owner", "note")
    notes = [f"epoch {found['epoch']}"] if found["epoch"] else []
    notes += [f"no answer from {', '.join(found['silent'])}"] if found["silent"] else []
    return Group(table(columns, [row[1:] for row in rows], right=("value",)), Text("   ".join(notes)))


def _rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Role, then a row's cells. Owners that agree about a knob share a row."""
    merged: dict[tuple[str, ...], list[str]] = {}
    roles: dict[tuple[str, ...], str] = {}
    for sheet in found["sheets"]:
        for state in sheet["knobs"]:
            cells = _cells(state, found["reverts"].get(state["tunable"]["name"], ""))
            merged.setdefault(cells, []).append(sheet["owner"])
            roles[cells] = state["tunable"]["owner"]
    return [(roles[cells], *cells[:-1], ", ".join(owners), cells[-1]) for cells, owners in merged.items()]


def _cells(state: dict[str, Any], reverts: str) -> tuple[str, ...]:
    knob = state["tunable"]
    notes = [f"file: {shown(state['first'])}"] if state["value"] != state["first"] else []
    notes += [f"will be {shown(state['pending'])}"] if state["pending"] is not None else []
    notes += [f"back {reverts}"] if reverts else []
    return knob["name"], shown(state["value"]), knob["unit"], range_text(knob), knob["boundary"], "; ".join(notes)


def range_text(knob: dict[str, Any]) -> str:
    """The limits of a knob that came as JSON."""
    import msgspec

    from ...core.knobs import Tunable

    return msgspec.convert(knob, Tunable).range_text()
