"""RunView: one look at a run, and every figure that a view shows of it. Pure.

The launcher makes it from the answers of actors, also as the answer of the verb `status`; of a run that is over it is
made from files. The live line, `top`, the dashboard and the report draw the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

import msgspec

from ...core.knobs import AuditRecord, KnobTable
from ...core.messages import BufferStats, RolloutNow, RunPhase, RunStatus
from .numbers import clean, doing, duration, name_order, percent, short, training_reward
from .run_files import RunFiles
from .why import Facts, explain_run, judge

_STALE_S = 10.0
"""A source silent for so long does not count in rates."""
ENDS = ("run-ended", "run-finished", "run-failed")
"""Kinds of the events that say in words why the run ended."""


class ActorFacts(msgspec.Struct, frozen=True):
    """One actor of the run: a row of `ps`."""

    name: str
    role: str = ""
    node: int = 0
    host: str = ""
    pid: int = 0
    state: str = ""
    """As the launcher sees its process: up, starting, hung, backing-off, ...; empty: not known."""
    attempt: int = 0
    epoch: int = 0
    restarts_left: int = 0
    devices: tuple[int, ...] = ()
    """GPU numbers on its node."""
    is_leaving: bool = False
    uptime_s: float = 0.0
    memory_bytes: int = 0
    doing: str = ""
    """What takes most of its time."""
    started_wall_s: float = 0.0
    note: str = ""

    @property
    def is_over(self) -> bool:
        return self.state in ("failed", "stopped")

    @property
    def is_well(self) -> bool:
        """Whether its process is up, or its state is unknown."""
        return self.state in ("up", "ended", "")


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    """One look at the run, also the answer of `status`; what was not asked for or not answered is None or empty."""

    now_wall_s: float
    started_wall_s: float
    status: RunStatus | None = None
    buffer: BufferStats | None = None
    snapshot: Mapping[str, Mapping[str, float]] = {}
    """What `MonitorContract.snapshot` answers."""
    note: str = ""
    run_dir: str = ""
    actors: tuple[ActorFacts, ...] = ()
    """By node, then role, then number."""
    knobs: KnobTable | None = None
    history: tuple[AuditRecord, ...] = ()
    why: str = ""
    remedy: str = ""
    under_way: tuple[RolloutNow, ...] = ()
    """Rollouts, those first that wait longest for something else than the engine."""
    troubles: tuple[str, ...] = ()
    has_ended: bool = False
    """The run is over, or its launcher does not answer any more."""
    is_of_files: bool = False
    """It was made from the files of the run; no actor was asked."""
    step_s: float | None = None
    """Seconds a step of late, by the files of the run."""
    rewards: tuple[float, ...] = ()
    """Training reward over the steps, by the files of the run."""

    @property
    def metrics(self) -> Mapping[str, float]:
        return self.snapshot.get("metrics", {})

    @property
    def name(self) -> str:
        return clean(self.status.name if self.status else "") or clean(self.run_dir.rpartition("/")[2])

    @property
    def version(self) -> int:
        return self.status.version if self.status else 0

    @property
    def num_steps(self) -> int:
        """That the run is to make; 0: not known, or without end."""
        return max(0, self.status.num_steps) if self.status else 0

    @property
    def phase(self) -> str:
        """Phase of the run; "starting" until the coordinator answers, "ended" if it did not say how."""
        phase = self.status.phase if self.status else "starting"
        return "ended" if self.has_ended and phase not in ("finished", "failed") else phase

    @property
    def elapsed_s(self) -> float:
        return max(0.0, self.now_wall_s - self.started_wall_s)

    def shares(self) -> dict[str, Mapping[str, float]]:
        prefix = "time/"
        return {key.removeprefix(prefix): value for key, value in self.snapshot.items() if key.startswith(prefix)}

    def held_back(self) -> str:
        return self.why or judge(self.shares(), self.facts).sentence

    @property
    def facts(self) -> Facts:
        """For `why`, beside the shares."""
        disk, paused = self.buffer.disk if self.buffer else "", self.status.paused if self.status else ""
        return Facts(gauges=self.snapshot, disk=disk, paused=clean(paused))

    @property
    def warning(self) -> str:
        """What is wrong and ends nothing."""
        num_off = int(self.snapshot.get("monitor", {}).get("sinks_off", 0.0))
        sinks = f"{num_off} of the monitor's sinks are off: `myxa logs monitor` says why" if num_off else ""
        return clean("; ".join(filter(None, (self.buffer.complaint if self.buffer else "", sinks))))

    def rate(self, name: str) -> float | None:
        ages = self.snapshot.get("age_s", {})
        values = {source: self.snapshot[source][name] for source in ages if name in self.snapshot.get(source, {})}
        fresh = [value for source, value in values.items() if ages[source] < _STALE_S]
        return sum(fresh) if fresh else (0.0 if values else None)


# -- views of files ------------------------------------------------------------------------------------------------


def with_past(view: RunView, run: RunFiles) -> RunView:
    return msgspec.structs.replace(
        view, step_s=run.step_s, rewards=tuple(run.steps(training_reward(run.series)).values())
    )


def run_view_of_files(run: RunFiles) -> RunView:
    """Of a run that is over, or that does not answer: the newest values, and time over the whole run."""
    first_s, last_s = run.wall_range_s or (0.0, 0.0)
    how = outcome(run)
    steps, goal = run.steps("train/loss"), run.setting("run.num_steps")
    metrics = {name: value for name in run.names() if (value := run.last(name)) is not None}
    shares = run.shares()
    reason = explain_run(run)
    view = RunView(
        now_wall_s=last_s,
        started_wall_s=first_s,
        status=RunStatus(
            name=run.run_dir.resolve().name,
            phase=cast("Any", how.phase if how.phase in get_args(RunPhase) else "running"),
            version=max(steps, default=0),
            num_steps=goal if isinstance(goal, int) else 0,
            reason=how.text if how.level == "good" else "",
            error=how.text if how.level == "bad" else "",
        ),
        snapshot={"metrics": metrics, **{f"time/{name}": kinds for name, kinds in shares.items()}},
        run_dir=str(run.run_dir),
        actors=tuple(
            ActorFacts(name, name.partition("/")[0], state="" if run.is_live else "ended", doing=doing(shares[name]))
            for name in sorted(shares, key=name_order)
        ),
        why=reason.sentence,
        remedy=reason.remedy,
        has_ended=not run.is_live,
        is_of_files=True,
    )
    return with_past(view, run)


def carried_over(new: RunView, old: RunView) -> RunView:
    """The new view; what is missing in it is kept from the old one. Actors end one after another."""
    carried = {name: getattr(new, name) or getattr(old, name) for name in _CARRIED}
    started_wall_s = new.started_wall_s if new.run_dir else old.started_wall_s
    remedy = new.remedy if new.why else old.remedy
    under_way = new.under_way if new.actors else old.under_way
    has_ended = new.has_ended or (carried["status"] is not None and carried["status"].phase in ("finished", "failed"))
    carried |= {"remedy": remedy, "under_way": () if has_ended else under_way}
    return msgspec.structs.replace(new, **carried, started_wall_s=started_wall_s, has_ended=has_ended)


_CARRIED = ("status", "buffer", "snapshot", "run_dir", "actors", "knobs", "history", "why")


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How the run ended; `level` is "good", "bad" or "open"."""

    level: str
    word: str
    text: str
    phase: str = ""


