"""`myxa top`: the run in a terminal. Only this command needs textual, and only when it is run."""

from __future__ import annotations

import argparse
import io
import sys
from importlib.util import find_spec
from pathlib import Path

from ...core.errors import ConfigError
from .output import Verbs


def add(verbs: Verbs) -> None:
    """Add the command."""
    top = verbs.add_parser(
        "top",
        help="the run in a terminal: look at it and turn its knobs",
        description="Nodes, actors, queues, staleness, engines, knobs, history, logs and stacks of a run that goes on.",
    )
    top.add_argument("--run", type=Path, default=None, metavar="RUN", dest="run_path",
                     help="run directory (the only run that goes on)")  # fmt: skip
    top.add_argument("--read-only", action="store_true", help="look only: no knob can be turned by mistake")
    top.set_defaults(run=_top)


def _top(options: argparse.Namespace) -> int:
    if find_spec("textual") is None:
        raise ConfigError("myxa top needs textual, which is not installed", remedy="pip install 'myxa[tui]'")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("myxa top needs a terminal", remedy="`myxa ps`, `myxa get` and `myxa why` print to a pipe")
    _make_lossy()
    from ..tui.app import TopApp  # textual is needed here only
    from ..tui.feed import Feed

    TopApp(Feed.of(options.run_path, only_view=options.read_only)).run()
    return 0


def _make_lossy() -> None:
    """In a terminal without Unicode each odd letter becomes one question mark, which keeps columns in place."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
