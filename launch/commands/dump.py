"""`myxa dump`: groups of the running run, with their tokens, into a file that can be read again."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .output import Verbs, add_run_flags, show, table
from .which_run import client_of
from .whole import at_least

if TYPE_CHECKING:
    from rich.console import RenderableType

DUMP_S = 1815.0


def add(verbs: Verbs) -> None:
    """The command and its flags."""
    dump = verbs.add_parser("dump", help="write groups with their tokens into a file of the run")
    what = dump.add_mutually_exclusive_group()
    what.add_argument("--next", type=at_least(1), default=0, metavar="N", dest="next_groups",
                      help="the next N that are claimed for training (all that was not trained yet)")  # fmt: skip
    what.add_argument("--end", action="store_true", help="end an earlier --next before it has all its groups")
    what.add_argument("--list", action="store_true", help="files that were written, or are being written")
    dump.add_argument(
        "--max-mb", type=at_least(1), default=1024, metavar="MB", help="largest file, in MiB (%(default)s)"
    )
    dump.set_defaults(run=_dump)
    add_run_flags(dump)


def _dump(options: argparse.Namespace) -> int:
    if options.list:
        show(options, client_of(options).ask("dumps"), _files)
        return 0
    client = client_of(options, changes=True)
    wanted = -1 if options.end else options.next_groups
    show(options, client.ask("dump", DUMP_S, next_groups=wanted, max_mb=options.max_mb), _sentence)
    return 0


def _sentence(told: dict[str, Any]) -> str:
    text = f"{told['num_groups']} groups, {told['num_bytes']:,} bytes in {told['path']}"
    return f"{text}: {told['reason']}" if told["reason"] else text


def _files(told: list[dict[str, Any]]) -> RenderableType:
    rows = [(d["path"], d["num_groups"], f"{d['num_bytes']:,}", d["reason"] or "whole") for d in told]
    return table(("file", "groups", "bytes", ""), rows, right=("groups", "bytes"))
