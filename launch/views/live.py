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
from types import TracebackType
from typing import Any, TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.text import Text

from ...core.messages import RunStatus
from .numbers import clean, duration, short
from .run_page import run_page
from .run_view import RunView, dropped_text, notice_text, plain_line
from .textplot import sparkline

_MAX_WIDTH = 72


def final_summary(
    console: Console,
    status: RunStatus,
    *,
    elapsed_s: float,
    run_dir: Path,
    report: Path | None,
    curves: Mapping[str, Mapping[int, float]],
    next_steps: Sequence[str] = (),
    dropped: Mapping[str, int] | None = None,
) -> None:
    """Print the end of a run. `curves`: values over steps, by name; `next_steps`: sentences or commands to try;
    `dropped`: reason -> groups left out."""
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
    if next_steps:
        console.print(Text("try next", style="bold"))
        for step in next_steps:
            console.print(Text(f"  - {clean(step)}"), soft_wrap=True)


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, view: RunView) -> None:
        """Draw the state; without a terminal print a line when a step, phase or warning is new, steps at most one per
        2 s."""
        if self._live is not None:
            self._live.update(render(view, self._console.width), refresh=True)
            return
        warns = bool(view.buffer and view.buffer.complaint)
        key, silent_s = (view.phase, warns, view.version), view.now_wall_s - self._line_s
        is_news = key[:2] != self._line_key[:2] or (key != self._line_key and silent_s >= _LINE_EVERY_S)
        if is_news or silent_s >= _HEARTBEAT_S:
            self._line_key, self._line_s = key, view.now_wall_s
            self.say(plain_line(view))

    def say(self, text: str) -> None:
        self._console.print(Text(clean(text)), soft_wrap=True)


def render(view: RunView, width: int) -> RenderableType:
    """A screen that is too low shows the beginning."""
    parts: list[RenderableType] = [Text(clean(view.held_back()), "italic")]
    if notice := notice_text(view):
        parts.append(Text(notice, "bold yellow"))
    parts.append(run_page(view, width - 4))
    if view.num_steps:
        parts.append(ProgressBar(total=view.num_steps, completed=min(view.version, view.num_steps)))
    colour = _PHASE_COLOURS.get(view.phase, "yellow")
    title, elapsed = Text(f"myxa  {view.name or 'starting'}"), Text(duration(view.elapsed_s))
    return Panel(Group(*parts), title=title, subtitle=elapsed, border_style=colour)


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
