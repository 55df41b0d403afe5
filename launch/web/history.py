"""The past of a run as its files record it, read on as they grow, in bounded memory.

`History` reads `metrics.jsonl`, `events.jsonl`, `audit.jsonl` and `config.toml`; it skips and counts lines that cannot
be read. Curves have a bounded number of points: when one is full, pairs of points side by side are merged. A library
of sketches was considered: means with their extremes, in order, are all that a plot 600 pixels wide can show.
"""

from __future__ import annotations

import math
import tomllib
from collections import Counter, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
import orjson

from ...actors.sinks.jsonl import EVENTS_FILE, METRICS_FILE
from ...core.activity import ACTIVITY_KINDS
from ...core.knobs import AuditRecord
from ..views.changes import RunChange, changes_of, placed
from ..views.run_files import AUDIT_FILE, CONFIG_FILE, EventRow

Bucket = tuple[float, float, float, float]
"""x (of its last point), mean, lowest, highest."""


class Series:
    """y over x, where x mostly grows. A point before the newest one rewinds: what it repeats is forgotten."""

    def __init__(self, limit: int = 400) -> None:
        self._limit = limit
        self._per_bucket = 1
        self._buckets: list[list[float]] = []
        """[x, sum, count, lowest, highest]"""

    def put(self, x: float, y: float) -> None:
        """One point."""
        while self._buckets and self._buckets[-1][0] > x:
            self._buckets.pop()
        last = self._buckets[-1] if self._buckets else None
        if last is not None and (
            last[2] < self._per_bucket or last[0] == x
        ):  # several readings of one step are averaged
            last[:] = [x, last[1] + y, last[2] + 1, min(last[3], y), max(last[4], y)]
            return
        self._buckets.append([x, y, 1.0, y, y])
        if len(self._buckets) > self._limit:
            self._merge()

    def _merge(self) -> None:
        self._per_bucket *= 2
        pairs = [self._buckets[index : index + 2] for index in range(0, len(self._buckets), 2)]
        self._buckets = [
            [
                pair[-1][0],
                sum(bucket[1] for bucket in pair),
                sum(bucket[2] for bucket in pair),
                min(bucket[3] for bucket in pair),
                max(bucket[4] for bucket in pair),
            ]
            for pair in pairs
        ]

    def points(self) -> list[Bucket]:
        """In order of x."""
        return [(x, total / count, low, high) for x, total, count, low, high in self._buckets]


