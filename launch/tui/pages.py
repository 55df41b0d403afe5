"""What `myxa top` shows, as text: pages, tables and lines of keys. Pure: a RunView or the answer of a verb in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from rich.text import Text

from ...core.knobs import AuditRecord
from ..views.changes import changes_of, clock_text, value_text
from ..views.numbers import clean, duration, short, time_parts
from ..views.run_page import add_fact, draw_bar
from ..views.run_view import (
    ActorFacts,
    RunView,
)

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


def actor_page(view: RunView, name: str, width: int = 0) -> Text:
    page = Text()
    for label, text in actor_lines(view, name):
        add_fact(page, label, text, width if label == "process" else 0)
    return page


def actor_label(actor: ActorFacts, view: RunView, width: int) -> Text:
    """`+ trainer/0    ███▓▓▓▓▓  wait-data 62 %`, as much of it as fits."""
    kinds = view.shares().get(actor.name, {})
    sign = _STATE_SIGNS.get(actor.state, "?")
    text = Text(f"{sign} ", style="" if actor.is_well else "bold red")
    text.append(f"{clean(actor.name):<12}")
    room = width - len(text)
    if room >= 8 and kinds:
        draw_bar(text, kinds, 8)
    if room >= 26:
        text.append(f"  {''.join(time_parts(kinds, 0)[:1]) if actor.is_well else actor.state}")
    return text


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
    lines += [("time" if not index else "", clean(part)) for index, part in enumerate(time_parts(shares))]
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
