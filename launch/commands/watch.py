"""`myxa watch`: changes, step metrics and events as they come."""

from __future__ import annotations

import argparse
import json
from datetime import datetime
from typing import Any

from .explain import change_line
from .output import Verbs, add_run_flags, say_now
from .which_run import client_of
from .whole import at_least

MAX_METRICS = 8
FIRST = ("reward/raw_mean", "reward/mean", "train/loss", "lag/max", "train/grad_norm", "train/entropy")
"""Metrics that are shown first where none was named."""


def add(verbs: Verbs) -> None:
    """The command and its flags."""
    parser = verbs.add_parser("watch", help="changes, step metrics and events as they come; Ctrl-C ends it")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help='only these knobs, metrics and kinds of events ("lag/*")'
    )
    parser.add_argument("--past", action="store_true", help="from the beginning of the run")
    parser.add_argument("--count", type=at_least(1), default=0, metavar="N", help="end after N lines")
    add_run_flags(parser)
    parser.set_defaults(run=_watch)


def _watch(options: argparse.Namespace) -> int:
    client = client_of(options)
    say_now()
    items = client.follow("watch", names=options.names, past=options.past)
    for number, item in enumerate(items, start=1):
        print(json.dumps(item) if options.json else _line(item, is_chosen=bool(options.names)), flush=True)
        if number == options.count:
            break
    return 0


def _line(item: dict[str, Any], *, is_chosen: bool) -> str:
    if item["kind"] == "change":
        return f"change   {change_line(item)}"
    when = datetime.fromtimestamp(item["wall_s"]).strftime("%H:%M:%S")
    if item["kind"] == "event":
        return f"event    {when} {item['source']} {item['event']}: {' '.join(str(item['text']).split())}"
    step = f"step {item['step']}" if item["step"] >= 0 else ""
    return f"metrics  {when} {item['source']} {step} {_values(item['values'], is_chosen=is_chosen)}".rstrip()


def _values(values: dict[str, float], *, is_chosen: bool) -> str:
    first = [name for name in FIRST if name in values]
    names = list(values) if is_chosen else [*first, *(name for name in values if name not in first)][:MAX_METRICS]
    more = f" (+{len(values) - len(names)})" if len(values) > len(names) else ""
    return "  ".join(f"{name} {values[name]:.5g}" for name in names) + more
