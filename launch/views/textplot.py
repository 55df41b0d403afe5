"""Curves and bars drawn with letters. Pure: numbers in, lines of text out. A terminal that lacks the letters gets plain
ones by the error handler of its encoding (`PLAIN`).

plotext and asciichartpy were considered: each is one person's package, and the two shapes needed here are short.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise

from ...core.activity import ACTIVITY_KINDS
from .numbers import short

COLOURS: Mapping[str, str] = dict(zip(
    ACTIVITY_KINDS,
    ("green", "yellow", "magenta", "cyan", "bright_magenta", "bright_green", "blue", "bright_black"),
    strict=True,
))  # fmt: skip
LETTERS: Mapping[str, str] = dict(zip(ACTIVITY_KINDS, "█▓▒░◇▫▪·", strict=True))
"""One letter a kind of time, so that bars can be read without colours."""
_BLOCKS = "▁▂▃▄▅▆▇█"
_PLAIN = dict(zip("█▓▒░◇▫▪·▁▂▃▄▅▆▇±", "#dwcmep._.-~=+*~", strict=True))

# Braille dots of a cell two wide and four high, from the top left: the bit of each dot.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def _plain(error: UnicodeError, spelt: Callable[[str], str]) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join("*" if "\u2800" < c <= "\u28ff" else _PLAIN.get(c) or spelt(c) for c in missing), error.end


PLAIN, PLAIN_COLUMNS = "myxa-plain", "myxa-plain-columns"
"""For `errors` of a stream; other letters are spelt out, or (columns stay in their places) become one question mark."""
codecs.register_error(PLAIN, partial(_plain, spelt=lambda c: c.encode("ascii", "backslashreplace").decode()))
codecs.register_error(PLAIN_COLUMNS, partial(_plain, spelt=lambda c: "?"))


def sparkline(values: Sequence[float], width: int = 30) -> str:
    """One line of at most `width` letters; more values than that are averaged. NaN is left out."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return ""
    bins = _averaged(finite, width)
    low, high = min(bins), max(bins)
    if high - low <= 1e-12 * max(1.0, abs(high)):
        return _BLOCKS[len(_BLOCKS) // 2] * len(bins)
    scale = (len(_BLOCKS) - 1) / (high - low)
    return "".join(_BLOCKS[round((value - low) * scale)] for value in bins)


def _averaged(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [index * len(values) // width for index in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def plot(
    curve: Mapping[int, float],
    marks: Mapping[int, float] | None = None,
    *,
    width: int = 60,
    height: int = 10,
) -> list[str]:
    """Lines of a curve over steps with its axes; `marks` are drawn as "o" on top (evaluations). Empty without data."""
    points = {step: value for step, value in curve.items() if math.isfinite(value)}
    marked = {step: value for step, value in (marks or {}).items() if math.isfinite(value)}
    if not points and not marked:
        return []
    frame = _Frame(points, marked, max(width, 16), max(height, 3))
    cells = _draw(frame, points)
    for step, value in marked.items():
        cells[frame.row(value)][frame.column(step)] = "o"
    return frame.with_axes(["".join(row) for row in cells])


class _Frame:
    """Where steps and values lie on the canvas."""

    def __init__(self, points: Mapping[int, float], marks: Mapping[int, float], width: int, height: int) -> None:
        self.width, self.height = width, height
        steps, values = [*points, *marks], [*points.values(), *marks.values()]
        self.first, self.last = min(steps), max(steps)
        self.low, self.high = min(values), max(values)
        self.flat: float | None = None
        if self.high - self.low < 1e-9 * max(1.0, abs(self.high)):
            self.flat = self.high
            self.low, self.high = self.low - 0.5, self.high + 0.5

    def column(self, step: float, scale: int = 1) -> int:
        span = max(1, self.last - self.first)
        return min(self.width * scale - 1, int((step - self.first) / span * (self.width * scale - 1) + 0.5))

    def row(self, value: float, scale: int = 1) -> int:
        share = (self.high - value) / (self.high - self.low)
        return min(self.height * scale - 1, max(0, int(share * (self.height * scale - 1) + 0.5)))

    def with_axes(self, rows: Sequence[str]) -> list[str]:
        marked = (0, self.height // 2, self.height - 1)
        labels = {row: short(self.high - (self.high - self.low) * row / (self.height - 1)) for row in marked}
        if self.flat is not None:
            labels = {self.row(self.flat): short(self.flat)}
        margin = max(len(label) for label in labels.values())
        lines = [f"{labels.get(index, ''):>{margin}} |{row.rstrip()}" for index, row in enumerate(rows)]
        lines.append(f"{'':>{margin}} +{'-' * self.width}")
        ends = f"{self.first}{'step':^{max(4, self.width - len(str(self.first)) - len(str(self.last)))}}{self.last}"
        lines.append(f"{'':>{margin}}  {ends}")
        return lines


def _walk(frame: _Frame, points: Mapping[int, float]) -> list[tuple[int, int]]:
    """Dots of the line through all points, gaps between columns closed."""
    dots: list[tuple[int, int]] = []
    for step in sorted(points):
        x, y = frame.column(step, 2), frame.row(points[step], 4)
        if dots:
            before_x, before_y = dots[-1]
            num = max(abs(x - before_x), abs(y - before_y))
            dots += [
                (before_x + round((x - before_x) * i / num), before_y + round((y - before_y) * i / num))
                for i in range(1, num)
            ]
        dots.append((x, y))
    return dots


def _draw(frame: _Frame, points: Mapping[int, float]) -> list[list[str]]:
    bits = [[0] * frame.width for _ in range(frame.height)]
    for x, y in _walk(frame, points):
        bits[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
    return [[chr(0x2800 + cell) if cell else " " for cell in row] for row in bits]


def bar(kinds: Mapping[str, float], width: int) -> list[tuple[str, str]]:
    """[(letters, kind)] of a stacked bar of exactly `width` letters, blanks at its end included."""
    filled, exact = 0, 0.0
    parts: list[tuple[str, str]] = []
    for kind in ACTIVITY_KINDS:
        exact += kinds.get(kind, 0.0) * width
        num = max(0, min(round(exact), width) - filled)
        filled += num
        if num:
            parts.append((LETTERS[kind] * num, kind))
    return [*parts, (" " * (width - filled), "")]


def gauge(count: int, total: int, width: int) -> str:
    """A bar of `width` letters; anything above 0 shows at least one."""
    num = 0 if count <= 0 or total <= 0 else max(1, min(width, round(count / total * width)))
    return "█" * num + "·" * (width - num)
