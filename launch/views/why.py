"""What holds a run back, from the time shares of its actors, and a remedy. Pure.

Shares are by kind (`ActivityKind`) and part ("wait-data/reward"). If the trainer computes nearly all the time, training
is the bottleneck; if it waits, what its rollout actors do meanwhile. Start-up is left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from ...core.activity import ACTIVITY_KINDS
from ...core.errors import ConfigError
from ...core.files import WAITS
from ...core.messages import Record, RolloutNow
from ...core.suggestion import suggest
from .numbers import clean, duration, name_order, percent, short, time_parts
from .run_files import NEWEST, RunFiles

Bound = Literal[
    "unknown", "starting", "disk", "paused", "filter", "evaluation", "generation", "concurrency", "reward",
    "environment", "data", "training", "checkpoint", "weights", "capacity", "memory", "none",
]  # fmt: skip
Shares = Mapping[str, Mapping[str, float]]
"""Actor -> kind, or "kind/part" -> share of its time (0..1)."""

NOTABLE = 0.25
AT_LIMIT = "compute/generate at limit"
"""Rollout actors generate, and may not take more groups at once."""
ROLLOUTS, REWARDS, CPU, HELD_OUT = "rollouts/", "rewards/", "cpu/", "held-out/"
"""Prefixes of seconds that are no part of their actor's: of its rollouts, of its calls of reward workers (see
`Guarded.seconds`), of its threads (see `ProcessorTime`), and of rollouts for evaluations."""
_BESIDE = (ROLLOUTS, REWARDS, CPU, HELD_OUT)
FIRST_EVALUATION = "other/start, first engine"
"""Part of the leader's time: engines have no weights yet, or evaluate them (eval.at_start)."""
_ENGINE = ("generate", "engine")
MAX_UNDER_WAY = 100
START = "other/start"
"""Prefix of the parts that are start-up and say nothing about the run."""
FOR_DISK = "/".join(WAITS)
"""Part of an actor's time."""
NEARLY_ALL = 0.8
"""From this share of the finished groups on, what the filter leaves out is the cause of the trainer's waiting."""
_LEAST_GROUPS = 16
_UNEVEN = 0.4
"""From this share of their time on, the slowest tenth of the steps is the cause; of even steps it takes a tenth."""

REMEDIES: Mapping[Bound, str] = {
    "disk": "make that file system writable again (`RUN/events.jsonl` names file, cause and remedy): the run then "
    "continues by itself",
    "paused": "`myxa resume`",
    "filter": "`myxa samples` shows answers with their rewards: mend the reward if right answers are worth nothing, "
    'else take easier prompts, or a run with algo.kind = "sft" before, or harder prompts where all are right',
    "evaluation": "a larger eval.every, or smaller eval.num_prompts and eval.num_samples; `myxa scale rollout=N` where "
    "cores or GPUs are left",
    "generation": "`myxa scale rollout=N` where cores or GPUs are left, shorter answers (`myxa set max_new_tokens=N`), "
    "or a faster engine",
    "concurrency": "`myxa set concurrency=N`: the engines have room for more groups at once (rollout.max_groups)",
    "reward": "reward.workers spreads the function over processes (`myxa resume RUN --set reward.workers=N`); or make "
    "it cheaper",
    "environment": "a faster environment or more of it; `myxa set concurrency=N` has the engine generate for other "
    "groups meanwhile",
    "data": "more data, or `myxa resume RUN --set data.max_passes=0`; if the data is there, `myxa logs buffer`",
    "training": "`myxa set max_tokens_per_microbatch=N` where memory allows; more trainer ranks, fewer mini-batches, "
    "or rollout devices for the trainer",
    "checkpoint": "a larger trainer.checkpoint_every, or trainer.async_save = true",
    "weights": "`myxa set weights_every=N`, a faster weights.channel, or fewer and larger steps (algo.batch_size)",
    "capacity": "`myxa set max_staleness=N`, or a smaller algo.batch_size",
    "memory": "larger steps (algo.batch_size); `myxa mem` shows what is moved each time",
}
_FAR_REWARD = (
    'reward.scope = "group", one message for all answers of a group, or a built-in reward (exact, numeric, ...), which '
    "runs in the rollout actor"
)
_UNEVEN_STEPS = (
    "`train/step_s` in the report shows which steps are slow: they build kernels for new shapes, or share their device "
    "or host; more equal lengths, or other work elsewhere"
)
_CROWDED = "more cores, or another host for some of these processes; on this one no further actor or worker helps"
_CROWDED_TOO: Mapping[Bound, str] = {
    "generation": "; or shorter answers (`myxa set max_new_tokens=N`)",
    "training": "; or fewer mini-batches",
    "none": "",
}
"""What helps beside that."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a verdict needs to know of the run beside its shares."""

    gauges: Shares = field(default_factory=dict[str, dict[str, float]])
    """Actor -> metric -> value."""
    disk: str = ""
    """Why the ledger cannot be written just now, and what to do."""
    paused: str = ""
    """By whom the run is paused just now."""

    @property
    def engines_are_full(self) -> bool:
        """Whether engines have all the requests they can compute at once, so that more would only queue up."""
        engines = [values for name, values in self.gauges.items() if _role(name) == "rollout"]
        busy = [values.get("rollout/running", 0.0) >= most for values in engines
                if (most := values.get("rollout/max_running", 0.0)) > 0]  # fmt: skip
        return any(values.get("rollout/waiting", 0.0) > 0 for values in engines) or (bool(busy) and all(busy))


