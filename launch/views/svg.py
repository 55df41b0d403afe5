"""Charts as inline SVG: lines, bars, the actors' timeline. Pure: numbers in, safe markup out.

matplotlib was considered: a 10 MB dependency that draws fixed colours, while a report must follow the reader's light or
dark scheme; plotly and vega need scripts of megabytes, and the report must work without any.

Colours are classes (`c1`..`c6`) of the page's style sheet. All text is escaped here. A long run has more spans than a
screen has pixels: a row of the timeline is cut into columns, a column shows the kind that fills most of it, and equal
columns side by side become one rectangle. So the markup's size does not depend on the run's length.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

from .numbers import duration, short
from .run_files import SpanRow

WIDTH, HEIGHT = 560, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 14, 10, 30
_MAX_POINTS = 400
_SMOOTH_FROM = 60
"""From so many points on a noisy curve is drawn faintly with its moving mean on top."""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class ChartLine:
    """One curve of a chart."""

    name: str
    points: Points
    """(x, y), by x."""
    colour: int = 1
    """1..6: class of the style sheet."""
    is_dashed: bool = False
    has_dots: bool = False
    """Draw the points themselves: for few, far apart ones such as evaluations."""
    is_noisy: bool = False
    """Show the moving mean when there are many points."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line: something was changed at `x`."""

    x: float
    label: str
    """Short, drawn at its top: the number of the change."""
    text: str
    """What it was, for a pointer and for screen readers."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps a range of values to a range of pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def nice_ticks(low: float, high: float, num: int = 5) -> list[float]:
    """At most about `num` round values inside [low, high] (1, 2, 2.5 or 5 times a power of ten apart); at least one."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low]
    raw = (high - low) / num
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    # A step longer than the range may have no multiple in it: -4..-1 has none of 5.
    return [index * step for index in range(first, last + 1)] or [low]


