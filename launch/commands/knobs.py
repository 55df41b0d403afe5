"""Knobs of a live run: `get`, `set`, `explain`, `apply`, `undo`, `config`, `suggest`; how knobs are written
and shown.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ...core.errors import ConfigError
from ..control.client import ControlClient
from .output import Verbs, add_run_flags, client_of, show, table
from .parser import Parser, at_least, stretch_s

if TYPE_CHECKING:
    from rich.console import RenderableType


QUIET = "process"
"""Owner of knobs that every process has; they are many and alike, and only shown when asked for."""


def add_get(verbs: Verbs) -> None:
    """The command and its flags."""
    parser = verbs.add_parser("get", help="knobs with their values, limits and owners")
    parser.add_argument("names", nargs="*", metavar="NAME", help="knobs; none: all but those of every process")
    parser.add_argument("--all", action="store_true", help="every knob of every actor")
    add_run_flags(parser)
    parser.set_defaults(run=_get)


def _get(options: argparse.Namespace) -> int:
    found = client_of(options).ask("get", names=options.names)
    show(options, found, lambda facts: _get_page(facts, every=options.all or bool(options.names)))
    return 0


def _get_page(found: dict[str, Any], *, every: bool) -> RenderableType:
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


CHANGE_S = 75.0


def add_set(verbs: Verbs) -> None:
    """The command and its flags."""
    parser = verbs.add_parser(
        "set",
        help="change knobs, all or none",
        description="Change knobs of a live run. All owners of all knobs agree, or nothing is changed; each "
        "knob takes effect at its boundary (`myxa explain NAME`).",
    )
    parser.add_argument("values", nargs="+", metavar="NAME=VALUE", help="such as lr=1e-4; values as in the run file")
    add_change_flags(parser)
    add_run_flags(parser)
    parser.set_defaults(run=_set)


def _set(options: argparse.Namespace) -> int:
    arguments = change_arguments(options, assignments(options.values, "set"))
    reply = client_of(options, changes=True).ask("set", CHANGE_S, **arguments)
    check_reply(reply)
    show(options, reply, change_text)
    return 0


BOUNDARIES = {
    "now": "at once",
    "request": "for the next work that is handed out",
    "batch": "for a batch, all owners at the same one",
    "step": "for a training step, all owners at the same one",
    "weights": "for a weight version, all owners at the same one",
}


def add_explain(verbs: Verbs) -> None:
    """The command and its flags."""
    parser = verbs.add_parser("explain", help="everything about one knob, with its history")
    parser.add_argument("name", metavar="NAME", help="a knob; `myxa get --all` lists them")
    add_run_flags(parser)
    parser.set_defaults(run=_explain)


def _explain(options: argparse.Namespace) -> int:
    found = client_of(options).ask("explain", name=options.name)
    show(options, found, lambda facts: "\n".join(_explain_lines(facts)))
    return 0


def _explain_lines(found: dict[str, Any]) -> Iterator[str]:
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


def add_apply(verbs: Verbs) -> None:
    """The command and its flags."""
    parser = verbs.add_parser(
        "apply",
        help="change knobs as a piece of a run file says, all or none",
        description="Change every knob whose key the file names, all or none. Keys that are no knobs, and differ from "
        "the run's, are refused together: they need a restart.",
    )
    parser.add_argument("file", type=Path, metavar="PATCH.TOML", help="sections and keys as in the run file")
    add_change_flags(parser)
    add_run_flags(parser)
    parser.set_defaults(run=_apply)


def _apply(options: argparse.Namespace) -> int:
    patch = _read(options.file)
    client = client_of(options, changes=True)
    values = knob_values(client, patch, str(options.file))
    reply = client.ask("set", CHANGE_S, **change_arguments(options, values))
    check_reply(reply)
    show(options, reply, change_text)
    return 0


def knob_values(client: ControlClient, patch: dict[str, Any], where: str) -> dict[str, Any]:
    """Knob -> value. Raises ConfigError naming every key that needs a restart or does not exist."""
    plan = client.ask("config", patch=patch)
    wrong = [f"{key} is no key of the run file" for key in plan["unknown"]]
    wrong += [f"{key} is no knob and needs a restart" for key in plan["needs_restart"]]
    if wrong:
        raise ConfigError(
            f"{where}: {'; '.join(wrong)}",
            remedy="take these out, or start the run again with this file; nothing was changed",
        )
    if not plan["values"]:
        raise ConfigError(
            f"{where}: names no knob", remedy="`myxa get --all` lists the knobs, `myxa explain` their keys"
        )
    return plan["values"]


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", remedy="name a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not TOML: {error}", remedy="mend the file; nothing was changed") from error


def add_undo(verbs: Verbs) -> None:
    """The command and its flags."""
    parser = verbs.add_parser("undo", help="take the newest change of knobs back, or that of an epoch")
    parser.add_argument("--epoch", type=at_least(1), default=0, metavar="N", help="which change (the newest)")
    parser.add_argument("-m", "--reason", default="", metavar="WHY", help="your own words, for the audit log")
    add_run_flags(parser)
    parser.set_defaults(run=_undo)


def _undo(options: argparse.Namespace) -> int:
    reply = client_of(options, changes=True).ask("undo", CHANGE_S, epoch=options.epoch, reason=options.reason)
    check_reply(reply)
    show(options, reply, change_text)
    return 0


def add_config(verbs: Verbs) -> None:
    """The command, its sub-commands and flags."""
    config = cast(Parser, verbs.add_parser("config", help="live knobs against the run file")).add_commands()
    diff = config.add_parser("diff", help="knobs that are not as the run file says")
    diff.set_defaults(run=_diff)
    save = config.add_parser(
        "save",
        help="write the live values into a TOML file",
        description="Write the knobs that were changed into a TOML file: a new one, which `myxa up run.toml FILE` "
        "takes as a second run file, or an old one, whose comments and other keys stay as they are.",
    )
    save.add_argument("file", type=Path, metavar="FILE", help="run file, or patch, that may exist")
    save.set_defaults(run=_save)
    for parser in (diff, save):
        add_run_flags(parser)


def _diff(options: argparse.Namespace) -> int:
    found = client_of(options).ask("config")["differences"]
    show(options, found, _config_page)
    return 0


def _config_page(found: list[dict[str, Any]]) -> RenderableType | str:
    if not found:
        return "every knob is as the run file says"
    rows = [(d["knob"], d["key"], shown(d["file"]), shown(d["live"]), d["owner"]) for d in found]
    return table(("knob", "key", "file", "live", "owner"), rows, right=("file", "live"))


def _save(options: argparse.Namespace) -> int:
    found = client_of(options).ask("config")["differences"]
    values, left_out = chosen(found)
    if not values:
        raise ConfigError("no knob with a key in the run file differs from it", remedy="`myxa config diff` lists all")
    _write(options.file, values)
    facts = {"file": str(options.file), "saved": values, "left_out": left_out}
    show(options, facts, lambda facts: "\n".join(_saved_lines(facts)))
    return 0


def _saved_lines(facts: dict[str, Any]) -> list[str]:
    lines = [f"{key} = {shown(found)}" for key, found in facts["saved"].items()]
    lines += [f"not saved: {name}: {why}" for name, why in facts["left_out"].items()]
    return [*lines, f"written to {facts['file']}"]


def chosen(differences: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Key -> value, and knob -> why it cannot be said in a run file."""
    values: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for difference in differences:
        knob, key, live = difference["knob"], difference["key"], difference["live"]
        if not key:
            left_out[knob] = "it has no key in the run file"
        elif values.get(key, live) != live:
            left_out[knob] = "its owners have different values"
        else:
            values[key] = live
    return {key: value for key, value in values.items() if not _is_left_out(key, differences, left_out)}, left_out