class Reason(Record, frozen=True):
    """The answer of `myxa why`: what holds the run back, and what may be changed."""

    bound: Bound
    sentence: str
    remedy: str = ""
    share: float = 0.0
    """Of the waiting actor's time that is lost by it (0..1)."""
    window_s: float = 0.0
    shares: dict[str, dict[str, float]] = {}
    """Actor -> kind -> share of its time in the window, start-up left out."""
    rollouts: dict[str, float] = {}
    """What rollouts do (`actors/workflows/timeline.py`) -> share of their time in the window, the largest first."""
    under_way: tuple[RolloutNow, ...] = ()
    """Of the asked actors those first that wait longest for something else than the engine."""


def slowest(under_way: Sequence[RolloutNow]) -> tuple[RolloutNow, ...]:
    """Those that wait, the longest first; before all others those that wait for something else than the engine."""
    waiting = [rollout for rollout in under_way if rollout.doing]
    return tuple(sorted(waiting, key=lambda rollout: (rollout.doing in _ENGINE, -rollout.since_s))[:MAX_UNDER_WAY])


def describe_rollout(now: RolloutNow) -> str:
    row = f"row {now.row}" + (f" of {clean(now.source.rpartition('/')[2])}" if now.source else "")
    name = f"{now.actor}, {'held-out prompt' if now.is_held_out else 'group'} {now.group_id}.{now.index} ({row})"
    for_s, what = duration(now.since_s), f"{'the ' * (now.doing in ('engine', 'reward'))}{clean(now.doing)}"
    activity = f"has generated for {for_s}" if now.doing == "generate" else f"has waited {for_s} for {what}"
    turn = f", at turn {now.turn}" if now.turn else ""
    return f"{name}: {activity}{turn}"


def rollout_time(shares: Shares) -> dict[str, float]:
    """What rollouts do -> share of their time, over all of these actors; where rewards have workers, what of it is the
    function."""
    seconds, calls = _summed(shares, ROLLOUTS), _summed(shares, REWARDS)
    if any(calls.values()):
        rewards_s = seconds.pop("reward", 0.0) / sum(calls.values())
        seconds |= {f"reward {part}": rewards_s * share for part, share in calls.items()}
    total, largest_first = sum(seconds.values()), sorted(seconds, key=lambda name: -seconds[name])
    return {name: round(seconds[name] / total, 4) for name in largest_first if seconds[name]}


def _summed(shares: Shares, prefix: str) -> dict[str, float]:
    sums = defaultdict[str, float](float)
    for kinds in shares.values():
        for name, share in kinds.items():
            if name.startswith(prefix):
                sums[name.removeprefix(prefix)] += share
    return sums


def explain(
    shares: Shares, facts: Facts, *, window_s: float = 0.0, target: str = "", under_way: Sequence[RolloutNow] = ()
) -> Reason:
    """`target`: an actor or a role that comes before the run. Raises ConfigError for one not measured."""
    reason = msgspec.structs.replace(judge(shares, facts), window_s=window_s)
    names = [name for name in shares if not target or target in (name, _role(name), f"{_role(name)}/*", "all")]
    actors = {name: without_start(shares[name]) for name in sorted(names, key=name_order)}
    if target:
        if not actors:
            raise ConfigError(f"no actor of this run is called {target!r}", remedy=suggest(target, shares))
        texts = [f"{name}: {', '.join(time_parts(kinds)) or 'it is starting'}" for name, kinds in actors.items()]
        reason = msgspec.structs.replace(reason, sentence="; ".join([*texts, f"the run: {reason.sentence}"]))
    by_kind = {name: {kind: round(kinds.get(kind, 0.0), 4) for kind in ACTIVITY_KINDS} if kinds else {}
               for name, kinds in actors.items()}  # fmt: skip
    waiting = slowest([rollout for rollout in under_way if rollout.actor in actors])[: None if target else 1]
    return msgspec.structs.replace(reason, shares=by_kind, rollouts=rollout_time(actors), under_way=waiting)


