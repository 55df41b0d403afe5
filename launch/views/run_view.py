"""RunView: one look at a run, and every figure that a view shows of it. Pure.

It is made from the answers of actors (the launcher's own look), from the answers of the control socket (verbs `status`,
`ps`, `get`, `history`, `why`), or from the files of a run that is over. The live line, `top`, the dashboard and the
report draw the same rows. An answer that is missing or malformed becomes an entry of `troubles`; it never raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar, cast, get_args

import msgspec

from ...core.knobs import AuditRecord, KnobTable
from ...core.messages import BufferStats, RunPhase, RunStatus
from .numbers import clean, duration, name_order, percent, short, training_reward
from .run_files import RunFiles
from .why import Facts, explain, explain_run, judge

T = TypeVar("T")

ASKED: tuple[str, ...] = ("status", "ps", "get", "history", "why")
"""Verbs that a view is made of."""
_STALE_S = 10.0
"""A source silent for so long does not count in rates."""
_MAX_ENGINES = 4
_MAX_LAG = 40
ENDS = ("run-ended", "run-finished", "run-failed")
"""Kinds of the events that say in words why the run ended."""


@dataclass(frozen=True, slots=True)
class VerbAnswer:
    """What a verb said: a result, or why there is none."""

    result: Any = None
    error: str = ""


class ActorFacts(msgspec.Struct, frozen=True):
    """One actor of the run, as `ps` tells it."""

    name: str
    node: int = 0
    host: str = ""
    pid: int = 0
    state: str = ""
    """As the launcher sees its process: up, starting, hung, backing-off, ...; empty: not known."""
    attempt: int = 0
    devices: tuple[int, ...] = ()
    """GPU numbers on its node."""

    @property
    def is_well(self) -> bool:
        """Whether its process is up, or its state is unknown."""
        return self.state in ("up", "")


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
    troubles: tuple[str, ...] = ()
    has_ended: bool = False
    """The run is over, or its launcher does not answer any more."""
    reader_only: bool = False
    """Only the read-only socket is within reach."""
    silent_s: float = 0.0
    is_of_files: bool = False
    """It was made from the files of the run; no actor was asked."""

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
        return self.why or judge(self.shares(), Facts(gauges=self.snapshot)).sentence

    def curve(self, name: str) -> dict[int, float]:
        return {int(step): value for step, value in self.snapshot.get(f"curve/{name}", {}).items()}

    def training_curve(self) -> dict[int, float]:
        return self.curve("reward/raw_mean") or self.curve("reward/mean")

    def rate(self, name: str) -> float | None:
        ages = self.snapshot.get("age_s", {})
        values = {source: self.snapshot[source][name] for source in ages if name in self.snapshot.get(source, {})}
        fresh = [value for source, value in values.items() if ages[source] < _STALE_S]
        return sum(fresh) if fresh else (0.0 if values else None)


class StepPace:
    """Seconds per version, for the estimated end. Counts from the first version made while it watches: a resumed run
    or a restarted coordinator starts at a version that was made before."""

    def __init__(self, window_s: float = 300.0) -> None:
        self._window_s = window_s
        self._newest: int | None = None
        self._seen: deque[tuple[float, int]] = deque()

    def put(self, now_s: float, version: int) -> None:
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
        step_s = self.step_s()
        if step_s is None or not self._seen or num_steps <= 0:
            return None
        return max(0, num_steps - self._seen[-1][1]) * step_s


# -- views of answers and files ------------------------------------------------------------------------------------


def run_view_of(answers: Mapping[str, VerbAnswer], now_wall_s: float) -> RunView:
    """Put the answers of the control socket together; verbs that were not asked are missing."""
    troubles = [f"{verb}: {answer.error}" for verb, answer in answers.items() if answer.error]
    results = {verb: answer.result for verb, answer in answers.items() if not answer.error}

    def read(verb: str, kind: type[T]) -> T | None:
        try:
            return msgspec.convert(results[verb], kind) if results.get(verb) is not None else None
        except msgspec.ValidationError as error:
            troubles.append(f"{verb}: an answer of another version: {error}")
            return None

    view = read("status", RunView) or RunView(now_wall_s=now_wall_s, started_wall_s=now_wall_s)
    sentence, remedy = _verdict(_mapping(results.get("why")), view.snapshot)
    return msgspec.structs.replace(
        view,
        actors=_actors(results.get("ps"), view.snapshot),
        knobs=read("get", KnobTable),
        history=tuple(_read_rows(results.get("history"), "records", AuditRecord)),
        why=sentence,
        remedy=remedy,
        troubles=tuple(troubles),
        has_ended=view.status is not None and view.status.phase in ("finished", "failed"),
    )


def run_view_of_files(run: RunFiles) -> RunView:
    """Of a run that is over, or that does not answer: the newest values, and time over the whole run."""
    first_s, last_s = run.wall_range_s or (0.0, 0.0)
    how = outcome(run)
    steps, goal = run.steps("train/loss"), run.setting("run", "num_steps")
    metrics = {name: value for name in run.names() if (value := run.last(name)) is not None}
    shares = run.shares()
    reason = explain_run(run)
    return RunView(
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
        actors=tuple(ActorFacts(name) for name in sorted(shares, key=name_order)),
        why=reason.sentence,
        remedy=reason.to_try,
        has_ended=not run.is_live,
        is_of_files=True,
    )


def carried_over(new: RunView, old: RunView) -> RunView:
    """The new view; what is missing in it is kept from the old one. Actors end one after another."""
    has_reported = bool(new.snapshot)
    kept: dict[str, Any] = {
        "status": new.status or old.status,
        "buffer": new.buffer or old.buffer,
        "snapshot": new.snapshot or old.snapshot,
        "started_wall_s": new.started_wall_s if new.run_dir else old.started_wall_s,
        "run_dir": new.run_dir or old.run_dir,
        "actors": new.actors if any(actor.state for actor in new.actors) else old.actors or new.actors,
        "knobs": new.knobs or old.knobs,
        "history": new.history or old.history,
        "why": new.why if has_reported else old.why,
        "remedy": new.remedy if has_reported else old.remedy,
    }
    phase = kept["status"].phase if kept["status"] else ""
    return msgspec.structs.replace(new, **kept, has_ended=new.has_ended or phase in ("finished", "failed"))


def _verdict(answer: Mapping[str, Any], snapshot: Mapping[str, Mapping[str, float]]) -> tuple[str, str]:
    """The run's own sentence; from the time shares when it has none."""
    sentence = answer.get("sentence")
    if isinstance(sentence, str) and sentence:
        return sentence, str(answer.get("to_try") or answer.get("remedy") or "")
    shares = {key.removeprefix("time/"): value for key, value in snapshot.items() if key.startswith("time/")}
    num_rollouts = sum(name.startswith("rollout/") for name in shares)
    # The largest possible number is not known: the present one is assumed.
    own = explain(shares, Facts(gauges=snapshot, num_rollouts=num_rollouts, most_rollouts=num_rollouts))
    return own.sentence, own.to_try


