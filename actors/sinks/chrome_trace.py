"""`trace.json`: what every actor did when, in Chrome's trace format; opens in ui.perfetto.dev and chrome://tracing.

A row ("process") per actor, in it a row for the actor itself and one per `track`; complete events (ph X) with the
activity kind as category, counters (ph C) from metrics, instants (ph i) from events (through all rows where a knob
was changed or the run paused), and flow arrows, each a pair (ph s, f) with its own id:

    a group            dispatch -> generate -> reward -> claim -> train, from spans with `args["hop"]` and `["flows"]`
    a weight version   from the span with `args["makes_version"]` to every span with `args["adopts_version"]`

Valid JSON at any time: the file is one array, one event per line. Each flush is a single write that starts on the
closing "]" and ends with a new one, so between any two system calls the file is complete. Only a kill *inside* that
one call, a power cut, or a writer that cannot be repaired leaves a torn tail: `open` cuts the file back to its last
whole line, a short write (disk full) is rolled back, and trace viewers accept an array without its end.

Bounded: at `PART_BYTES` the file becomes `trace.1.json`, in the place of the one that had that name, and a new one
begins with the names of all rows. Each part is a separate trace; no arrow leads from one into the other.
"""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import orjson

from ...core.activity import Hop
from ...core.files import refusal
from ...core.messages import Event, MetricPoint, Span, Telemetry
from ...core.sink import SinkContext

TRACE_FILE = "trace.json"
PART_BEFORE = "trace.1.json"
PART_BYTES = 128 * 1024 * 1024
"""More in one file no viewer loads."""

_END = b"\n]\n"
_MAX_TRACKS = 128
_MAX_WAITING = 50_000
"""Events that wait while the disk refuses: some 20 MiB. Then all but the names of rows go."""
_ROUNDING_US = 2
_FLOWING = frozenset({"hop", "makes_version", "adopts_version"})
"""Slices that arrows are bound to."""
_UNCOUNTED = ("time/", "lag_hist/")
_GLOBAL = frozenset({"knob", "knob-undone", "knobs-restored", "run-paused", "run-resumed"})
"""Events that concern every actor: a line through the whole trace."""
_ROLE_ORDER = ("launcher", "coordinator", "buffer", "trainer", "rollout", "monitor")