def explain_run(run: RunFiles, target: str = "") -> Reason:
    """Of a run that ended or does not answer: over all of it."""
    window_s = run.wall_range_s[1] - run.wall_range_s[0] if run.wall_range_s else 0.0
    return explain(run.shares(), Facts(gauges=run.gauges()), window_s=window_s, target=target)


# -- what holds the run back -------------------------------------------------------------------------------------------


def judge(shares: Shares, facts: Facts) -> Reason:
    if facts.disk:
        cause, _, remedy = facts.disk.partition(" -- ")
        return Reason(bound="disk", sentence=f"the run waits for a disk: {cause}", remedy=remedy, share=1.0)
    if facts.paused:
        return _verdict("paused", f"the run is paused: {facts.paused}", 1.0)
    reason = _bottleneck(shares, facts)
    role = "trainer" if reason.bound in ("training", "none") else "rollout"
    actors = {name: kinds for name, kinds in shares.items() if _role(name) == role}
    cpu = _summed(actors, CPU)
    runnable = sum(cpu.values())
    if reason.bound not in _CROWDED_TOO or runnable < len(actors) / 2 or cpu["waited"] < NOTABLE * runnable:
        return reason
    waits = f"{_verb(_subject(actors, role), 'wait')} for a processor {percent(cpu['waited'] / runnable)}"
    sentence = f"{reason.sentence}; {waits} of the time in which threads could run"
    return msgspec.structs.replace(reason, sentence=sentence, remedy=_CROWDED + _CROWDED_TOO[reason.bound])


def _bottleneck(shares: Shares, facts: Facts) -> Reason:
    leader = leader_of(shares)
    rollouts = {name: without_start(kinds) for name, kinds in shares.items() if _role(name) == "rollout"}
    rollouts = {name: kinds for name, kinds in rollouts.items() if kinds}
    trainer = without_start(shares.get(leader, {}))
    held_out = _held_out_share(rollouts)
    if leader and not trainer:
        is_first = held_out and shares[leader].get(FIRST_EVALUATION, 0.0) >= NOTABLE
        activity = "waits for the evaluation of the first weights (eval.at_start)" if is_first else "is starting"
        return Reason(bound="starting", sentence=f"{leader} {activity}: no verdict yet")
    if not leader or not rollouts:
        sentence = "nothing can be said yet: no time was measured for the trainer or the rollout actors"
        return Reason(bound="unknown", sentence=sentence)
    kinds = {kind for actor in rollouts.values() for kind in actor if not kind.startswith(_BESIDE)}
    mean = {kind: sum(actor.get(kind, 0.0) for actor in rollouts.values()) / len(rollouts) for kind in kinds}
    actors = _subject(rollouts, "rollout")
    if (share := max(trainer.get("paused", 0.0), mean.get("paused", 0.0))) >= 0.5:
        is_disk = max(trainer.get(FOR_DISK, 0.0), mean.get(FOR_DISK, 0.0)) >= share / 2
        kind, activity = (FOR_DISK, "waits for a disk") if is_disk else ("paused", "is paused")
        text = f"the run {activity} ({leader} {_pct(trainer, kind)}, {actors} {_pct(mean, kind)})"
        return _verdict("disk" if is_disk else "paused", text, share)
    if trainer.get("other", 0.0) >= 0.5:
        sentence = f"{leader} spends {_pct(trainer, 'other')} of the time on start-up and other chores: no verdict yet"
        return Reason(bound="starting", sentence=sentence)
    wait = max(_TRAINER_WAITS, key=lambda kind: trainer.get(kind, 0.0))
    if trainer.get(wait, 0.0) < NOTABLE:
        return _if_busy(leader, trainer, actors, mean, facts)
    if wait != "wait-data":
        return _if_waiting(leader, trainer, wait)
    reason = _if_filtered(leader, trainer, facts) or _if_starved(leader, trainer, actors, mean, facts)
    if held_out >= 0.5 and reason.bound in _OF_ROLLOUTS:
        waits = f"{leader} waits for data {_pct(trainer, 'wait-data')} of the time"
        sentence = f"{waits}: evaluation is the bottleneck ({percent(held_out)} of the time of rollouts)"
        return _verdict("evaluation", sentence, reason.share)
    calls = _summed(rollouts, REWARDS)
    if reason.bound != "reward" or calls["messages"] <= calls["function"]:
        return reason
    away = calls["messages"] / (calls["messages"] + calls["function"])
    sentence = f"{reason.sentence}; {percent(away)} of a call are its messages to the worker and back"
    return msgspec.structs.replace(reason, sentence=sentence, remedy=_FAR_REWARD)