def thinned(points: Points, limit: int = _MAX_POINTS) -> list[tuple[float, float]]:
    """At most about `limit` points that keep every peak: lowest and highest of each bucket, first and last."""
    if len(points) <= limit:
        return list(points)
    num_buckets = max(1, limit // 2)
    kept = {0, len(points) - 1}
    for bucket in range(num_buckets):
        indexes = range(bucket * len(points) // num_buckets, (bucket + 1) * len(points) // num_buckets)
        kept |= {min(indexes, key=lambda i: points[i][1]), max(indexes, key=lambda i: points[i][1])}
    return [points[index] for index in sorted(kept)]


def moving_mean(points: Points) -> list[tuple[float, float]]:
    """Mean over a centred window of about a twelfth of the points, cut off at the ends."""
    half = max(2, len(points) // 24)
    sums = [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    smooth: list[tuple[float, float]] = []
    for index, (x, _) in enumerate(points):
        first, last = max(0, index - half), min(len(points) - 1, index + half)
        smooth.append((x, (sums[last + 1] - sums[first]) / (last + 1 - first)))
    return smooth


def line_chart(
    title: str,
    lines: Sequence[ChartLine],
    *,
    x_label: str = "step",
    bound: tuple[str, float] | None = None,
    y_from_zero: bool = False,
    y_text: Callable[[float], str] = short,
    marks: Sequence[Mark] = (),
) -> Markup:
    """A chart of curves; `bound` is a labelled horizontal limit, `marks` are vertical lines. Empty markup when there is
    nothing to draw."""
    lines = [line for line in lines if line.points]
    if not lines:
        return Markup("")
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points] + ([bound[1]] if bound else [])
    x, y = _x_scale(xs), _y_scale(ys, y_from_zero=y_from_zero)
    parts = [_grid(x, y, x_label, y_text)]
    if bound is not None:
        parts.append(_bound(y(bound[1]), bound[0]))
    parts.append(_marks(marks, x))
    parts += [_draw(line, x, y) for line in lines]
    hover = [{"n": line.name, "c": line.colour, "p": _hover_points(line, x, y, x_label, y_text)} for line in lines]
    data = escape(json.dumps(hover, separators=(",", ":")), quote=True)
    legend = _legend(lines) if len(lines) > 1 or lines[0].name != title else ""
    body = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_label(title, lines)}">{"".join(parts)}</svg>'
    caption = f"<figcaption><b>{escape(title)}</b>{legend}</figcaption>"
    return Markup(f'<figure class="chart" data-hover="{data}">{caption}{body}</figure>')


def _x_scale(xs: Sequence[float]) -> Scale:
    low, high = min(xs), max(xs)
    return Scale(low, high if high > low else low + 1.0, _LEFT, WIDTH - _RIGHT)


def _y_scale(ys: Sequence[float], *, y_from_zero: bool) -> Scale:
    low, high = min(ys), max(ys)
    if y_from_zero:
        low, high = min(0.0, low), max(0.0, high)
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return Scale(low if y_from_zero and low == 0.0 else low - margin, high + margin, HEIGHT - _BOTTOM, _TOP)


def _grid(x: Scale, y: Scale, x_label: str, y_text: Callable[[float], str]) -> str:
    parts = [
        f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        f"{_text(_LEFT - 6, y(tick) + 3.5, y_text(tick), anchor='end')}"
        for tick in nice_ticks(y.low, y.high)
    ]
    parts += [_text(x(tick), HEIGHT - _BOTTOM + 14, short(tick, 6)) for tick in nice_ticks(x.low, x.high, 6)]
    parts.append(
        f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{HEIGHT - _BOTTOM}" y2="{HEIGHT - _BOTTOM}"/>'
    )
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(_text(middle, HEIGHT - 3, x_label))
    return "".join(parts)


def _text(x: float, y: float, text: str, *, anchor: str = "middle", css: str = "tick") -> str:
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _bound(pixel: float, name: str) -> str:
    return (
        f'<line class="bound" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{pixel:.1f}" y2="{pixel:.1f}"/>'
        f"{_text(WIDTH - _RIGHT - 4, pixel - 4, name, anchor='end', css='tick boundtext')}"
    )


_MARK_ROOM = 13.0
"""Pixels that the label of a mark needs; closer marks share one."""


def _marks(marks: Sequence[Mark], x: Scale) -> str:
    """Marks inside the axis; those that lie close together have one label, "3-5"."""
    clusters: list[list[Mark]] = []
    for mark in sorted((mark for mark in marks if x.low <= mark.x <= x.high), key=lambda mark: mark.x):
        if clusters and x(mark.x) - x(clusters[-1][0].x) < _MARK_ROOM:
            clusters[-1].append(mark)
        else:
            clusters.append([mark])
    return "".join(_cluster(cluster, x) for cluster in clusters)


def _cluster(cluster: Sequence[Mark], x: Scale) -> str:
    lines = "".join(
        f'<line class="change" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>'
        for at in sorted({mark.x for mark in cluster})
    )
    first, last = cluster[0], cluster[-1]
    label = first.label if len(cluster) == 1 else f"{first.label}-{last.label}"
    texts = "\n".join(f"{mark.label}: {mark.text}" for mark in cluster)
    left, right = x(first.x) - 6, x(last.x) + 6
    target = f'<rect class="target" x="{left:.1f}" y="0" width="{right - left:.1f}" height="{HEIGHT - _BOTTOM}"/>'
    label_text = _text((left + right) / 2, _TOP - 2, label, css="tick changetext")
    return f"<g><title>{escape(texts)}</title>{target}{lines}{label_text}</g>"


def _draw(line: ChartLine, x: Scale, y: Scale) -> str:
    colour = f"c{line.colour}"
    if line.is_noisy and len(line.points) >= _SMOOTH_FROM:
        return _path(line.points, x, y, f"{colour} faint") + _path(moving_mean(line.points), x, y, colour)
    text = _path(line.points, x, y, f"{colour} dashed" if line.is_dashed else colour)
    if line.has_dots or len(line.points) == 1:
        text += "".join(f'<circle class="{colour}" cx="{x(a):.1f}" cy="{y(b):.1f}" r="3"/>' for a, b in line.points)
    return text


def _path(points: Points, x: Scale, y: Scale, classes: str) -> str:
    corners = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in thinned(points))
    return f'<polyline class="{classes}" points="{corners}"/>'


def _hover_points(
    line: ChartLine, x: Scale, y: Scale, x_label: str, y_text: Callable[[float], str]
) -> list[list[float | str]]:
    unit = x_label.partition(" ")[0]
    return [
        [round(x(a), 1), round(y(b), 1), f"{unit} {short(a, 6)}" if unit == "step" else f"{short(a)} {unit}", y_text(b)]
        for a, b in thinned(line.points, 240)  # enough for a pointer on a chart 560 pixels wide
    ]


def _legend(lines: Sequence[ChartLine]) -> str:
    keys = "".join(f'<span class="key c{line.colour}">{escape(line.name)}</span>' for line in lines)
    return f'<span class="keys">{keys}</span>'


def _label(title: str, lines: Sequence[ChartLine]) -> str:
    """What a screen reader says instead of the picture."""
    facts = [
        f"{line.name} from {short(line.points[0][1])} to {short(line.points[-1][1])} in {len(line.points)} points"
        for line in lines
    ]
    return escape(f"{title}: {'; '.join(facts)}", quote=True)


def bar_chart(title: str, bars: Mapping[str, float], *, x_label: str = "", colour: int = 1) -> Markup:
    """Vertical bars with their values on top. Empty markup without bars."""
    if not bars or max(bars.values()) <= 0:
        return Markup("")
    y = Scale(0.0, max(bars.values()) * 1.12, HEIGHT - _BOTTOM, _TOP)
    slot = (WIDTH - _LEFT - _RIGHT) / len(bars)
    width = min(56.0, slot * 0.72)
    total = sum(bars.values())
    parts: list[str] = []
    for index, (name, value) in enumerate(bars.items()):
        middle, top = _LEFT + slot * (index + 0.5), y(value)
        share = f"{name}: {short(value, 6)} ({value / total * 100:.1f} %)"
        parts.append(
            f'<rect class="c{colour}" x="{middle - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" '
            f'height="{HEIGHT - _BOTTOM - top:.1f}" rx="2"><title>{escape(share)}</title></rect>'
            f"{_text(middle, HEIGHT - _BOTTOM + 14, name)}{_text(middle, top - 4, short(value, 4), css='value')}"
        )
    parts.append(
        f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{HEIGHT - _BOTTOM}" y2="{HEIGHT - _BOTTOM}"/>'
    )
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(_text(middle, HEIGHT - 3, x_label))
    facts = "; ".join(f"{name}: {short(value, 6)}" for name, value in bars.items())
    label = escape(f"{title}: {facts}", quote=True)
    body = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    figure = f'<figure class="chart"><figcaption><b>{escape(title)}</b></figcaption>{body}</figure>'
    return Markup(figure)


_TIMELINE_WIDTH, _ROW_HEIGHT, _ROW_LEFT, _ROW_RIGHT, _ROWS_TOP = 1140, 20, 104, 12, 18
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
    x = Scale(start_s, end_s, _ROW_LEFT, _TIMELINE_WIDTH - _ROW_RIGHT)
    bottom = _ROWS_TOP + _ROW_HEIGHT * len(shown)
    has_titles = sum(len(runs) for runs in shown.values()) <= _MAX_TITLES
    parts = [_axis(x, bottom, origin_s), *(_mark(x, moment, name, bottom) for moment, name in marks)]
    for index, (actor, runs) in enumerate(shown.items()):
        top = _ROWS_TOP + _ROW_HEIGHT * index
        parts.append(
            f'<text class="tick" x="{_ROW_LEFT - 8}" y="{top + 14}" text-anchor="end">{escape(actor[:18])}</text>'
        )
        parts += [_rect(x, top, run, origin_s if has_titles else None) for run in runs]
    height = bottom + 20
    note = f" ({hidden} more actors are not shown)" if hidden > 0 else ""
    label = escape(f"{title}: what {len(shown)} actors did over {duration(end_s - start_s)}{note}", quote=True)
    body = f'<svg viewBox="0 0 {_TIMELINE_WIDTH} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
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
    column_s = (end_s - start_s) / (_TIMELINE_WIDTH - _ROW_LEFT - _ROW_RIGHT)
    inside = [span for span in spans if span.start_s < end_s and span.start_s + span.duration_s > start_s]
    if len(inside) <= (_TIMELINE_WIDTH - _ROW_LEFT) / 3:
        return [
            (max(start_s, span.start_s), min(end_s, span.start_s + span.duration_s), span.activity, span.name)
            for span in inside
        ]
    filled: list[dict[str, float]] = [{} for _ in range(_TIMELINE_WIDTH - _ROW_LEFT - _ROW_RIGHT)]
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
        f'<line class="grid" x1="{x(tick + origin_s):.1f}" x2="{x(tick + origin_s):.1f}" y1="{_ROWS_TOP}" '
        f'y2="{bottom}"/>'
        f'<text class="tick" x="{x(tick + origin_s):.1f}" y="{bottom + 14}" text-anchor="middle">'
        f"{escape(duration(tick))}</text>"
        for tick in ticks
    )


