"""The last stretch of a trace, as a trace of its own: whole slices, arrows with both ends, names of rows that occur.

Pure: events in, events out. Works on a stream that can be read twice, because a trace may be large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

TraceEvent = dict[str, Any]
Read = Callable[[], Iterable[TraceEvent]]
"""Begins at the first event each time."""

US = 1_000_000


def trace_tail(read: Read, last_s: float | None) -> list[TraceEvent]:
    """Everything that happened in the last `last_s` seconds before the trace's newest event; None: everything."""
    cut_us = None if last_s is None else max((_end_us(event) for event in read()), default=0) - round(last_s * US)
    arrows = _whole_arrows(read(), cut_us)
    kept: list[TraceEvent] = []
    names: dict[tuple[int, int, str], TraceEvent] = {}
    for event in read():
        if event["ph"] == "M":
            names[event["pid"], event["tid"], event["name"]] = event  # each part of a trace has them
        elif event["ph"] in ("s", "f"):
            if _arrow(event) in arrows:
                kept.append(event)
        elif cut_us is None or _end_us(event) > cut_us:
            kept.append(event)
    actors = {event["pid"] for event in kept}
    return [event for event in names.values() if event["pid"] in actors] + kept


def _whole_arrows(events: Iterable[TraceEvent], cut_us: int | None) -> set[tuple[str, str, int]]:
    ends: dict[tuple[str, str, int], int] = {}
    for event in events:
        if event["ph"] in ("s", "f") and (cut_us is None or event["ts"] > cut_us):
            ends[_arrow(event)] = ends.get(_arrow(event), 0) + 1
    return {arrow for arrow, num in ends.items() if num == 2}


def _arrow(event: TraceEvent) -> tuple[str, str, int]:
    return str(event.get("cat")), str(event.get("name")), int(event.get("id", -1))


def _end_us(event: TraceEvent) -> int:
    return int(event.get("ts", 0)) + int(event.get("dur", 0))
