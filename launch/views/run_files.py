"""Reads a run directory: metrics, events, trace, configuration, audit log, samples. The run may have ended long ago.

A run may be killed at any moment, so files may be missing, torn or full of garbage. Everything readable is read, and
`notes` names the rest. The content of a file never raises an error.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, cast

import msgspec
import orjson

from ...actors.sinks.chrome_trace import TRACE_FILE, read_trace, trace_parts
from ...actors.sinks.jsonl import EVENTS_FILE, METRICS_FILE, OLDER_SAMPLES_FILE, SAMPLES_FILE
from ...core.activity import ACTIVITY_KINDS
from ...core.errors import ConfigError
from ...core.knobs import AuditRecord
from .bottleneck import NEWEST
from .changes import KNOB_EVENT, RunChange, changes_of, changes_of_events, placed

CONFIG_FILE = "config.toml"
AUDIT_FILE = "audit.jsonl"

_SUMMED = ("rollout/tokens_per_s", "rollout/running", "rollout/waiting", "rollout/num_groups", "rollout/num_errors")
_LOAD = ("rollout/running", "rollout/waiting", "rollout/max_running")
BUFFER_CHARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Groups in the buffer", ("under_way", "dispatched", "requeued", "ready", "claimed")),
    ("Slots of admission", ("slots_used", "slots_total")),
)
"""Charts of the buffer's gauges, each of one unit: title and names without "buffer/"."""
_MAX_SPANS = 400_000
_MAX_EVENTS = 100_000


@dataclass(frozen=True, slots=True)
class EventRow:
    """One line of events.jsonl."""

    wall_s: float
    source: str
    kind: str
    text: str
    data: dict[str, Any] = field(default_factory=dict[str, Any])
    """Of knob events; others are read as words only."""


@dataclass(frozen=True, slots=True)
class SpanRow:
    """One stretch of an actor's own time."""

    start_s: float
    duration_s: float
    activity: str
    name: str


