"""`myxa why`: what holds the run back, and the knob to turn."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .output import Verbs, add_run_flags, show, table
from .stretch import stretch_s
from .which_run import client_or_folder

if TYPE_CHECKING:
    from rich.console import RenderableType


def add(verbs: Verbs) -> None:
    """The command and its flags."""
    parser = verbs.add_parser("why", help="what holds the run back, and the knob to turn")
    parser.add_argument("target", nargs="?", default="", metavar="TARGET",
                        help="actor: rollout/1, rollout, trainer/0 (the run as a whole)")  # fmt: skip
    parser.add_argument("--window", type=stretch_s, default=60.0, metavar="T", dest="window_s",
                        help="the last so many seconds, at most 10min (60s)")  # fmt: skip
    add_run_flags(parser)
    parser.set_defaults(run=_why)


def _why(options: argparse.Namespace) -> int:
    found = client_or_folder(options)
    if isinstance(found, Path):
        reason = _from_files(found, options.target)
    else:
        reason = found.ask("why", target=options.target, window_s=options.window_s)
    show(options, reason, _page)
    return 0


def _from_files(folder: Path, target: str) -> dict[str, Any]:
    """Of a run that is over, over all of it."""
    import msgspec

    from ..views.why import explain_files

    return msgspec.to_builtins(explain_files(folder, target))


def _page(reason: dict[str, Any]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from ...core.activity import ACTIVITY_KINDS

    parts: list[RenderableType] = [Text(reason["sentence"])]
    if reason["remedy"]:
        parts.append(Text(f"because: {reason['remedy']}" if change_words(reason) else f"try: {reason['remedy']}"))
    if words := change_words(reason):
        parts.append(Text(f"try: {words}", style="bold"))
    rows = [
        (name, *(_percent(kinds, kind) for kind in ACTIVITY_KINDS)) for name, kinds in sorted(reason["shares"].items())
    ]
    parts += [Text(""), table(("actor", *ACTIVITY_KINDS), rows, right=ACTIVITY_KINDS)]
    return Group(*parts)


def change_words(reason: dict[str, Any]) -> str:
    """The command to type, or the line of the run file; empty: there is neither."""
    if reason["command"]:
        return str(reason["command"])
    return f"in the run file: {reason['key']} = {reason['new']}" if reason["key"] else ""


def _percent(kinds: dict[str, float], kind: str) -> str:
    share = kinds.get(kind, 0.0)
    return f"{share * 100:.0f} %" if share >= 0.005 else ("" if kinds else "?")
