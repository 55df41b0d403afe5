"""What `myxa top` shows, as text: pages, tables and lines of keys. Pure: a RunView or the answer of a verb in."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, cast

from rich.text import Text

from ...core.activity import ACTIVITY_KINDS
from ...core.knobs import AuditRecord
from ..views.changes import changes_of, clock_text, value_text
from ..views.numbers import clean, duration, percent, short
from ..views.run_view import (
    ENGINE_COLUMNS,
    ActorFacts,
    RunView,
    StepPace,
    done_text,
    engine_rows,
    fact_lines,
    lag_rows,
    lag_text,
    queue_rows,
)
from ..views.textplot import COLOURS, LETTERS, bar, gauge, sparkline

_RUN_FACTS = frozenset({"step", "reward", "learning", "speed"})
_LABEL = 12
_GAP, _GLUE = "   ", "\u00a0"
"""Between the parts of a line; within a part."""
_STATE_SIGNS = {
    "up": "+",
    "starting": "~",
    "ending": "~",
    "hung": "!",
    "backing-off": "!",
    "failed": "x",
    "stopped": "x",
}
"""Of an actor's process; ?: not known."""


def run_page(view: RunView, pace: StepPace, width: int) -> Text:
    page = Text()
    for label, text in fact_lines(view, pace):
        if label in _RUN_FACTS:
            _fact(page, label, text, width)
    if view.remedy:
        _fact(page, "to try", clean(view.remedy), width)
    if curve := view.training_curve():
        _fact(page, "", sparkline([curve[step] for step in sorted(curve)], min(60, width - _LABEL - 2)))
    _queues(page, view, width)
    _staleness(page, view, width)
    if engines := engine_rows(view):
        _heading(page, "engines")
        page.append(_grid((ENGINE_COLUMNS, *engines)))
    _time(page, view, width)
    return page


def actor_page(view: RunView, name: str, width: int = 0) -> Text:
    page = Text()
    for label, text in actor_lines(view, name):
        _fact(page, label, text, width if label == "process" else 0)
    return page


def actor_label(actor: ActorFacts, view: RunView, width: int) -> Text:
    """`+ trainer/0    ███▓▓▓▓▓  wait-data 62 %`, as much of it as fits."""
    kinds = view.shares().get(actor.name, {})
    sign = _STATE_SIGNS.get(actor.state, "?")
    text = Text(f"{sign} ", style="" if actor.is_well else "bold red")
    text.append(f"{clean(actor.name):<12}")
    room = width - len(text)
    if room >= 8 and kinds:
        _bar(text, kinds, 8)
    if room >= 26:
        text.append(f"  {main_kind(kinds) if actor.is_well else actor.state}")
    return text


def legend() -> Text:
    text = Text()
    for kind in ACTIVITY_KINDS:
        text.append(LETTERS[kind], style=COLOURS[kind])
        text.append(f" {kind}  ")
    return text


def _heading(page: Text, title: str, note: str = "") -> None:
    page.append("\n")
    page.append(title, style="bold underline")
    page.append(f"   {note}\n" if note else "\n")


def _fact(page: Text, label: str, text: str, width: int = 0) -> None:
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
    _fact(page, "since start", done_text(view), width)


def _staleness(page: Text, view: RunView, width: int) -> None:
    lags = lag_rows(view)
    if not lags:
        return
    _heading(page, "staleness", "groups of the newest step by lag")
    _fact(page, "lag", lag_text(view), width)
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
    shares = view.shares()
    names = [actor.name for actor in view.actors if shares.get(actor.name)]
    if not names:
        return
    _heading(page, "time", "of each actor over the last minute")
    for name in names:
        page.append(f"{clean(name):<{_LABEL + 1}}")
        _bar(page, shares[name], min(30, max(8, width - 50)))
        parts = sorted(((shares[name].get(kind, 0.0), kind) for kind in ACTIVITY_KINDS), reverse=True)
        page.append(
            "  "
            + "  ".join(f"{kind} {percent(share)}" for share, kind in parts[: 1 + (width >= 54)] if share >= 0.005)
            + "\n"
        )
    page.append(legend())
    page.append("\n")


def _bar(text: Text, kinds: Mapping[str, float], width: int) -> None:
    for letters, kind in bar(kinds, width):
        text.append(letters, style=COLOURS.get(kind, ""))