@dataclass(slots=True)
class RunFiles:
    """All that is left of a run."""

    run_dir: Path
    config_text: str = ""
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    by_step: dict[str, dict[str, dict[int, float]]] = field(default_factory=dict[str, dict[str, dict[int, float]]])
    """metric -> source -> step -> value; a step that was reported again holds the later value."""
    by_time: dict[str, dict[str, list[tuple[float, float]]]] = field(
        default_factory=dict[str, dict[str, list[tuple[float, float]]]]
    )
    """metric -> source -> (wall_s, value) in order of the file, for what is measured by the clock."""
    step_wall_s: dict[int, float] = field(default_factory=dict[int, float])
    """Step -> when the trainer reported it."""
    time_totals: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    """Actor -> kind (or "kind/name") -> seconds over the run, all incarnations."""
    events: list[EventRow] = field(default_factory=list[EventRow])
    spans: dict[str, list[SpanRow]] = field(default_factory=dict[str, list[SpanRow]])
    """Actor -> its own stretches, by time; tracks of single requests are left out."""
    changes: list[RunChange] = field(default_factory=list[RunChange])
    """What was changed while it ran, in order; refused and failed attempts too."""
    num_steps_repeated: int = 0
    notes: list[str] = field(default_factory=list[str])
    """What is missing or could not be read."""

    def steps(self, metric: str) -> dict[int, float]:
        """Step -> value, by step. Several sources: sums of rates and counts, else the first source's value."""
        sources = self.by_step.get(metric, {})
        merged: dict[int, float] = {}
        for source in sorted(sources):
            for step, value in sources[source].items():
                if metric in _SUMMED:
                    merged[step] = merged.get(step, 0.0) + value
                else:
                    merged.setdefault(step, value)
        return {step: merged[step] for step in sorted(merged)}

    def last(self, metric: str) -> float | None:
        """The newest value by the clock; of sums over sources the sum of their newest values."""
        newest = [points[-1] for points in self.by_time.get(metric, {}).values() if points]
        if not newest:
            return None
        return sum(value for _, value in newest) if metric in _SUMMED else max(newest)[1]

    def names(self, prefix: str) -> list[str]:
        """Known metrics that start with the prefix, sorted."""
        return sorted(name for name in self.by_time if name.startswith(prefix))

    @property
    def wall_range_s(self) -> tuple[float, float] | None:
        """First and last moment of any record."""
        moments = [w for sources in self.by_time.values() for points in sources.values() for w, _ in points]
        moments += [event.wall_s for event in self.events]
        moments += [s.start_s for spans in self.spans.values() for s in spans]
        moments += [s.start_s + s.duration_s for spans in self.spans.values() for s in spans]
        return (min(moments), max(moments)) if moments else None

    def gauges(self) -> dict[str, dict[str, float]]:
        """Actor -> metric -> value: each engine's load, and what became of the newest groups, as it was mostly: the
        last gauges are those of an engine that is being drained."""
        found: dict[str, dict[str, float]] = {}
        for metric in (*_LOAD, *self.names(NEWEST)):
            for source, points in self.by_time.get(metric, {}).items():
                values = sorted(value for _, value in points)
                found.setdefault(source, {})[metric] = values[len(values) // 2] if values else 0.0
        return found

    def shares(self) -> dict[str, dict[str, float]]:
        """Actor -> kind -> share of its time over the run."""
        shares: dict[str, dict[str, float]] = {}
        for actor, seconds in self.time_totals.items():
            total = sum(seconds.get(kind, 0.0) for kind in ACTIVITY_KINDS)
            if total > 0:
                shares[actor] = {kind: value / total for kind, value in seconds.items()}
        return shares


def load_run(run_dir: Path) -> RunFiles:
    """Read everything. Raises ConfigError only when the directory is not there or holds no file of a run."""
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir} is not a directory", remedy="name a run directory, e.g. runs/latest")
    names = (METRICS_FILE, EVENTS_FILE, CONFIG_FILE, TRACE_FILE)
    if not any((run_dir / name).is_file() for name in names):
        raise ConfigError(
            f"{run_dir} holds none of {', '.join(names)}", remedy="name a run directory, e.g. runs/latest"
        )
    run = RunFiles(run_dir)
    _read_config(run)
    _read_metrics(run)
    _read_events(run)
    _read_changes(run)
    _read_trace(run)
    return run


def _read_config(run: RunFiles) -> None:
    path = run.run_dir / CONFIG_FILE
    try:
        run.config_text = path.read_text(encoding="utf-8", errors="replace")
        run.config = tomllib.loads(run.config_text)
    except FileNotFoundError:
        run.notes.append(f"{CONFIG_FILE} is missing")
    except (OSError, tomllib.TOMLDecodeError) as error:
        run.notes.append(f"{CONFIG_FILE} cannot be read: {error}")


def _lines(run: RunFiles, name: str) -> Iterator[dict[str, Any]]:
    """Objects of a JSON-lines file; garbage is counted, not raised."""
    path, num_bad = run.run_dir / name, 0
    try:
        with path.open("rb") as file:
            for line in file:
                if not line.strip():
                    continue
                try:
                    record: Any = orjson.loads(line)
                except orjson.JSONDecodeError:
                    record = None
                if isinstance(record, dict):
                    yield cast("dict[str, Any]", record)
                else:
                    num_bad += 1
    except FileNotFoundError:
        run.notes.append(f"{name} is missing")
    except OSError as error:
        run.notes.append(f"{name} cannot be read: {error}")
    if num_bad:
        lines = "1 line" if num_bad == 1 else f"{num_bad} lines"
        run.notes.append(f"{lines} of {name} could not be read and {'was' if num_bad == 1 else 'were'} skipped")


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _read_metrics(run: RunFiles) -> None:
    times: dict[str, dict[str, float]] = {}
    num_odd = 0
    for record in _lines(run, METRICS_FILE):
        source, step, wall_s, values = (record.get(key) for key in ("source", "step", "wall_s", "values"))
        wall = _number(wall_s)
        if not isinstance(source, str) or not isinstance(step, int) or wall is None or not isinstance(values, dict):
            num_odd += 1
            continue
        seconds: dict[str, float] = {}
        for name, raw in cast("dict[str, Any]", values).items():
            value = _number(raw)
            if value is not None and name.startswith("time/"):
                seconds[name.removeprefix("time/")] = value
            elif value is not None:
                _add_value(run, source, step, wall, name, value)
        if seconds:
            _add_times(run.time_totals.setdefault(source, {}), times.get(source, {}), seconds)
            times[source] = seconds
    if num_odd:
        run.notes.append(f"{num_odd} lines of {METRICS_FILE} are not metric points and were skipped")


