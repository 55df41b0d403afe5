"""The name of a data file with an optional slice of its rows: `file.jsonl@[10:100]`."""

from __future__ import annotations

import re
from dataclasses import dataclass

SLICED = re.compile(r"(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]", re.DOTALL)
FORM = "a slice must look like file@[10:100], with whole numbers on either side of the colon"


@dataclass(frozen=True, slots=True)
class Source:
    """A data file and which of its rows are meant: Python's slice rules, no step; None = open at that end."""

    path: str
    start: int | None = None
    stop: int | None = None

    def rows(self, num_rows: int) -> range:
        """The chosen rows of a file that has `num_rows`."""
        return range(num_rows)[self.start : self.stop]

    def __str__(self) -> str:
        if self.start is None and self.stop is None:
            return self.path
        start = "" if self.start is None else self.start
        stop = "" if self.stop is None else self.stop
        return f"{self.path}@[{start}:{stop}]"


def parse_source(text: str) -> Source:
    """Split a name from its slice. Raises ValueError saying what is wrong with it."""
    if not text:
        raise ValueError("must not be empty")
    match = SLICED.fullmatch(text)
    if match is None:
        if "@[" in text:
            raise ValueError(FORM)
        return Source(text)
    if "-" in (match["start"], match["stop"]):
        raise ValueError(FORM)
    start = int(match["start"]) if match["start"] else None
    stop = int(match["stop"]) if match["stop"] else None
    return Source(match["path"], start, stop)


def parse_sources(value: str | tuple[str, ...]) -> tuple[Source, ...]:
    """One name or several; empty for an empty text. Raises ValueError."""
    if isinstance(value, str):
        return (parse_source(value),) if value else ()
    return tuple(parse_source(one) for one in value)


def check_sources(value: str | tuple[str, ...]) -> str | tuple[str, ...]:
    """The value itself if every name parses; raises ValueError naming the one that does not."""
    if isinstance(value, tuple):
        for one in value:
            try:
                parse_source(one)
            except ValueError as error:
                raise ValueError(f'"{one}": {error}') from error
    else:
        parse_sources(value)
    return value
