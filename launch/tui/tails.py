"""Logs and stacks as the run tells them, as text for a screen. Pure: the answer of a verb in, lines out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

_HEADS = ("actor", "name", "target")
_BODIES = ("lines", "text", "log", "stack", "frames", "threads", "tail")
_MAX_LINES = 2000


def log_text(answer: object) -> str:
    """Lines of a log, oldest first, without control characters."""
    return _joined(answer) or "the log is empty"


def stack_text(answer: object) -> str:
    """Stacks of an actor's threads."""
    return _joined(answer) or "no stack was told"


def _joined(answer: object) -> str:
    lines = [_plain(line) for part in _lines(answer) for line in part.splitlines()]
    return "\n".join(lines[-_MAX_LINES:])


def _lines(answer: object) -> Iterator[str]:
    """A text, a list of texts, or records that hold them under one of the usual names."""
    if isinstance(answer, str):
        yield answer
    elif isinstance(answer, list | tuple):
        for part in cast("list[object]", answer):
            yield from _lines(part)
    elif isinstance(answer, dict):
        record = cast("dict[str, Any]", answer)
        bodies = [record[key] for key in _BODIES if record.get(key)]
        if bodies and (head := next((str(record[key]) for key in _HEADS if record.get(key)), "")):
            yield f"-- {head}"
        for body in bodies or [value for value in record.values() if isinstance(value, list | dict)]:
            yield from _lines(body)


def _plain(line: str) -> str:
    return "".join(c if c.isprintable() else " " for c in line.replace("\t", "    "))
