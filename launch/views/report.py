"""`myxa report RUN`: one self-contained HTML page about a run, made from the files in its directory.

The page holds its style, script and charts, and a content policy forbids everything else. It can be read without
JavaScript; the script adds values under the pointer and a filter. From top to bottom: findings (sentences by rules with
named thresholds; red: do not trust the result, amber: worth a look), key figures and tables, charts, the page.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from ...actors.workflows.failures import FAILURE_KINDS
from ...core.activity import ACTIVITY_KINDS
from ...core.errors import ConfigError, LaunchError
from ..run_lineage.origin import RunOrigin
from .advice import facts_of_file, num_cores, what_to_try
from .bottleneck import Filtered, engines_look_full, judge
from .changes import stairs, when_text
from .numbers import duration, percent, short, training_reward
from .run_files import BUFFER_CHARTS, EventRow, RunFiles, SpanRow, load_run, sample_page
from .svg import ChartLine, Mark, actor_order, bar_chart, line_chart, timeline

Level = Literal["red", "amber"]


@dataclass(frozen=True, slots=True)
class ReportFinding:
    """One sentence and how bad it is."""

    level: Level
    text: str


def findings(run: RunFiles) -> list[ReportFinding]:
    """All findings, red ones first."""
    found = [finding for rule in _RULES for finding in rule(run)]
    return sorted(found, key=lambda finding: finding.level != "red")


def setting(run: RunFiles, section: str, key: str) -> Any:
    """A value of the resolved configuration, or None."""
    table = run.config.get(section)
    return cast("dict[str, Any]", table).get(key) if isinstance(table, dict) else None


def tail_mean(values: Sequence[float]) -> float | None:
    """Mean of the last fifth: what the run looks like at its end."""
    if not values:
        return None
    num = max(1, len(values) // 5)
    return sum(values[-num:]) / num


def _tail(run: RunFiles, metric: str) -> float | None:
    return tail_mean(list(run.steps(metric).values()))


def _non_finite(run: RunFiles) -> Iterator[ReportFinding]:
    texts = [event.text for event in run.events if event.kind == "non-finite"]
    if texts:
        more = f", and {len(texts) - 1} more" if len(texts) > 1 else ""
        yield ReportFinding("red", f"Not a number: {texts[0]}{more}.")


def _over_stale(run: RunFiles) -> Iterator[ReportFinding]:
    """The bound is hard: a lag above it is a bug, unless it was lowered while running."""
    bound, lags = setting(run, "async", "max_staleness"), run.steps("lag/max")
    if not isinstance(bound, int) or not lags:
        return
    worst = max(lags, key=lambda step: lags[step])
    if lags[worst] > bound:
        knobs = any(event.kind == "knob" and "max_staleness" in event.text for event in run.events)
        tail = "max_staleness was changed while running." if knobs else "This must not happen: please report it."
        level: Level = "amber" if knobs else "red"
        yield ReportFinding(level, f"Lag {lags[worst]:.0f} at step {worst} is above max_staleness = {bound}. {tail}")


def _logprob_gap(run: RunFiles) -> Iterator[ReportFinding]:
    """Mean |trainer - behaviour| log-prob in nats. Part of it is staleness; a lot of it at lag 0 is a mismatch."""
    gap = _tail(run, "train/logprob_diff_abs_mean")
    if gap is not None and gap > 0.1:
        level: Level = "red" if gap > 0.3 else "amber"
        text = f"Trainer and engines disagree by {short(gap)} nats per token at the end (below 0.1 is usual)."
        yield ReportFinding(level, text)


def _no_spread(run: RunFiles) -> Iterator[ReportFinding]:
    zero, groups = _tail(run, "reward/zero_std_groups"), _tail(run, "reward/finished_groups")
    groups = _tail(run, "batch/num_groups") if groups is None else groups
    if zero is not None and groups and zero / groups > 0.5:
        share = percent(zero / groups)
        right, wrong = _tail(run, "reward/all_right") or 0.0, _tail(run, "reward/all_wrong") or 0.0
        of_which = f" ({percent(wrong)} all wrong, {percent(right)} all right)" if right or wrong else ""
        yield ReportFinding(
            "amber", f"{share} of the groups at the end have no spread of rewards{of_which} and teach nothing."
        )


def _truncated(run: RunFiles) -> Iterator[ReportFinding]:
    share = _tail(run, "batch/truncated_fraction")
    share = _tail(run, "rollout/truncated_fraction") if share is None else share
    if share is not None and share > 0.3:
        yield ReportFinding("amber", f"{percent(share)} of the samples at the end hit the length limit.")


def _collapse(run: RunFiles) -> Iterator[ReportFinding]:
    rewards = list(run.steps(training_reward(run.by_step)).values())
    end = tail_mean(rewards)
    if len(rewards) < 10 or end is None:
        return
    best = max(sum(rewards[i : i + 5]) / 5 for i in range(len(rewards) - 4))
    spread = best - min(rewards)
    if spread > 0 and best - end > 0.5 * spread:
        yield ReportFinding(
            "amber", f"The reward fell from {short(best)} to {short(end)}: the run collapsed or forgot."
        )


def _entropy(run: RunFiles) -> Iterator[ReportFinding]:
    values = list(run.steps("train/entropy").values())
    end = tail_mean(values)
    if len(values) >= 10 and end is not None and values[0] > 0 and end < 0.02 * values[0]:
        yield ReportFinding(
            "amber", f"Entropy fell from {short(values[0])} to {short(end)}: the policy hardly explores."
        )


def _dropped(run: RunFiles) -> Iterator[ReportFinding]:
    """Drops for staleness favour short answers; drops for errors hide a broken reward."""
    trained = sum(run.steps("batch/num_groups").values())
    for name in run.names("buffer/dropped/"):
        num, reason = run.last(name) or 0.0, name.removeprefix("buffer/dropped/")
        if num > 0 and trained > 0 and num > 0.2 * trained and "variance" not in reason:
            yield ReportFinding("amber", f"{num:.0f} groups were dropped for {reason}, {trained:.0f} were trained.")


def _restarts(run: RunFiles) -> Iterator[ReportFinding]:
    if run.num_steps_repeated:
        yield ReportFinding("amber", f"{run.num_steps_repeated} steps were trained again after a restart.")


def _sinks(run: RunFiles) -> Iterator[ReportFinding]:
    for event in run.events:
        if event.kind in {"sink-disabled", "telemetry-dropped", "telemetry-gap", "trace-gap"}:
            yield ReportFinding("amber", f"Telemetry is incomplete: {event.text}.")
            return


_RULES: tuple[Callable[[RunFiles], Iterator[ReportFinding]], ...] = (
    _non_finite,
    _over_stale,
    _logprob_gap,
    _no_spread,
    _truncated,
    _collapse,
    _entropy,
    _dropped,
    _restarts,
    _sinks,
)


_MAX_EVENTS = 600
_MAX_ROUTINE = 25
_MAX_ALARMING = 200
_MAX_SLOW = 8
_ALARMING = re.compile(r"fail|error|gone|fenced|non-finite|drop|disabled|killed|restart|full|hung|suspect")
_ENDS = ("run-ended", "run-finished", "run-failed")
"""Event kinds that say in words why the run ended."""
_SECRET = re.compile(
    r"""(["']?\b[A-Z0-9_]*(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL)[A-Z0-9_]*["']?\s*=\s*)("[^"\n]*"|'[^'\n]*')"""
)


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How the run ended; `level` is "good", "bad" or "open"."""

    level: str
    word: str
    text: str


@dataclass(frozen=True, slots=True)
class Tile:
    """One key figure."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class SlowStep:
    """A step that took long, as texts in the order of `SLOW_COLUMNS`."""

    cells: tuple[str, ...]


SLOW_COLUMNS = ("step", "took", "training", "publishing", "the rest", "response tokens", "lag", "reward")


@dataclass(frozen=True, slots=True)
class EventLine:
    """A row of the table of events."""

    at: str
    source: str
    kind: str
    text: str
    is_alarming: bool


def run_name(run: RunFiles) -> str:
    """The run's name and stamp: the name of its directory."""
    return run.run_dir.resolve().name


def outcome(run: RunFiles) -> RunOutcome:
    """From the coordinator's phase events; a run that was killed has no last one."""
    moves = [event.text.rpartition("->")[2].strip() for event in run.events if event.kind == "phase"]
    words = [event for event in run.events if event.kind in _ENDS]
    reason = words[-1].text if words else ""
    phase = moves[-1] if moves else ""
    if words and words[-1].kind == "run-failed":
        phase = "failed"
    if phase == "failed":
        return RunOutcome("bad", "failed", reason or _last_alarm(run))
    if phase == "finished":
        return RunOutcome("good", "finished", reason)
    if phase:
        return RunOutcome("open", "unfinished", f"The last known phase is {phase!r}: still running, or killed.")
    return RunOutcome("open", "unknown", reason or "No event says how the run ended.")


def _last_alarm(run: RunFiles) -> str:
    alarms = [event for event in run.events if _ALARMING.search(event.kind)]
    return f"{alarms[-1].source}: {alarms[-1].text}" if alarms else ""


def tiles(run: RunFiles) -> list[Tile]:
    """The figures that are asked for first."""
    found = [_steps_tile(run), _time_tile(run), _reward_tile(run), _eval_tile(run)]
    found += [_speed_tile(run), _lag_tile(run), _groups_tile(run), _origin_tile(run)]
    return [tile for tile in found if tile is not None]


def _steps_tile(run: RunFiles) -> Tile:
    steps, goal = run.steps("train/loss"), setting(run, "run", "num_steps")
    done = max(steps) if steps else 0
    return Tile("steps", f"{done}", f"of {goal}" if isinstance(goal, int) and goal > 0 else "")


def _origin_tile(run: RunFiles) -> Tile | None:
    """Of a run that was forked from another one, or resumed."""
    try:
        origin = RunOrigin.load(run.run_dir)
    except LaunchError:
        return None
    return Tile("lives", f"{len(origin.lives)}", origin.in_words()) if origin.in_words() else None


def _time_tile(run: RunFiles) -> Tile | None:
    span = run.wall_range_s
    if span is None:
        return None
    gaps = sorted(after - before for before, after in pairwise(sorted(run.step_wall_s.values())))
    note = f"{duration(gaps[len(gaps) // 2])} a step (median)" if gaps else ""
    return Tile("wall time", duration(span[1] - span[0]), note)


def _reward_tile(run: RunFiles) -> Tile | None:
    values = list(run.steps(training_reward(run.by_step)).values())
    end = tail_mean(values)
    if end is None:
        return None
    num = max(1, len(values) // 10)
    return Tile("training reward", short(end), f"from {short(sum(values[:num]) / num)}")


def _eval_tile(run: RunFiles) -> Tile | None:
    values = run.steps("eval/reward")
    if not values:
        return None
    best = max(values, key=lambda step: values[step])
    note = "the best so far" if best == max(values) else f"best {short(values[best])} at {best}"
    return Tile("held-out reward", short(values[max(values)]), note)


def _speed_tile(run: RunFiles) -> Tile | None:
    trained = run.steps("train/num_tokens")
    span = sorted(run.step_wall_s.values())
    if not trained or len(span) < 2 or span[-1] <= span[0]:
        return None
    total = sum(trained.values())
    return Tile("trained tokens", short(total), f"{short(total / (span[-1] - span[0]))} per second")


def _lag_tile(run: RunFiles) -> Tile | None:
    lags = run.steps("lag/max")
    if not lags:
        return None
    bound = setting(run, "async", "max_staleness")
    return Tile("largest lag", f"{max(lags.values()):.0f}", f"bound {bound}" if isinstance(bound, int) else "")


def _groups_tile(run: RunFiles) -> Tile | None:
    trained = sum(run.steps("batch/num_groups").values())
    if not trained:
        return None
    dropped = sum(drops(run).values())
    return Tile("groups trained", short(trained), f"{dropped:.0f} dropped")


def drops(run: RunFiles) -> dict[str, float]:
    """Reason -> groups dropped over the run, largest first."""
    prefix = "buffer/dropped/"
    counts = {name.removeprefix(prefix): run.last(name) or 0.0 for name in run.names(prefix)}
    return dict(sorted(((k, v) for k, v in counts.items() if v > 0), key=lambda item: -item[1]))


def failures(run: RunFiles) -> dict[str, float]:
    """Kind of failure -> how often workflows failed by it, largest first."""
    counts = Counter(event.text.partition(":")[0] for event in run.events if event.kind == "member-failed")
    return {kind: float(number) for kind, number in counts.most_common() if kind in FAILURE_KINDS}


_SETTINGS = (
    ("model", "model", "path"),
    ("training data", "data", "train"),
    ("algorithm", "algo", "kind"),
    ("correction", "algo", "correction"),
    ("groups a step", "algo", "batch_size"),
    ("samples a group", "rollout", "num_samples"),
    ("new tokens", "rollout", "max_new_tokens"),
    ("temperature", "rollout", "temperature"),
    ("reward", "reward", "fn"),
    ("max staleness", "async", "max_staleness"),
    ("staleness policy", "async", "policy"),
    ("learning rate", "optimizer", "lr"),
    ("seed", "run", "seed"),
)


def settings(run: RunFiles) -> list[tuple[str, str]]:
    """The settings that say what was run."""
    found = [(label, setting(run, section, key)) for label, section, key in _SETTINGS]
    return [(label, str(value)) for label, value in found if value not in (None, "")]


def config_text(run: RunFiles) -> str:
    """The configuration with what looks like a secret blanked: reports are passed around."""
    return _SECRET.sub(r'\1"(hidden)"', run.config_text)


def slow_steps(run: RunFiles) -> list[SlowStep]:
    """The steps that took longest from report to report, and where the time went."""
    gaps = [
        (run.step_wall_s[after] - run.step_wall_s[before], after) for before, after in pairwise(sorted(run.step_wall_s))
    ]
    worst = sorted((gap for gap in gaps if gap[0] > 0), reverse=True)[:_MAX_SLOW]
    return [_slow_step(run, step, took_s) for took_s, step in worst]


def _slow_step(run: RunFiles, step: int, took_s: float) -> SlowStep:
    train_s, publish_s = run.steps("train/step_s").get(step), run.steps("weights/publish_s").get(step)
    rest_s = max(0.0, took_s - (train_s or 0.0) - (publish_s or 0.0))
    rest = f"{duration(rest_s)} ({percent(rest_s / took_s)})"
    names = ("batch/response_tokens_mean", "lag/max", training_reward(run.by_step))
    others = [short(run.steps(name).get(step)) for name in names]
    times = [duration(value) if value is not None else "-" for value in (took_s, train_s, publish_s)]
    return SlowStep((str(step), *times, rest, *others))


def event_lines(run: RunFiles) -> list[EventLine]:
    """The newest events of each kind, more of those that alarm, so that routine events do not hide them."""
    span = run.wall_range_s
    origin_s = span[0] if span else 0.0
    room: Counter[str] = Counter()
    chosen: list[EventRow] = []
    for event in reversed(run.events):
        room[event.kind] += 1
        if room[event.kind] <= (_MAX_ALARMING if _ALARMING.search(event.kind) else _MAX_ROUTINE):
            chosen.append(event)
    return [_event_line(event, origin_s) for event in reversed(chosen[:_MAX_EVENTS])]


def _event_line(event: EventRow, origin_s: float) -> EventLine:
    is_alarming = bool(_ALARMING.search(event.kind)) or (event.kind == "phase" and "failed" in event.text)
    return EventLine(duration(event.wall_s - origin_s), event.source, event.kind, event.text, is_alarming)


def event_counts(run: RunFiles) -> Iterator[tuple[str, int]]:
    """Kinds of events by number."""
    yield from Counter(event.kind for event in run.events).most_common(20)


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


REPORT_FILE = "report.html"

_FOLDER = Path(__file__).parent


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the report of a run and return where it is (`<run_dir>/report.html` unless `out` says otherwise).

    Raises ConfigError when `run_dir` is not a run directory or `out` cannot be written. Damaged or missing files of the
    run are no error: the page says what is missing.
    """
    return write_page(load_run(Path(run_dir)), Path(out) if out is not None else Path(run_dir) / REPORT_FILE)


def write_page(run: RunFiles, path: Path) -> Path:
    """The same of what was read already. Raises ConfigError when `path` cannot be written."""
    page = render_report(run)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(page, encoding="utf-8", errors="replace")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        why = error.strerror or str(error)
        raise ConfigError(f"the report cannot be written to {path}: {why}", remedy="name a file with --out") from error
    return path


@functools.cache
def page_template() -> Template:
    """Compiled once: that takes longer than to fill it in."""
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.jinja")


def render_report(run: RunFiles) -> str:
    """The page as text."""
    script = (_FOLDER / "report_script.jinja").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    span = run.wall_range_s
    gauges, shares = run.gauges(), run.shares()
    num_rollouts = sum(name.startswith("rollout/") for name in shares)
    verdict = judge(shares, engines_are_full=engines_look_full(gauges), filtered=Filtered.of(gauges))
    return page_template().render(
        name=run_name(run),
        style=Markup((_FOLDER / "report_style.jinja").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
        outcome=outcome(run),
        tiles=tiles(run),
        settings=settings(run),
        verdict=verdict,
        to_try=what_to_try(verdict, facts_of_file(run.config, num_rollouts, num_cores())),
        findings=findings(run),
        learning=learning_charts(run),
        samples=sample_page(run.run_dir),
        staleness=staleness_charts(run),
        speed=speed_charts(run),
        time_bars=time_bars(run),
        kinds=ACTIVITY_KINDS,
        timelines=timelines(run),
        marks=step_marks(run),
        changes=[(when_text(change, span[0] if span else 0.0), change) for change in run.changes],
        slow_columns=SLOW_COLUMNS,
        slow_steps=slow_steps(run),
        events=event_lines(run),
        num_events=len(run.events),
        event_counts=list(event_counts(run)),
        config_text=config_text(run),
        notes=run.notes,
        length=duration(span[1] - span[0]) if span else "",
    )
