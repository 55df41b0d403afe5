"""LiveState: one look at a live run as facts and text, from the coordinator's, buffer's and monitor's answers. Pure."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...core.messages import BufferStats, RunStatus
from .bottleneck import Filtered, bottleneck, engines_look_full
from .numbers import duration, percent, short, training_reward

_STALE_S = 10.0
"""A source silent for so long does not count in rates."""
_MAX_ENGINES = 4


@dataclass(frozen=True, slots=True)
class LiveState:
    """One look at the run; a missing answer is None or empty."""

    now_wall_s: float
    started_wall_s: float
    status: RunStatus | None = None
    buffer: BufferStats | None = None
    snapshot: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, dict[str, float]])
    """What `MonitorContract.snapshot` answers."""
    note: str = ""
    """What the launcher waits for or complains about, e.g. "waiting for rollout/0"."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Newest value by name."""
        return self.snapshot.get("metrics", {})

    @property
    def version(self) -> int:
        """Weight version = finished steps."""
        return self.status.version if self.status else 0

    @property
    def phase(self) -> str:
        """Phase of the run; "starting" until the coordinator answers."""
        return self.status.phase if self.status else "starting"

    def shares(self) -> dict[str, Mapping[str, float]]:
        """Actor -> kind -> share of its time over the last window."""
        prefix = "time/"
        return {key.removeprefix(prefix): value for key, value in self.snapshot.items() if key.startswith(prefix)}

    def held_back(self) -> str:
        """What holds the run back, in one sentence."""
        full, filtered = engines_look_full(self.snapshot), Filtered.of(self.snapshot)
        return bottleneck(self.shares(), engines_are_full=full, filtered=filtered)

    def curve(self, name: str) -> dict[int, float]:
        """Step -> value of one of the monitor's curves."""
        return {int(step): value for step, value in self.snapshot.get(f"curve/{name}", {}).items()}

    def training_curve(self) -> dict[int, float]:
        """Step -> training reward."""
        return self.curve("reward/raw_mean") or self.curve("reward/mean")

    def rate(self, name: str) -> float | None:
        """Sum of a metric over all sources that reported lately."""
        ages = self.snapshot.get("age_s", {})
        values = [self.snapshot[source][name] for source in ages if name in self.snapshot.get(source, {})]
        fresh = [
            self.snapshot[source][name]
            for source, age_s in ages.items()
            if age_s < _STALE_S and name in self.snapshot.get(source, {})
        ]
        return sum(fresh) if fresh else (0.0 if values else None)


class StepPace:
    """Seconds per version, for the estimated end. Counts from the first version made while it watches: a resumed run
    or a restarted coordinator starts at a version that was made before."""

    def __init__(self, window_s: float = 300.0) -> None:
        self._window_s = window_s
        self._newest: int | None = None
        self._seen: deque[tuple[float, int]] = deque()

    def put(self, now_s: float, version: int) -> None:
        """Note the version at this moment. A version that fell (restart from a checkpoint) resets it."""
        before, self._newest = self._newest, version
        if before is None or version < before:
            self._seen.clear()
            return
        if version > before or self._seen:
            self._seen.append((now_s, version))
        while len(self._seen) > 2 and self._seen[1][0] < now_s - self._window_s:
            self._seen.popleft()

    def step_s(self) -> float | None:
        """Seconds per step over the window; None until one step was seen from its beginning to its end."""
        if len(self._seen) < 2:
            return None
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        return (last_s - first_s) / (last - first) if last > first else None

    def eta_s(self, num_steps: int) -> float | None:
        """Seconds until `num_steps` at this pace."""
        step_s = self.step_s()
        if step_s is None or not self._seen or num_steps <= 0:
            return None
        return max(0, num_steps - self._seen[-1][1]) * step_s