def outcome(run: RunFiles) -> RunOutcome:
    """From the coordinator's phase events; a run that was killed has no last one."""
    moves = [event.text.rpartition("->")[2].strip() for event in run.of_kind("phase")]
    endings = sorted((event for kind in ENDS for event in run.of_kind(kind)), key=lambda event: event.wall_s)
    reason = endings[-1].text if endings else ""
    phase = moves[-1] if moves else ""
    if endings and endings[-1].kind == "run-failed":
        phase = "failed"
    if phase == "failed":
        alarms = [event for event in run.events if is_alarming(event.kind)]
        return RunOutcome(
            "bad", "failed", reason or (f"{alarms[-1].source}: {alarms[-1].text}" if alarms else ""), phase
        )
    if phase == "finished":
        return RunOutcome("good", "finished", reason, phase)
    if run.is_live:
        return RunOutcome("open", "running", "The run still works: this is how far it is.", phase or "starting")
    if phase:
        return RunOutcome("open", "unfinished", f"The last known phase is {phase!r}: it was killed.", phase)
    word = "unknown" if run.reported else "not started"
    return RunOutcome("open", word, reason or "No event says how the run ended; its logs may.")


ALARMING = ("fail", "error", "gone", "fenced", "non-finite", "drop", "disabled", "killed", "restart", "full", "hung",
            "suspect", "gap")  # fmt: skip