def _mapping(raw: object) -> dict[str, Any]:
    return cast("dict[str, Any]", raw) if isinstance(raw, dict) else {}


def _rows(raw: object, key: str) -> Sequence[object]:
    """A list, or the list that an object holds under `key`."""
    found = cast("dict[str, object]", raw).get(key) if isinstance(raw, dict) else raw
    return cast("Sequence[object]", found) if isinstance(found, list | tuple) else ()


def _read_rows(raw: object, key: str, kind: type[T]) -> list[T]:
    """Those that are what they should be."""
    found: list[T] = []
    for row in _rows(raw, key):
        with suppress(msgspec.ValidationError):
            found.append(msgspec.convert(row, kind))
    return found


def _actors(raw: object, snapshot: Mapping[str, Mapping[str, float]]) -> tuple[ActorFacts, ...]:
    """What `ps` lists; without it, the actors that the monitor knows."""
    listed = _read_rows(raw, "actors", ActorFacts) or [ActorFacts(name) for name in snapshot.get("age_s", {})]
    return tuple(sorted((actor for actor in listed if actor.name), key=lambda a: (a.node, name_order(a.name))))


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
    words = sorted((event for kind in ENDS for event in run.of_kind(kind)), key=lambda event: event.wall_s)
    reason = words[-1].text if words else ""
    phase = moves[-1] if moves else ""
    if words and words[-1].kind == "run-failed":
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
    return RunOutcome("open", "unknown", reason or "No event says how the run ended.")


ALARMING = ("fail", "error", "gone", "fenced", "non-finite", "drop", "disabled", "killed", "restart", "full", "hung",
            "suspect")  # fmt: skip
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
    """The line that must not be missed: paused, ended, silent, only a reader; empty when all is well."""
    if view.has_ended:
        reason = (view.status.error or view.status.reason) if view.status else ""
        why = clean(reason or next(iter(view.troubles), ""))
        return f"the run has ended{f': {why}' if why else ''} -- this is how it was last seen"
    if view.silent_s > 0:
        return f"no answer for {duration(view.silent_s)}: {clean('; '.join(view.troubles))}"
    parts: list[str] = []
    if view.status is not None and view.status.paused:
        parts.append(f"paused: {clean(view.status.paused)}")
    if view.buffer is not None and view.buffer.complaint:
        parts.append(clean(view.buffer.complaint))
    if view.reader_only:
        parts.append("read-only: knobs can be seen, not turned")
    return "; ".join([*parts, *(clean(trouble) for trouble in view.troubles)])