def _mark(x: Scale, moment_s: float, name: str, bottom: float) -> str:
    if not x.low <= moment_s <= x.high:
        return ""
    pixel = x(moment_s)
    label = (
        f'<text class="tick" x="{pixel:.1f}" y="{_ROWS_TOP - 5}" text-anchor="middle">{escape(name)}</text>'
        if name
        else ""
    )
    return f'<line class="mark" x1="{pixel:.1f}" x2="{pixel:.1f}" y1="{_ROWS_TOP - 3}" y2="{bottom}"/>{label}'


def _rect(x: Scale, top: float, run: Run, origin_s: float | None) -> str:
    start_s, end_s, kind, name = run
    left, width = x(start_s), max(0.4, x(end_s) - x(start_s))
    place = f'x="{left:.1f}" y="{top + 2}" width="{width:.1f}" height="{_ROW_HEIGHT - 4}"'
    css = f"k-{kind}" if kind.replace("-", "").isalpha() else "k-other"
    if origin_s is None:
        return f'<rect class="{css}" {place}/>'
    what = kind if name in {"", kind} else f"{kind} ({name})"
    text = f"{what}, {duration(end_s - start_s)} from {duration(start_s - origin_s)}"
    return f'<rect class="{css}" {place}><title>{escape(text)}</title></rect>'