def without_start(kinds: Mapping[str, float]) -> dict[str, float]:
    """Shares of the time after start-up; empty while there is none worth speaking of."""
    start = sum(share for name, share in kinds.items() if name.startswith(START))
    total = sum(share for name, share in kinds.items() if "/" not in name)
    remaining = total - start
    if remaining <= 0.02 * total:
        return {}
    shares = {name: share / remaining for name, share in kinds.items() if not name.startswith(START)}
    if "other" in shares:
        shares["other"] = max(0.0, kinds["other"] - start) / remaining
    return shares


def _held_out_share(rollouts: Shares) -> float:
    """Of the time of rollouts, that of rollouts for evaluations."""
    total = sum(_summed(rollouts, ROLLOUTS).values())
    return _summed(rollouts, HELD_OUT)["rollouts"] / total if total else 0.0


def leader_of(shares: Shares) -> str:
    """The lowest trainer rank that was measured: other ranks wait for it and would blame the wrong one."""
    ranks = [name for name, kinds in shares.items() if _role(name) == "trainer" and kinds]
    return min(ranks, key=lambda name: (len(name), name), default="")


def _if_busy(leader: str, trainer: Mapping[str, float], actors: str, mean: Mapping[str, float], facts: Facts) -> Reason:
    works = f"{leader} computes {_pct(trainer, 'compute')} of the time"
    slowest = facts.gauges.get(leader, {}).get("leader/slowest_tenth", 0.0)
    if slowest >= _UNEVEN:
        sentence = f"{works}, and a tenth of its newest steps takes {percent(slowest)} of that: they are the bottleneck"
        return Reason(bound="training", sentence=sentence, remedy=_UNEVEN_STEPS, share=slowest)
    for bound, (activity, *parts) in _NO_TRAINING.items():
        share = sum(trainer.get(f"compute/{part}", 0.0) for part in parts)
        if share >= NOTABLE:
            sentence = f"{leader} spends {percent(share)} of the time on {activity}: that is the bottleneck"
            return _verdict(bound, sentence, share)
    idle = max(_REASONS, key=lambda kind: mean.get(kind, 0.0))
    if mean.get(idle, 0.0) < NOTABLE:
        sentence = f"well balanced: {works}, {_verb(actors, 'compute')} {_pct(mean, 'compute')}"
        return Reason(bound="none", sentence=sentence)
    waits = f"{_verb(actors, 'wait')} {_REASONS[idle]} {_pct(mean, idle)} of the time"
    return _verdict("training", f"{works}: training is the bottleneck ({waits})", mean.get(idle, 0.0))


def _if_filtered(leader: str, trainer: Mapping[str, float], facts: Facts) -> Reason | None:
    """None: the group filter leaves enough of the newest finished groups."""
    newest = {n.removeprefix(NEWEST): value for n, value in facts.gauges.get("buffer", {}).items()}
    left_out, lowest, highest = newest.get("left_out", 0.0), newest.get("reward_min"), newest.get("reward_max")
    if newest.get("groups", 0.0) < _LEAST_GROUPS or left_out < NEARLY_ALL:
        return None
    if lowest is not None and lowest == highest:
        why = f"the reward is always {short(lowest)}"
    elif newest.get("flat", 0.0) >= NEARLY_ALL:
        shares = f"all wrong {_pct(newest, 'all_wrong')}, all right {_pct(newest, 'all_right')}"
        why = f"the answers of a group all get the same reward ({shares})"
    else:
        why = "see algo.group_filter"
    sentence = (
        f"{leader} waits for data {_pct(trainer, 'wait-data')} of the time: the filter leaves out "
        f"{percent(left_out)} of the newest {newest['groups']:.0f} groups: {why}"
    )
    return _verdict("filter", sentence, trainer.get("wait-data", 0.0))