def _is_left_out(key: str, differences: list[dict[str, Any]], left_out: dict[str, str]) -> bool:
    return any(d["key"] == key and d["knob"] in left_out for d in differences)


def _write(path: Path, values: dict[str, Any]) -> None:
    """Into the file in one step; comments and order of an old one are kept (tomlkit)."""
    import tomlkit  # only here, and slow to import
    from tomlkit.exceptions import TOMLKitError

    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        document: Any = tomlkit.parse(text)
        for key, found in values.items():
            *sections, name = key.split(".")
            place = document
            for section in sections:
                if section not in place:
                    place[section] = tomlkit.table()
                place = place[section]
            place[name] = found
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_text(tomlkit.dumps(document), encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}", remedy="name another file") from error
    except (TOMLKitError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not TOML: {error}", remedy="name another file; this one is as it was") from error


ACTIONS = ("approve", "forbid", "allow", "pin", "unpin")
DECIDE_S = 60.0
PROPOSAL_COLUMNS = ("id", "change", "now", "proposed", "why")


def add_suggest(verbs: Verbs) -> None:
    """The command and its flags."""
    parser = verbs.add_parser("suggest", help="what could be turned now; approve, forbid, pin")
    parser.add_argument("action", nargs="?", choices=ACTIONS, help="what to do with it; without: list what there is")
    parser.add_argument("what", nargs="?", default="", metavar="ID|KNOB",
                        help="name of a suggestion (approve, forbid), or a knob (pin, unpin, allow)")  # fmt: skip
    parser.add_argument("--window", type=stretch_s, default=60.0, metavar="T", dest="window_s",
                        help="judge by the last so many seconds (60s)")  # fmt: skip
    parser.add_argument("-m", dest="reason", default="", metavar="REASON", help="why, for the audit log")
    add_run_flags(parser)
    parser.set_defaults(run=_suggest)


def _suggest(options: argparse.Namespace) -> int:
    client = client_of(options, changes=options.action is not None)
    if options.action is None:
        show(options, client.ask("suggest", window_s=options.window_s), _suggest_page)
        return 0
    if not options.what:
        from ...core.errors import ConfigError

        raise ConfigError(f"suggest {options.action}: of what?", remedy="name one that `myxa suggest` lists, or a knob")
    done = client.ask("suggest-decide", DECIDE_S, action=options.action, what=options.what, reason=options.reason)
    show(options, done, _suggest_done)
    return 1 if done.get("refused") else 0


def _suggest_page(facts: dict[str, Any]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(facts["sentence"]), Text("")]
    rows = [(s["id"], change_words(s) or s["knob"], s["old"], s["new"], s["why"]) for s in facts["open"]]
    parts.append(table(PROPOSAL_COLUMNS, rows) if rows else Text("nothing to propose"))
    if facts["pins"]:
        parts.append(Text(f"pinned: {', '.join(facts['pins'])}"))
    if facts["forbidden"]:
        rules = ", ".join(f"{rule['knob'] or rule['key']} = {rule['new']}" for rule in facts["forbidden"])
        parts.append(Text(f"forbidden: {rules}"))
    if facts["autopilot"]:
        parts.append(Text("the autopilot approves what lasts"))
    return Group(*parts)


def _suggest_done(done: dict[str, Any]) -> str:
    if done.get("refused"):
        return f"refused: {done['refused']}"
    if "moves" in done:
        moves = sorted({f"{move['name']} {move['old']} -> {move['new']}" for move in done["moves"]})
        return f"{', '.join(moves)} (epoch {done['epoch']})"
    return ", ".join(f"{word} {value['id'] if isinstance(value, dict) else value}" for word, value in done.items())


_BARE = re.compile(r"[A-Za-z_][A-Za-z0-9_.:/*,-]*|\d+,(\d+,)*\d*")
_WORDS = {"True": "true", "False": "false"}
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
        table[name.strip()] = value(name.strip(), text.strip())
    return table


def value(name: str, text: str) -> Any:
    """A TOML value; a bare word is text, for shells eat quotes."""
    try:
        found = tomllib.loads(f"value = {_WORDS.get(text, text)}")["value"]
    except tomllib.TOMLDecodeError as error:
        if _BARE.fullmatch(text):
            return text
        raise ConfigError(f"{name} = {text}: is no TOML value: {error}", remedy='write 1e-4, true or "text"') from None
    if isinstance(found, float) and not math.isfinite(found):
        raise ConfigError(f"{name} = {text}: must be finite", remedy=f"`myxa explain {name}` shows its range")
    if not isinstance(found, bool | int | float | str):
        raise ConfigError(f"{name} = {text}: knobs are numbers, text, true or false", remedy=f"`myxa explain {name}`")
    return found


def lasting(text: str) -> dict[str, Any]:
    """A time such as 50steps or 30s, as arguments of `set`. Raises ConfigError."""
    found = _LASTING.fullmatch(text.strip())
    is_steps = found is not None and found["unit"].startswith("step")
    if found is None or (is_steps and "." in found["number"]) or float(found["number"]) == 0:
        raise ConfigError(f"--for {text}: is no time", remedy="write 50steps, 30s, 10min or 2h")
    if is_steps:
        return {"for_steps": int(found["number"])}
    return {"for_s": float(found["number"]) * _LASTING_SECONDS[found["unit"]]}


def add_change_flags(parser: argparse.ArgumentParser) -> None:
    """What every command that changes knobs takes."""
    parser.add_argument("-m", "--reason", default="", metavar="WHY", help="your own words, for the audit log")
    parser.add_argument("--for", dest="lasting", default="", metavar="TIME",
                        help="go back by itself after 50steps, 30s, 10min, 2h")  # fmt: skip
    parser.add_argument("--if", dest="expect", action="append", default=[], metavar="NAME=VALUE",
                        help="only if that knob has that value now; may be repeated")  # fmt: skip
    parser.add_argument("--target", default="", metavar="WHO",
                        help="only these owners: rollout, rollout/3, rollout/*, node:1")  # fmt: skip
    parser.add_argument("--at", type=at_least(0), default=0, metavar="N", dest="not_before",
                        help="not before boundary number N (training step, version)")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="ask the owners, change nothing")
    parser.add_argument("--force", action="store_true", help="also beyond a guard, such as ten times the file's lr")


