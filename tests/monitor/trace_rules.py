"""What Chrome's trace event format asks of a file, and how a viewer binds its arrows."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Event = dict[str, Any]
FLOWS = "stf"
PHASES = {"M", "X", "i", *FLOWS}


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
    """Every arrow as a viewer draws it: the flow events of one name in the order of time, from the one before to the
    next, each bound to the slice of its row that encloses its time. A flow begins again with each start."""
    slices = rows(events)
    newest: dict[tuple[str, str, int], Event] = {}
    followed: list[Followed] = []
    for flow in sorted((e for e in events if e["ph"] in FLOWS), key=lambda e: (e["ts"], FLOWS.index(e["ph"]))):
        assert flow["bp"] == "e"
        key, place = (flow["cat"], flow["name"], flow["id"]), _enclosing(slices, flow)
        if flow["ph"] != "s" and key in newest:
            followed.append(Followed(flow["name"], flow["cat"], newest[key], place))
        newest[key] = place
        if flow["ph"] == "f":
            del newest[key]
    ids = {(flow["cat"], flow["name"]): flow["id"] for flow in events if flow["ph"] in FLOWS}
    assert len(set(ids.values())) == len(ids), "some viewers look at the number alone"
    return followed


def _enclosing(slices: dict[tuple[int, int], list[Event]], flow: Event) -> Event:
    row = slices.get((flow["pid"], flow["tid"]), [])
    found = [event for event in row if event["ts"] <= flow["ts"] < event["ts"] + event["dur"]]
    assert found, f"no slice encloses {flow}"
    return found[-1]
