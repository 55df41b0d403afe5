"""`myxa explain`: everything about one knob."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from .get import range_text
from .knob_words import shown
from .output import Verbs, add_run_flags, show
from .which_run import client_of

BOUNDARIES = {
    "now": "at once",
    "request": "for the next work that is handed out",
    "batch": "for a batch, all owners at the same one",
    "step": "for a training step, all owners at the same one",
    "weights": "for a weight version, all owners at the same one",
}


def add(verbs: Verbs) -> None:
    """The command and its flags."""
    parser = verbs.add_parser("explain", help="everything about one knob, with its history")
    parser.add_argument("name", metavar="NAME", help="a knob; `myxa get --all` lists them")
    add_run_flags(parser)
    parser.set_defaults(run=_explain)


def _explain(options: argparse.Namespace) -> int:
    found = client_of(options).ask("explain", name=options.name)
    show(options, found, lambda told: "\n".join(_lines(told)))
    return 0


def _lines(found: dict[str, Any]) -> Iterator[str]:
    knob = found["knob"]["tunable"]
    yield f"{knob['name']}: {knob['help']}"
    yield f"  type      {knob['kind']}{', in ' + knob['unit'] if knob['unit'] else ''}"
    yield f"  range     {range_text(knob)}"
    if knob["guard_factor"]:
        yield f"  guard     more than {knob['guard_factor']:g} times the file's value needs --force"
    yield f"  boundary  {knob['boundary']}: used {BOUNDARIES[knob['boundary']]}"
    yield (
        f"  {'default ' if found['is_default'] else 'file    '}  {knob['key']} = {shown(found['file_value'])}"
        if knob["key"]
        else "  file      it has no key there"
    )
    for owner, state in found["owners"].items():
        pending = f", will be {shown(state['pending'])}" if state["pending"] is not None else ""
        yield f"  live      {shown(state['value'])}{pending}  ({owner})"
    if found["reverts"]:
        yield f"  reverts   {found['reverts']}"
    yield "  history" if found["history"] else "  history   it was not changed"
    for record in found["history"]:
        yield f"    {change_line(record, knob['name'])}"


def change_line(record: dict[str, Any], only: str = "") -> str:
    """One line of the audit log, in words."""
    when = datetime.fromtimestamp(record["wall_s"]).strftime("%m-%d %H:%M:%S")
    moves = [
        f"{move['name']} {shown(move['old'])} -> {shown(move['new'])}"
        for move in record["moves"]
        if only in ("", move["name"])
    ]
    facts = [f"epoch {record['epoch']}"] if record["epoch"] else []
    facts += [f"at {record['at']}"] if record["at"] else []
    facts += [] if record["result"] == "done" else [f"{record['result']}: {record['detail']}"]
    facts += [f'"{record["reason"]}"'] if record["reason"] else []
    who = record["who"]["user"] or record["who"]["via"]
    what = ", ".join(dict.fromkeys(moves)) or _asked(record)
    return "  ".join(filter(None, (f"#{record['number']}", when, who, record["verb"], what, ", ".join(facts))))


def _asked(record: dict[str, Any]) -> str:
    asked = {name: found for name, found in record["arguments"].items() if found and name != "reason"}
    return ", ".join(f"{name}={found}" for name, found in asked.items())