"""Parts of the kinds of events that are worth a look."""


def is_alarming(kind: str) -> bool:
    return any(word in kind for word in ALARMING)


# -- figures -------------------------------------------------------------------------------------------------------


def title_text(view: RunView) -> str:
    """`sort-1  running  step 12 of 200  reward 0.82  4 min 05 s`."""
    goal = f" of {view.num_steps}" if view.num_steps else ""
    parts = [view.name or "?", view.phase, f"step {view.version}{goal}"]
    if (reward := view.metrics.get(training_reward(view.metrics))) is not None:
        parts.append(f"reward {short(reward)}")
    return "  ".join([*parts, duration(view.elapsed_s)])


def notice_text(view: RunView) -> str:
    """The line that must not be missed: paused, ended, what does not answer; empty when all is well."""
    if view.has_ended:
        reason = (view.status.error or view.status.reason) if view.status else ""
        why = clean(reason or next(iter(view.troubles), ""))
        return f"the run has ended{f': {why}' if why else ''} -- this is how it was last seen"
    parts: list[str] = []
    if view.status is not None and view.status.paused:
        parts.append(f"paused: {clean(view.status.paused)}")
    if view.warning:
        parts.append(view.warning)
    return "; ".join([*parts, *(clean(trouble) for trouble in view.troubles)])


def fact_lines(view: RunView) -> list[tuple[str, str]]:
    trained = view.metrics.get("train/num_loss_tokens", 0.0) / (view.step_s or math.inf)
    rates = [("generated", view.rate("rollout/tokens_per_s")), ("trained", trained or None)]
    speeds = [f"{what} {short(rate)} tokens/s" for what, rate in rates if rate is not None]
    lines = [
        ("step", _step_line(view)),
        ("reward", _reward_line(view)),
        ("learning", _pairs(view.metrics, _LEARNING)),
        ("lag", lag_text(view)),
        ("speed", "   ".join(speeds)),
        ("warning", view.warning),
    ]
    return [(label, text) for label, text in lines if text]


_LEARNING = (
    ("loss", "train/loss"), ("accuracy", "train/accuracy"), ("margin", "train/margin"), ("grad", "train/grad_norm"),
    ("kl to reference", "train/kl"), ("approx kl", "train/approx_kl"), ("entropy", "train/entropy"),
    ("|logp diff|", "train/logprob_diff_abs_mean"),
)  # fmt: skip
_SHARES = (("pass", "reward/pass_rate"), ("all right", "reward/all_right"), ("all wrong", "reward/all_wrong"))


def _pairs(metrics: Mapping[str, float], names: Sequence[tuple[str, str]]) -> str:
    return "   ".join(f"{label} {short(metrics[name])}" for label, name in names if name in metrics)


def _step_line(view: RunView) -> str:
    if view.status is None:
        return clean(view.note) or "waiting for the coordinator"
    parts = [f"{view.version}{f' of {view.num_steps}' if view.num_steps else ''}", view.phase]
    if view.step_s is not None:
        parts.append(f"{duration(view.step_s)} a step")
        if view.phase == "running" and view.num_steps:
            parts.append(f"{duration(max(0, view.num_steps - view.version) * view.step_s)} to go")
    if view.status.error or view.note:
        parts.append(clean(view.status.error or view.note))
    return "   ".join(parts)


