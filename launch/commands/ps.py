"""`myxa ps`: every actor of the run, where it is and what it does."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .output import Verbs, add_run_flags, show, table
from .which_run import client_or_folder

if TYPE_CHECKING:
    from rich.console import RenderableType

COLUMNS = ("actor", "state", "pid", "node", "host", "attempt", "epoch", "up", "memory", "doing")


def add(verbs: Verbs) -> None:
    """The command and its flags."""
    parser = verbs.add_parser("ps", help="every actor, where it runs and what it does")
    add_run_flags(parser)
    parser.set_defaults(run=_ps)


def _ps(options: argparse.Namespace) -> int:
    found = client_or_folder(options)
    show(options, _from_files(found) if isinstance(found, Path) else found.ask("ps"), _page)
    return 0


def _from_files(folder: Path) -> list[dict[str, Any]]:
    """The actors of a run that is over, and what each did most."""
    import msgspec

    from ..control.ps_verbs import ActorRow, doing
    from ..views.run_files import load_run

    return [
        msgspec.to_builtins(
            ActorRow(
                name=name, role=name.partition("/")[0], node=0, host="", state="ended", pid=0, attempt=0, epoch=0,
                restarts_left=0, devices=(), uptime_s=0.0, memory_bytes=0, doing=doing(shares),
            )
        )
        for name, shares in sorted(load_run(folder).shares().items())
    ]  # fmt: skip


def _page(rows: list[dict[str, Any]]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from ..views.numbers import duration

    cells = [
        (
            row["name"], row["state"], row["pid"] or "", row["node"], row["host"], row["attempt"], row["epoch"] or "",
            duration(row["uptime_s"]) if row["uptime_s"] else "", _size(row["memory_bytes"]), row["doing"],
        )
        for row in rows
    ]  # fmt: skip
    notes = [Text(f"{row['name']}: {row['note']}") for row in rows if row.get("note")]
    return Group(table(COLUMNS, cells, right=("pid", "node", "attempt", "epoch", "up", "memory")), *notes)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.0f} MiB" if num_bytes else ""
