"""The verb `watch`: changes, step metrics and events as they come, read from the files in which they are kept anyway.

So it costs the run nothing, works while the coordinator is away, and shows exactly what the report will show.
"""

from __future__ import annotations

import asyncio
import fnmatch
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec

from ...actors.audit import AUDIT_FILE
from ...core.knobs import Operator
from .verb import Arguments, Verb, VerbContext

LOOK_EVERY_S = 0.2
MAX_LINE_BYTES = 1 << 20
MAX_BYTES_A_LOOK = 4 << 20
MAX_NAMES = 64
OF_A_STEP = ("train/", "reward/", "lag/", "eval/")
"""How metrics begin that belong to a step as a whole."""

Pattern = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
_FILES = {"change": AUDIT_FILE, "metrics": "metrics.jsonl", "event": "events.jsonl"}


class WatchArguments(Arguments, frozen=True, kw_only=True):
    """Of `watch`."""

    names: Annotated[tuple[Pattern, ...], msgspec.Meta(max_length=MAX_NAMES)] = ()
    """Only these knobs, metrics and kinds of events; "*" and "?" stand for any text. Empty: all."""
    past: bool = False
    """From the beginning of the run instead of from now."""


class LineTail:
    """New whole lines of a file that grows, and may not be there yet."""

    def __init__(self, path: Path, *, from_start: bool) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._from_start = from_start
        self._kept = b""
        self._open()
        self._from_start = True  # a file that comes later is news as a whole

    def _open(self) -> None:
        try:
            self._file = self._path.open("rb")
        except OSError:
            return
        if not self._from_start:
            self._file.seek(0, 2)

    def lines(self) -> Iterator[bytes]:
        """Those that were added since the last call; over-long ones are left out."""
        if self._file is None:
            self._open()
        if self._file is None:
            return
        data = self._kept + self._file.read(MAX_BYTES_A_LOOK)
        *whole, self._kept = data.split(b"\n")
        if len(self._kept) > MAX_LINE_BYTES:
            self._kept = b""
        yield from (line for line in whole if line)

    def close(self) -> None:
        """No more lines."""
        if self._file is not None:
            self._file.close()


async def _watch(context: VerbContext, arguments: WatchArguments, who: Operator) -> AsyncIterator[dict[str, Any]]:
    """Items {"kind": "change" | "metrics" | "event", ...}: a line of the file, with its kind."""
    tails = {kind: LineTail(context.run_dir.path / name, from_start=arguments.past) for kind, name in _FILES.items()}
    try:
        while True:
            for kind, tail in tails.items():
                for item in await asyncio.to_thread(_items, kind, tail, arguments.names):
                    yield item
            await asyncio.sleep(LOOK_EVERY_S)
    finally:
        for tail in tails.values():
            tail.close()


def _items(kind: str, tail: LineTail, names: tuple[str, ...]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for line in tail.lines():
        try:
            record: dict[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError:
            continue
        item = wanted(kind, record, names)
        if item is not None:
            items.append(item)
    return items


def wanted(kind: str, record: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any] | None:
    """The item to show of a record; None: nothing of it was asked for. Metrics of no step (gauges that come every
    second) and engines' gauges are shown only to those who name them."""
    if kind == "metrics":
        values: dict[str, Any] = record.get("values", {})
        chosen = {name: value for name, value in values.items() if _is_meant(name, names)} if names else values
        is_news = bool(names) or (record.get("step", -1) >= 0 and any(name.startswith(OF_A_STEP) for name in chosen))
        return {"kind": kind, **record, "values": chosen} if chosen and is_news else None
    if kind == "event":
        is_meant = not names or _is_meant(str(record.get("kind", "")), names) or _data_name_is_meant(record, names)
        # "kind" is the kind of the item here, so the event's own has another name.
        return {**record, "kind": kind, "event": record.get("kind")} if is_meant else None
    moves: list[dict[str, Any]] = record.get("moves", [])
    is_meant = not names or any(_is_meant(str(move.get("name", "")), names) for move in moves)
    return {"kind": kind, **record} if is_meant else None


def _data_name_is_meant(record: dict[str, Any], names: tuple[str, ...]) -> bool:
    data: dict[str, Any] = record.get("data") or {}
    return _is_meant(str(data.get("name", "")), names)


def _is_meant(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


WATCH_VERBS: tuple[Verb[Any], ...] = (
    Verb("watch", "view", WatchArguments, "changes, step metrics and events as they come", stream=_watch),
)
