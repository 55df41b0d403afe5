"""Numbers, durations, names, small curves and texts of a run as people read them. Pure text. A terminal that lacks a
letter gets a plain one by the error handler of its encoding (`PLAIN`).
"""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Container, Mapping, Sequence
from itertools import pairwise


def short(value: float | None, digits: int = 3) -> str:
    """About `digits` significant digits: 0.0412, 1.5, 12.3k, 4.1M; "-" for None, NaN and infinities spelt out."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size == 0:
        return "0"
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit * 0.99995:
            scale = 1e3 if suffix == "k" else limit
            return f"{_trim(value / scale, digits)}{suffix}"
    if size < 1e-4:
        return f"{value:.{max(digits - 2, 0)}e}".replace("e-0", "e-").replace("e+0", "e+")
    return _trim(value, digits)


def _trim(value: float, digits: int) -> str:
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def duration(seconds: float) -> str:
    """850 ms, 12.3 s, 4 min 05 s, 2 h 07 min, 3 d 4 h."""
    if not math.isfinite(seconds) or seconds < 0:
        return "-"
    if 0 < seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def percent(share: float) -> str:
    """0.624 -> "62 %"."""
    return f"{share * 100:.0f} %"


def time_parts(kinds: Mapping[str, float], num_names: int = 4) -> list[str]:
    """`wait-data 62 % (claim 60 %)` of each kind of a hundredth or more. `kinds`: kind or "kind/name" -> share."""
    parts: list[str] = []
    main_kinds = (kind for kind, share in kinds.items() if "/" not in kind and share >= 0.01)
    for kind in sorted(main_kinds, key=lambda kind: (-kinds[kind], kind)):
        inner = [(share, key) for key, share in kinds.items() if key.startswith(f"{kind}/") and share >= 0.01]
        names = [f"{key.partition('/')[2]} {percent(share)}" for share, key in sorted(inner, reverse=True)[:num_names]]
        parts.append(f"{kind} {percent(kinds[kind])}" + (f" ({', '.join(names)})" if names else ""))
    return parts


def doing(kinds: Mapping[str, float]) -> str:
    """What takes most of an actor's time."""
    return next(iter(time_parts(kinds, 1)), "")


def training_reward(names: Container[str]) -> str:
    """The metric shown as training reward: of all finished groups, else of the batch's. `names`: metric names."""
    return "reward/raw_mean" if "reward/raw_mean" in names else "reward/mean"


def clean(text: str) -> str:
    """Text from elsewhere on one line and without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() else " " for c in text)


_ROLES = ("trainer", "rollout", "model", "gateway", "buffer", "coordinator", "memory", "monitor")


def name_order(name: str) -> tuple[int, str, int, str]:
    """Trainers first, then rollout actors, then the others; by number."""
    role, _, number = name.partition("/")
    place = _ROLES.index(role) if role in _ROLES else len(_ROLES)
    return (place, role, int(number) if re.fullmatch(r"\d{1,9}", number) else 0, name)


_BLOCKS = "▁▂▃▄▅▆▇█"
_PLAIN = dict(zip("▁▂▃▄▅▆▇█±", "_.-~=+*#~", strict=True))


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
