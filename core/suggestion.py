"""Did you mean: the nearest known name for a name that is not known. `difflib` is enough; no library needed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

CUTOFF = 0.6
"""difflib's own default: lower gives misleading guesses."""
LIST_LIMIT = 12


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The known name most like `name` (case ignored), or None when nothing is alike."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    if name.lower() in by_lower:
        return by_lower[name.lower()]
    matches = difflib.get_close_matches(name.lower(), list(by_lower), n=1, cutoff=CUTOFF)
    return by_lower[matches[0]] if matches else None


def suggest(name: str, candidates: Iterable[str]) -> str:
    """`did you mean "x"?`, or `known: a, b, c` when nothing is alike."""
    names = sorted(candidates)
    best = nearest(name, names)
    if best is not None:
        return f'did you mean "{best}"?'
    if not names:
        return "none is known here"
    shown = ", ".join(names[:LIST_LIMIT])
    return f"known: {shown}" + (f" and {len(names) - LIST_LIMIT} more" if len(names) > LIST_LIMIT else "")