def fact_lines(view: RunView, pace: StepPace) -> list[tuple[str, str]]:
    rates = [("generated", view.rate("rollout/tokens_per_s")), ("trained", view.rate("train/tokens_per_s"))]
    speeds = [f"{what} {short(rate)} tokens/s" for what, rate in rates if rate is not None]
    lines = [
        ("step", _step_line(view, pace)),
        ("reward", _reward_line(view)),
        ("learning", _pairs(view.metrics, _LEARNING)),
        ("lag", lag_text(view)),
        ("speed", "   ".join(speeds)),
        ("groups", _groups_line(view.buffer)),
        ("warning", clean(view.buffer.complaint) if view.buffer else ""),
        ("engines", _engines_line(view)),
    ]
    return [(label, text) for label, text in lines if text]


_LEARNING = (
    ("loss", "train/loss"), ("grad", "train/grad_norm"), ("kl", "train/approx_kl"), ("entropy", "train/entropy"),
    ("|logp diff|", "train/logprob_diff_abs_mean"),
)  # fmt: skip
_SHARES = (("pass", "reward/pass_rate"), ("all right", "reward/all_right"), ("all wrong", "reward/all_wrong"))


def _pairs(metrics: Mapping[str, float], names: Sequence[tuple[str, str]]) -> str:
    return "   ".join(f"{label} {short(metrics[name])}" for label, name in names if name in metrics)


def _step_line(view: RunView, pace: StepPace) -> str:
    if view.status is None:
        return clean(view.note) or "waiting for the coordinator"
    parts = [f"{view.version}{f' of {view.num_steps}' if view.num_steps else ''}", view.phase]
    if (step_s := pace.step_s()) is not None:
        parts.append(f"{duration(step_s)} a step")
    if view.phase == "running" and (eta_s := pace.eta_s(view.num_steps)) is not None:
        parts.append(f"{duration(eta_s)} to go")
    if view.status.paused:
        parts.append(f"paused: {clean(view.status.paused)}")
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
    told = view.status.eval_reward if view.status else None
    return view.metrics.get("eval/reward") if told is None else told


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
    return f"{sum(dropped.values())}{f' ({reasons})' if reasons else ''}"


def _load(view: RunView, engine: str, what: str) -> str:
    return short(view.snapshot.get(engine, {}).get(f"rollout/{what}"))


def _engines_line(view: RunView) -> str:
    engines = view.status.engines if view.status is not None else ()
    if not engines:
        return ""
    if len(engines) > _MAX_ENGINES:
        versions = sorted(engine.version for engine in engines)
        running, waiting = view.rate("rollout/running"), view.rate("rollout/waiting")
        span = f"v{versions[0]}" if versions[0] == versions[-1] else f"v{versions[0]}..v{versions[-1]}"
        return f"{len(engines)} engines at {span}   {short(running)} running, {short(waiting)} waiting"
    return "   ".join(
        f"{clean(engine.rollout)} v{engine.version} ({'draining, ' if engine.draining else ''}"
        f"{_load(view, engine.rollout, 'running')} running, {_load(view, engine.rollout, 'waiting')} waiting)"
        for engine in engines
    )


_ON_ONE_LINE = frozenset({"step", "reward", "lag", "speed", "warning"})


def plain_line(view: RunView, pace: StepPace) -> str:
    lines = [f"{label} {text}" for label, text in fact_lines(view, pace) if label in _ON_ONE_LINE]
    if view.metrics.get("train/loss") is not None:
        lines.insert(2, f"loss {short(view.metrics['train/loss'])}")
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


def lag_rows(view: RunView) -> list[tuple[int, int, bool]]:
    """(lag, groups of the newest step, whether the bound allows it), every lag up to the bound."""
    prefix, newest = "lag_hist/", view.metrics.get("lag/max", -1.0)
    counts = {
        int(name.removeprefix(prefix)): round(value)
        for name, value in view.metrics.items()
        if name.startswith(prefix) and name.removeprefix(prefix).isdecimal() and len(name) < 16
    }
    counts = {lag: count for lag, count in counts.items() if lag <= newest}  # the others are of an older step
    bound = view.buffer.max_staleness if view.buffer is not None else max(counts, default=-1)
    last = min(max([bound, *counts]), _MAX_LAG)
    return [(lag, counts.get(lag, 0), lag <= bound) for lag in range(last + 1)]