class TimeBins:
    """Gauges of several sources over wall time, summed: of each source its mean in the bin."""

    def __init__(self, limit: int = 240, width_s: float = 1.0) -> None:
        self._limit = limit
        self.width_s = width_s
        self._start_s: float | None = None
        self._bins: dict[int, dict[str, tuple[float, int]]] = {}

    def put(self, wall_s: float, source: str, value: float) -> None:
        """One reading."""
        if self._start_s is None:
            self._start_s = wall_s
        index = max(0, int((wall_s - self._start_s) / self.width_s))
        while index >= self._limit:
            self._widen()
            index //= 2
        total, count = self._bins.setdefault(index, {}).get(source, (0.0, 0))
        self._bins[index][source] = (total + value, count + 1)

    def _widen(self) -> None:
        self.width_s *= 2
        wider: dict[int, dict[str, tuple[float, int]]] = {}
        for index, sources in self._bins.items():
            into = wider.setdefault(index // 2, {})
            for source, (total, count) in sources.items():
                before = into.get(source, (0.0, 0))
                into[source] = (before[0] + total, before[1] + count)
        self._bins = wider

    def points(self) -> list[Bucket]:
        """Wall time of the middle of each bin that heard anything, and the sum; a silent source adds nothing."""
        start_s = self._start_s or 0.0
        sums = {index: sum(total / count for total, count in bins.values()) for index, bins in self._bins.items()}
        return [
            (start_s + (index + 0.5) * self.width_s, sums[index], sums[index], sums[index]) for index in sorted(sums)
        ]


class ShareBins:
    """How one actor's time was shared over wall time, from readings of cumulative seconds by kind."""

    def __init__(self, limit: int = 120, width_s: float = 2.0) -> None:
        self._limit = limit
        self.width_s = width_s
        self._start_s: float | None = None
        self._bins: dict[int, dict[str, float]] = {}
        self._last: tuple[float, Mapping[str, float]] | None = None

    def put(self, wall_s: float, totals: Mapping[str, float]) -> None:
        """A reading: seconds by kind since the actor began. A sum that fell means that it was restarted."""
        last, self._last = self._last, (wall_s, dict(totals))
        if last is not None and wall_s < last[0]:
            self._last = last
            return
        if last is None or sum(totals.values()) < sum(last[1].values()):
            spent = dict(totals)
            before_s = max(wall_s - sum(totals.values()), last[0] if last else float("-inf"))
        else:
            spent = {kind: max(0.0, seconds - last[1].get(kind, 0.0)) for kind, seconds in totals.items()}
            before_s = last[0]
        self._spread(before_s, wall_s, spent)

    def _spread(self, begin_s: float, end_s: float, spent: Mapping[str, float]) -> None:
        if self._start_s is None:
            self._start_s = begin_s
        if end_s <= begin_s:
            return
        while int((end_s - self._start_s) / self.width_s) >= self._limit:
            self._widen()
        first = max(0, int((begin_s - self._start_s) / self.width_s))
        for index in range(first, int((end_s - self._start_s) / self.width_s) + 1):
            left_s = self._start_s + index * self.width_s
            part = (min(end_s, left_s + self.width_s) - max(begin_s, left_s)) / (end_s - begin_s)
            into = self._bins.setdefault(index, {})
            for kind, seconds in spent.items():
                into[kind] = into.get(kind, 0.0) + seconds * max(0.0, part)

    def _widen(self) -> None:
        self.width_s *= 2
        wider: dict[int, dict[str, float]] = {}
        for index, kinds in self._bins.items():
            into = wider.setdefault(index // 2, {})
            for kind, seconds in kinds.items():
                into[kind] = into.get(kind, 0.0) + seconds
        self._bins = wider

    def total(self) -> dict[str, float]:
        """Share of all recorded time, by kind."""
        sums: dict[str, float] = {}
        for kinds in self._bins.values():
            for kind, seconds in kinds.items():
                sums[kind] = sums.get(kind, 0.0) + seconds
        whole = sum(sums.values())
        return {kind: seconds / whole for kind, seconds in sums.items()} if whole > 0 else {}

    def shares(self) -> list[tuple[float, dict[str, float]]]:
        """(wall time of the left edge, kind -> share) of each bin in which time was spent."""
        start_s = self._start_s or 0.0
        found: list[tuple[float, dict[str, float]]] = []
        for index in sorted(self._bins):
            total = sum(self._bins[index].values())
            if total > 0:
                shares = {kind: seconds / total for kind, seconds in self._bins[index].items()}
                found.append((start_s + index * self.width_s, shares))
        return found


_CHUNK_BYTES = 4 << 20
_MAX_LINE_BYTES = 8 << 20
_MAX_NAMES = 512
_MAX_SOURCES = 256
_MAX_EVENTS = 400
_MAX_OF_A_KIND = 80
"""Frequent kinds must not push out rare ones."""
_MAX_CHANGES = 500
_MAX_STEPS = 200_000
_LAG_STEPS = 50
"""The histogram of lags is over so many newest steps."""
_BY_TIME = ("rollout/tokens_per_s", "rollout/running", "rollout/waiting", "buffer/", "train/tokens_per_s")
"""Metrics, or beginnings of their names, that are gauges of a moment."""
_BY_STEP = ("reward/", "train/", "eval/", "lag/", "batch/", "weights/", "knob/", "knobs/")


class JsonTail:
    """Reads the lines that were added to a file of JSON objects since the last time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._kept = b""
        self.num_bad = 0

    def read(self) -> list[dict[str, Any]]:
        """At most a few MiB at once: call again until nothing comes. A file that shrank is read from its start."""
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._offset:
                    self._offset, self._kept = 0, b""
                file.seek(self._offset)
                chunk = file.read(_CHUNK_BYTES)
        except OSError:
            return []
        self._offset += len(chunk)
        *whole, self._kept = (self._kept + chunk).split(b"\n")
        if len(self._kept) > _MAX_LINE_BYTES:
            self._kept = b""
            self.num_bad += 1
        return [record for line in whole if line.strip() and (record := self._record(line)) is not None]

    def _record(self, line: bytes) -> dict[str, Any] | None:
        try:
            record: Any = orjson.loads(line)
        except orjson.JSONDecodeError:
            record = None
        if isinstance(record, dict):
            return cast("dict[str, Any]", record)
        self.num_bad += 1
        return None


class History:
    """The past of one run. `read` takes in what is new; blocking, so call it from a thread."""

    def __init__(self, run_dir: Path) -> None:
        self.by_step: dict[str, Series] = {}
        self.by_time: dict[str, TimeBins] = {}
        self.shares: dict[str, ShareBins] = {}
        """By actor."""
        self.lags: deque[dict[int, float]] = deque(maxlen=_LAG_STEPS)
        """Lag -> groups, of the newest steps."""
        self._events: dict[str, deque[EventRow]] = {}
        self.event_counts: Counter[str] = Counter()
        self._steps: list[tuple[float, int]] = []
        """(when the trainer reported it, step)."""
        self.start_wall_s: float | None = None
        self.step_range: tuple[int, int] | None = None
        self.generation = 0
        """Grows with everything that was new."""
        self.config: dict[str, Any] = {}
        self._config_path = run_dir / CONFIG_FILE
        self._owner: dict[str, str] = {}
        self._records: deque[AuditRecord] = deque(maxlen=_MAX_CHANGES)
        self._files = (
            (JsonTail(run_dir / METRICS_FILE), self.take_metric),
            (JsonTail(run_dir / EVENTS_FILE), self.take_event),
            (JsonTail(run_dir / AUDIT_FILE), self.take_audit),
        )

    def read(self) -> bool:
        """Whether anything was new."""
        before = self.generation
        self.config = self.config or _config(self._config_path)  # a run that starts writes it a little later
        for tail, take in self._files:
            while records := tail.read():
                for record in records:
                    take(record)
        return self.generation != before

    @property
    def num_bad(self) -> int:
        """Lines that were skipped."""
        return sum(tail.num_bad for tail, _ in self._files)

    def take_metric(self, record: dict[str, Any]) -> None:
        """One line of metrics.jsonl."""
        source, step, wall_s, values = (record.get(key) for key in ("source", "step", "wall_s", "values"))
        wall = _number(wall_s)
        if not isinstance(source, str) or not isinstance(step, int) or wall is None or not isinstance(values, dict):
            return
        self.generation += 1
        self.start_wall_s = wall if self.start_wall_s is None else min(self.start_wall_s, wall)
        seconds: dict[str, float] = {}
        lags: dict[int, float] = {}
        for name, raw in cast("dict[str, Any]", values).items():
            value = _number(raw)
            if value is None:
                continue
            if name.startswith("time/"):
                seconds[name.removeprefix("time/")] = value
            elif name.startswith("lag_hist/"):
                lags |= {
                    int(lag): value for lag in [name.removeprefix("lag_hist/")] if lag.isdecimal() and len(lag) < 7
                }
            else:
                self._take_value(source, step, wall, name, value)
        if lags:
            self.lags.append(lags)
        self._take_seconds(source, wall, seconds)

    def _take_seconds(self, source: str, wall_s: float, seconds: dict[str, float]) -> None:
        kinds = {kind: seconds[kind] for kind in ACTIVITY_KINDS if kind in seconds}
        if kinds and (source in self.shares or len(self.shares) < _MAX_SOURCES):
            self.shares.setdefault(source, ShareBins()).put(wall_s, kinds)

    def _take_value(self, source: str, step: int, wall_s: float, name: str, value: float) -> None:
        if name.startswith(_BY_TIME) and (name in self.by_time or len(self.by_time) < _MAX_NAMES):
            self.by_time.setdefault(name, TimeBins()).put(wall_s, source, value)
        if step < 0 or not name.startswith(_BY_STEP):
            return
        if name == "train/loss" and len(self._steps) < _MAX_STEPS:
            self._steps.append((wall_s, step))
        # Of several ranks that report the same metric, the first one counts.
        if self._owner.setdefault(name, source) != source or (
            name not in self.by_step and len(self.by_step) >= _MAX_NAMES
        ):
            return
        self.by_step.setdefault(name, Series()).put(float(step), value)
        low, high = self.step_range or (step, step)
        self.step_range = (min(low, step), max(high, step))

    def take_event(self, record: dict[str, Any]) -> None:
        """One line of events.jsonl."""
        wall_s = _number(record.get("wall_s"))
        texts = [record.get(key) for key in ("source", "kind", "text")]
        if wall_s is None or not all(isinstance(text, str) for text in texts):
            return
        self.generation += 1
        source, kind, text = (str(value)[:2000] for value in texts)
        if kind in self._events or len(self._events) < _MAX_NAMES:
            self._events.setdefault(kind, deque(maxlen=_MAX_OF_A_KIND)).append(EventRow(wall_s, source, kind, text))
            self.event_counts[kind] += 1

    @property
    def events(self) -> list[EventRow]:
        """The newest of each kind, oldest first."""
        found = sorted((row for rows in self._events.values() for row in rows), key=lambda row: row.wall_s)
        return found[-_MAX_EVENTS:]

    def take_audit(self, record: dict[str, Any]) -> None:
        """One line of audit.jsonl."""
        try:
            self._records.append(msgspec.convert(record, AuditRecord))
        except msgspec.ValidationError:
            return
        self.generation += 1

    @property
    def changes(self) -> list[RunChange]:
        """What was changed, oldest first, at its step."""
        return placed(changes_of(list(self._records)), sorted(self._steps), self.events)

    def lag_counts(self) -> dict[int, float]:
        """Lag -> groups, over the newest steps."""
        total: dict[int, float] = {}
        for lags in self.lags:
            for lag, count in lags.items():
                total[lag] = total.get(lag, 0.0) + count
        return {lag: total[lag] for lag in sorted(total)}


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _config(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, tomllib.TOMLDecodeError):
        return {}
