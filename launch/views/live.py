"""The live view: one table in a terminal, one plain line now and then everywhere else.

Knows: rich, `LiveState`. Must not know: actors, files. It draws only when told to (`update`): no thread, no timer.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ...core.activity import ACTIVITY_KINDS
from .live_state import LiveState, StepPace, clean, fact_lines, plain_line
from .numbers import duration, percent
from .summary import Curves, final_summary
from .textplot import sparkline

__all__ = ["Curves", "LiveState", "LiveView", "final_summary", "render"]

COLOURS: Mapping[str, str] = {
    "compute": "green",
    "wait-data": "yellow",
    "wait-weights": "magenta",
    "wait-capacity": "cyan",
    "wait-memory": "bright_magenta",
    "wait-env": "bright_green",
    "paused": "blue",
    "other": "bright_black",
}
_LETTERS: Mapping[str, str] = dict(zip(COLOURS, "█▓▒░◇▫▪·", strict=True))
_LETTERS_ASCII: Mapping[str, str] = dict(zip(COLOURS, "#dwcmep.", strict=True))

_BAR = 16
_MAX_ACTORS = 6
_LINE_EVERY_S = 2.0
_HEARTBEAT_S = 30.0
_PHASE_COLOURS = {"running": "green", "finished": "green", "failed": "red"}


class LiveView:
    """Shows states as they come. Use as a context manager, so that the terminal is itself again afterwards."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._pace = StepPace()
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

    def update(self, state: LiveState) -> None:
        """Draw the state; without a terminal print a line when a step, phase or warning is new, steps at most one per
        2 s."""
        if state.status is not None:  # a coordinator that does not answer says nothing of the version
            self._pace.put(state.now_wall_s, state.version)
        if self._live is not None:
            is_ascii = not self._console.encoding.lower().startswith("utf")
            self._live.update(render(state, self._pace, is_ascii=is_ascii), refresh=True)
            return
        warns = bool(state.buffer and state.buffer.complaint)
        key, silent_s = (state.phase, warns, state.version), state.now_wall_s - self._line_s
        is_news = key[:2] != self._line_key[:2] or (key != self._line_key and silent_s >= _LINE_EVERY_S)
        if is_news or silent_s >= _HEARTBEAT_S:
            self._line_key, self._line_s = key, state.now_wall_s
            self.say(plain_line(state, self._pace))

    def say(self, text: str) -> None:
        """A line that stays, above the table."""
        self._console.print(Text(clean(text)), soft_wrap=True)


def render(state: LiveState, pace: StepPace, *, is_ascii: bool = False) -> RenderableType:
    """The table: facts, time shares, what holds the run back, progress."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, line in fact_lines(state, pace):
        text = Text(line)
        if label == "reward" and (curve := state.training_curve()):
            text.append("  " + sparkline([curve[step] for step in sorted(curve)], 30, is_ascii=is_ascii), style="green")
        table.add_row(label, text)
    for index, line in enumerate(_time_lines(state, is_ascii=is_ascii)):
        table.add_row("" if index else "time", line)
    table.add_row("held back", Text(state.held_back(), style="italic"))
    name = clean(state.status.name) if state.status else "starting"
    elapsed = duration(max(0.0, state.now_wall_s - state.started_wall_s))
    colour = _PHASE_COLOURS.get(state.phase, "yellow")
    parts: list[RenderableType] = [table]
    if state.status is not None and state.status.num_steps > 0:
        parts.append(ProgressBar(total=state.status.num_steps, completed=min(state.version, state.status.num_steps)))
    return Panel(Group(*parts), title=Text(f"myxa  {name}"), subtitle=Text(elapsed), border_style=colour)


def _time_lines(state: LiveState, *, is_ascii: bool) -> list[Text]:
    shares = {name: kinds for name, kinds in state.shares().items() if kinds}
    workers = [name for name in sorted(shares, key=_order) if name.startswith(("trainer/", "rollout/"))]
    lines = [time_bar(name, shares[name], is_ascii=is_ascii) for name in workers[:_MAX_ACTORS]]
    if len(workers) > _MAX_ACTORS:
        lines.append(Text(f"... and {len(workers) - _MAX_ACTORS} more", style="bright_black"))
    return lines


def _order(name: str) -> tuple[bool, str, int, str]:
    role, _, number = name.partition("/")
    return (role != "trainer", role, int(number) if number.isdecimal() else 0, name)


def time_bar(name: str, kinds: Mapping[str, float], *, is_ascii: bool = False) -> Text:
    """`trainer/0  ████▓▓▓▓  compute 40 %  wait-data 60 %`; the letters tell the kinds apart without colours too."""
    letters = _LETTERS_ASCII if is_ascii else _LETTERS
    text = Text(f"{clean(name):<11}")
    filled, exact = 0, 0.0
    for kind in ACTIVITY_KINDS:
        exact += kinds.get(kind, 0.0) * _BAR
        cells = max(0, round(exact) - filled)
        text.append(letters[kind] * cells, style=COLOURS[kind])
        filled += cells
    text.append(" " * max(0, _BAR - filled))
    for kind in ACTIVITY_KINDS:
        if kinds.get(kind, 0.0) >= 0.01:
            text.append(f"  {letters[kind]}", style=COLOURS[kind])
            text.append(f" {kind} {percent(kinds[kind])}")
    return text
