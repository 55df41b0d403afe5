"""`myxa logs`: the logs of the run's processes, wherever they are."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .output import Verbs, add_run_flags, say_now, show
from .which_run import client_or_folder
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
    client = client_or_folder(options)
    arguments = {
        "target": options.target, "num_lines": options.num_lines, "grep": options.grep, "engine": options.engine,
    }  # fmt: skip
    if isinstance(client, Path):
        show(options, _from_files(client, options), _told)
        return 0
    if not options.follow:
        show(options, client.ask("logs", **arguments), _told)
        return 0
    say_now()
    names: set[str] = set()
    for chunk in client.follow("logs-follow", **arguments):
        names.add(chunk["name"])
        told = json.dumps(chunk) if options.json else _lines(chunk, is_one_of_several=len(names) > 1)
        if told:
            print(told, flush=True)
    return 0


def _from_files(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Of a run that is over; the logs of other nodes are there. Raises ConfigError for one that is not here."""
    import msgspec

    from ..contracts import LogRequest
    from ..nodes.log_reader import read_log
    from ..run_dir import RunDir

    run_dir, target = RunDir(folder), options.target.removesuffix("/*")
    there = sorted(path.stem.replace(".", "/") for path in (run_dir.logs / "latest").glob("*.log"))
    names = [name for name in there if target in (name, name.partition("/")[0], "all")] or [target]
    requests = [
        LogRequest(name=name, num_lines=options.num_lines, grep=options.grep, engine=options.engine) for name in names
    ]
    return [msgspec.to_builtins(read_log(run_dir, 0, request)) for request in requests]


def _told(chunks: list[dict[str, Any]]) -> str:
    return "\n".join(filter(None, (_lines(chunk, is_one_of_several=len(chunks) > 1) for chunk in chunks)))


def _lines(chunk: dict[str, Any], *, is_one_of_several: bool) -> str:
    before = f"{chunk['name']}: " if is_one_of_several else ""
    return "\n".join(f"{before}{line}" for line in chunk["lines"])