def _add_value(run: RunFiles, source: str, step: int, wall_s: float, name: str, value: float) -> None:
    run.by_time.setdefault(name, {}).setdefault(source, []).append((wall_s, value))
    if step < 0:
        return
    points = run.by_step.setdefault(name, {}).setdefault(source, {})
    if name == "train/loss":
        run.num_steps_repeated += step in points
        run.step_wall_s[step] = wall_s
    points[step] = value


def _add_times(totals: dict[str, float], before: dict[str, float], now: dict[str, float]) -> None:
    """Cumulative seconds -> totals over all incarnations: a meter whose sum fell began again at 0."""
    if sum(now.get(kind, 0.0) for kind in ACTIVITY_KINDS) < sum(before.get(kind, 0.0) for kind in ACTIVITY_KINDS):
        before = {}
    for key, seconds in now.items():
        totals[key] = totals.get(key, 0.0) + max(0.0, seconds - before.get(key, 0.0))


def _read_events(run: RunFiles) -> None:
    for record in _lines(run, EVENTS_FILE):
        if len(run.events) >= _MAX_EVENTS:
            run.notes.append(f"only the first {_MAX_EVENTS} events were read")
            break
        wall_s = _number(record.get("wall_s"))
        texts = [record.get(key) for key in ("source", "kind", "text")]
        if wall_s is not None and all(isinstance(text, str) for text in texts):
            source, kind, text = (str(value) for value in texts)
            data: Any = record.get("data") if kind == KNOB_EVENT else None
            facts = cast("dict[str, Any]", data) if isinstance(data, dict) else {}
            run.events.append(EventRow(wall_s, source, kind, text, facts))
    run.events.sort(key=lambda event: event.wall_s)


def _read_changes(run: RunFiles) -> None:
    """The audit log; without one, the knob events."""
    if not (run.run_dir / AUDIT_FILE).is_file():
        events = ((event.wall_s, event.text, event.data) for event in run.events if event.kind == KNOB_EVENT)
        run.changes = changes_of_events(events)
        return
    records: list[AuditRecord] = []
    num_odd = 0
    for line in _lines(run, AUDIT_FILE):
        try:
            records.append(msgspec.convert(line, AuditRecord))
        except msgspec.ValidationError:
            num_odd += 1
    if num_odd:
        run.notes.append(f"{num_odd} lines of {AUDIT_FILE} are not audit records and were skipped")
    steps = sorted((wall_s, step) for step, wall_s in run.step_wall_s.items())
    run.changes = placed(changes_of(records), steps, run.events)


def _read_trace(run: RunFiles) -> None:
    path = run.run_dir / TRACE_FILE
    if not path.is_file():
        run.notes.append(f"{TRACE_FILE} is missing: no timeline")
        return
    names: dict[object, str] = {}
    num = 0
    try:
        for event in chain.from_iterable(map(read_trace, trace_parts(path))):
            if event.get("ph") == "M" and event.get("name") == "process_name":
                args: Any = event.get("args")
                named = cast("dict[str, Any]", args) if isinstance(args, dict) else {}
                names[event.get("pid")] = str(named.get("name", "?"))
            elif event.get("ph") == "X" and event.get("tid") == 0:
                if num >= _MAX_SPANS:
                    run.notes.append(f"only the first {_MAX_SPANS} spans of {TRACE_FILE} were read")
                    break
                num += _add_span(run, names, event)
    except OSError as error:
        run.notes.append(f"{TRACE_FILE} cannot be read: {error}")
    for spans in run.spans.values():
        spans.sort(key=lambda span: span.start_s)


