"""`myxa suggest`: what could be turned now; approve it, forbid it, pin a knob."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .output import Verbs, add_run_flags, show, table
from .stretch import stretch_s
from .which_run import client_of
from .why import change_words

if TYPE_CHECKING:
    from rich.console import RenderableType

ACTIONS = ("approve", "forbid", "allow", "pin", "unpin")
CHANGE_S = 60.0
COLUMNS = ("id", "change", "now", "proposed", "why")


def add(verbs: Verbs) -> None:
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
        show(options, client.ask("suggest", window_s=options.window_s), _page)
        return 0
    if not options.what:
        from ...core.errors import ConfigError

        raise ConfigError(f"suggest {options.action}: of what?", remedy="name one that `myxa suggest` lists, or a knob")
    done = client.ask("suggest-decide", CHANGE_S, action=options.action, what=options.what, reason=options.reason)
    show(options, done, _done)
    return 1 if done.get("refused") else 0


def _page(told: dict[str, Any]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(told["sentence"]), Text("")]
    rows = [(s["id"], change_words(s) or s["knob"], s["old"], s["new"], s["why"]) for s in told["open"]]
    parts.append(table(COLUMNS, rows) if rows else Text("nothing to propose"))
    if told["pins"]:
        parts.append(Text(f"pinned: {', '.join(told['pins'])}"))
    if told["forbidden"]:
        rules = ", ".join(f"{rule['knob'] or rule['key']} = {rule['new']}" for rule in told["forbidden"])
        parts.append(Text(f"forbidden: {rules}"))
    if told["autopilot"]:
        parts.append(Text("the autopilot approves what lasts"))
    return Group(*parts)


def _done(done: dict[str, Any]) -> str:
    if done.get("refused"):
        return f"refused: {done['refused']}"
    if "moves" in done:
        moves = sorted({f"{move['name']} {move['old']} -> {move['new']}" for move in done["moves"]})
        return f"{', '.join(moves)} (epoch {done['epoch']})"
    return ", ".join(f"{word} {value['id'] if isinstance(value, dict) else value}" for word, value in done.items())
