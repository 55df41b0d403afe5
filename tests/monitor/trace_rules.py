"""What Chrome's trace event format asks of a file, and how a viewer binds its arrows."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Event = dict[str, Any]
PHASES = {"M", "X", "C", "i", "s", "f"}


@dataclass(frozen=True)
class Followed:
    """An arrow with the slices that its ends are bound to."""

    name: str
    category: str
    source: Event
    target: Event


def check_events(events: list[Event]) -> None:
    """Every event has the fields of its phase, and slices of one row never overlap."""
    for event in events:
        assert event["ph"] in PHASES, event
        assert isinstance(event["name"], str), event
        assert event["name"], event
        assert isinstance(event["pid"], int), event
        assert isinstance(event["tid"], int), event
        if event["ph"] == "M":
            continue
        assert isinstance(event["ts"], int), event
        if event["ph"] == "X":
            assert event["dur"] >= 1, event
        if event["ph"] == "i":
            assert event["s"] in {"g", "p", "t"}, event
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values()), event
    named = {event["pid"] for event in events if event["ph"] == "M" and event["name"] == "process_name"}
    assert {event["pid"] for event in events} <= named
    for row in rows(events).values():
        for before, after in pairwise(row):
            assert after["ts"] >= before["ts"] + before["dur"], (before, after)


def rows(events: list[Event]) -> dict[tuple[int, int], list[Event]]:
    """Slices by row, in order of time."""
    found: dict[tuple[int, int], list[Event]] = {}
    for event in events:
        if event["ph"] == "X":
            found.setdefault((event["pid"], event["tid"]), []).append(event)
    return {row: sorted(slices, key=lambda e: (e["ts"], e["dur"])) for row, slices in found.items()}


def follow(events: list[Event]) -> list[Followed]:
    """Every arrow, bound as a viewer binds it: to the slice of that row that encloses its time. Asserts that each start
    has exactly one end, that both are bound, and that no arrow runs backwards."""
    starts = [event for event in events if event["ph"] == "s"]
    ends = [event for event in events if event["ph"] == "f"]
    keys = [(event["cat"], event["name"], event["id"]) for event in starts]
    assert len(set(keys)) == len(keys)
    assert sorted(keys) == sorted((event["cat"], event["name"], event["id"]) for event in ends)
    by_key = {(event["cat"], event["name"], event["id"]): event for event in ends}
    slices = rows(events)
    followed: list[Followed] = []
    for start, key in zip(starts, keys, strict=True):
        end = by_key[key]
        assert end["bp"] == "e"
        assert start["ts"] <= end["ts"]
        followed.append(Followed(start["name"], start["cat"], _enclosing(slices, start), _enclosing(slices, end)))
    return followed


def _enclosing(slices: dict[tuple[int, int], list[Event]], flow: Event) -> Event:
    row = slices.get((flow["pid"], flow["tid"]), [])
    found = [event for event in row if event["ts"] <= flow["ts"] < event["ts"] + event["dur"]]
    assert found, f"no slice encloses {flow}"
    return found[-1]
