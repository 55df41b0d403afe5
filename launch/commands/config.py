"""`myxa config diff`, `config save`: how the knobs stand against the run file, and keeping that in a file."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ...core.errors import ConfigError
from .knob_words import shown
from .output import Verbs, add_run_flags, show, table
from .parser import Parser
from .which_run import client_of

if TYPE_CHECKING:
    from rich.console import RenderableType


def add(verbs: Verbs) -> None:
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
    show(options, found, _page)
    return 0


def _page(found: list[dict[str, Any]]) -> RenderableType | str:
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
    told = {"file": str(options.file), "saved": values, "left_out": left_out}
    show(options, told, lambda told: "\n".join(_told(told)))
    return 0


def _told(told: dict[str, Any]) -> list[str]:
    lines = [f"{key} = {shown(found)}" for key, found in told["saved"].items()]
    lines += [f"not saved: {name}: {why}" for name, why in told["left_out"].items()]
    return [*lines, f"written to {told['file']}"]


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