def _reward_line(view: RunView) -> str:
    metrics, parts = view.metrics, list[str]()
    if (name := training_reward(metrics)) in metrics:
        std = metrics.get(name.replace("mean", "std"))
        parts.append(f"train {short(metrics[name])}" + (f" ± {short(std)}" if std is not None else ""))
    if (evaluation := _evaluation(view)) is not None:
        parts.append(f"eval {short(evaluation)}")
    if zero := metrics.get("reward/zero_std_groups"):
        total = metrics.get("reward/finished_groups")
        parts.append(f"{zero:.0f}{f' of {total:.0f}' if total else ''} groups without spread")
    parts += [f"{label} {percent(metrics[name])}" for label, name in _SHARES if name in metrics]
    return "   ".join(parts)


def _evaluation(view: RunView) -> float | None:
    reward = view.status.eval_reward if view.status else None
    return view.metrics.get("eval/reward") if reward is None else reward


def dropped_text(dropped: Mapping[str, int]) -> str:
    """`12 (zero_variance 9, prompt-too-long 3)`."""
    reasons = ", ".join(f"{clean(reason)} {count}" for reason, count in dropped.items() if count)
    return f"{sum(dropped.values())}{f' ({reasons})' if reasons else ''}"


def _load(view: RunView, engine: str, what: str) -> str:
    return short(view.snapshot.get(engine, {}).get(f"rollout/{what}"))


_ON_ONE_LINE = frozenset({"step", "reward", "lag", "speed", "warning"})


def plain_line(view: RunView) -> str:
    lines = [f"{label} {text}" for label, text in fact_lines(view) if label in _ON_ONE_LINE]
    if learning := _pairs(view.metrics, _LEARNING[:2]):
        lines.insert(2, learning)
    verdict = view.held_back()
    if not verdict.startswith("nothing"):
        lines.append(verdict)
    return " | ".join(" ".join(line.split()) for line in lines)


ENGINE_COLUMNS = ("engine", "at", "lag", "runs", "waits", "tok/s")


def engine_rows(view: RunView) -> list[tuple[str, ...]]:
    return [
        (
            clean(engine.rollout),
            f"v{engine.version}",
            str(max(0, view.version - engine.version)),
            _load(view, engine.rollout, "running"),
            _load(view, engine.rollout, "waiting"),
            "drains" if engine.draining else _load(view, engine.rollout, "tokens_per_s"),
        )
        for engine in sorted(view.status.engines if view.status else (), key=lambda e: name_order(e.rollout))
    ]


_DONE = ("trained", "durable", "dropped")


def queue_rows(view: RunView) -> list[tuple[str, int, int]]:
    """(label, count, out of): the buffer's slots, and its states that hold groups which are not done."""
    stats = view.buffer
    if stats is None:
        return []
    living = {clean(name).lower(): count for name, count in stats.states.items()}
    living = {name: count for name, count in living.items() if name not in _DONE}
    largest = max([*living.values(), stats.slots_total, 1])
    rows = [("slots", stats.slots_used, stats.slots_total)]
    return rows + [(name, count, largest) for name, count in living.items() if count]


def done_text(view: RunView) -> str:
    """`drawn 96   trained 80   dropped 3 (zero_variance 3)`."""
    stats = view.buffer
    return f"drawn {stats.drawn}   trained {stats.trained}   dropped {dropped_text(stats.dropped)}" if stats else ""


def lag_text(view: RunView) -> str:
    """`max 2   mean 0.4   bound 4 (pace)`; empty: no step has trained on what engines generated."""
    lags = _pairs(view.metrics, (("max", "lag/max"), ("mean", "lag/mean")))
    stats = view.buffer if lags else None
    return lags if stats is None else f"{lags}   bound {stats.max_staleness} ({clean(stats.policy)})"
