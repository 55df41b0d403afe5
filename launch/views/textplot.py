"""Bars and small curves drawn with letters. Pure: numbers in, text out. A terminal that lacks the letters gets plain
ones by the error handler of its encoding (`PLAIN`).
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from ...core.activity import ACTIVITY_KINDS

COLOURS: Mapping[str, str] = dict(zip(
    ACTIVITY_KINDS,
    ("green", "yellow", "magenta", "cyan", "bright_magenta", "bright_green", "blue", "bright_black"),
    strict=True,
))  # fmt: skip
LETTERS: Mapping[str, str] = dict(zip(ACTIVITY_KINDS, "█▓▒░◇▫▪·", strict=True))
"""One letter a kind of time, so that bars can be read without colours."""
_BLOCKS = "▁▂▃▄▅▆▇█"
_PLAIN = dict(zip("█▓▒░◇▫▪·▁▂▃▄▅▆▇±", "#dwcmep._.-~=+*~", strict=True))


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(_PLAIN.get(c) or c.encode("ascii", "backslashreplace").decode() for c in missing), error.end


PLAIN = "myxa-plain"
"""For `errors` of a stream; other letters are spelt out."""
codecs.register_error(PLAIN, _plain)


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
