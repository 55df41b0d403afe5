"""The last stretch of a trace is a trace: no arrow without its end, no row without its name."""

from __future__ import annotations

from typing import Any

from tests.monitor.trace_rules import check_events, follow

from myxa.launch.commands.views import trace_tail

Event = dict[str, Any]


def trace(num: int) -> list[Event]:
    """Two actors; an arrow every second from a slice of the first to one of the second, half a second later."""
    events: list[Event] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": f"actor/{pid}"}} for pid in (1, 2, 3)
    ]
    events.append(_slice(3, "long ago", 0, 10))
    for index in range(num):
        at = index * 1_000_000
        events += [_slice(1, "make", at, 400_000), _slice(2, "take", at + 600_000, 300_000)]
        flow = {"name": f"group {index}", "cat": "group", "id": index + 1, "tid": 0}
        events.append({"ph": "s", **flow, "pid": 1, "ts": at + 399_999})
        events.append({"ph": "f", "bp": "e", **flow, "pid": 2, "ts": at + 600_000})
        events.append({"ph": "C", "name": "loss", "pid": 1, "tid": 0, "ts": at, "args": {"value": 0.5}})
    return events


def _slice(pid: int, name: str, start_us: int, duration_us: int) -> Event:
    row = {"pid": pid, "tid": 0, "ts": start_us, "dur": duration_us}
    return {"ph": "X", "name": name, "cat": "compute", **row, "args": {}}


def test_the_last_seconds() -> None:
    events = trace(20)
    tail: list[Event] = []
    for tenth in range(1, 60):
        tail = trace_tail(lambda: iter(events), tenth / 10)
        check_events(tail)
        arrows = follow(tail)
        newest = 19_900_000
        assert all(e["ts"] + e.get("dur", 0) > newest - tenth * 100_000 for e in tail if e["ph"] != "M")
        assert len(arrows) in {tenth // 10, (tenth + 9) // 10}
    assert {e["args"]["name"] for e in tail if e["ph"] == "M"} == {"actor/1", "actor/2"}


def test_an_empty_trace_and_half_an_arrow() -> None:
    assert trace_tail(lambda: iter([]), 5.0) == []
    half = [_slice(1, "make", 0, 100), {"ph": "s", "name": "g", "cat": "g", "id": 1, "pid": 1, "tid": 0, "ts": 5}]
    assert [e["ph"] for e in trace_tail(lambda: iter(half), 5.0)] == ["X"]