def _add_span(run: RunFiles, names: dict[object, str], event: dict[str, Any]) -> bool:
    start_us, duration_us = _number(event.get("ts")), _number(event.get("dur"))
    if start_us is None or duration_us is None or duration_us < 0:
        return False
    actor = names.get(event.get("pid"), str(event.get("pid")))
    span = SpanRow(start_us / 1e6, duration_us / 1e6, str(event.get("cat")), str(event.get("name")))
    run.spans.setdefault(actor, []).append(span)
    return True


FILES = (OLDER_SAMPLES_FILE, SAMPLES_FILE)
"""Older groups first."""
_NUM_SHOWN = 3
_NUM_ANSWERS = 4


@dataclass(frozen=True, slots=True)
class SampleQuery:
    """Which groups of the files."""

    step: int = -1
    """-1: of any step."""
    held_out: bool = False
    """Answers to held-out prompts, not those of training."""
    eval_set: str = ""
    """Of this evaluation set alone; empty: of every one."""

    def takes(self, group: dict[str, Any]) -> bool:
        """Whether it is one of them."""
        return (
            group.get("is_held_out", False) == self.held_out
            and self.step in (-1, group.get("step"))
            and self.eval_set in ("", group.get("eval_set"))
        )


def read_samples(run_dir: Path, wanted: SampleQuery, num_groups: int) -> list[dict[str, Any]]:
    """The newest of those, newest first; of a step that was made again the later ones. Lines that cannot be read are
    passed over."""
    found: dict[tuple[object, ...], dict[str, Any]] = {}
    for group in _groups(run_dir):
        if wanted.takes(group):
            key = tuple(group.get(name) for name in ("step", "eval_set", "group_id"))
            found.pop(key, None)
            found[key] = group
            if len(found) > num_groups:
                del found[next(iter(found))]
    return list(found.values())[::-1]


def sample_page(run_dir: Path) -> list[dict[str, Any]]:
    """A few groups for a page: of the first, a middle and the last step; then the newest held-out ones."""
    steps: dict[bool, set[int]] = {False: set(), True: set()}
    for group in _groups(run_dir):
        if isinstance(step := group.get("step"), int):
            steps[group.get("is_held_out", False) is True].add(step)
    trained, held_out = sorted(steps[False]), sorted(steps[True])
    chosen = dict.fromkeys(trained[index] for index in (0, len(trained) // 2, -1)) if trained else {}
    wanted = [SampleQuery(step) for step in chosen] + [SampleQuery(held_out[-1], held_out=True) for _ in held_out[-1:]]
    return [_shown(group) for one in wanted for group in read_samples(run_dir, one, _NUM_SHOWN)]


def _shown(group: dict[str, Any]) -> dict[str, Any]:
    """As the page needs it; a line of another version, or of another program, may lack fields."""
    answers: Any = group.get("answers")
    shown = [cast("dict[str, Any]", answer) for answer in answers if isinstance(answer, dict)] if answers else []
    return {
        **{name: group.get(name, "") for name in ("step", "outcome", "eval_set", "reason", "prompt", "label")},
        "answers": [{name: answer.get(name, "") for name in ("reward", "text")} for answer in shown[:_NUM_ANSWERS]],
    }


def _groups(run_dir: Path) -> Iterator[dict[str, Any]]:
    for name in FILES:
        try:
            with (run_dir / name).open("rb") as file:
                for line in file:
                    try:
                        group: Any = orjson.loads(line)
                    except orjson.JSONDecodeError:
                        continue
                    if isinstance(group, dict):
                        yield cast("dict[str, Any]", group)
        except OSError:
            continue
