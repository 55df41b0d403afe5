"""`myxa logs`: the logs of the run's processes, wherever they are."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..control.client import ControlClient
from .output import Verbs, add_run_flags, show
from .whole import at_least


def add(verbs: Verbs) -> None:
    """The command and its flags."""
    logs = verbs.add_parser("logs", help="an actor's log, on whatever node it is")
    logs.add_argument("target", metavar="TARGET", help="rollout/1, rollout, node:1, all, launcher")
    logs.add_argument("-f", "--follow", action="store_true", help="go on with what is added, until Ctrl-C")
    logs.add_argument("-n", "--lines", type=at_least(0), default=100, metavar="N", dest="num_lines",
                      help="so many of the last lines (%(default)s)")  # fmt: skip
    logs.add_argument("--grep", default="", metavar="TEXT", help="only lines that hold this text")
    logs.add_argument("--engine", action="store_true", help="of the server that the actor launched")
    logs.set_defaults(run=_logs)
    add_run_flags(logs)


def _logs(options: argparse.Namespace) -> int:
    client = ControlClient.of(options.run_path)
    arguments = {
        "target": options.target, "num_lines": options.num_lines, "grep": options.grep, "engine": options.engine,
    }  # fmt: skip
    if not options.follow:
        show(options, client.ask("logs", **arguments), _told)
        return 0
    names: set[str] = set()
    for chunk in client.follow("logs-follow", **arguments):
        names.add(chunk["name"])
        told = json.dumps(chunk) if options.json else _lines(chunk, is_one_of_several=len(names) > 1)
        if told:
            print(told, flush=True)
    return 0


def _told(chunks: list[dict[str, Any]]) -> str:
    return "\n".join(filter(None, (_lines(chunk, is_one_of_several=len(chunks) > 1) for chunk in chunks)))


def _lines(chunk: dict[str, Any], *, is_one_of_several: bool) -> str:
    before = f"{chunk['name']}: " if is_one_of_several else ""
    return "\n".join(f"{before}{line}" for line in chunk["lines"])
