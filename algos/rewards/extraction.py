"""Finding the answer in an answer text: boxed, after a marker, in a tag, in the last line, the last number.

Pure and linear in the length of the text: model output is hostile input.
"""

from __future__ import annotations

import re
from typing import Literal, get_args

Extract = Literal["all", "last_line", "boxed", "marker", "tag", "auto"]
EXTRACTS: tuple[Extract, ...] = get_args(Extract)

TOKENS = re.compile(r"(\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
MARKER = "####"
"""What GSM8K writes in front of the final answer."""
OPEN_TAG, CLOSE_TAG = "<answer>", "</answer>"


def boxed(text: str) -> str | None:
    r"""What stands in the `\boxed{...}` that closes last, braces balanced; None without one."""
    found: str | None = None
    opened: list[int] = []  # where the contents of each open brace begin; -1 for a brace that is not a box's
    for match in TOKENS.finditer(text):
        if match[1]:
            opened.append(match.end())
        elif match[0] == "{":
            opened.append(-1)
        elif match[0] == "}" and opened:
            start = opened.pop()
            if start >= 0:
                found = text[start : match.start()]
    return found.strip() if found is not None else None


def after_marker(text: str) -> str | None:
    """The rest of the line after the last `####`; None without one."""
    _, marker, rest = text.rpartition(MARKER)
    return rest.strip().partition("\n")[0].strip() if marker else None


def in_tag(text: str) -> str | None:
    """What stands in the last `<answer>...</answer>`; None without one."""
    before, close, _ = text.rpartition(CLOSE_TAG)
    _, opening, inner = before.rpartition(OPEN_TAG)
    return inner.strip() if close and opening else None


def last_line(text: str) -> str | None:
    """The last line that is not blank; None if there is none."""
    lines = text.rstrip().rsplit("\n", 1)
    return lines[-1].strip() or None


def extract(text: str, how: Extract) -> str | None:
    """The answer in `text`, or None if there is none of that kind. `auto`: boxed, else marker, else tag, else all."""
    if how == "boxed":
        return boxed(text)
    if how == "marker":
        return after_marker(text)
    if how == "tag":
        return in_tag(text)
    if how == "last_line":
        return last_line(text)
    if how == "all":
        return text.strip()
    for found in (boxed(text), after_marker(text), in_tag(text)):
        if found is not None:
            return found
    return text.strip()
