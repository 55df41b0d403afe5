"""`myxa apply`: change many knobs at once, from a piece of a run file."""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ..control.client import ControlClient
from .knob_words import add_change_flags, change_arguments, change_text, check_reply
from .output import Verbs, add_run_flags, show
from .which_run import client_of

CHANGE_S = 75.0


def add(verbs: Verbs) -> None:
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
