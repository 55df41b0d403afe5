"""What the files of a run say of its past, read on as they grow; bounded, however long the run is.

Knows `metrics.jsonl`, `events.jsonl`, `audit.jsonl` and `config.toml`. Must not know charts or pages. A run may have
been killed at any moment: lines that cannot be read are skipped and counted.
"""

from __future__ import annotations

import math
import tomllib
from collections import Counter, deque
from pathlib import Path
from typing import Any, cast

import msgspec
import orjson

from ...actors.sinks.jsonl import EVENTS_FILE, METRICS_FILE
from ...core.activity import ACTIVITY_KINDS
from ...core.knobs import AuditRecord
from ..views.changes import RunChange, changes_of, placed
from ..views.run_files import AUDIT_FILE, CONFIG_FILE, EventRow
from .series import Series, ShareBins, TimeBins

_CHUNK_BYTES = 4 << 20
_MAX_LINE_BYTES = 8 << 20
_MAX_NAMES = 512
_MAX_SOURCES = 256
_MAX_EVENTS = 400
_MAX_OF_A_KIND = 80
"""Routine must not bury the event that counts."""
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
        """At most a few MiB at once: call again until nothing comes. A file that shrank is read anew."""
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
        """(when the trainer told of it, step)."""
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
        # Of several ranks that report the same metric, the first that was heard speaks for all.
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
