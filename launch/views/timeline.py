"""The actors' time as a chart: one row per actor, coloured by what it did. Pure: spans in, safe markup out.

A long run has far more spans than a screen has pixels: each row is cut into columns, a column shows the kind that fills
most of it, and neighbours of one kind become one rectangle. So the markup's size does not depend on the run's length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from markupsafe import Markup

from .numbers import duration
from .run_files import SpanRow
from .svg import Scale, nice_ticks

_WIDTH, _ROW, _LEFT, _RIGHT, _TOP = 1140, 20, 104, 12, 18
_MAX_ACTORS = 32
_MAX_TITLES = 4000
_ROLES = ("trainer", "rollout", "buffer", "coordinator", "monitor")


def timeline(
    title: str,
    spans: Mapping[str, Sequence[SpanRow]],
    *,
    start_s: float,
    end_s: float,
    origin_s: float,
    marks: Sequence[tuple[float, str]] = (),
) -> Markup:
    """Rows of `spans` (actor -> stretches by time) between two wall times; labels count from `origin_s`.
    `marks` are (wall time, name) of moments such as new versions. Empty markup when nothing lies in the window."""
    rows = {actor: _runs(spans[actor], start_s, end_s) for actor in sorted(spans, key=actor_order)}
    rows = {actor: runs for actor, runs in rows.items() if runs}
    if not rows or end_s <= start_s:
        return Markup("")
    hidden = len(rows) - _MAX_ACTORS
    shown = dict(list(rows.items())[:_MAX_ACTORS])
    x = Scale(start_s, end_s, _LEFT, _WIDTH - _RIGHT)
    bottom = _TOP + _ROW * len(shown)
    has_titles = sum(len(runs) for runs in shown.values()) <= _MAX_TITLES
    parts = [_axis(x, bottom, origin_s), *(_mark(x, moment, name, bottom) for moment, name in marks)]
    for index, (actor, runs) in enumerate(shown.items()):
        top = _TOP + _ROW * index
        parts.append(f'<text class="tick" x="{_LEFT - 8}" y="{top + 14}" text-anchor="end">{escape(actor[:18])}</text>')
        parts += [_rect(x, top, run, origin_s if has_titles else None) for run in runs]
    height = bottom + 20
    note = f" ({hidden} more actors are not shown)" if hidden > 0 else ""
    label = escape(f"{title}: what {len(shown)} actors did over {duration(end_s - start_s)}{note}", quote=True)
    body = f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    caption = f"<figcaption><b>{escape(title)}</b>{escape(note)}</figcaption>"
    return Markup(f'<figure class="chart wide">{caption}{body}</figure>')


def actor_order(actor: str) -> tuple[int, str, int, str]:
    """Sort key: the actors that work first, numbers as numbers."""
    role, _, number = actor.partition("/")
    place = _ROLES.index(role) if role in _ROLES else len(_ROLES)
    return (place, role, int(number) if number.isdecimal() else 0, actor)


Run = tuple[float, float, str, str]
"""(start, end, kind, name or "" when several are merged)"""


def _runs(spans: Sequence[SpanRow], start_s: float, end_s: float) -> list[Run]:
    """Stretches to draw between two times: as they are when they are wide enough, else merged by column."""
    column_s = (end_s - start_s) / (_WIDTH - _LEFT - _RIGHT)
    inside = [span for span in spans if span.start_s < end_s and span.start_s + span.duration_s > start_s]
    if len(inside) <= (_WIDTH - _LEFT) / 3:
        return [
            (max(start_s, span.start_s), min(end_s, span.start_s + span.duration_s), span.activity, span.name)
            for span in inside
        ]
    filled: list[dict[str, float]] = [{} for _ in range(_WIDTH - _LEFT - _RIGHT)]
    for span in inside:
        first = max(0, int((span.start_s - start_s) / column_s))
        last = min(len(filled) - 1, int((span.start_s + span.duration_s - start_s) / column_s))
        for column in range(first, last + 1):
            left, right = start_s + column * column_s, start_s + (column + 1) * column_s
            seconds = min(right, span.start_s + span.duration_s) - max(left, span.start_s)
            filled[column][span.activity] = filled[column].get(span.activity, 0.0) + max(0.0, seconds)
    return _merged(filled, start_s, column_s)


def _merged(filled: Sequence[Mapping[str, float]], start_s: float, column_s: float) -> list[Run]:
    runs: list[Run] = []
    for column, kinds in enumerate(filled):
        if not kinds or sum(kinds.values()) < column_s * 0.25:
            continue
        kind = max(kinds, key=lambda k: kinds[k])
        left = start_s + column * column_s
        if runs and runs[-1][2] == kind and abs(runs[-1][1] - left) < column_s * 0.5:
            runs[-1] = (runs[-1][0], left + column_s, kind, "")
        else:
            runs.append((left, left + column_s, kind, ""))
    return runs


def _axis(x: Scale, bottom: float, origin_s: float) -> str:
    ticks = nice_ticks(x.low - origin_s, x.high - origin_s, 8)
    return "".join(
        f'<line class="grid" x1="{x(tick + origin_s):.1f}" x2="{x(tick + origin_s):.1f}" y1="{_TOP}" y2="{bottom}"/>'
        f'<text class="tick" x="{x(tick + origin_s):.1f}" y="{bottom + 14}" text-anchor="middle">'
        f"{escape(duration(tick))}</text>"
        for tick in ticks
    )


def _mark(x: Scale, moment_s: float, name: str, bottom: float) -> str:
    if not x.low <= moment_s <= x.high:
        return ""
    pixel = x(moment_s)
    label = (
        f'<text class="tick" x="{pixel:.1f}" y="{_TOP - 5}" text-anchor="middle">{escape(name)}</text>' if name else ""
    )
    return f'<line class="mark" x1="{pixel:.1f}" x2="{pixel:.1f}" y1="{_TOP - 3}" y2="{bottom}"/>{label}'


def _rect(x: Scale, top: float, run: Run, origin_s: float | None) -> str:
    start_s, end_s, kind, name = run
    left, width = x(start_s), max(0.4, x(end_s) - x(start_s))
    place = f'x="{left:.1f}" y="{top + 2}" width="{width:.1f}" height="{_ROW - 4}"'
    css = f"k-{kind}" if kind.replace("-", "").isalpha() else "k-other"
    if origin_s is None:
        return f'<rect class="{css}" {place}/>'
    what = kind if name in {"", kind} else f"{kind} ({name})"
    text = f"{what}, {duration(end_s - start_s)} from {duration(start_s - origin_s)}"
    return f'<rect class="{css}" {place}><title>{escape(text)}</title></rect>'