def main_kind(kinds: Mapping[str, float]) -> str:
    """`compute 62 %`: what takes most of its time."""
    top = max(ACTIVITY_KINDS, key=lambda kind: kinds.get(kind, 0.0))
    return f"{top} {percent(kinds[top])}" if kinds.get(top) else ""


def node_label(node: int, actors: Sequence[ActorFacts]) -> str:
    """`node 0  (host)`."""
    host = next((actor.host for actor in actors if actor.host), "")
    return f"node {node}" + (f"  {clean(host)}" if host else "")


def actor_lines(view: RunView, name: str) -> list[tuple[str, str]]:
    actor = next((actor for actor in view.actors if actor.name == name), None)
    if actor is None:
        return [("actor", f"{name} is not in the run any more")]
    place = f"pid {actor.pid or '?'}, node {actor.node} {actor.host}, attempt {actor.attempt}"
    process = f"{actor.state or 'state unknown'}, {place}"
    lines = [("actor", name), ("process", clean(process))]
    age_s = view.snapshot.get("age_s", {}).get(name)
    if age_s is not None:
        lines.append(("heard", f"{duration(age_s)} ago"))
    shares = view.shares().get(name, {})
    parts = sorted(((share, kind) for kind, share in shares.items() if share >= 0.005), reverse=True)
    lines += [
        ("time" if not index else "", f"{percent(share):>5}  {clean(kind)}")
        for index, (share, kind) in enumerate(parts[:10])
    ]
    values = view.snapshot.get(name, {})
    lines += [
        ("metrics" if not index else "", f"{short(value):>9}  {clean(key)}")
        for index, (key, value) in enumerate(sorted(values.items())[:60])
    ]
    return lines


HISTORY_COLUMNS = ("no.", "time", "step", "what", "who", "result", "reason")


def history_rows(records: Sequence[AuditRecord]) -> list[tuple[str, ...]]:
    rows = [
        (
            str(change.number),
            clock_text(change.wall_s),
            str(change.step) if change.step >= 0 else "",
            clean(change.what),
            clean(change.who),
            clean(change.result + (f": {change.detail}" if change.detail and not change.is_done else "")),
            clean(change.reason),
        )
        for change in changes_of(records)
    ]
    return rows[::-1] or [("", "", "", "nothing was changed", "", "", "")]


def done_words(verb: str, answer: object) -> str:
    """`pause: rests at 523`."""
    facts = cast("dict[str, object]", answer) if isinstance(answer, dict) else {}
    text = ", ".join(f"{name.replace('_', ' ')} {value_text(value)}" for name, value in facts.items())
    return f"{verb}: {clean(text) or 'done'}"


_KEYS = {
    "knobs": "enter turn the knob  up/down choose",
    "history": "up/down choose",
    "log": "f hold or follow  up/down actor  space scroll",
    "stack": "r ask again  up/down actor  space scroll",
}


def help_text(page: str) -> str:
    return f"q quit  1-6 pages  {_KEYS.get(page, 'up/down actor  space scroll')}  t tree  ? help"


HELP = """\
Before an actor: + its process is up, ~ on its way, ! in trouble, x gone, ? unknown.
Bars: where its last minute went (the letters are explained below the bars of page 1).
Enter on a knob turns it.
1 run  2 actor  3 knobs  4 history  5 log  6 stack
r refresh  t tree  p pause or resume the run  q quit"""


_MAX_LINES = 2000


def log_text(answer: object) -> str:
    return _joined(answer) or "the log is empty"


def stack_text(answer: object) -> str:
    return _joined(answer) or "the stack is empty"


def _joined(answer: object) -> str:
    found: list[str] = []
    for part in cast("list[object]", answer) if isinstance(answer, list) else [answer]:
        record = cast("dict[str, Any]", part) if isinstance(part, dict) else {}
        lines = record.get("lines") or str(record.get("text", "")).splitlines()
        head = record.get("name") or record.get("actor")
        found += [f"-- {head}"] if head and lines else []
        found += ["".join(c if c.isprintable() else " " for c in str(line).replace("\t", "    ")) for line in lines]
    return "\n".join(found[-_MAX_LINES:])
