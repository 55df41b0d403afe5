"""The words and tables of a report: outcome, key figures, settings, slow steps, events. Pure: a run in, records out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from ...actors.workflows.failures import FAILURE_KINDS
from ...core.errors import LaunchError
from ..lives.origin import Origin
from .findings import setting, tail_mean
from .numbers import duration, percent, short, training_reward
from .run_files import EventRow, RunFiles

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
        return RunOutcome("open", "unfinished", f"The last phase that was told is {phase!r}: still running, or killed.")
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
    """Of a run that was forked from another one, or went on after an end."""
    try:
        origin = Origin.load(run.run_dir)
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
    """The newest events of each kind, more of those that alarm: routine must not bury the one that counts."""
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