def _if_starved(
    leader: str, trainer: Mapping[str, float], actors: str, mean: Mapping[str, float], facts: Facts
) -> Reason:
    """The trainer waits for data: what the rollout actors do most meanwhile is the cause."""
    rewards = sum(share for kind, share in mean.items() if "/" in kind and "reward" in kind)
    at_limit = 0.0 if facts.engines_are_full else mean.get(AT_LIMIT, 0.0)
    causes: dict[Bound, float] = {
        "generation": max(0.0, mean.get("compute", 0.0) - at_limit),
        "concurrency": at_limit,
        "reward": rewards,
        "environment": mean.get("wait-env", 0.0),
        "capacity": mean.get("wait-capacity", 0.0),
        "weights": mean.get("wait-weights", 0.0),
        "data": max(0.0, mean.get("wait-data", 0.0) - rewards),
    }
    cause = max(causes, key=lambda bound: causes[bound])
    waits = f"{leader} waits for data {_pct(trainer, 'wait-data')} of the time"
    if causes[cause] <= 0.0:
        sentence = f"{waits}, and {_verb(actors, 'show')} nothing that explains it: see the logs"
        return Reason(bound="unknown", sentence=sentence)
    parts = {name: lost for name, lost in mean.items() if name.startswith("wait-env/")}
    environment = max(parts, key=lambda name: parts[name]).partition("/")[2] if parts else "it"
    texts = {"do": _verb(actors, "compute"), "wait": _verb(actors, "wait"), "share": percent(causes[cause])}
    sentence = f"{waits}: {_CAUSES[cause].format(**texts, environment=environment)}"
    return _verdict(cause, sentence, trainer.get("wait-data", 0.0))


_CAUSES: dict[Bound, str] = {
    "generation": "generation is the bottleneck ({do} {share})",
    "concurrency": "concurrency is the bottleneck ({do} {share} of the time with as many groups as they may have at "
    "once)",
    "reward": "the reward function is the bottleneck ({wait} for rewards {share})",
    "environment": "the environment is the bottleneck ({wait} for {environment} {share})",
    "capacity": "the staleness bound holds both back ({wait} for capacity {share})",
    "weights": "weight adoption is the bottleneck ({wait} for weights {share})",
    "data": "the rollout actors have nothing to do ({wait} for prompts {share})",
}
_OF_ROLLOUTS: tuple[Bound, ...] = ("generation", "concurrency", "reward", "environment")
"""Causes of which evaluations may have the larger part."""
_TRAINER_WAITS = ("wait-data", "wait-weights", "wait-capacity", "wait-memory")


def _if_waiting(leader: str, trainer: Mapping[str, float], wait: str) -> Reason:
    """For weights, for the device, or for room."""
    share, waits = trainer[wait], f"{leader} waits {_pct(trainer, wait)} of the time"
    if wait == "wait-weights":
        return _verdict("weights", f"{waits} until its weights are taken: publishing weights is the bottleneck", share)
    if wait == "wait-memory":
        sentence = f"{waits} until the device has changed hands: switching memory is the bottleneck"
        return _verdict("memory", sentence, share)
    remedy = "`myxa mem` shows which actor holds the memory that is missing"
    sentence = f"{waits} for capacity: room (memory) is the bottleneck"
    return Reason(bound="capacity", sentence=sentence, remedy=remedy, share=share)


_NO_TRAINING: Mapping[Bound, tuple[str, ...]] = {
    "checkpoint": ("checkpoints", "checkpoint", "copy checkpoint", "finish checkpoint", "export"),
    "weights": ("publishing weights", "publish"),
}
"""What takes a trainer's time while it computes: its name, and the parts of the time."""
_REASONS = {
    "wait-capacity": "for the trainer to catch up",
    "wait-data": "for work",
    "wait-weights": "for weights",
    "wait-memory": "for the device",
    "wait-env": "for the environment",
}
"""What a rollout actor that does not generate waits for."""


def _verdict(bound: Bound, sentence: str, share: float) -> Reason:
    return Reason(bound=bound, sentence=sentence, remedy=REMEDIES.get(bound, ""), share=share)


def _subject(actors: Shares, role: str) -> str:
    return next(iter(actors)) if len(actors) == 1 else f"{len(actors)} {role} actors"


def _role(name: str) -> str:
    return name.partition("/")[0]


def _pct(shares: Mapping[str, float], kind: str) -> str:
    return percent(shares.get(kind, 0.0))


def _verb(actors: str, verb: str) -> str:
    return f"{actors} {verb}" if actors.endswith("actors") else f"{actors} {verb}s"
