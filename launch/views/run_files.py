"""Reads a run directory: metrics, events, changes, configuration, samples. Of a run that ended, or as it grows.

A run may be killed at any moment: everything readable is read, `notes` names the rest, and no content raises an error.
Memory is bounded: a series that is full merges pairs of neighbours and keeps their mean and extremes.
"""

from __future__ import annotations

import math
import tomllib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import msgspec
import orjson

from ...actors.sinks.jsonl import EVENTS_FILE, METRICS_FILE, OLDER_SAMPLES_FILE, SAMPLES_FILE
from ...core.activity import ACTIVITY_KINDS
from ...core.errors import ConfigError
from ...core.knobs import AuditRecord
from ...core.messages import GroupText
from ..run_dir import RunDir
from .changes import EventRow, RunChange, changes_of
from .conversation import shown

CONFIG_FILE = "config.toml"
AUDIT_FILE = "audit.jsonl"
SUMMED = ("rollout/tokens_per_s", "rollout/running", "rollout/waiting", "rollout/num_groups", "rollout/num_errors")
"""Gauges whose sum over the actors means something."""
NEWEST = "buffer/newest/"
"""Prefix of the metrics about the newest finished groups."""
_LOAD = ("rollout/running", "rollout/waiting", "rollout/max_running")
_MAX_SERIES = 2048
_MAX_POINTS = 400
_MAX_SOURCES = 256
_MAX_KINDS = 128
_MAX_OF_A_KIND = 1000
"""Frequent kinds of events must not push out rare ones."""
_MAX_TEXT = 2000
_MAX_STEPS = 200_000
_MAX_CHANGES = 500
_NUM_GAPS = 50
_LARGEST_GAP = 10
"""Times the median: longer gaps are those between two lives of a run, or of a pause."""
_CHUNK_BYTES = 4 << 20
_MAX_LINE_BYTES = 8 << 20


@dataclass(slots=True)
class Point:
    """One or several readings."""

    x: float
    """Step, or wall time of a gauge; of the last reading."""
    other: float
    """The wall time of a step, or the step of a gauge."""
    total: float
    count: int
    low: float
    high: float

    @property
    def mean(self) -> float:
        return self.total / self.count


class Series:
    """One metric of one actor. A step before the newest one rewinds: what it repeats is forgotten."""

    def __init__(self, *, is_gauge: bool = False, limit: int = _MAX_POINTS) -> None:
        self.is_gauge = is_gauge
        self.points: list[Point] = []
        self._limit = limit
        self._per_point = 1

    def put(self, x: float, other: float, value: float, *, replaces: bool = False) -> None:
        """`replaces`: an earlier value at the same x; else the two are averaged, as of engines that adopt a version."""
        points = self.points
        if points and (points[-1].x > x or (replaces and points[-1].x == x)):
            while points and points[-1].x >= x:
                points.pop()
        last = points[-1] if points else None
        if last is not None and (last.count < self._per_point or last.x == x):
            last.x, last.other, last.total, last.count = x, other, last.total + value, last.count + 1
            if value < last.low:
                last.low = value
            elif value > last.high:
                last.high = value
            return
        points.append(Point(x, other, value, 1, value, value))
        if len(points) > self._limit:
            self._per_point *= 2
            self.points = [_merge(points[index : index + 2]) for index in range(0, len(points), 2)]

    @property
    def newest(self) -> Point:
        return self.points[-1]

    def walls(self) -> list[float]:
        return [point.x if self.is_gauge else point.other for point in self.points]

    def steps(self) -> list[float]:
        return [point.other if self.is_gauge else point.x for point in self.points]


def _merge(pair: list[Point]) -> Point:
    last = pair[-1]
    return Point(last.x, last.other, sum(p.total for p in pair), sum(p.count for p in pair),
                 min(p.low for p in pair), max(p.high for p in pair))  # fmt: skip