class ChromeTraceSink:
    """Writes spans, counters, instants and flow arrows."""

    name = "chrome_trace"

    def __init__(self, part_bytes: int = PART_BYTES) -> None:
        """A part ends with the flush that takes it beyond `part_bytes`."""
        self._part_bytes = part_bytes
        self._file = -1
        self._end = 0
        """Offset of the closing bracket's line break: where the next flush starts."""
        self._pending: list[dict[str, Any]] = []
        self._num_lost = 0
        self._pids: dict[str, int] = {}
        self._tids: dict[tuple[str, str], int] = {}
        self._num_tracks: dict[str, int] = {}
        self._flows = TraceFlows()
        self._lanes = Lanes()
        self._row_ends_us: dict[tuple[int, int], int] = {}
        self._volume = TraceVolume()
        self._num_arrows = 0
        self._has_reported_thinned = False
        self._context: SinkContext | None = None

    def open(self, context: SinkContext) -> None:
        self._context = context
        path = context.run_dir / TRACE_FILE
        self._begin(path)
        for event in read_trace(path):
            self._learn(event)

    def _begin(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._end = whole_events_end(path)
        try:
            self._commit(b"[" if self._end == 0 else b"")
        except OSError as error:
            if refusal(error) is None:
                raise

    def write(self, bundle: Telemetry) -> None:
        """Turn records into trace events; they reach the file with the next flush."""
        if self._file < 0:
            return
        # `list` first: making an event may itself add the names of a new row to what is pending.
        for span in bundle.spans:
            self._pending += list(self._from_span(span))
        for point in bundle.metrics:
            self._pending += list(self._from_metrics(point))
        for event in bundle.events:
            self._pending.append(self._from_event(event))

    def flush(self) -> None:
        """Append what waits; the file is complete JSON before and after. Raises OSError when the disk refuses: what
        waits is kept for the next time, `_MAX_WAITING` events of it."""
        is_thin = self._lanes.num_refused + self._volume.num_skipped > 0
        if is_thin and not self._has_reported_thinned and self._context is not None:
            self._has_reported_thinned = True
            self._context.emit(
                "trace-thinned", f"{TRACE_FILE} leaves short stretches out: more happens than it can show"
            )
        if not self._pending or self._file < 0:
            return
        if len(self._pending) > _MAX_WAITING:
            names = [event for event in self._pending if event["ph"] == "M"]
            self._num_lost += len(self._pending) - len(names)
            self._pending = names
        lines = [orjson.dumps(event, default=str, option=orjson.OPT_SERIALIZE_NUMPY) for event in self._pending]
        before = b",\n" if self._end > 1 else b"\n" if self._end else b"[\n"
        self._commit(before + b",\n".join(lines))
        self._pending.clear()
        if self._num_lost and self._context is not None:
            text = f"{TRACE_FILE} lacks {self._num_lost} events: its disk refused them for too long"
            self._context.emit("trace-gap", text)
            self._num_lost = 0
        if self._end > self._part_bytes and self._context is not None:
            self._rotate(self._context.run_dir / TRACE_FILE)

    def _rotate(self, path: Path) -> None:
        """The next part begins. Rows keep their numbers; what waited for the other end of its arrow is forgotten."""
        os.close(self._file)
        self._file = -1
        path.replace(path.with_name(PART_BEFORE))
        self._begin(path)
        self._flows = TraceFlows()
        for source, pid in self._pids.items():
            self._name_row(source, pid)
        for (source, track), tid in self._tids.items():
            self._name_track(source, track, tid)

    def close(self) -> None:
        if self._file < 0:
            return
        try:
            self.flush()
        finally:
            os.close(self._file)
            self._file = -1

    def _commit(self, text: bytes) -> None:
        """One write over the old end; on a short write the old end is put back."""
        data = text + _END
        written = os.pwrite(self._file, data, self._end)
        if written != len(data):
            os.ftruncate(self._file, self._end)
            os.pwrite(self._file, _END if self._end else b"", self._end)
            what = f"only {written} of {len(data)} bytes could be written to {TRACE_FILE} (disk full?)"
            raise OSError(errno.ENOSPC, what)
        self._end += len(text)
        os.ftruncate(self._file, self._end + len(_END))

    def _learn(self, event: dict[str, Any]) -> None:
        """Take names of rows and numbers of arrows from an earlier monitor's trace, to continue both."""
        if event.get("ph") == "s" and isinstance(event.get("id"), int):
            self._num_arrows = max(self._num_arrows, event["id"])
        if event.get("ph") != "M":
            return
        name = str(event.get("args", {}).get("name", ""))
        if event.get("name") == "process_name":
            self._pids[name] = int(event["pid"])
        elif event.get("name") == "thread_name":
            owner = next((actor for actor, pid in self._pids.items() if pid == event["pid"]), "")
            tid = int(event["tid"])
            self._tids[owner, "" if tid == 0 else name] = tid
            self._num_tracks[owner] = max(tid, self._num_tracks.get(owner, 0))

    def _pid(self, source: str) -> int:
        if source not in self._pids:
            pid = self._pids[source] = len(self._pids) + 1
            self._name_row(source, pid)
        if (source, "") not in self._tids:  # also when an earlier trace was torn just behind the row's name
            self._name_track(source, "", 0)
        return self._pids[source]

    def _name_row(self, source: str, pid: int) -> None:
        role = source.partition("/")[0]
        order = _ROLE_ORDER.index(role) if role in _ROLE_ORDER else len(_ROLE_ORDER)
        self._pending.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": source}})
        sort = {"sort_index": order * 1000 + pid}
        self._pending.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": sort})

    def _tid(self, source: str, track: str) -> int:
        self._pid(source)
        if (source, track) not in self._tids:
            tid = self._num_tracks.get(source, 0) + 1
            if tid > _MAX_TRACKS:  # tracks made from ids would be a row each; the rest shares the last one
                return _MAX_TRACKS
            self._name_track(source, track, tid)
        return self._tids[source, track]

    def _name_track(self, source: str, track: str, tid: int) -> None:
        self._tids[source, track] = tid
        self._num_tracks[source] = max(tid, self._num_tracks.get(source, 0))
        name = {"name": track or "actor"}
        self._pending.append({"ph": "M", "name": "thread_name", "pid": self._pids[source], "tid": tid, "args": name})

    def _from_span(self, span: Span) -> Iterator[dict[str, Any]]:
        start_us, end_us = _us(span.start_wall_s), _us(span.start_wall_s + span.duration_s)
        track: str | None = span.track
        if "hop" in span.args:
            track = self._lanes.take(span.source, span.track, start_us, max(end_us, start_us + 1))
        if track is None:
            return
        if not _FLOWING.intersection(span.args) and not self._volume.has_room(
            (self._pid(span.source), self._tid(span.source, track)), start_us, end_us - start_us
        ):
            return
        place = self._placed(self._pid(span.source), self._tid(span.source, track), start_us, end_us)
        yield {
            "ph": "X",
            "name": span.name,
            "cat": span.activity,
            "ts": place.start_us,
            "dur": place.end_us - place.start_us,
            "pid": place.pid,
            "tid": place.tid,
            "args": span.args,
        }
        for arrow in self._arrows(span, place):
            yield from self._from_arrow(arrow)

    def _placed(self, pid: int, tid: int, start_us: int, end_us: int) -> TraceSlice:
        """Neighbours of a row whose times were rounded apart touch again: slices that overlap would be dropped."""
        before_us = self._row_ends_us.get((pid, tid), 0)
        if 0 < before_us - start_us <= _ROUNDING_US:
            start_us = before_us
        place = TraceSlice(pid, tid, start_us, max(end_us, start_us + 1))
        self._row_ends_us[pid, tid] = place.end_us
        return place

    def _arrows(self, span: Span, place: TraceSlice) -> Iterator[Arrow]:
        args = span.args
        if isinstance(version := args.get("makes_version"), int):
            yield from self._flows.made(version, place)
        if isinstance(version := args.get("adopts_version"), int):
            yield from self._flows.adopted(version, place)
        if isinstance(flows := args.get("flows"), list | tuple):
            for group_id in cast("list[object]", flows):
                if isinstance(group_id, int):
                    yield from self._flows.station(group_id, str(args.get("hop")), place)

    def _from_arrow(self, arrow: Arrow) -> Iterator[dict[str, Any]]:
        """Both ends at once. Viewers bind an end to the slice that encloses its time (bp "e": also the second one)."""
        self._num_arrows += 1
        both = {"name": arrow.name, "cat": arrow.category, "id": self._num_arrows}
        source, target = arrow.source, arrow.target
        yield {"ph": "s", **both, "pid": source.pid, "tid": source.tid, "ts": arrow.from_us}
        yield {"ph": "f", "bp": "e", **both, "pid": target.pid, "tid": target.tid, "ts": arrow.to_us}

    def _from_metrics(self, point: MetricPoint) -> Iterator[dict[str, Any]]:
        counted = {name: value for name, value in point.values.items() if not name.startswith(_UNCOUNTED)}
        if not counted:
            return
        pid, ts = self._pid(point.source), _us(point.wall_s)
        for name, value in counted.items():
            if not self._volume.is_due(pid, name, ts):
                continue
            yield {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": ts, "args": {"value": value}}

    def _from_event(self, event: Event) -> dict[str, Any]:
        pid, ts = self._pid(event.source), _us(event.wall_s)
        args = {**event.data, "text": event.text}
        scope = "g" if event.kind in _GLOBAL else "p"
        return {"ph": "i", "s": scope, "name": event.kind, "cat": "event", "pid": pid, "tid": 0, "ts": ts, "args": args}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def whole_events_end(path: Path) -> int:
    """Offset behind the last whole event of a trace (0: there is none, start over). A torn last line does not count."""
    with path.open("rb") as file:
        position = len(first := file.readline())
        if first.rstrip() != b"[":
            return 0
        end = 1
        for line in file:
            body = line.rstrip(b"\n").removesuffix(b",")
            if _event(body) is None:
                break
            end = position + len(body)
            position += len(line)
    return end


def read_trace(path: Path) -> Iterator[dict[str, Any]]:
    """All whole events of a trace, also of one that is torn; lines that are not events are skipped."""
    with path.open("rb") as file:
        yield from (event for line in file if (event := _event(line.strip().removesuffix(b","))) is not None)


def _event(text: bytes) -> dict[str, Any] | None:
    if not text.startswith(b"{"):
        return None
    try:
        event: Any = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return cast("dict[str, Any]", event) if isinstance(event, dict) and "ph" in event else None


_ORDER: tuple[Hop, ...] = get_args(Hop)
_MAX_GROUPS = 8192
_MAX_VERSIONS = 256
_MAX_ADOPTIONS = 4096


@dataclass(frozen=True, slots=True)
class TraceSlice:
    """A slice of the trace; microseconds of the wall clock."""

    pid: int
    tid: int
    start_us: int
    end_us: int
    """Behind its last microsecond."""


@dataclass(frozen=True, slots=True)
class Arrow:
    """From inside one slice to inside another; `from_us <= to_us`."""

    name: str
    category: str
    source: TraceSlice
    target: TraceSlice
    from_us: int
    to_us: int


class TraceFlows:
    """Which arrows a trace has: from station to station of a group, from the making of a weight version to each
    adoption. Different actors report stations, in any order and some never. An arrow is given out once both of its ends
    are known: no arrow of the file is without an end. A group that has all its arrows is forgotten. Arrows that wait
    for their other end are bounded; the oldest is forgotten first."""

    def __init__(self) -> None:
        self._groups: OrderedDict[int, dict[int, TraceSlice]] = OrderedDict()
        self._makers: OrderedDict[int, TraceSlice] = OrderedDict()
        self._adoptions: OrderedDict[int, list[TraceSlice]] = OrderedDict()

    def station(self, group_id: int, hop: str, place: TraceSlice) -> Iterator[Arrow]:
        """A group passed a station. A later visit (the group was handed out again) replaces an earlier one."""
        if hop not in _ORDER:
            return
        stations = self._groups.setdefault(group_id, {})
        self._groups.move_to_end(group_id)
        index = _ORDER.index(hop)
        known = stations.get(index)
        if known is not None and known.start_us >= place.start_us:
            return
        stations[index] = place
        name = f"group {group_id}"
        if (before := stations.get(index - 1)) is not None:
            yield from _arrow(name, "group", before, place)
        if (behind := stations.get(index + 1)) is not None:
            yield from _arrow(name, "group", place, behind)
        if len(stations) == len(_ORDER):
            self._groups.pop(group_id, None)
        while len(self._groups) > _MAX_GROUPS:
            self._groups.popitem(last=False)

    def made(self, version: int, place: TraceSlice) -> Iterator[Arrow]:
        self._makers[version] = place
        self._makers.move_to_end(version)
        for adoption in self._adoptions.pop(version, []):
            yield from _arrow(f"version {version}", "weights", place, adoption)
        while len(self._makers) > _MAX_VERSIONS:
            self._makers.popitem(last=False)

    def adopted(self, version: int, place: TraceSlice) -> Iterator[Arrow]:
        maker = self._makers.get(version)
        if maker is not None:
            yield from _arrow(f"version {version}", "weights", maker, place)
            return
        waiting = self._adoptions.setdefault(version, [])
        if len(waiting) < _MAX_ADOPTIONS:
            waiting.append(place)
        while len(self._adoptions) > _MAX_VERSIONS:
            self._adoptions.popitem(last=False)


def _arrow(name: str, category: str, source: TraceSlice, target: TraceSlice) -> Iterator[Arrow]:
    """Nothing where the target was over before the source began: clocks that differ, or a visit that was replaced."""
    to_us = max(target.start_us, source.start_us)
    if to_us >= target.end_us:
        return
    from_us = min(source.end_us - 1, to_us)
    yield Arrow(name, category, source, target, from_us, to_us)


class Lanes:
    """Rows for things that overlap: slices of one row must not, or viewers drop them."""

    def __init__(self, max_lanes: int = 32) -> None:
        self._max_lanes = max_lanes
        self._free_us: dict[tuple[str, str], list[int]] = {}
        """(actor, track) -> when each of its rows is free."""
        self.num_refused = 0
        """Slices for which there was no row."""

    def take(self, source: str, track: str, start_us: int, end_us: int) -> str | None:
        """The row's name: the first that is free at `start_us`; None when all of them are taken."""
        free_us = self._free_us.setdefault((source, track), [])
        lane = next((lane for lane, free in enumerate(free_us) if free <= start_us), len(free_us))
        if lane >= self._max_lanes:
            self.num_refused += 1
            return None
        if lane == len(free_us):
            free_us.append(0)
        free_us[lane] = end_us
        return track if lane == 0 else f"{track} {lane + 1}"


_SHORT_US = 2_000
_SLICES_PER_S = 60
_COUNTER_GAP_US = 100_000
_SECOND_US = 1_000_000


class TraceVolume:
    """Keeps a trace loadable when a run makes dozens of steps a second: each row gets so many short slices a second,
    each counter so many points. Long slices are always drawn; what is left out is counted."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, int], tuple[int, int]] = {}
        """Row -> (second, short slices drawn in it)."""
        self._newest_us: dict[tuple[int, str], int] = {}
        self.num_skipped = 0
        """Slices and points that were left out."""

    def has_room(self, row: tuple[int, int], start_us: int, duration_us: int) -> bool:
        if duration_us >= _SHORT_US:
            return True
        second, num = self._seconds.get(row, (0, 0))
        now = start_us // _SECOND_US
        num = num if now == second else 0
        if num >= _SLICES_PER_S:
            self.num_skipped += 1
            return False
        self._seconds[row] = (now, num + 1)
        return True

    def is_due(self, pid: int, counter: str, at_us: int) -> bool:
        before_us = self._newest_us.get((pid, counter))
        if before_us is not None and 0 <= at_us - before_us < _COUNTER_GAP_US:
            self.num_skipped += 1
            return False
        self._newest_us[pid, counter] = at_us
        return True
