"""Findings: sentences about what looks wrong in a run, by rules with thresholds. Pure.

Red: do not trust the result. Amber: worth a look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from .numbers import percent, short, training_reward
from .run_files import RunFiles

Level = Literal["red", "amber"]
Found = Iterator[tuple[Level, str]]


@dataclass(frozen=True, slots=True)
class ReportFinding:
    """One sentence and how bad it is."""

    level: Level
    text: str


def findings(run: RunFiles) -> list[ReportFinding]:
    found = [ReportFinding(*finding) for rule in _RULES for finding in rule(run)]
    return sorted(found, key=lambda finding: finding.level != "red")


def tail_mean(values: Sequence[float]) -> float | None:
    """Mean of the last fifth: what the run looks like at its end."""
    num = max(1, len(values) // 5)
    return sum(values[-num:]) / num if values else None


def _tail(run: RunFiles, metric: str) -> float | None:
    return tail_mean(list(run.steps(metric).values()))


def _non_finite(run: RunFiles) -> Found:
    texts = [event.text for event in run.of_kind("non-finite")]
    if texts:
        more = f", and {len(texts) - 1} more" if len(texts) > 1 else ""
        yield ("red", f"Not a number: {texts[0]}{more}.")


def _over_stale(run: RunFiles) -> Found:
    """The bound is hard: a lag above it is a bug, unless it was lowered while running."""
    bound, lags = run.setting("async.max_staleness"), run.main("lag/max")
    if not isinstance(bound, int) or lags is None:
        return
    worst = max(lags.points, key=lambda point: point.high)
    if worst.high > bound:
        knobs = any("max_staleness" in event.text for event in run.of_kind("knob"))
        tail = "max_staleness was changed while running." if knobs else "This must not happen: please report it."
        level: Level = "amber" if knobs else "red"
        yield level, f"Lag {worst.high:.0f} at step {worst.x:.0f} is above max_staleness = {bound}. {tail}"


def _logprob_gap(run: RunFiles) -> Found:
    """Mean |trainer - behaviour| log-prob in nats. Part of it is staleness; a lot of it at lag 0 is a mismatch."""
    gap = _tail(run, "train/logprob_diff_abs_mean")
    if gap is not None and gap > 0.1:
        level: Level = "red" if gap > 0.3 else "amber"
        text = f"Trainer and engines disagree by {short(gap)} nats per token at the end (below 0.1 is usual)."
        yield (level, text)


def _no_spread(run: RunFiles) -> Found:
    zero, groups = _tail(run, "reward/zero_std_groups"), _tail(run, "reward/finished_groups")
    groups = _tail(run, "batch/num_groups") if groups is None else groups
    if zero is not None and groups and zero / groups > 0.5:
        share = percent(zero / groups)
        right, wrong = _tail(run, "reward/all_right") or 0.0, _tail(run, "reward/all_wrong") or 0.0
        of_which = f" ({percent(wrong)} all wrong, {percent(right)} all right)" if right or wrong else ""
        yield ("amber", f"{share} of the groups at the end have no spread of rewards{of_which} and teach nothing.")


def _truncated(run: RunFiles) -> Found:
    share = _tail(run, "batch/truncated_fraction")
    share = _tail(run, "rollout/truncated_fraction") if share is None else share
    if share is not None and share > 0.3:
        yield ("amber", f"{percent(share)} of the samples at the end hit the length limit.")


def _collapse(run: RunFiles) -> Found:
    rewards = list(run.steps(training_reward(run.series)).values())
    end = tail_mean(rewards)
    if len(rewards) < 10 or end is None:
        return
    best = max(sum(rewards[i : i + 5]) / 5 for i in range(len(rewards) - 4))
    spread = best - min(rewards)
    if spread > 0 and best - end > 0.5 * spread:
        yield ("amber", f"The reward fell from {short(best)} to {short(end)}: the run collapsed or forgot.")


def _entropy(run: RunFiles) -> Found:
    values = list(run.steps("train/entropy").values())
    end = tail_mean(values)
    if len(values) >= 10 and end is not None and values[0] > 0 and end < 0.02 * values[0]:
        yield ("amber", f"Entropy fell from {short(values[0])} to {short(end)}: the policy hardly explores.")


def _dropped(run: RunFiles) -> Found:
    """Drops for staleness favour short answers; drops for errors hide a broken reward."""
    trained = run.total("batch/num_groups")
    for name in run.names("buffer/dropped/"):
        num, reason = run.last(name) or 0.0, name.removeprefix("buffer/dropped/")
        if num > 0 and trained > 0 and num > 0.2 * trained and "variance" not in reason:
            yield ("amber", f"{num:.0f} groups were dropped for {reason}, {trained:.0f} were trained.")


def _restarts(run: RunFiles) -> Found:
    if run.num_steps_repeated:
        yield ("amber", f"{run.num_steps_repeated} steps were trained again after a restart.")


def _sinks(run: RunFiles) -> Found:
    for kind in ("sink-disabled", "telemetry-dropped", "telemetry-gap", "trace-gap"):
        for event in run.of_kind(kind)[-1:]:
            yield ("amber", f"Telemetry is incomplete: {event.text}.")
            return


_RULES: tuple[Callable[[RunFiles], Found], ...] = (
    _non_finite, _over_stale, _logprob_gap, _no_spread, _truncated, _collapse, _entropy, _dropped, _restarts, _sinks,
)  # fmt: skip
