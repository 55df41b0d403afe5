"""Pages of `myxa top` as styled text, made from `rows`. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from rich.text import Text

from ...core.activity import ACTIVITY_KINDS
from ..views.live import COLOURS
from ..views.live_state import LiveState, StepPace, clean, fact_lines
from ..views.numbers import percent
from ..views.run_view import ActorFacts, RunView
from ..views.textplot import sparkline
from . import rows

_RUN_FACTS = frozenset({"step", "reward", "learning", "speed"})
_LABEL = 12


def run_page(view: RunView, pace: StepPace, width: int, *, is_ascii: bool = False) -> Text:
    """The run at a glance: facts, queues, staleness, engines, time."""
    live = view.live
    page = Text()
    for label, text in fact_lines(live, pace):
        if label in _RUN_FACTS:
            _fact(page, label, text, width)
    if view.remedy:
        _fact(page, "to try", clean(view.remedy), width)
    if curve := live.training_curve():
        _fact(
            page, "", sparkline([curve[step] for step in sorted(curve)], min(60, width - _LABEL - 2), is_ascii=is_ascii)
        )
    _queues(page, live, width, is_ascii=is_ascii)
    _staleness(page, live, width, is_ascii=is_ascii)
    _engines(page, live)
    _time(page, view, width, is_ascii=is_ascii)
    return page


def actor_page(view: RunView, name: str, width: int = 0) -> Text:
    """Everything about one actor."""
    page = Text()
    for label, text in rows.actor_lines(view, name):
        _fact(page, label, text, width if label == "process" else 0)
    return page


def actor_label(actor: ActorFacts, view: RunView, width: int, *, is_ascii: bool = False) -> Text:
    """`+ trainer/0    ███▓▓▓▓▓  wait-data 62 %`, as much of it as fits."""
    kinds = view.live.shares().get(actor.name, {})
    sign = rows.state_sign(actor)
    text = Text(f"{sign} ", style="" if rows.is_well(actor) else "bold red")
    text.append(f"{clean(actor.name):<12}")
    room = width - len(text)
    if room >= 8 and kinds:
        _bar(text, kinds, 8, is_ascii=is_ascii)
    if room >= 26:
        text.append(f"  {rows.main_kind(kinds) if rows.is_well(actor) else actor.state}")
    return text


def legend(*, is_ascii: bool = False) -> Text:
    """The letters of the bars."""
    letters = rows.LETTERS_ASCII if is_ascii else rows.LETTERS
    text = Text()
    for kind in ACTIVITY_KINDS:
        text.append(letters[kind], style=COLOURS[kind])
        text.append(f" {kind}  ")
    return text


def _heading(page: Text, title: str, note: str = "") -> None:
    page.append("\n")
    page.append(title, style="bold underline")
    page.append(f"   {note}\n" if note else "\n")


def _fact(page: Text, label: str, text: str, width: int = 0) -> None:
    """A label and its text; with `width`, longer texts are wrapped with a hanging indent."""
    lines = textwrap.wrap(text, max(20, width - _LABEL), break_on_hyphens=False) if width else [text]
    for index, line in enumerate(lines or [""]):
        page.append(f"{'' if index else label:<{_LABEL}}", style="bold")
        page.append(f"{line}\n")


def _queues(page: Text, live: LiveState, width: int, *, is_ascii: bool) -> None:
    queues = rows.queue_rows(live)
    if not queues:
        return
    _heading(page, "queues", "groups in the buffer")
    for label, count, total in queues:
        page.append(f"{label:<{_LABEL}}")
        page.append(rows.gauge(count, total, min(30, width - 28), is_ascii=is_ascii), style="cyan")
        page.append(f"  {count}" + (f" of {total}\n" if label == "slots" else "\n"))
    _fact(page, "since start", rows.done_text(live), width)


def _staleness(page: Text, live: LiveState, width: int, *, is_ascii: bool) -> None:
    lags = rows.lag_rows(live)
    if not lags:
        return
    _heading(page, "staleness", "groups of the newest step by lag")
    _fact(page, "lag", rows.lag_text(live), width)
    largest = max(1, *(count for _, count, _ in lags))
    bound = max((lag for lag, _, is_allowed in lags if is_allowed), default=-1)
    for lag, count, is_allowed in lags:
        page.append(f"{f'lag {lag}':<{_LABEL}}", style="" if is_allowed else "bold red")
        page.append(
            rows.gauge(count, largest, min(30, width - 28), is_ascii=is_ascii), style="green" if is_allowed else "red"
        )
        page.append(f"  {count}{'  <- bound' if lag == bound else ''}\n")


def _engines(page: Text, live: LiveState) -> None:
    engines = rows.engine_rows(live)
    if not engines:
        return
    _heading(page, "engines")
    page.append(_grid((rows.ENGINE_COLUMNS, *engines)))


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


def _time(page: Text, view: RunView, width: int, *, is_ascii: bool) -> None:
    shares = view.live.shares()
    names = [actor.name for actor in view.actors if shares.get(actor.name)]
    if not names:
        return
    _heading(page, "time", "of each actor over the last minute")
    for name in names:
        page.append(f"{clean(name):<{_LABEL + 1}}")
        _bar(page, shares[name], min(30, max(8, width - 50)), is_ascii=is_ascii)
        parts = sorted(((shares[name].get(kind, 0.0), kind) for kind in ACTIVITY_KINDS), reverse=True)
        page.append(
            "  "
            + "  ".join(f"{kind} {percent(share)}" for share, kind in parts[: 1 + (width >= 54)] if share >= 0.005)
            + "\n"
        )
    page.append(legend(is_ascii=is_ascii))
    page.append("\n")


def _bar(text: Text, kinds: Mapping[str, float], width: int, *, is_ascii: bool) -> None:
    for letters, kind in rows.bar(kinds, width, is_ascii=is_ascii):
        text.append(letters, style=COLOURS.get(kind, ""))
