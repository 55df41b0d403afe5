"""Terminal output of `myxa up`: a live table, or plain lines where there is no terminal; the summary at the end.

The view draws only in `update`: it has no thread and no timer. `lasting` keeps a run alive when its standard output
breaks: a reader that ended (`myxa up | tee`), a closed terminal, a full disk under a redirected output.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ...core.messages import RunStatus
from .changes import changes_of, clock_text
from .numbers import clean, duration, name_order, short, sparkline, time_parts
from .run_view import (
    ENGINE_COLUMNS,
    RunView,
    done_text,
    dropped_text,
    engine_rows,
    fact_lines,
    notice_text,
    plain_line,
    queue_rows,
)
from .why import describe_rollout

_MAX_WIDTH = 72


def final_summary(
    console: Console,
    status: RunStatus,
    *,
    elapsed_s: float,
    run_dir: Path,
    report: Path | None,
    curves: Mapping[str, Mapping[int, float]],
    dropped: Mapping[str, int] | None = None,
) -> None:
    """The end of a run. `curves`: values over steps by name; `dropped`: reason -> groups left out."""
    colour = {"finished": "green", "failed": "red"}.get(status.phase, "yellow")
    goal = f" of {status.num_steps}" if status.num_steps > 0 else ""
    headline = f"{clean(status.name)}: {status.phase} after {status.version}{goal} steps, {duration(elapsed_s)}"
    console.print(Text(headline, style=f"bold {colour}"))
    for reason in (status.reason, status.error):
        if reason:
            console.print(Text(clean(reason)), soft_wrap=True)
    if dropped and any(dropped.values()):
        console.print(Text(f"groups left out: {dropped_text(dropped)}"), soft_wrap=True)
    for name, curve in curves.items():
        if curve:
            values = [curve[step] for step in sorted(curve)]
            line = sparkline(values, min(_MAX_WIDTH, console.width - 12))
            console.print(Text(f"{name}: {_change(values)}\n  {line}", no_wrap=True), crop=False)
    console.print()
    for label, path in (("report", report), ("run directory", run_dir)):
        if path is not None:
            console.print(Text.assemble((f"{label}: ", "bold"), str(path)), soft_wrap=True)


def _change(values: Sequence[float]) -> str:
    """First and last value; of a noisy curve the means of its first and last tenth."""
    num = max(1, len(values) // 10)
    first, last = sum(values[:num]) / num, sum(values[-num:]) / num
    return f"{short(first)} -> {short(last)}"


_LINE_EVERY_S = 2.0
_HEARTBEAT_S = 30.0
_PHASE_COLOURS = {"running": "green", "finished": "green", "failed": "red"}


class LiveView:
    """Shows states as they come. A context manager, which restores the terminal at its end."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._live: Live | None = None
        self._line_s = float("-inf")
        self._line_key: tuple[str, bool, int] = ("", False, -1)

    def __enter__(self) -> LiveView:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, view: RunView) -> None:
        """Draw the state; without a terminal a line for news, steps at most one per 2 s."""
        if self._live is not None:
            self._live.update(render(view), refresh=True)
            return
        key, silent_s = (view.phase, bool(view.warning), view.version), view.now_wall_s - self._line_s
        is_news = key[:2] != self._line_key[:2] or (key != self._line_key and silent_s >= _LINE_EVERY_S)
        if is_news or silent_s >= _HEARTBEAT_S:
            self._line_key, self._line_s = key, view.now_wall_s
            self.say(plain_line(view))

    def say(self, text: str) -> None:
        self._console.print(Text(clean(text)), soft_wrap=True)


_MAX_CHANGES = 3
_MAX_WAITS = 3
_MAX_ROWS = 12
"""Of engines, and of actors."""


def render(view: RunView) -> RenderableType:
    """A screen that is too low shows the beginning."""
    parts: list[RenderableType] = [Text(clean(view.held_back()), "italic")]
    if notice := notice_text(view):
        parts.append(Text(notice, "bold yellow"))
    queues = "   ".join(f"{label} {count}{f' of {of}' * (label == 'slots')}" for label, count, of in queue_rows(view))
    facts = [(label, text) for label, text in fact_lines(view) if label != "warning"]
    facts += [("to try", clean(view.remedy)), ("groups", queues), ("since start", done_text(view))]
    parts.append(_rows([*facts, ("reward", sparkline(view.rewards, 60))]))
    if engines := engine_rows(view):
        more = f"{len(engines)} engines, of which" if len(engines) > _MAX_ROWS else ""
        parts += [Text(more), _rows([ENGINE_COLUMNS, *engines[:_MAX_ROWS]])]
    shares = {name: "  ".join(time_parts(kinds, 0)) for name, kinds in view.shares().items() if kinds}
    if shares:
        more = f", {_MAX_ROWS} of {len(shares)} actors" if len(shares) > _MAX_ROWS else ""
        rows = [(clean(name), shares[name]) for name in sorted(shares, key=name_order)[:_MAX_ROWS]]
        parts += [Text(f"\ntime of the last minute{more}"), _rows(rows)]
    if waits := [describe_rollout(rollout) for rollout in view.under_way[:_MAX_WAITS]]:
        parts += [Text("\nrollouts that wait longest"), *map(Text, waits)]
    if changes := [change for change in changes_of(view.history) if change.is_done][-_MAX_CHANGES:]:
        words = ("   ".join(filter(None, (change.what, change.who, change.record.reason))) for change in changes)
        rows = [(clock_text(change.record.wall_s), clean(text)) for change, text in zip(changes, words, strict=True)]
        parts += [Text("\nnewest changes"), _rows(rows)]
    if view.num_steps:
        parts.append(ProgressBar(total=view.num_steps, completed=min(view.version, view.num_steps)))
    colour = _PHASE_COLOURS.get(view.phase, "yellow")
    title, elapsed = Text(f"myxa  {view.name or 'starting'}"), Text(duration(view.elapsed_s))
    return Panel(Group(*parts), title=title, subtitle=elapsed, border_style=colour)


def _rows(rows: Sequence[Sequence[str]]) -> Table:
    """In columns, the first one bold; a row that has only a label is left out."""
    table = Table.grid(padding=(0, 3, 0, 0))
    for row in rows:
        if any(row[1:]):
            table.add_row(*(Text(cell, "" if at else "bold") for at, cell in enumerate(row)))
    return table


_log = logging.getLogger("myxa.launcher")


def lasting(file: TextIO) -> TextIO:
    """The same file with writes that never fail: after the first failed write, all output is dropped."""
    return cast("TextIO", _Outlet(file))


class _Outlet:
    """The file that `lasting` gives."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._is_gone = False

    def __getattr__(self, name: str) -> Any:
        """Everything else is the file's own."""
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        if not self._is_gone:
            try:
                self._file.write(text)
            except OSError as error:
                self._give_up(error)
        return len(text)

    def flush(self) -> None:
        if not self._is_gone:
            try:
                self._file.flush()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Drop what the file has buffered: Python would write it again at its exit, and fail."""
        self._is_gone = True
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(nowhere, self._file.fileno())
            os.close(nowhere)
            self._file.flush()
        _log.info("standard output cannot be written any more, the run continues: %s", error)
