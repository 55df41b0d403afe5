"""`trace.json`: what every actor did when, in Chrome's trace format; opens in ui.perfetto.dev and chrome://tracing.

A row ("process") per actor, in it a row for the actor itself and one per `track`; complete events (ph X) with the
activity kind as category, instants (ph i) from events (through all rows where a knob was changed or the run paused),
and flows (ph s, t, f), which a viewer draws as arrows from slice to slice by their times:

    a group            dispatch -> generate -> reward -> claim -> train, from spans with `args["hop"]` and `["flows"]`
    a weight version   from the span with `args["makes_version"]` to those with `args["adopts_version"]`

The file is one array, one event per line (`LineFile`). It gets its "]" when it gets no more events, which a killed
monitor does not write: trace viewers accept an array without its end.

Bounded: at `PART_BYTES` the file becomes `trace.1.json`, in the place of the one that had that name, and a new one
begins with the names of all rows. So it does when the monitor is started again. Each part is a separate trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast, get_args

import orjson

from ...core.activity import Hop
from ...core.messages import Event, Span, Telemetry
from ...core.sink import SinkContext
from .jsonl import LineFile

TRACE_FILE = "trace.json"
PART_BEFORE = "trace.1.json"
PART_BYTES = 128 * 1024 * 1024
"""More in one file no viewer loads."""

_MAX_TRACKS = 128
_ROUNDING_US = 2
_HOPS: tuple[Hop, ...] = get_args(Hop)
_GLOBAL = frozenset({"knob", "knob-undone", "knobs-restored", "run-paused", "run-resumed"})
"""Events that concern every actor: a line through the whole trace."""
_ROLE_ORDER = ("launcher", "coordinator", "buffer", "trainer", "rollout", "model", "monitor")


class ChromeTraceSink:
    """Writes spans, instants and flows."""

    name = "chrome_trace"
    _file: LineFile | None = None

    def __init__(self, part_bytes: int = PART_BYTES) -> None:
        """A part that would be larger than `part_bytes` ends."""
        self._part_bytes = part_bytes
        self._names: list[bytes] = []
        """Lines with those of all rows."""
        self._pids: dict[str, int] = {}
        self._tids: dict[tuple[str, str], int] = {}
        self._num_tracks: dict[str, int] = {}
        self._lanes = Lanes()
        self._row_ends_us: dict[tuple[int, int], int] = {}

    def open(self, context: SinkContext) -> None:
        path = context.run_dir / TRACE_FILE
        if path.exists():
            path.replace(path.with_name(PART_BEFORE))
        self._file = LineFile(path, context.emit, self._part_bytes, self._frame)

    def _frame(self) -> tuple[bytes, bytes]:
        """The last line says one name again, since JSON wants no comma before the end."""
        return b"[\n" + b"".join(self._names), self._names[0].replace(b",\n", b"\n]\n")

    def write(self, bundle: Telemetry) -> None:
        """Turn records into trace events; they reach the file with the next flush."""
        for span in bundle.spans:
            self._add(*self._from_span(span))
        for event in bundle.events:
            self._add(self._from_event(event))

    def _add(self, *events: dict[str, Any]) -> None:
        assert self._file is not None
        for event in events:
            self._file.add(_line(event))

    def flush(self) -> None:
        """Raises OSError when the disk refuses: what waits is kept for the next time, up to a bound."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _name(self, title: str, pid: int, tid: int, **args: object) -> None:
        event = {"ph": "M", "name": title, "pid": pid, "tid": tid, "args": args}
        self._names.append(_line(event))
        if self._file is not None and self._file.has_begun:
            self._add(event)

    def _pid(self, source: str) -> int:
        if source not in self._pids:
            pid = self._pids[source] = len(self._pids) + 1
            role = source.partition("/")[0]
            order = _ROLE_ORDER.index(role) if role in _ROLE_ORDER else len(_ROLE_ORDER)
            self._name("process_name", pid, 0, name=source)
            self._name("process_sort_index", pid, 0, sort_index=order * 1000 + pid)
            self._name("thread_name", pid, 0, name="actor")
            self._tids[source, ""] = 0
        return self._pids[source]

    def _tid(self, source: str, track: str) -> int:
        pid = self._pid(source)
        if (source, track) not in self._tids:
            tid = self._num_tracks.get(source, 0) + 1
            if tid > _MAX_TRACKS:  # tracks made from ids would be a row each; the rest shares the last one
                return _MAX_TRACKS
            self._tids[source, track] = self._num_tracks[source] = tid
            self._name("thread_name", pid, tid, name=track)
        return self._tids[source, track]

    def _from_span(self, span: Span) -> Iterator[dict[str, Any]]:
        start_us, end_us = _us(span.start_wall_s), _us(span.start_wall_s + span.duration_s)
        track: str | None = span.track
        if "hop" in span.args or "parts" in span.args:
            track = self._lanes.take(span.source, span.track, start_us, max(end_us, start_us + 1))
        if track is None:  # more at once than there are rows
            return
        row = self._pid(span.source), self._tid(span.source, track)
        if "parts" in span.args:
            yield from self._parts(span, row)
            return
        before_us = self._row_ends_us.get(row, 0)
        if 0 < before_us - start_us <= _ROUNDING_US:  # neighbours whose times were rounded apart touch again
            start_us = before_us
        self._row_ends_us[row] = end_us = max(end_us, start_us + 1)
        place = {"pid": row[0], "tid": row[1], "ts": start_us}
        yield {"ph": "X", "name": span.name, "cat": span.activity, **place, "dur": end_us - start_us, "args": span.args}
        for flow in _flows_of(span):
            yield flow | place

    def _parts(self, span: Span, row: tuple[int, int]) -> Iterator[dict[str, Any]]:
        """What a rollout did, one thing after another: (label, activity, seconds after its begin, seconds, turn)."""
        facts = {name: value for name, value in span.args.items() if name != "parts"}
        for label, activity, after_s, lasted_s, turn in span.args["parts"]:
            start_us = max(_us(span.start_wall_s + after_s), self._row_ends_us.get(row, 0))
            self._row_ends_us[row] = end_us = max(_us(span.start_wall_s + after_s + lasted_s), start_us + 1)
            place = {"pid": row[0], "tid": row[1], "ts": start_us, "dur": end_us - start_us}
            yield {"ph": "X", "name": label, "cat": activity, **place, "args": {**facts, "turn": turn}}

    def _from_event(self, event: Event) -> dict[str, Any]:
        pid, ts = self._pid(event.source), _us(event.wall_s)
        args = {**event.data, "text": event.text}
        scope = "g" if event.kind in _GLOBAL else "p"
        return {"ph": "i", "s": scope, "name": event.kind, "cat": "event", "pid": pid, "tid": 0, "ts": ts, "args": args}