class TimeShares:
    """How one actor's time was shared, from readings of cumulative seconds by kind: in all, and over wall time."""

    def __init__(self, limit: int = 120) -> None:
        """`limit`: stretches that are kept; when there are more, neighbours become one."""
        self.totals: dict[str, float] = {}
        """Kind, or "kind/name" -> seconds of all incarnations."""
        self._limit = limit
        self._stretches: list[tuple[float, float, dict[str, float]]] = []
        """Wall times of begin and end, kind -> seconds."""
        self._last: tuple[float, Mapping[str, float]] | None = None

    def put(self, wall_s: float, seconds: Mapping[str, float]) -> None:
        """A reading: seconds since the actor began. A sum that fell means that it was restarted."""
        last, self._last = self._last, (wall_s, seconds)
        is_new = last is None or _total_s(seconds) < _total_s(last[1])
        before: Mapping[str, float] = {} if is_new or last is None else last[1]
        added = {key: max(0.0, value - before.get(key, 0.0)) for key, value in seconds.items()}
        for key, value in added.items():
            self.totals[key] = self.totals.get(key, 0.0) + value
        last_s = last[0] if last is not None else float("-inf")
        begin_s = max(wall_s - _total_s(seconds), last_s) if is_new else last_s
        if wall_s > begin_s:
            self._stretches.append((begin_s, wall_s, {kind: added[kind] for kind in ACTIVITY_KINDS if kind in added}))
        if len(self._stretches) > self._limit:
            pairs = (self._stretches[index : index + 2] for index in range(0, len(self._stretches), 2))
            self._stretches = [(pair[0][0], pair[-1][1], _sum(stretch[2] for stretch in pair)) for pair in pairs]

    def shares(self) -> dict[str, float]:
        """Kind, or "kind/name" -> share of all recorded time."""
        total = _total_s(self.totals)
        return {key: seconds / total for key, seconds in self.totals.items()} if total > 0 else {}

    def stretches(self) -> list[tuple[float, float, dict[str, float]]]:
        """(wall times of begin and end, kind -> share) of each stretch in which time was spent."""
        return [
            (begin_s, end_s, {kind: seconds / total for kind, seconds in kinds.items()})
            for begin_s, end_s, kinds in self._stretches
            if (total := sum(kinds.values())) > 0
        ]


def _sum(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)


def _total_s(seconds: Mapping[str, float]) -> float:
    return sum(seconds.get(kind, 0.0) for kind in ACTIVITY_KINDS)


