"""What the dashboard's page shows, as JSON types: state (every second) and history (charts, when it grew). Pure.

All text is plain; the page escapes it and only draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ...core.activity import ACTIVITY_KINDS
from ..tui import rows
from ..views.advice import facts_of_file, num_cores, what_to_try
from ..views.bottleneck import NEWEST, Filtered, judge
from ..views.changes import stairs, value_text
from ..views.knob_table import knob_rows, owners_text
from ..views.live_state import clean, name_order
from ..views.numbers import duration, percent, short, training_reward
from ..views.run_files import BUFFER_CHARTS
from ..views.run_view import ActorFacts, RunView
from .history import History

_MAX_ACTORS = 24


@dataclass(frozen=True, slots=True)
class LineSpec:
    """One curve: what it is called and which metric it shows."""

    name: str
    metric: str
    colour: int
    """1..6, as in the style sheet."""
    has_dots: bool = False
    is_noisy: bool = True
    """Show the moving mean when there are many points."""


@dataclass(frozen=True, slots=True)
class ChartSpec:
    """One chart of a page."""

    title: str
    page: Literal["learning", "speed", "staleness"]
    x: Literal["step", "time"]
    lines: tuple[LineSpec, ...]
    from_zero: bool = False
    is_share: bool = False


CHARTS: tuple[ChartSpec, ...] = (
    ChartSpec("Reward", "learning", "step",
              (LineSpec("training", "reward/raw_mean", 1), LineSpec("trained on (kept groups)", "reward/mean", 3),
               LineSpec("held-out", "eval/reward", 2, has_dots=True, is_noisy=False))),
    ChartSpec("Finished groups", "learning", "step",
              (LineSpec("answers that are right", "reward/pass_rate", 1),
               LineSpec("groups all right", "reward/all_right", 2),
               LineSpec("groups all wrong", "reward/all_wrong", 4)), from_zero=True, is_share=True),
    ChartSpec("Loss", "learning", "step", (LineSpec("loss", "train/loss", 1),)),
    ChartSpec("Entropy (nats per token)", "learning", "step", (LineSpec("entropy", "train/entropy", 4),)),
    ChartSpec("Gradient norm", "learning", "step", (LineSpec("norm", "train/grad_norm", 3),), from_zero=True),
    ChartSpec("KL to the behaviour policy", "learning", "step", (LineSpec("kl", "train/approx_kl", 5),),
              from_zero=True),
    ChartSpec("Trainer against engine: |log-prob difference|", "learning", "step",
              (LineSpec("nats", "train/logprob_diff_abs_mean", 6),), from_zero=True),
    ChartSpec("Learning rate", "learning", "step", (LineSpec("lr", "train/lr", 1, is_noisy=False),), from_zero=True),
    ChartSpec("Groups without spread of rewards", "learning", "step",
              (LineSpec("groups", "reward/zero_std_groups", 4),), from_zero=True),
    ChartSpec("Tokens per second", "speed", "time",
              (LineSpec("generated", "rollout/tokens_per_s", 1), LineSpec("trained", "train/tokens_per_s", 2)),
              from_zero=True),
    ChartSpec("Seconds per step", "speed", "step",
              (LineSpec("training", "train/step_s", 1), LineSpec("publishing", "weights/publish_s", 2),
               LineSpec("adopting", "weights/adopt_s", 3)), from_zero=True),
    ChartSpec("Requests in the engines", "speed", "time",
              (LineSpec("running", "rollout/running", 1), LineSpec("waiting", "rollout/waiting", 4)), from_zero=True),
    ChartSpec("Mean response length (tokens)", "speed", "step", (LineSpec("tokens", "batch/response_tokens_mean", 5),)),
    ChartSpec("Truncated samples", "speed", "step", (LineSpec("share", "batch/truncated_fraction", 2),),
              from_zero=True, is_share=True),
)  # fmt: skip


def all_charts(history: History) -> list[dict[str, Any]]:
    """Every chart that has anything to show."""
    charts = [chart for spec in CHARTS if (chart := _chart(history, spec)) is not None]
    return [*charts, *_staleness(history), *_buffer(history)]


def _chart(history: History, spec: ChartSpec) -> dict[str, Any] | None:
    lines = [
        _line(line.name, _points(history, spec.x, line.metric), line.colour, dots=line.has_dots, noisy=line.is_noisy)
        for line in spec.lines
    ]
    lines = [line for line in lines if line["points"]]
    if not lines:
        return None
    return _table(spec.title, spec.page, spec.x, lines, from_zero=spec.from_zero, is_share=spec.is_share)


def _points(history: History, x: str, metric: str) -> list[list[float]]:
    found = history.by_step.get(metric) if x == "step" else history.by_time.get(metric)
    return [[_tidy(value) for value in point] for point in found.points()] if found is not None else []


def _tidy(value: float) -> float:
    """Seven digits are more than a plot can show, and half the bytes."""
    return float(f"{value:.7g}") if abs(value) < 1e7 else round(value, 2)


def _line(
    name: str,
    points: list[list[float]],
    colour: int,
    *,
    dots: bool = False,
    dashed: bool = False,
    noisy: bool = False,
) -> dict[str, Any]:
    return {"name": name, "points": points, "colour": colour, "dots": dots, "dashed": dashed, "noisy": noisy}


def _table(
    title: str, page: str, x: str, lines: Sequence[dict[str, Any]], *, from_zero: bool = False, is_share: bool = False
) -> dict[str, Any]:
    return {"title": title, "page": page, "x": x, "lines": lines, "fromZero": from_zero, "isShare": is_share}


def _staleness(history: History) -> list[dict[str, Any]]:
    lines = [
        _line(name, _points(history, "step", metric), colour, noisy=metric == "lag/mean")
        for name, metric, colour in (("largest", "lag/max", 2), ("mean", "lag/mean", 1), ("smallest", "lag/min", 6))
    ]
    lines = [line for line in lines if line["points"]]
    if not lines:
        return []
    bound = staleness_bound(history)
    if bound:
        lines.append(_line("bound", [[x, y, y, y] for x, y in bound], 5, dashed=True))
    return [_table("Lag of the trained groups (versions)", "staleness", "step", lines, from_zero=True)]


def staleness_bound(history: History) -> list[tuple[float, float]]:
    """The bound over steps, as stairs; empty if the run file does not say it."""
    table: Any = history.config.get("async")
    first: Any = table.get("max_staleness") if isinstance(table, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType] - TOML
    if not isinstance(first, int) or history.step_range is None:
        return []
    low, high = history.step_range
    return stairs(history.changes, "max_staleness", float(first), float(low), float(high))


def _buffer(history: History) -> list[dict[str, Any]]:
    charts: list[dict[str, Any]] = []
    for title, names in BUFFER_CHARTS:
        found = [(name, _points(history, "time", f"buffer/{name}")) for name in names]
        alive = [(name, points) for name, points in found if any(point[1] for point in points)]
        lines = [_line(name.replace("_", " "), points, index + 1) for index, (name, points) in enumerate(alive)]
        charts += [_table(title, "speed", "time", lines, from_zero=True)] if lines else []
    return charts


def time_charts(history: History) -> list[dict[str, Any]]:
    """Per actor its shares over wall time: `bins` of [wall time, share of each kind in the order of the kinds]."""
    actors = sorted(history.shares, key=name_order)[:_MAX_ACTORS]
    return [
        {
            "actor": actor,
            "width_s": history.shares[actor].width_s,
            "bins": [
                [round(at, 2), *(round(kinds.get(kind, 0.0), 4) for kind in ACTIVITY_KINDS)]
                for at, kinds in history.shares[actor].shares()
            ],
        }
        for actor in actors
    ]


def marks(history: History) -> list[dict[str, Any]]:
    """What was changed, for the vertical lines and the table of changes."""
    return [
        {
            "number": change.number,
            "wall_s": change.wall_s,
            "step": change.step,
            "what": change.what,
            "who": change.who,
            "reason": change.reason,
            "result": change.result,
            "detail": change.detail,
        }
        for change in history.changes
    ]


_MAX_KINDS = 30


def state_table(view: RunView, history: History, *, may_operate: bool) -> dict[str, Any]:
    """What changes every second."""
    if not view.actors:
        view = _from_files(view, history)
    live = view.live
    return {
        "name": (live.status.name if live.status else "") or view.run_dir.rpartition("/")[2],
        "runDir": view.run_dir,
        "phase": "ended" if view.has_ended and live.phase not in ("finished", "failed") else live.phase,
        "title": rows.title_text(view),
        "notice": rows.notice_text(replace(view, reader_only=False)),  # a page that only shows needs no notice of it
        "hasEnded": view.has_ended,
        "isSilent": view.silent_s > 0,
        "mayOperate": may_operate and not view.has_ended,
        "why": clean(view.why),
        "remedy": clean(view.remedy),
        "tiles": _tiles(view, history),
        "kinds": ACTIVITY_KINDS,
        "actors": _actors(view),
        "queues": [{"label": label, "count": count, "total": total} for label, count, total in rows.queue_rows(live)],
        "done": rows.done_text(live),
        "lags": _lags(view, history),
        "engines": {"columns": rows.ENGINE_COLUMNS, "rows": rows.engine_rows(live)},
        "knobs": _knobs(view),
    }


def _from_files(view: RunView, history: History) -> RunView:
    """Of a run that does not answer any more: its actors and what held it back, over the whole run."""
    shares = {name: bins.total() for name, bins in history.shares.items()}
    names = sorted(shares, key=name_order)
    snapshot = {f"time/{name}": kinds for name, kinds in shares.items()}
    newest = {name: series.points()[-1][1] for name, series in history.by_time.items() if name.startswith(NEWEST)}
    verdict = judge(shares, filtered=Filtered.of({"buffer": newest}))
    facts = facts_of_file(history.config, sum(name.startswith("rollout/") for name in shares), num_cores())
    return replace(
        view,
        live=replace(view.live, snapshot=snapshot),
        actors=tuple(ActorFacts(name, name.partition("/")[0]) for name in names),
        why=verdict.sentence,
        remedy=what_to_try(verdict, facts),
    )


def history_table(history: History) -> dict[str, Any]:
    """What grows: charts, time, changes, events."""
    return {
        "startWall": history.start_wall_s or 0.0,
        "charts": all_charts(history),
        "time": time_charts(history),
        "changes": marks(history),
        "events": [
            {"wall_s": event.wall_s, "source": event.source, "kind": event.kind, "text": event.text}
            for event in history.events
        ],
        "eventCounts": history.event_counts.most_common(_MAX_KINDS),
        "numBad": history.num_bad,
    }


def _tiles(view: RunView, history: History) -> list[dict[str, str]]:
    """The figures that are asked for first; of a run that is over from its files."""
    live = view.live
    status = live.status
    version = live.version if status else (history.step_range or (0, 0))[1]
    goal = f"of {status.num_steps}" if status and status.num_steps > 0 else ""
    found = [("step", str(version), goal)]
    if status is not None:
        found.append(("running for", duration(max(0.0, live.now_wall_s - live.started_wall_s)), ""))
    found += [
        ("training reward", *_reward(view, history)),
        ("right", _share(view, history, "reward/pass_rate"), "of the answers"),
        ("all right / wrong", _all_or_none(view, history), "of the groups"),
        ("held-out reward", short(_newest(view, history, "eval/reward")), ""),
        ("loss", short(_newest(view, history, "train/loss")), ""),
        ("generated", short(live.rate("rollout/tokens_per_s")), "tokens/s"),
        ("trained", short(live.rate("train/tokens_per_s")), "tokens/s"),
        ("largest lag", short(_newest(view, history, "lag/max")), _bound(view)),
    ]
    return [{"label": label, "value": value, "note": note} for label, value, note in found if value != "-"]


def _newest(view: RunView, history: History, name: str) -> float | None:
    if name in view.live.metrics:
        return view.live.metrics[name]
    series = history.by_step.get(name)
    points = series.points() if series is not None else []
    return points[-1][1] if points else None


def _reward(view: RunView, history: History) -> tuple[str, str]:
    """Of all finished groups, with its deviation."""
    name = training_reward({*view.live.metrics, *history.by_step})
    std = view.live.metrics.get(name.replace("mean", "std"))
    spread = f"± {short(std)}" if std is not None and math.isfinite(std) else ""
    return short(_newest(view, history, name)), spread


def _share(view: RunView, history: History, name: str) -> str:
    value = _newest(view, history, name)
    return "-" if value is None else percent(value)


def _all_or_none(view: RunView, history: History) -> str:
    shares = [_share(view, history, name) for name in ("reward/all_right", "reward/all_wrong")]
    return "-" if "-" in shares else " / ".join(shares)


def _bound(view: RunView) -> str:
    return f"bound {view.live.buffer.max_staleness}" if view.live.buffer else ""


def _actors(view: RunView) -> list[dict[str, Any]]:
    shares = view.live.shares()
    return [
        {
            "name": actor.name,
            "node": actor.node,
            "host": actor.host,
            "state": actor.state,
            "isWell": rows.is_well(actor),
            "pid": actor.pid,
            "shares": [round(shares.get(actor.name, {}).get(kind, 0.0), 4) for kind in ACTIVITY_KINDS],
            "parts": [
                f"{kind} {percent(share)}"
                for kind, share in sorted(shares.get(actor.name, {}).items(), key=lambda item: -item[1])
                if share >= 0.01
            ][:6],
        }
        for actor in view.actors
    ]


def _lags(view: RunView, history: History) -> dict[str, Any]:
    """Groups of the newest steps by lag, every lag up to the bound."""
    counts = history.lag_counts()
    bound = view.live.buffer.max_staleness if view.live.buffer else max(counts, default=-1)
    last = min(max([bound, *counts], default=-1), 40)
    return {
        "text": rows.lag_text(view.live),
        "numSteps": len(history.lags),
        "bars": [{"lag": lag, "count": counts.get(lag, 0.0), "isAllowed": lag <= bound} for lag in range(last + 1)],
    }


def _knobs(view: RunView) -> list[dict[str, Any]]:
    return [
        {
            "name": row.name,
            "kind": row.tunable.kind,
            "choices": row.tunable.choices,
            "value": row.value,
            "raw": value_text(row.values[0]),
            "unit": row.tunable.unit,
            "pending": "" if row.pending is None else value_text(row.pending),
            "reverts": row.reverts,
            "takes": row.tunable.range_text(),
            "boundary": row.tunable.boundary,
            "owner": owners_text(row.owners),
            "first": value_text(row.first),
            "isChanged": row.is_changed,
            "help": row.tunable.help,
        }
        for row in knob_rows(view.knobs)
    ]