def _line(event: dict[str, Any]) -> bytes:
    return orjson.dumps(event, default=str, option=orjson.OPT_SERIALIZE_NUMPY) + b",\n"


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _flows_of(span: Span) -> Iterator[dict[str, Any]]:
    """The flows that pass this slice (bp "e": bound to the slice that encloses the time)."""
    args = span.args
    for key, phase in (("makes_version", "s"), ("adopts_version", "t")):
        if isinstance(version := args.get(key), int):
            yield {"ph": phase, "bp": "e", "name": f"version {version}", "cat": "weights", "id": 2 * version + 1}
    hop, flows = args.get("hop"), args.get("flows")
    if hop in _HOPS and isinstance(flows, list | tuple):
        phase = "s" if hop == _HOPS[0] else "f" if hop == _HOPS[-1] else "t"
        for group in cast("list[object]", flows):
            if isinstance(group, int):
                yield {"ph": phase, "bp": "e", "name": f"group {group}", "cat": "group", "id": 2 * group}


class Lanes:
    """Rows for things that overlap: slices of one row must not, or viewers drop them."""

    def __init__(self, max_lanes: int = 32) -> None:
        self._max_lanes = max_lanes
        self._free_us: dict[tuple[str, str], list[int]] = {}
        """(actor, track) -> when each of its rows is free."""

    def take(self, source: str, track: str, start_us: int, end_us: int) -> str | None:
        """The row's name: the first that is free at `start_us`; None when all of them are taken."""
        free_us = self._free_us.setdefault((source, track), [])
        lane = next((lane for lane, free in enumerate(free_us) if free <= start_us), len(free_us))
        if lane >= self._max_lanes:
            return None
        if lane == len(free_us):
            free_us.append(0)
        free_us[lane] = end_us
        return track if lane == 0 else f"{track} {lane + 1}"
