"""What the page of a run shows, as JSON types: the state now, and the past that grows. Pure.

The dashboard sends these tables to its page, the report carries them in it. All text is plain; the page escapes it and
only draws. Which metrics make which chart is the page's own (`web/charts.js`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ...core.activity import ACTIVITY_KINDS
from ...core.errors import LaunchError
from ..run_lineage.origin import RunOrigin
from .changes import EventRow, stairs, value_text
from .knob_table import knob_rows, owners_text
from .numbers import clean, duration, name_order, percent, time_parts
from .run_files import SUMMED, RunFiles
from .run_view import (
    ENGINE_COLUMNS,
    ActorFacts,
    RunView,
    done_text,
    engine_rows,
    fact_lines,
    is_alarming,
    lag_text,
    notice_text,
    outcome,
    queue_rows,
)
from .why import describe_rollout, rollout_time

_MAX_ACTORS = 32
_MAX_UNDER_WAY = 12
_MAX_KINDS = 30
_MAX_EVENTS = 600
_MAX_ROUTINE = 25
_MAX_ALARMING = 200
_MAX_LAG = 40
_BADGES = {"running": "good", "finished": "good", "failed": "bad"}


def state_table(view: RunView, run: RunFiles) -> dict[str, Any]:
    return {
        "name": view.name,
        "phase": view.phase,
        "badge": _BADGES.get(view.phase, "open"),
        "notice": outcome(run).text if view.is_of_files else notice_text(view),
        "origin": _origin(run),
        "hasEnded": view.has_ended,
        "why": clean(view.why),
        "remedy": clean(view.remedy),
        "facts": [*fact_lines(view), ("time", duration(view.elapsed_s))],
        "notes": run.notes,
        "kinds": ACTIVITY_KINDS,
        "actors": [_actor(actor, dict(view.shares().get(actor.name, {}))) for actor in view.actors],
        "queues": [{"label": label, "count": count, "total": total} for label, count, total in queue_rows(view)],
        "done": done_text(view),
        "lagText": lag_text(view),
        "lags": _lags(view, run),
        "engines": {"columns": ENGINE_COLUMNS, "rows": engine_rows(view)},
        "underWay": [describe_rollout(rollout) for rollout in view.under_way[:_MAX_UNDER_WAY]],
        "rolloutTime": [f"{name} {percent(share)}" for name, share in rollout_time(view.shares()).items()],
        "knobs": _knobs(view),
    }


def _origin(run: RunFiles) -> str:
    try:
        return RunOrigin.load(run.run_dir).in_words()
    except LaunchError:
        return ""


def _actor(actor: ActorFacts, shares: dict[str, float]) -> dict[str, Any]:
    return {
        **_picked(actor, "name node host state pid devices"),
        "isWell": actor.is_well,
        "shares": _by_kind(shares),
        "parts": time_parts(shares),
    }


def _lags(view: RunView, run: RunFiles) -> list[dict[str, Any]]:
    """Groups by lag, over all steps, up to the largest bound that the run had; none: no engine took part."""
    prefix = "lag_hist/"
    counts = {int(name.removeprefix(prefix)): sum(point.total for point in series.points) for name in run.names(prefix)
              if re.fullmatch(r"\d{1,2}", name.removeprefix(prefix)) and (series := run.main(name))}  # fmt: skip
    bounds = [int(bound) for _, bound in _bound(run)]
    bound = max(bounds, default=view.buffer.max_staleness if view.buffer is not None else max(counts, default=-1))
    last = max(min(bound, _MAX_LAG), *counts) if counts else -1
    return [{"lag": lag, "count": counts.get(lag, 0.0), "isAllowed": lag <= bound} for lag in range(last + 1)]


def _picked(thing: object, names: str) -> dict[str, Any]:
    return {name: getattr(thing, name) for name in names.split()}


def _knobs(view: RunView) -> list[dict[str, Any]]:
    return [
        {
            **_picked(row, "name value reverts"),
            **_picked(row.tunable, "kind unit boundary help"),
            "raw": row.value,
            "pending": "" if row.state.pending is None else value_text(row.state.pending),
            "takes": row.tunable.range_text(),
            "owner": owners_text(row.owners),
            "first": value_text(row.state.first),
            "isChanged": row.is_changed,
        }
        for row in knob_rows(view.knobs)
    ]


def past_table(run: RunFiles) -> dict[str, Any]:
    start_s = run.wall_range_s[0] if run.wall_range_s else 0.0
    return {
        "name": run.run_dir.resolve().name,
        "startWall": start_s,
        **series_table(run, start_s),
        "bound": _bound(run),
        "lanes": _lanes(run, start_s),
        "changes": _changes(run, start_s),
        "events": _events(run, start_s),
        "eventCounts": run.event_counts.most_common(_MAX_KINDS),
        "numEvents": run.event_counts.total(),
        "drops": _drops(run),
        "failures": run.failures.most_common(_MAX_KINDS),
        "configText": config_text(run),
    }


def series_table(run: RunFiles, start_s: float) -> dict[str, Any]:
    """`axes`: [steps, seconds since the start] that series share; `series`: [metric, source, number of its axis,
    values, lowest, highest]; the last two where a point stands for several readings. Of gauges every source, and their
    sum (source "") where it means something; of what is reported by step one source."""
    axes: dict[tuple[tuple[float, ...], tuple[float, ...]], int] = {}
    rows: list[list[Any]] = []
    for metric in run.names():
        sources = {name: series for name, series in run.series[metric].items() if series.points}
        main = run.main(metric)
        shows_all = main is not None and main.is_gauge and len(sources) <= _MAX_ACTORS
        for source in sorted((n for n in sources if shows_all or sources[n] is main), key=name_order):
            series = sources[source]
            axis = (tuple(series.steps()), tuple(round(wall - start_s, 1) for wall in series.walls()))
            row = [metric, source, axes.setdefault(axis, len(axes)), [_tidy(p.mean) for p in series.points]]
            if any(point.count > 1 for point in series.points):
                row += [[_tidy(p.low) for p in series.points], [_tidy(p.high) for p in series.points]]
            rows.append(row)
        if metric in SUMMED and len(sources) > 1:
            points = run.summed(metric)
            steps = _steps_at(run, [wall for wall, _ in points])
            axis = (tuple(steps), tuple(round(wall - start_s, 1) for wall, _ in points))
            rows.append([metric, "", axes.setdefault(axis, len(axes)), [_tidy(value) for _, value in points]])
    return {"axes": [[list(steps), list(walls)] for steps, walls in axes], "series": rows}


def _steps_at(run: RunFiles, walls: Sequence[float]) -> list[float]:
    """The newest step at each of these moments."""
    steps: list[float] = []
    reported, index, step = sorted(run.reported), 0, 0
    for wall_s in walls:
        while index < len(reported) and reported[index][0] <= wall_s:
            step, index = reported[index][1], index + 1
        steps.append(float(step))
    return steps


def _tidy(value: float) -> float:
    """Six digits are more than a plot can show, and half the bytes."""
    return float(f"{value:.6g}")


def _bound(run: RunFiles) -> list[tuple[float, float]]:
    """The staleness bound over steps, as stairs; empty if no step had a lag or the run file does not say it."""
    first, steps = run.setting("async.max_staleness"), [step for _, step in run.reported]
    if not isinstance(first, int) or not steps or not run.names("lag_hist/"):
        return []
    return stairs(run.changes, "max_staleness", float(first), float(min(steps)), float(max(steps)))


def _drops(run: RunFiles) -> list[tuple[str, float]]:
    """Reason -> groups, the most first."""
    prefix = "buffer/dropped/"
    counts = ((name.removeprefix(prefix), run.last(name) or 0.0) for name in run.names(prefix))
    return sorted(((reason, count) for reason, count in counts if count > 0), key=lambda item: -item[1])


def _lanes(run: RunFiles, start_s: float) -> list[dict[str, Any]]:
    """By actor shares of its time, and in `bins`: begin, end (seconds since the start), share of each kind."""
    shares = run.shares()
    return [
        {
            "actor": actor,
            "devices": _devices(run, actor),
            "bins": [
                [round(begin_s - start_s, 2), round(end_s - start_s, 2), *_by_kind(kinds)]
                for begin_s, end_s, kinds in run.times[actor].stretches()
            ],
            "total": _by_kind(shares[actor]),
            "parts": time_parts(shares[actor]),
        }
        for actor in sorted(shares, key=name_order)[:_MAX_ACTORS]
    ]


def _by_kind(shares: Mapping[str, float]) -> list[float]:
    return [round(shares.get(kind, 0.0), 4) for kind in ACTIVITY_KINDS]


def _devices(run: RunFiles, actor: str) -> str:
    """The GPUs that the run file gives to the role: actors of one heading take turns where memory is shared."""
    role, _, rest = actor.partition("/")
    devices = run.setting(f"models.{rest.partition('/')[0]}.devices" if role == "model" else f"roles.{role}.devices")
    return "" if devices in (None, "cpu", "") else f"GPU {str(devices)[:40]}"


def _changes(run: RunFiles, start_s: float) -> list[dict[str, Any]]:
    return [
        {
            **_picked(change, "step what who result"),
            **_picked(change.record, "number reason detail"),
            "after": round(change.record.wall_s - start_s, 2),
            "isDone": change.is_done,
        }
        for change in run.changes
    ]


def _events(run: RunFiles, start_s: float) -> list[dict[str, Any]]:
    """The newest events of each kind, more of those that alarm, so that routine events do not hide them."""
    room: Counter[str] = Counter()
    rows: list[EventRow] = []
    for event in reversed(run.events):
        room[event.kind] += 1
        if room[event.kind] <= (_MAX_ALARMING if is_alarming(event.kind) else _MAX_ROUTINE):
            rows.append(event)
    return [
        {
            **_picked(event, "source kind text"),
            "after": round(event.wall_s - start_s, 2),
            "isAlarming": is_alarming(event.kind) or (event.kind == "phase" and "failed" in event.text),
        }
        for event in reversed(rows[:_MAX_EVENTS])
    ]


_SECRET = re.compile(
    r"""(["']?\b[A-Z0-9_]*(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL)[A-Z0-9_]*["']?\s*=\s*)("[^"\n]*"|'[^'\n]*')"""
)


def config_text(run: RunFiles) -> str:
    """The configuration with what looks like a secret blanked: reports are passed around."""
    return _SECRET.sub(r'\1"(hidden)"', run.config_text)