def lag_text(view: RunView) -> str:
    """`max 2   mean 0.4   bound 4 (pace)`."""
    parts = [_pairs(view.metrics, (("max", "lag/max"), ("mean", "lag/mean")))]
    if view.buffer is not None:
        parts.append(f"bound {view.buffer.max_staleness} ({clean(view.buffer.policy)})")
    return "   ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Tile:
    """One key figure."""

    label: str
    value: str
    note: str = ""


def tiles(view: RunView, run: RunFiles) -> list[Tile]:
    found = [
        Tile("step", f"{view.version}", f"of {view.num_steps}" if view.num_steps else ""),
        Tile("wall time", duration(view.elapsed_s) if view.elapsed_s else "-", _pace_note(run)),
        _reward_tile(view, run),
        _eval_tile(view, run),
        Tile("right", _share(view, "reward/pass_rate"), "of the answers"),
        Tile("all right / wrong", _all_or_none(view), "of the groups"),
        Tile("loss", short(view.metrics.get("train/loss"))),
        Tile("generated", short(view.rate("rollout/tokens_per_s")), "tokens/s"),
        _trained_tile(view, run),
        _lag_tile(view, run),
        Tile("groups trained", short(run.total("batch/num_groups") or None), f"{sum(drops(run).values()):.0f} dropped"),
    ]
    return [tile for tile in found if tile.value != "-"]


def _pace_note(run: RunFiles) -> str:
    gaps = sorted(after - before for (before, _), (after, _) in pairwise(run.reported) if after > before)
    return f"{duration(gaps[len(gaps) // 2])} a step" if gaps else ""


def _reward_tile(view: RunView, run: RunFiles) -> Tile:
    """Of all finished groups, with its deviation; of an ended run the mean of the last fifth."""
    name = training_reward({*view.metrics, *run.series})
    values = list(run.steps(name).values())
    begin = f"from {short(sum(values[: max(1, len(values) // 10)]) / max(1, len(values) // 10))}" if values else ""
    if view.has_ended and values:
        return Tile("training reward", short(tail_mean(values)), begin)
    std = view.metrics.get(name.replace("mean", "std"))
    return Tile("training reward", short(view.metrics.get(name)), f"± {short(std)}" if std is not None else begin)


def tail_mean(values: Sequence[float]) -> float | None:
    """Mean of the last fifth: what the run looks like at its end."""
    num = max(1, len(values) // 5)
    return sum(values[-num:]) / num if values else None


def _eval_tile(view: RunView, run: RunFiles) -> Tile:
    values = run.steps("eval/reward")
    if not values:
        return Tile("held-out reward", short(_evaluation(view)))
    best = max(values, key=lambda step: values[step])
    note = "the best so far" if best == max(values) else f"best {short(values[best])} at {best}"
    return Tile("held-out reward", short(values[max(values)]), note)


def _trained_tile(view: RunView, run: RunFiles) -> Tile:
    rate = view.rate("train/tokens_per_s")
    if rate is not None:
        return Tile("trained", short(rate), "tokens/s")
    total, span = run.total("train/num_tokens"), run.reported
    seconds = span[-1][0] - span[0][0] if span else 0.0
    return Tile("trained tokens", short(total or None), f"{short(total / seconds)} a second" if seconds > 0 else "")


def _lag_tile(view: RunView, run: RunFiles) -> Tile:
    series = run.main("lag/max")
    largest = max((point.high for point in series.points), default=None) if series else view.metrics.get("lag/max")
    bound = view.buffer.max_staleness if view.buffer else run.setting("async", "max_staleness")
    return Tile("largest lag", short(largest), f"bound {bound}" if isinstance(bound, int) else "")


def _share(view: RunView, name: str) -> str:
    return percent(view.metrics[name]) if name in view.metrics else "-"


def _all_or_none(view: RunView) -> str:
    shares = [_share(view, name) for name in ("reward/all_right", "reward/all_wrong")]
    return "-" if "-" in shares else " / ".join(shares)


def drops(run: RunFiles) -> dict[str, float]:
    prefix = "buffer/dropped/"
    counts = {name.removeprefix(prefix): run.last(name) or 0.0 for name in run.names(prefix)}
    return dict(sorted(((k, v) for k, v in counts.items() if v > 0), key=lambda item: -item[1]))