class JsonTail:
    """Reads the lines that were added to a file of JSON objects since the last time."""

    def __init__(self, path: Path, last_bytes: int = 0) -> None:
        """`last_bytes`: read no more than the end of the file; 0: all of it."""
        self.path = path
        self.trouble = ""
        self.num_bad = 0
        self.num_odd = 0
        """Objects that are not what the file is for."""
        self._offset = max(0, path.stat().st_size - last_bytes) if last_bytes and path.is_file() else 0
        self._is_cut = self._offset > 0
        self._unfinished = b""

    def read(self) -> list[dict[str, Any]]:
        """At most a few MiB at once: call again until nothing comes. A file that shrank is read from its start."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self._offset:
                    self._offset, self._unfinished = 0, b""
                file.seek(self._offset)
                chunk = file.read(_CHUNK_BYTES)
            self.trouble = ""
        except FileNotFoundError:
            self.trouble = "is missing"
            return []
        except OSError as error:
            self.trouble = f"cannot be read: {error}"
            return []
        self._offset += len(chunk)
        *lines, self._unfinished = (self._unfinished + chunk).split(b"\n")
        if self._is_cut and lines:
            lines, self._is_cut = lines[1:], False
        if len(self._unfinished) > _MAX_LINE_BYTES:
            self._unfinished = b""
            self.num_bad += 1
        return self._records(lines)

    def unfinished_line(self) -> list[dict[str, Any]]:
        """The last line, which does not end: of a run that was killed."""
        last, self._unfinished = self._unfinished, b""
        return self._records([last])

    def _records(self, lines: list[bytes]) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = []
        for line in lines:
            if not line.strip():
                continue
            record = _json(line)
            if record is None:
                self.num_bad += 1
            else:
                records.append(record)
        return records

    def notes(self, record_kind: str) -> Iterator[str]:
        """What was wrong with it."""
        name = self.path.name
        if self.trouble:
            yield f"{name} {self.trouble}"
        if self.num_bad:
            lines, were = ("1 line", "was") if self.num_bad == 1 else (f"{self.num_bad} lines", "were")
            yield f"{lines} of {name} could not be read and {were} skipped"
        if self.num_odd:
            yield f"{self.num_odd} lines of {name} are not {record_kind} and were skipped"


def _json(line: bytes) -> dict[str, Any] | None:
    try:
        record: Any = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return cast("dict[str, Any]", record) if isinstance(record, dict) else None


class RunFiles:
    """The past of one run. `read` takes in what is new; blocking."""

    def __init__(self, run_dir: Path, last_bytes: int = 0) -> None:
        """`last_bytes`: of each file no more than its end, for a glance; 0: all."""
        self.run_dir = run_dir
        self.is_live = False
        """Its launcher works, so that its files grow."""
        self.config: dict[str, Any] = {}
        self.config_text = ""
        self.series: dict[str, dict[str, Series]] = {}
        """metric -> source -> its values."""
        self.times: dict[str, TimeShares] = {}
        self.event_counts: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        """Kind of failure -> how often workflows failed by it."""
        self.wall_range_s: tuple[float, float] | None = None
        self.generation = 0
        self.reported: list[tuple[float, int]] = []
        """(wall time, step) of each report of the trainer; steps that were made again are there twice."""
        self._newest_step = 0
        self._num_series = 0
        self._events: dict[str, deque[EventRow]] = {}
        self._records: deque[AuditRecord] = deque(maxlen=_MAX_CHANGES)
        self._config_trouble = f"{CONFIG_FILE} is missing"
        self._tails = {
            "metric points": (JsonTail(run_dir / METRICS_FILE, last_bytes), self.take_metric),
            "events": (JsonTail(run_dir / EVENTS_FILE, last_bytes), self.take_event),
            "audit records": (JsonTail(run_dir / AUDIT_FILE, last_bytes), self.take_audit),
        }

    # -- reading -----------------------------------------------------------------------------------------------

    def read(self, *, is_over: bool = False) -> bool:
        """Whether anything was new. `is_over`: nothing will be added, so the last line counts, too."""
        before = self.generation
        if not self.config:  # a run that starts writes it a little later
            self._read_config()
        for tail, take in self._tails.values():
            while records := tail.read():
                tail.num_odd += sum(not take(record) for record in records)
            if is_over:
                tail.num_odd += sum(not take(record) for record in tail.unfinished_line())
        return self.generation != before

    def _read_config(self) -> None:
        try:
            self.config_text = (self.run_dir / CONFIG_FILE).read_text(encoding="utf-8", errors="replace")
            self.config, self._config_trouble = tomllib.loads(self.config_text), ""
        except FileNotFoundError:
            self._config_trouble = f"{CONFIG_FILE} is missing"
        except (OSError, tomllib.TOMLDecodeError) as error:
            self._config_trouble = f"{CONFIG_FILE} cannot be read: {error}"

    @property
    def notes(self) -> list[str]:
        notes = [self._config_trouble] if self._config_trouble else []
        for record_kind, (tail, _) in self._tails.items():
            if (
                record_kind != "audit records" or tail.trouble != "is missing"
            ):  # a run in which nothing was changed has none
                notes += tail.notes(record_kind)
        return notes

    def _saw(self, wall_s: float) -> None:
        self.generation += 1
        first, last = self.wall_range_s or (wall_s, wall_s)
        self.wall_range_s = (min(first, wall_s), max(last, wall_s))

    def take_metric(self, record: dict[str, Any]) -> bool:
        """One line of metrics.jsonl; whether it is one."""
        source, step, wall_s, values = (record.get(key) for key in ("source", "step", "wall_s", "values"))
        wall = _number(wall_s)
        if not isinstance(source, str) or not isinstance(step, int) or wall is None or not isinstance(values, dict):
            return False
        self._saw(wall)
        seconds: dict[str, float] = {}
        for name, raw in cast("dict[str, Any]", values).items():
            value = _number(raw)
            if value is not None and name.startswith("time/"):
                seconds[name.removeprefix("time/")] = value
            elif value is not None:
                self._take_value(source, step, wall, name, value)
        if seconds and (source in self.times or len(self.times) < _MAX_SOURCES):
            self.times.setdefault(source, TimeShares()).put(wall, seconds)
        return True

    def _take_value(self, source: str, step: int, wall_s: float, name: str, value: float) -> None:
        series = self.series.get(name, {}).get(source)
        if series is None:
            if self._num_series >= _MAX_SERIES:
                return
            self._num_series += 1
            is_gauge = step < 0 or source.startswith("rollout/") or name.startswith("buffer/")
            series = self.series.setdefault(name, {})[source] = Series(is_gauge=is_gauge)
        if series.is_gauge:
            series.put(wall_s, self._newest_step, value)
            return
        if name == "train/loss" and step >= 0:
            self._newest_step = step
            is_first = not self.reported or self.reported[-1][1] != step  # of several ranks
            if is_first and len(self.reported) < _MAX_STEPS:
                self.reported.append((wall_s, step))
        if step >= 0:
            series.put(step, wall_s, value, replaces=name.startswith("eval/"))

    def take_event(self, record: dict[str, Any]) -> bool:
        """One line of events.jsonl; whether it is one."""
        wall_s = _number(record.get("wall_s"))
        texts = [record.get(key) for key in ("source", "kind", "text")]
        if wall_s is None or not all(isinstance(text, str) for text in texts):
            return False
        source, kind, text = (str(value)[:_MAX_TEXT] for value in texts)
        self._saw(wall_s)
        if kind not in self._events and len(self._events) >= _MAX_KINDS:
            return True
        self._events.setdefault(kind, deque(maxlen=_MAX_OF_A_KIND)).append(EventRow(wall_s, source, kind, text))
        self.event_counts[kind] += 1
        if kind == "member-failed":
            self.failures[text.partition(":")[0][:40]] += 1
        return True

    def take_audit(self, record: dict[str, Any]) -> bool:
        """One line of audit.jsonl; whether it is one."""
        try:
            self._records.append(msgspec.convert(record, AuditRecord))
        except msgspec.ValidationError:
            return False
        self.generation += 1
        return True

    # -- what was read -----------------------------------------------------------------------------------------

    @property
    def step_s(self) -> float | None:
        """Seconds a step of late: mean of the newest gaps between reports while it worked; None before two steps."""
        gaps = sorted(after - before for (before, _), (after, _) in pairwise(self.reported[-_NUM_GAPS:]))
        usual = [gap for gap in gaps if 0 < gap <= _LARGEST_GAP * gaps[len(gaps) // 2]]
        return sum(usual) / len(usual) if usual else None

    @property
    def events(self) -> list[EventRow]:
        return sorted((row for rows in self._events.values() for row in rows), key=lambda row: row.wall_s)

    def of_kind(self, kind: str) -> list[EventRow]:
        return sorted(self._events.get(kind, ()), key=lambda row: row.wall_s)

    @property
    def changes(self) -> list[RunChange]:
        """What was changed while it ran, in order; refused and failed attempts too."""
        return changes_of(self._records, sorted(self.reported))

    def main(self, metric: str) -> Series | None:
        sources = self.series.get(metric, {})
        name = max(sorted(sources), key=lambda source: len(sources[source].points), default=None)
        return sources[name] if name is not None and sources[name].points else None

    def steps(self, metric: str) -> dict[int, float]:
        """Step -> value, by step; in a long run means of several steps."""
        series = self.main(metric)
        return {int(step): p.mean for step, p in zip(series.steps(), series.points, strict=True)} if series else {}

    def last(self, metric: str) -> float | None:
        """The newest value by the clock; of what is summed over actors the sum of their newest values."""
        newest = [(s.walls()[-1], s.newest.mean) for s in self.series.get(metric, {}).values() if s.points]
        if not newest:
            return None
        return sum(value for _, value in newest) if metric in SUMMED else max(newest)[1]

    def names(self, prefix: str = "") -> list[str]:
        return sorted(name for name in self.series if name.startswith(prefix))

    def summed(self, metric: str, num_bins: int = 160) -> list[tuple[float, float]]:
        """(wall time, sum over sources of each one's mean in a bin); a source that is silent in a bin adds nothing."""
        sources = [series for series in self.series.get(metric, {}).values() if series.points]
        if not sources:
            return []
        first = min(series.walls()[0] for series in sources)
        last = max(series.walls()[-1] for series in sources)
        width_s = max((last - first) / max(1, min(num_bins, *(len(s.points) - 1 for s in sources))), 1e-9)
        sums: dict[int, float] = {}
        for series in sources:
            bins: dict[int, list[Point]] = {}
            for wall_s, point in zip(series.walls(), series.points, strict=True):
                bins.setdefault(int((wall_s - first) / width_s), []).append(point)
            for index, points in bins.items():
                mean = sum(p.total for p in points) / sum(p.count for p in points)
                sums[index] = sums.get(index, 0.0) + mean
        return [(first + (index + 0.5) * width_s, sums[index]) for index in sorted(sums)]

    def gauges(self) -> dict[str, dict[str, float]]:
        """Actor -> metric -> value: each engine's load, and what became of the newest groups, as it was mostly: the
        last gauges are those of an engine that is being drained."""
        gauges: dict[str, dict[str, float]] = {}
        for metric in (*_LOAD, *self.names(NEWEST)):
            for source, series in self.series.get(metric, {}).items():
                values = sorted(point.mean for point in series.points)
                gauges.setdefault(source, {})[metric] = values[len(values) // 2] if values else 0.0
        return gauges

    def shares(self) -> dict[str, dict[str, float]]:
        return {actor: shares for actor, times in self.times.items() if (shares := times.shares())}

    def setting(self, key: str) -> Any:
        """Of a dotted key of the run file; None where it is not there, or no plain value."""
        value: Any = self.config
        for part in key.split(".") if key else ():
            value = cast("Mapping[str, Any]", value).get(part) if isinstance(value, Mapping) else None
        return value if isinstance(value, bool | int | float | str) else None


def _number(value: object) -> float | None:
    if value.__class__ is float:
        return cast("float", value) if math.isfinite(cast("float", value)) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def load_run(run_dir: Path) -> RunFiles:
    """Read everything. Raises ConfigError only when the directory is not there or holds no file of a run."""
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir} is not a directory", remedy="name a run directory, e.g. runs/latest")
    names = (METRICS_FILE, EVENTS_FILE, CONFIG_FILE)
    if not any((run_dir / name).is_file() for name in names):
        raise ConfigError(
            f"{run_dir} holds none of {', '.join(names)}", remedy="name a run directory, e.g. runs/latest"
        )
    run = RunFiles(run_dir)
    run.is_live = RunDir(run_dir).is_held
    run.read(is_over=True)
    return run


# -- samples -------------------------------------------------------------------------------------------------------

SAMPLE_FILES = (OLDER_SAMPLES_FILE, SAMPLES_FILE)


@dataclass(frozen=True, slots=True)
class SampleQuery:
    """Which groups of the files."""

    step: int = -1
    """-1: of any step."""
    held_out: bool | None = False
    """Answers to held-out prompts, not those of training; None: both."""
    eval_set: str = ""
    """Of this evaluation set alone; empty: of every one."""
    search: str = ""
    """Words that prompt, label or an answer holds, in any case of letters."""
    prompt: str = ""
    """Beginning of the prompt: what became of one over the steps."""

    def takes(self, group: GroupText) -> bool:
        return (
            self.held_out in (None, group.is_held_out)
            and self.step in (-1, group.step)
            and self.eval_set in ("", group.eval_set)
            and group.prompt.startswith(self.prompt)
            and (not self.search or self.search.lower() in group.words.lower())
        )


def read_samples(run_dir: Path, query: SampleQuery, num_groups: int) -> list[dict[str, Any]]:
    """The newest first, as `conversation.shown` makes them; of a step made again the later ones."""
    return [shown(group) for group in _newest(run_dir, query, num_groups)]


def _newest(run_dir: Path, query: SampleQuery, num_groups: int) -> list[GroupText]:
    groups: dict[tuple[object, ...], GroupText] = {}
    for group in filter(query.takes, _groups(run_dir)):
        key = (group.step, group.eval_set, group.group_id)
        groups.pop(key, None)
        groups[key] = group
        if len(groups) > num_groups:
            del groups[next(iter(groups))]
    return list(groups.values())[::-1]


def sample_page(run_dir: Path, max_bytes: int = 1 << 20) -> list[dict[str, Any]]:
    """Groups over the whole run, newest first, in at most so many bytes: every step, or every second, ... one."""
    groups = _newest(run_dir, SampleQuery(held_out=None), 20_000)
    num_bytes = 2 * sum(len(msgspec.json.encode(group)) for group in groups)  # as they are shown, about
    steps = sorted({group.step for group in groups})
    kept_steps = set(steps[:: -max(1, -(-num_bytes // max_bytes))])
    page: list[dict[str, Any]] = []
    for group in (group for group in groups if group.step in kept_steps):
        size = len(orjson.dumps(text := shown(group)))
        if size <= max_bytes or not page:
            page.append(text)
            max_bytes -= size
    return page


_line = msgspec.json.Decoder(GroupText)


def _groups(run_dir: Path) -> Iterator[GroupText]:
    for name in SAMPLE_FILES:
        with suppress(OSError), (run_dir / name).open("rb") as file:
            for line in file:
                with suppress(ValueError, RecursionError):
                    yield _line.decode(line)
