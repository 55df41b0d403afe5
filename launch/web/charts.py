"""The dashboard's charts and their data as JSON types. Pure: a history in, plain tables out; the page only draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...core.activity import ACTIVITY_KINDS
from ..views.changes import stairs
from ..views.picture import name_order
from ..views.run_files import BUFFER_CHARTS
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
