"""`myxa ps`: every actor of the run, where it is and what it does."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ..control.client import ControlClient
from .output import Verbs, add_run_flags, show, table

if TYPE_CHECKING:
    from rich.console import RenderableType

COLUMNS = ("actor", "state", "pid", "node", "host", "attempt", "epoch", "up", "memory", "doing")


def add(verbs: Verbs) -> None:
    """The command and its flags."""
    parser = verbs.add_parser("ps", help="every actor, where it runs and what it does")
    add_run_flags(parser)
    parser.set_defaults(run=_ps)


def _ps(options: argparse.Namespace) -> int:
    show(options, ControlClient.of(options.run_path).ask("ps"), _page)
    return 0


def _page(rows: list[dict[str, Any]]) -> RenderableType:
    from ..views.numbers import duration

    cells = [
        (
            row["name"], row["state"], row["pid"] or "", row["node"], row["host"], row["attempt"], row["epoch"] or "",
            duration(row["uptime_s"]) if row["uptime_s"] else "", _size(row["memory_bytes"]), row["doing"],
        )
        for row in rows
    ]  # fmt: skip
    return table(COLUMNS, cells, right=("pid", "node", "attempt", "epoch", "up", "memory"))


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.0f} MiB" if num_bytes else ""