def clean(text: str) -> str:
    """Text from elsewhere on one line and without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() else " " for c in text)


def fact_lines(state: LiveState, pace: StepPace) -> list[tuple[str, str]]:
    """(label, text) rows of everything that is words and numbers, in order."""
    lines = [
        ("step", _step_line(state, pace)),
        ("reward", _reward_line(state)),
        ("learning", _pairs(state.metrics, _LEARNING)),
        ("lag", _lag_line(state)),
        ("speed", _speed_line(state)),
        ("groups", _groups_line(state.buffer)),
        ("warning", clean(state.buffer.complaint) if state.buffer else ""),
        ("engines", _engines_line(state.status)),
    ]
    return [(label, text) for label, text in lines if text]


_LEARNING = (
    ("loss", "train/loss"),
    ("grad", "train/grad_norm"),
    ("kl", "train/approx_kl"),
    ("entropy", "train/entropy"),
    ("|logp diff|", "train/logprob_diff_abs_mean"),
)


def _pairs(metrics: Mapping[str, float], names: Sequence[tuple[str, str]]) -> str:
    return "   ".join(f"{label} {short(metrics[name])}" for label, name in names if name in metrics)


def _step_line(state: LiveState, pace: StepPace) -> str:
    if state.status is None:
        return clean(state.note) or "waiting for the coordinator"
    goal = f" of {state.status.num_steps}" if state.status.num_steps > 0 else ""
    parts = [f"{state.version}{goal}", state.phase]
    if (step_s := pace.step_s()) is not None:
        parts.append(f"{duration(step_s)} a step")
    if state.phase == "running" and (eta_s := pace.eta_s(state.status.num_steps)) is not None:
        parts.append(f"{duration(eta_s)} to go")
    if state.status.paused:
        parts.append(f"paused: {clean(state.status.paused)}")
    if state.status.error or state.note:
        parts.append(clean(state.status.error or state.note))
    return "   ".join(parts)


def _reward_line(state: LiveState) -> str:
    metrics, parts = state.metrics, list[str]()
    if (name := training_reward(metrics)) in metrics:
        std = metrics.get(name.replace("mean", "std"))
        parts.append(f"train {short(metrics[name])}" + (f" ± {short(std)}" if std is not None else ""))
    evaluation = state.status.eval_reward if state.status and state.status.eval_reward is not None else None
    evaluation = metrics.get("eval/reward") if evaluation is None else evaluation
    if evaluation is not None:
        parts.append(f"eval {short(evaluation)}")
    if zero := metrics.get("reward/zero_std_groups"):
        total = metrics.get("reward/finished_groups")
        parts.append(f"{zero:.0f}{f' of {total:.0f}' if total else ''} groups without spread")
    parts += [f"{label} {percent(metrics[name])}" for label, name in _SHARES if name in metrics]
    return "   ".join(parts)


_SHARES = (("pass", "reward/pass_rate"), ("all right", "reward/all_right"), ("all wrong", "reward/all_wrong"))


def _lag_line(state: LiveState) -> str:
    parts = [_pairs(state.metrics, (("max", "lag/max"), ("mean", "lag/mean")))]
    if state.buffer is not None:
        parts.append(f"bound {state.buffer.max_staleness} ({clean(state.buffer.policy)})")
    return "   ".join(part for part in parts if part)


def _speed_line(state: LiveState) -> str:
    generated, trained = state.rate("rollout/tokens_per_s"), state.rate("train/tokens_per_s")
    parts = [f"generated {short(generated)} tokens/s"] if generated is not None else []
    parts += [f"trained {short(trained)} tokens/s"] if trained is not None else []
    return "   ".join(parts)


def _groups_line(stats: BufferStats | None) -> str:
    if stats is None:
        return ""
    parts = [f"{clean(name).lower()} {count}" for name, count in stats.states.items() if count]
    parts.append(f"slots {stats.slots_used}/{stats.slots_total}")
    if sum(stats.dropped.values()):
        parts.append(f"dropped {dropped_text(stats.dropped)}")
    return "   ".join(parts)


def dropped_text(dropped: Mapping[str, int]) -> str:
    """`12 (zero_variance 9, prompt-too-long 3)`."""
    reasons = ", ".join(f"{clean(reason)} {count}" for reason, count in dropped.items() if count)
    return f"{sum(dropped.values())} ({reasons})"


def _engines_line(status: RunStatus | None) -> str:
    if status is None or not status.engines:
        return ""
    engines = status.engines
    if len(engines) > _MAX_ENGINES:
        versions = sorted(engine.version for engine in engines)
        running, waiting = sum(e.running for e in engines), sum(e.waiting for e in engines)
        span = f"v{versions[0]}" if versions[0] == versions[-1] else f"v{versions[0]}..v{versions[-1]}"
        return f"{len(engines)} engines at {span}   {running} running, {waiting} waiting"
    return "   ".join(
        f"{clean(engine.rollout)} v{engine.version} ({'draining, ' if engine.draining else ''}"
        f"{engine.running} running, {engine.waiting} waiting)"
        for engine in engines
    )


_ON_ONE_LINE = frozenset({"step", "reward", "lag", "speed", "warning"})


def plain_line(state: LiveState, pace: StepPace) -> str:
    """The whole state on one line, for logs and pipes."""
    lines = [f"{label} {text}" for label, text in fact_lines(state, pace) if label in _ON_ONE_LINE]
    if state.metrics.get("train/loss") is not None:
        lines.insert(2, f"loss {short(state.metrics['train/loss'])}")
    verdict = state.held_back()
    if not verdict.startswith("nothing"):
        lines.append(verdict)
    return " | ".join(" ".join(line.split()) for line in lines)


_ROLES = ("trainer", "rollout", "buffer", "coordinator", "memory", "monitor")


def name_order(name: str) -> tuple[int, str, int, str]:
    """Trainers first, then rollout actors, then the others; by number."""
    role, _, number = name.partition("/")
    place = _ROLES.index(role) if role in _ROLES else len(_ROLES)
    return (place, role, int(number) if re.fullmatch(r"\d{1,9}", number) else 0, name)