def change_arguments(options: argparse.Namespace, values: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the verb `set`."""
    return {
        "values": values,
        "reason": options.reason,
        "target": options.target,
        "expect": assignments(options.expect, "--if"),
        "not_before": options.not_before,
        "dry_run": options.dry_run,
        "force": options.force,
        **(lasting(options.lasting) if options.lasting else {}),
    }


def shown(found: Any) -> str:
    """A value as TOML has it."""
    if isinstance(found, bool):
        return "true" if found else "false"
    if isinstance(found, float):
        return f"{found:.10g}"
    return f'"{found}"' if isinstance(found, str) else str(found)


def change_text(reply: dict[str, Any]) -> str:
    """What became of a change."""
    if reply["refused"]:
        return ""  # reported as an error
    lines = [
        f"{m['name']}  {shown(m['old'])} -> {shown(m['new'])}  {m['owner']}, {_boundary(m, reply['at'])}"
        for m in reply["moves"]
    ]
    lines += [f"warning: {text}" for text in reply["warnings"]]
    lines.append(f"epoch {reply['epoch']}" if reply["epoch"] else "nothing was changed")
    return "\n".join(lines)


def _boundary(move: dict[str, Any], at: int) -> str:
    kind = move["boundary"]
    return {"now": "at once", "request": "from the next request on"}.get(kind, f"at {kind} {at}")


def check_reply(reply: dict[str, Any]) -> None:
    """Raises ConfigError for a change that was refused."""
    if reply["refused"]:
        raise ConfigError(reply["refused"], remedy="nothing was changed")


def change_words(reason: dict[str, Any]) -> str:
    """The command to type, or the line of the run file; empty: there is neither."""
    if reason["command"]:
        return str(reason["command"])
    return f"in the run file: {reason['key']} = {reason['new']}" if reason["key"] else ""
