"""The run on one page of text, for a terminal: the live view of `myxa up`, and the first page of `myxa top`. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from rich.text import Text

from ...core.activity import ACTIVITY_KINDS
from .changes import changes_of, clock_text
from .numbers import clean, name_order, time_parts
from .run_view import (
    ENGINE_COLUMNS,
    RunView,
    done_text,
    engine_rows,
    fact_lines,
    lag_rows,
    lag_text,
    queue_rows,
)
from .textplot import COLOURS, LETTERS, bar, gauge, sparkline

_LABEL = 12
_GAP, _GLUE = "   ", "\u00a0"
"""Between the parts of a line; within a part."""
_MAX_CHANGES = 3
_MAX_ROWS = 12
"""Of engines, and of actors."""


def run_page(view: RunView, width: int) -> Text:
    page = Text()
    for label, text in fact_lines(view):
        if label not in ("lag", "warning"):
            add_fact(page, label, text, width)
    if view.remedy:
        add_fact(page, "to try", clean(view.remedy), width)
    _queues(page, view, width)
    _staleness(page, view, width)
    if view.rewards:
        _heading(page, "reward", "over the steps")
        page.append(f"{sparkline(view.rewards, min(60, width))}\n")
    if engines := engine_rows(view):
        _heading(page, "engines", f"{len(engines)}, of which" * (len(engines) > _MAX_ROWS))
        page.append(_grid((ENGINE_COLUMNS, *engines[:_MAX_ROWS])))
    _time(page, view, width)
    if changes := [change for change in changes_of(view.history) if change.is_done][-_MAX_CHANGES:]:
        _heading(page, "changes", "the newest")
        for change in changes:
            words = f"{change.what}   {change.who}" + (f"   {change.reason}" if change.reason else "")
            add_fact(page, clock_text(change.wall_s), clean(words), width)
    return page


def _heading(page: Text, title: str, note: str = "") -> None:
    page.append("\n")
    page.append(title, style="bold underline")
    page.append(f"   {note}\n" if note else "\n")


def add_fact(page: Text, label: str, text: str, width: int = 0) -> None:
    """A label and its text; with `width`, longer texts are wrapped with a hanging indent, between parts if it has."""
    if _GAP in text:
        text = _GAP.join(part.replace(" ", _GLUE) for part in text.split(_GAP))
    lines = textwrap.wrap(text, max(20, width - _LABEL), break_on_hyphens=False) if width else [text]
    for index, line in enumerate(lines or [""]):
        page.append(f"{'' if index else label:<{_LABEL}}", style="bold")
        page.append(f"{line.replace(_GLUE, ' ')}\n")


def _queues(page: Text, view: RunView, width: int) -> None:
    queues = queue_rows(view)
    if not queues:
        return
    _heading(page, "queues", "groups in the buffer")
    for label, count, total in queues:
        page.append(f"{label:<{_LABEL}}")
        page.append(gauge(count, total, min(30, width - 28)), style="cyan")
        page.append(f"  {count}" + (f" of {total}\n" if label == "slots" else "\n"))
    add_fact(page, "since start", done_text(view), width)


def _staleness(page: Text, view: RunView, width: int) -> None:
    lags = lag_rows(view)
    if not lags:
        return
    _heading(page, "staleness", "groups of the newest step by lag")
    add_fact(page, "lag", lag_text(view), width)
    largest = max(1, *(count for _, count, _ in lags))
    bound = max((lag for lag, _, is_allowed in lags if is_allowed), default=-1)
    for lag, count, is_allowed in lags:
        page.append(f"{f'lag {lag}':<{_LABEL}}", style="" if is_allowed else "bold red")
        page.append(gauge(count, largest, min(30, width - 28)), style="green" if is_allowed else "red")
        page.append(f"  {count}{'  <- bound' if lag == bound else ''}\n")


def _grid(lines: Sequence[Sequence[str]]) -> Text:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = Text()
    for index, line in enumerate(lines):
        cells = [
            f"{line[0]:<{widths[0]}}",
            *(f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        text.append("  ".join(cells).rstrip() + "\n", style="bold" if index == 0 else "")
    return text


def _time(page: Text, view: RunView, width: int) -> None:
    shares = {name: kinds for name, kinds in view.shares().items() if kinds}
    if not shares:
        return
    more = f", {_MAX_ROWS} of {len(shares)}" if len(shares) > _MAX_ROWS else ""
    _heading(page, "time", f"of each actor over the last minute{more}")
    for name in sorted(shares, key=name_order)[:_MAX_ROWS]:
        page.append(f"{clean(name):<{_LABEL + 1}}")
        draw_bar(page, shares[name], min(30, max(8, width - 50)))
        page.append(f"  {'  '.join(time_parts(shares[name], 0)[: 1 + (width >= 54)])}\n")
    page.append(legend())
    page.append("\n")


def draw_bar(text: Text, kinds: Mapping[str, float], width: int) -> None:
    for letters, kind in bar(kinds, width):
        text.append(letters, style=COLOURS.get(kind, ""))


def legend() -> Text:
    text = Text()
    for kind in ACTIVITY_KINDS:
        text.append(LETTERS[kind], style=COLOURS[kind])
        text.append(f"\u00a0{kind}  ")
    return text
