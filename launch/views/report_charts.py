"""The charts of a report, by section. Pure: a run in, safe markup out."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from ...core.activity import ACTIVITY_KINDS
from .changes import stairs
from .findings import setting
from .numbers import percent, training_reward
from .report_facts import drops, failures
from .run_files import BUFFER_CHARTS, RunFiles, SpanRow
from .svg import ChartLine, Mark, bar_chart, line_chart
from .timeline import actor_order, timeline

_NUM_BINS = 160
_CLOSE_UP_STEPS = 6


def _step_line(run: RunFiles, metric: str, name: str = "", colour: int = 1, *, is_noisy: bool = True) -> ChartLine:
    points = [(float(step), value) for step, value in run.steps(metric).items()]
    return ChartLine(name or metric, points, colour, is_noisy=is_noisy)


_LEARNING = (
    ("Loss", "train/loss", 1, False),
    ("Gradient norm", "train/grad_norm", 3, True),
    ("Entropy (nats per token)", "train/entropy", 4, False),
    ("Approximate KL to the behaviour policy", "train/approx_kl", 5, True),
    ("Trainer against engine: |log-prob difference|", "train/logprob_diff_abs_mean", 6, True),
    ("Share of clipped tokens", "train/clip_fraction", 3, True),
    ("Groups without spread of rewards", "reward/zero_std_groups", 4, True),
    ("Learning rate", "train/lr", 1, True),
)


_SHARES = (
    ("answers that are right", "reward/pass_rate", 1),
    ("groups all right", "reward/all_right", 2),
    ("groups all wrong", "reward/all_wrong", 4),
)


def learning_charts(run: RunFiles) -> list[Markup]:
    """Reward first, then what the trainer says of its steps."""
    evaluations = [(float(step), value) for step, value in run.steps("eval/reward").items()]
    shown = training_reward(run.by_step)
    reward = [_step_line(run, shown, "training"), ChartLine("held-out", evaluations, 2, has_dots=True)]
    if shown != "reward/mean":
        reward.append(_step_line(run, "reward/mean", "trained on (kept groups)", 3))
    marks = step_marks(run)
    charts = [line_chart("Reward", reward, marks=marks)]
    shares = [_step_line(run, metric, name, colour) for name, metric, colour in _SHARES]
    charts.append(line_chart("Finished groups", shares, y_from_zero=True, y_text=percent, marks=marks))
    for title, metric, colour, y_from_zero in _LEARNING:
        line = _step_line(run, metric, title, colour, is_noisy=metric != "train/lr")
        charts.append(line_chart(title, [line], y_from_zero=y_from_zero, marks=marks))
    return [chart for chart in charts if chart]


def step_marks(run: RunFiles) -> list[Mark]:
    """What was changed, on an axis of steps."""
    return [Mark(float(c.step), str(c.number), c.legend) for c in run.changes if c.is_done and c.step >= 0]


def _time_marks(run: RunFiles, unit_s: float) -> list[Mark]:
    span = run.wall_range_s
    start_s = span[0] if span else 0.0
    return [Mark((c.wall_s - start_s) / unit_s, str(c.number), c.legend) for c in run.changes if c.is_done]


def staleness_charts(run: RunFiles) -> list[Markup]:
    """Lag over steps against its bound, and how often each lag was trained."""
    bound = setting(run, "async", "max_staleness")
    limit = (f"max_staleness = {bound}", float(bound)) if isinstance(bound, int) else None
    lines = [
        ChartLine("largest", _step_line(run, "lag/max").points, 2),
        ChartLine("mean", _step_line(run, "lag/mean").points, 1, is_noisy=True),
        ChartLine("smallest", _step_line(run, "lag/min").points, 6, is_dashed=True),
    ]
    if limit is not None and lines[0].points and (moved := _moved_bound(run, limit[1])):
        lines, limit = [*lines, ChartLine("bound", moved, 5, is_dashed=True)], None
    charts = [
        line_chart("Lag of the trained groups (versions)", lines, bound=limit, y_from_zero=True, marks=step_marks(run)),
        bar_chart("Groups trained by lag", lag_histogram(run), x_label="lag (versions)", colour=1),
    ]
    return [chart for chart in charts if chart]


def _moved_bound(run: RunFiles, bound: float) -> list[tuple[float, float]]:
    """The staleness bound over steps, as stairs; nothing if it stayed as it was."""
    if not any("max_staleness" in change.values for change in run.changes if change.is_done):
        return []
    steps = list(run.steps("lag/max"))
    return stairs(run.changes, "max_staleness", bound, float(steps[0]), float(steps[-1]))


def lag_histogram(run: RunFiles) -> dict[str, float]:
    """Lag -> groups trained with it, over all steps."""
    prefix = "lag_hist/"
    counts = {name.removeprefix(prefix): sum(run.steps(name).values()) for name in run.names(prefix)}
    lags = sorted((lag for lag in counts if lag.lstrip("-").isdecimal()), key=int)
    return {lag: counts[lag] for lag in lags}


def speed_charts(run: RunFiles) -> list[Markup]:
    """Tokens per second, seconds per step, lengths, groups in the buffer."""
    unit, label = _time_unit(run)
    by_time, by_step = _time_marks(run, unit), step_marks(run)
    speed = [
        ChartLine("generated", _binned_sum(run, "rollout/tokens_per_s", unit), 1),
        ChartLine("trained", _binned_sum(run, "train/tokens_per_s", unit), 2),
    ]
    seconds = [
        _step_line(run, "train/step_s", "training", 1),
        _step_line(run, "weights/publish_s", "publishing weights", 2),
        _step_line(run, "weights/adopt_s", "adopting weights", 3),
    ]
    load = [
        ChartLine("running", _binned_sum(run, "rollout/running", unit), 1),
        ChartLine("waiting", _binned_sum(run, "rollout/waiting", unit), 4),
    ]
    tokens = [_step_line(run, "batch/response_tokens_mean", "Mean response length (tokens)", 5)]
    cut = [_step_line(run, "batch/truncated_fraction", "Share of truncated samples", 2)]
    charts = [
        line_chart("Tokens per second", speed, x_label=label, y_from_zero=True, marks=by_time),
        line_chart("Seconds per step", seconds, y_from_zero=True, marks=by_step),
        line_chart("Requests in the engines", load, x_label=label, y_from_zero=True, marks=by_time),
        *(
            line_chart(title, _buffer_lines(run, names, unit), x_label=label, y_from_zero=True, marks=by_time)
            for title, names in BUFFER_CHARTS
        ),
        line_chart("Mean response length (tokens)", tokens, marks=by_step),
        line_chart("Share of truncated samples", cut, y_from_zero=True, y_text=percent, marks=by_step),
        bar_chart("Dropped groups by reason", drops(run), colour=2),
        bar_chart("Failures of workflows by kind", failures(run), colour=2),
    ]
    return [chart for chart in charts if chart]


def _buffer_lines(run: RunFiles, names: Sequence[str], unit: float) -> list[ChartLine]:
    lines = [(name, _binned_sum(run, f"buffer/{name}", unit)) for name in names]
    alive = [(name, points) for name, points in lines if any(value for _, value in points)]
    return [ChartLine(name.replace("_", " "), points, index + 1) for index, (name, points) in enumerate(alive)]


def _time_unit(run: RunFiles) -> tuple[float, str]:
    """Seconds per unit of the time axis, and its label."""
    span = run.wall_range_s
    length_s = span[1] - span[0] if span else 0.0
    if length_s <= 300:
        return 1.0, "seconds since the start"
    return (60.0, "minutes since the start") if length_s <= 7200 else (3600.0, "hours since the start")


def _binned_sum(run: RunFiles, metric: str, unit_s: float) -> list[tuple[float, float]]:
    """(time, sum over sources of each source's mean in the bin); a source that is silent in a bin adds nothing."""
    span = run.wall_range_s
    sources = run.by_time.get(metric, {})
    if span is None or not sources:
        return []
    start_s, width_s = span[0], max((span[1] - span[0]) / _NUM_BINS, 1e-9)
    sums: dict[int, float] = {}
    for points in sources.values():
        bins: dict[int, list[float]] = {}
        for wall_s, value in points:
            bins.setdefault(min(_NUM_BINS - 1, int((wall_s - start_s) / width_s)), []).append(value)
        for index, values in bins.items():
            sums[index] = sums.get(index, 0.0) + sum(values) / len(values)
    return [((index + 0.5) * width_s / unit_s, sums[index]) for index in sorted(sums)]


def time_bars(run: RunFiles) -> list[tuple[str, list[tuple[str, float, str]]]]:
    """(actor, [(kind, percent of its time, text)]) for the stacked bars."""
    bars: list[tuple[str, list[tuple[str, float, str]]]] = []
    for actor, kinds in sorted(run.shares().items(), key=lambda item: actor_order(item[0])):
        parts = [
            (kind, kinds[kind] * 100, f"{kind} {percent(kinds[kind])}{_details(kind, kinds)}")
            for kind in ACTIVITY_KINDS
            if kinds.get(kind, 0.0) >= 0.0005
        ]
        bars.append((actor, parts))
    return bars


def _details(kind: str, kinds: dict[str, float]) -> str:
    """The named parts of a kind, largest first: " (claim 40 %, fetch 2 %)"."""
    parts = {
        key.partition("/")[2]: share for key, share in kinds.items() if key.startswith(f"{kind}/") and share >= 0.01
    }
    texts = [f"{name} {percent(share)}" for name, share in sorted(parts.items(), key=lambda item: -item[1])[:4]]
    return f" ({', '.join(texts)})" if texts else ""


def timelines(run: RunFiles) -> list[Markup]:
    """The whole run, and a close-up of a few steps in its middle."""
    if not run.spans:
        return []
    start_s = min(spans[0].start_s for spans in run.spans.values() if spans)
    end_s = max(span.start_s + span.duration_s for spans in run.spans.values() for span in spans)
    charts = [timeline("The whole run", run.spans, start_s=start_s, end_s=end_s, origin_s=start_s)]
    moments = sorted((wall_s, step) for step, wall_s in run.step_wall_s.items() if start_s <= wall_s <= end_s)
    if len(moments) > 2 * _CLOSE_UP_STEPS:
        middle = len(moments) // 2 - _CLOSE_UP_STEPS // 2
        chosen = moments[middle : middle + _CLOSE_UP_STEPS + 1]
        title = f"Close-up: versions {chosen[0][1]} to {chosen[-1][1]}"
        marks = [(wall_s, f"v{step}") for wall_s, step in chosen]
        left, right = chosen[0][0], chosen[-1][0]
        close = _between(run.spans, left, right)
        charts.append(timeline(title, close, start_s=left, end_s=right, origin_s=start_s, marks=marks))
    return [chart for chart in charts if chart]


def _between(spans: dict[str, list[SpanRow]], left: float, right: float) -> dict[str, Sequence[SpanRow]]:
    return {
        actor: [s for s in stretches if s.start_s < right and s.start_s + s.duration_s > left]
        for actor, stretches in spans.items()
    }
