"""Knobs of a run: `get`, `set`, `explain`, `undo`, `history`; how a change is written and shown."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...core.errors import ConfigError, LedgerError
from ...core.knobs import AuditRecord, ChangeReply, KnobTable, Tunable
from ..control import verbs
from ..views.changes import asked_text, moves_text, value_text
from ..views.knob_table import KNOB_COLUMNS, knob_rows, read_value, reply_text
from .parser import Parser, ask, folder_of, show, table, verb_command

if TYPE_CHECKING:
    from rich.console import RenderableType


QUIET = "process"
"""Owner of knobs that every process has; they are many and alike, and only shown when asked for."""


def _add_get(parser: Parser) -> None:
    parser.add_argument("--all", action="store_true", help="every knob of every actor")
    parser.add_argument("--toml", action="store_true",
                        help="what differs from the run file, as a second run file for `myxa up`")  # fmt: skip


def _get(options: argparse.Namespace) -> int:
    page = toml_text if options.toml else partial(_get_page, every=options.all or bool(options.names))
    show(options, ask(options, verbs.GET), page)
    return 0


def toml_text(found: dict[str, Any]) -> str:
    """The knobs that are not as the run file says, by their keys there; comments for those that it cannot say."""
    live: dict[tuple[str, str], list[Any]] = {}
    is_changed: set[tuple[str, str]] = set()
    for sheet in found["sheets"]:
        for state in sheet["knobs"]:
            place = state["tunable"]["key"], state["tunable"]["name"]
            value = state["value"] if state["pending"] is None else state["pending"]
            live.setdefault(place, []).append(value)
            if value != state["first"]:
                is_changed.add(place)
    return "\n".join(_toml_line(*place, live[place]) for place in sorted(is_changed))


def _toml_line(key: str, name: str, values: list[Any]) -> str:
    words = list(dict.fromkeys(repr(v) if isinstance(v, float) else json.dumps(v, ensure_ascii=False) for v in values))
    if not key:
        return f"# {name} = {', '.join(words)}: has no key in the run file"
    if len(words) > 1:
        return f"# {key} = {', '.join(words)}: its owners have different values"
    return f"{key} = {words[0]}"


def _get_page(found: dict[str, Any], *, every: bool = False) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    known = msgspec.convert(found, KnobTable)
    rows = [row.cells() for row in knob_rows(known) if every or row.tunable.owner != QUIET]
    notes = [f"epoch {known.epoch}"] if known.epoch else []
    notes += [f"no answer from {', '.join(known.silent)}"] if known.silent else []
    return Group(table(KNOB_COLUMNS, rows, right=("value",)), Text("   ".join(notes)))


def _add_set(parser: Parser) -> None:
    parser.add_argument("--for", dest="lasting", default="", metavar="TIME",
                        help="go back by itself after 50steps, 30s, 10min, 2h")  # fmt: skip


def _changes(options: argparse.Namespace) -> dict[str, Any]:
    return {"values": assignments(options.values, "set"), **(lasting(options.lasting) if options.lasting else {})}


BOUNDARIES = {
    "now": "at once",
    "request": "for the next work that is handed out",
    "batch": "for a batch, all owners at the same one",
    "step": "for a training step, all owners at the same one",
    "weights": "for a weight version, all owners at the same one",
}


def _explain_lines(found: dict[str, Any]) -> Iterator[str]:
    knob = msgspec.convert(found["knob"]["tunable"], Tunable)
    yield f"{knob.name}: {knob.help}"
    yield f"  type      {knob.kind}{', in ' + knob.unit if knob.unit else ''}"
    yield f"  range     {knob.range_text()}"
    if knob.guard_factor:
        yield f"  guard     more than {knob.guard_factor:g} times the file's value needs --force"
    yield f"  boundary  {knob.boundary}: used {BOUNDARIES[knob.boundary]}"
    yield (
        f"  {'default ' if found['is_default'] else 'file    '}  {knob.key} = {value_text(found['file_value'])}"
        if knob.key
        else "  file      it has no key there"
    )
    for owner, state in found["owners"].items():
        pending = f", will be {value_text(state['pending'])}" if state["pending"] is not None else ""
        yield f"  live      {value_text(state['value'])}{pending}  ({owner})"
    if found["reverts"]:
        yield f"  reverts   {found['reverts']}"
    yield "  history" if found["history"] else "  history   it was not changed"
    for record in found["history"]:
        yield f"    {change_line(record, knob.name)}"


def change_line(raw: dict[str, Any], only: str = "") -> str:
    record = msgspec.convert(raw, AuditRecord)
    when = datetime.fromtimestamp(record.wall_s).strftime("%m-%d %H:%M:%S")
    what = moves_text([move for move in record.moves if only in ("", move.name)]) or asked_text(record.arguments)
    facts = [f"epoch {record.epoch}"] if record.epoch else []
    facts += [f"at {record.at}"] if record.at else []
    facts += [] if record.result == "done" else [f"{record.result}: {record.detail}"]
    facts += [f'"{record.reason}"'] if record.reason else []
    who = record.who.user or record.who.via
    return "  ".join(filter(None, (f"#{record.number}", when, who, record.verb, what, ", ".join(facts))))


_LASTING = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>steps?|s|min|h)")
_LASTING_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


def assignments(words: Sequence[str], what: str) -> dict[str, Any]:
    """["lr=1e-4", "on_stale=drop"] as a table. Raises ConfigError naming the word."""
    table: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"{what} {word!r}: must look like NAME=VALUE", remedy='for example "lr=1e-4"')
        if name.strip() in table:
            raise ConfigError(f"{what} {word!r}: {name.strip()} is given twice", remedy="say it once")
        table[name.strip()] = read_value(name.strip(), text.strip())
    return table


def lasting(text: str) -> dict[str, Any]:
    """A time such as 50steps or 30s, as arguments of `set`. Raises ConfigError."""
    found = _LASTING.fullmatch(text.strip())
    is_steps = found is not None and found["unit"].startswith("step")
    if found is None or (is_steps and "." in found["number"]) or float(found["number"]) == 0:
        raise ConfigError(f"--for {text}: is no time", remedy="write 50steps, 30s, 10min or 2h")
    if is_steps:
        return {"for_steps": int(found["number"])}
    return {"for_s": float(found["number"]) * _LASTING_SECONDS[found["unit"]]}


def _reply_page(reply: dict[str, Any]) -> str:
    return reply_text(msgspec.convert(reply, ChangeReply))


def check_reply(options: argparse.Namespace, reply: dict[str, Any]) -> int:
    """Raises ConfigError for a change that was refused."""
    del options
    if reply["refused"]:
        raise ConfigError(reply["refused"], remedy="nothing was changed")
    return 0


def _add_history(parser: Parser) -> None:
    parser.add_argument("--verify", action="store_true", help="check the chain of digests of the whole log")


def _history(options: argparse.Namespace) -> int:
    """From the audit log itself, so it works after the run, too."""
    from ...actors.coordinator.audit import AUDIT_FILE, read_audit

    run: Path | None = options.run_path
    path = (run if run is not None and run.is_dir() else folder_of(options)) / AUDIT_FILE
    if options.verify:
        return _verify(options, path)
    records = msgspec.to_builtins(read_audit(path, options.limit))
    show(options, records, lambda found: "\n".join(map(change_line, found)) or "nothing was changed")
    return 0


def _verify(options: argparse.Namespace, path: Path) -> int:
    from dataclasses import asdict

    from ...actors.coordinator.audit import verify_audit

    verdict = verify_audit(path)
    if verdict.complaint:
        raise LedgerError(
            f"{path}: {verdict.complaint}; {verdict.num_records} records before it hold",
            remedy="the file was edited, or the disk lost a part of it",
        )
    show(options, asdict(verdict), _verdict_text)
    return 0


def _verdict_text(facts: dict[str, Any]) -> str:
    torn = "; the last line was never finished and does not count" if facts["is_torn"] else ""
    digest = f"; digest {facts['digest']}" if facts["digest"] else ""
    return f"{facts['num_records']} records, the chain holds{torn}{digest}"


SET_WORDS = (
    "Change knobs of a live run. All owners of all knobs agree, or nothing is changed; each knob takes effect at its "
    "boundary (`myxa explain NAME`)."
)
COMMANDS = (
    verb_command(verbs.GET, _get_page, add=_add_get, run=_get),
    verb_command(verbs.SET, _reply_page, add=_add_set, more=_changes, check=check_reply, description=SET_WORDS),
    verb_command(verbs.EXPLAIN, lambda facts: "\n".join(_explain_lines(facts))),
    verb_command(verbs.UNDO, _reply_page, check=check_reply),
    verb_command(verbs.HISTORY, change_line, add=_add_history, run=_history),
)
