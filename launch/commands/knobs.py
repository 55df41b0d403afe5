"""Knobs of a run: `get`, `set`, `undo`, `history`; how a change is written and shown."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...core.errors import ConfigError, LedgerError, raised_as
from ...core.knobs import AuditRecord, ChangeReply, KnobTable, Tunable
from .. import verbs
from ..views.changes import asked_text, moves_text
from ..views.knob_table import KNOB_COLUMNS, knob_rows, read_value, reply_text
from .parser import ask, flag, folder_of, show, stretch_s, table, verb_command

if TYPE_CHECKING:
    from rich.console import RenderableType


def declared(sources: Sequence[str] = ()) -> tuple[Tunable, ...]:
    """All knobs that actors have. `sources`: names of data sources, whose shares are knobs."""
    from ...actors.buffer.knobs import BufferLimits, buffer_tunables
    from ...actors.coordinator.options import COORDINATOR_TUNABLES
    from ...actors.knobs.owner import LOG_LEVEL, PAUSE_AT
    from ...actors.rollout.knobs import TUNABLES as OF_ROLLOUT
    from ...actors.trainer.knobs import TUNABLES as OF_TRAINER
    from ...algos.filters import GROUP_FILTERS

    of_buffer = buffer_tunables(tuple(GROUP_FILTERS), BufferLimits(), sources)
    return (*OF_TRAINER, *of_buffer, *OF_ROLLOUT, *COORDINATOR_TUNABLES, PAUSE_AT, LOG_LEVEL.tunable)


def _get(options: argparse.Namespace) -> int:
    show(options, ask(options, verbs.GET), partial(_get_page, options.names))
    return 0


def _get_page(names: Sequence[str], answer: dict[str, Any]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    knobs = msgspec.convert(answer, KnobTable)
    rows = knob_rows(knobs)
    helps = [
        Text(f"{row.name}: {row.tunable.help}\n  {knobs.origins.get(row.name, '')}".rstrip()) for row in rows if names
    ]
    notes = [f"epoch {knobs.epoch}"] if knobs.epoch else []
    notes += [f"no answer from {', '.join(knobs.silent)}"] if knobs.silent else []
    return Group(table(KNOB_COLUMNS, [row.cells() for row in rows], right=("value",)), *helps, Text("   ".join(notes)))


def _changes(options: argparse.Namespace) -> dict[str, Any]:
    values, expect = assignments(options.values, "set"), assignments(options.expect, "--if")
    return {"values": values, "expect": expect, **(lasting(options.lasting) if options.lasting else {})}


def change_line(raw: dict[str, Any]) -> str:
    record = msgspec.convert(raw, AuditRecord)
    when = datetime.fromtimestamp(record.wall_s).strftime("%m-%d %H:%M:%S")
    change = moves_text(record.moves) or asked_text(record.arguments)
    facts = [f"epoch {record.epoch}"] if record.epoch else []
    facts += [f"at {record.at}"] if record.at else []
    facts += [] if record.result == "done" else [f"{record.result}: {record.detail}"]
    facts += [f'"{record.reason}"'] if record.reason else []
    user = record.who.user or record.who.via
    return "  ".join(filter(None, (f"#{record.number}", when, user, record.verb, change, ", ".join(facts))))


_STEPS = re.compile(r"([1-9]\d*)\s*steps?")


def assignments(texts: Sequence[str], flag: str) -> dict[str, Any]:
    """["lr=1e-4", "on_stale=drop"] as a table. Raises ConfigError naming the text."""
    table: dict[str, Any] = {}
    for assignment in texts:
        name, equals, text = assignment.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"{flag} {assignment!r}: must look like NAME=VALUE", remedy='for example "lr=1e-4"')
        if name.strip() in table:
            raise ConfigError(f"{flag} {assignment!r}: {name.strip()} is given twice", remedy="say it once")
        table[name.strip()] = read_value(name.strip(), text.strip())
    return table


def lasting(text: str) -> dict[str, Any]:
    """A time such as 50steps or 30s, as arguments of `set`. Raises ConfigError."""
    if steps := _STEPS.fullmatch(text.strip()):
        return {"for_steps": int(steps[1])}
    remedy = "write 50steps, 30s, 10min or 2h"
    with raised_as(ConfigError, f"--for {text}: is no time", argparse.ArgumentTypeError, remedy=remedy):
        return {"for_s": stretch_s(text if text.strip()[-1:].isalpha() else f"{text} without a unit")}


def _reply_page(reply: dict[str, Any]) -> str:
    return reply_text(msgspec.convert(reply, ChangeReply))


def check_reply(options: argparse.Namespace, reply: dict[str, Any]) -> int:
    """Raises ConfigError for a change that was refused."""
    if reply["refused"]:
        raise ConfigError(reply["refused"], remedy="nothing was changed")
    return 0


def _history(options: argparse.Namespace) -> int:
    """From the audit log itself, so it works after the run, too."""
    from ...actors.coordinator.audit import AUDIT_FILE, read_audit, verify_audit

    run: Path | None = options.run_path
    path = (run if run is not None and run.is_dir() else folder_of(options)) / AUDIT_FILE
    if options.verify:
        verdict = verify_audit(path)
        if verdict.complaint:
            raise LedgerError(
                f"{path}: {verdict.complaint}; {verdict.num_records} records before it hold",
                remedy="the file was edited, or the disk lost a part of it",
            )
        show(options, msgspec.to_builtins(verdict), _verdict_text)
        return 0
    records = msgspec.to_builtins(read_audit(path, options.limit))
    show(options, records, lambda records: "\n".join(map(change_line, records)) or "nothing was changed")
    return 0


def _verdict_text(facts: dict[str, Any]) -> str:
    torn = "; the last line was never finished and does not count" if facts["is_torn"] else ""
    digest = f"; digest {facts['digest']}" if facts["digest"] else ""
    return f"{facts['num_records']} records, the chain holds{torn}{digest}"


COMMANDS = (
    verb_command(verbs.GET, str, run=_get),
    verb_command(
        verbs.SET, _reply_page,
        flag("--for", dest="lasting", default="", metavar="TIME",
             help="go back by itself after 50steps, 30s, 10min, 2h"),
        more=_changes, check=check_reply,
        description="Change knobs of a live run. All owners of all knobs agree, or nothing is changed; each knob takes "
        "effect at its boundary (`myxa get NAME`).",
    ),
    verb_command(verbs.UNDO, _reply_page, check=check_reply),
    verb_command(
        verbs.HISTORY, change_line,
        flag("--verify", action="store_true", help="check the chain of digests of the whole log"), run=_history,
    ),
)  # fmt: skip
