"""What holds a run back, in one sentence, from the time shares of its actors. Pure.

Shares are by kind (`ActivityKind`) and part ("wait-data/reward"). A run is as fast as its trainer is busy. If the
trainer computes nearly all the time, training is the bottleneck. If it waits, the bottleneck is what its rollout actors
do meanwhile. Start-up is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ...core.files import WAITS
from .numbers import percent, short

FOR_DISK = "/".join(WAITS)
"""Part of an actor's time."""

Bound = Literal[
    "unknown", "starting", "disk", "paused", "filter", "generation", "concurrency", "reward", "environment", "data",
    "training", "weights", "guard", "capacity", "memory", "none",
]  # fmt: skip

NOTABLE = 0.25
AT_LIMIT = "compute/generate at limit"
"""Rollout actors generate, and may not take more groups at once."""
START = "other/start"
"""Prefix of the parts that are start-up and say nothing about the run."""


NEWEST = "buffer/newest/"
"""Prefix of the metrics about the newest finished groups."""
NEARLY_ALL = 0.8
"""From this share of the finished groups on, what the filter leaves out is the cause of the trainer's waiting."""
_LEAST_GROUPS = 16

REMEDIES: Mapping[Bound, str] = {
    "disk": "make that file system writable again (`RUN/events.jsonl` names file, cause and remedy): the run then "
    "continues by itself",
    "paused": "`myxa resume`",
    "filter": "`myxa samples` shows answers with their rewards: mend the reward if right answers are worth nothing, "
    "else take easier prompts, or harder ones where all are right",
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
    "weights": "`myxa set weights_every=N`, a faster weights.channel, or fewer and larger steps (algo.batch_size)",
    "guard": "`myxa set guard_every=N`, or fewer guard.prompts",
    "capacity": "`myxa set max_staleness=N` or `window=N`, or a smaller algo.batch_size",
    "memory": "larger steps (algo.batch_size); `myxa mem` shows what is moved each time",
}
"""What may be changed when only the bottleneck is known; `advice.py` gives values."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """What holds the run back and what to do about it."""

    bound: Bound
    sentence: str
    remedy: str = ""
    share: float = 0.0
    """Share of its time that the waiting actor loses by it (0..1)."""


@dataclass(frozen=True, slots=True)
class Filtered:
    """What the group filter did to the newest finished groups; shares of them."""

    num_groups: float = 0.0
    left_out: float = 0.0
    flat: float = 0.0
    """All rewards of the group are equal."""
    all_right: float = 0.0
    all_wrong: float = 0.0
    only_reward: float | None = None
    """The reward that all answers got; None: they differ, or it is not known."""

    @classmethod
    def of(cls, gauges: Mapping[str, Mapping[str, float]]) -> Filtered:
        values = gauges.get("buffer", {})
        low, high = values.get(f"{NEWEST}reward_min"), values.get(f"{NEWEST}reward_max")
        return cls(
            num_groups=values.get(f"{NEWEST}groups", 0.0),
            left_out=values.get(f"{NEWEST}left_out", 0.0),
            flat=values.get(f"{NEWEST}flat", 0.0),
            all_right=values.get(f"{NEWEST}all_right", 0.0),
            all_wrong=values.get(f"{NEWEST}all_wrong", 0.0),
            only_reward=low if low == high else None,
        )

    @property
    def is_nearly_all(self) -> bool:
        return self.num_groups >= _LEAST_GROUPS and self.left_out >= NEARLY_ALL


def bottleneck(
    shares: Mapping[str, Mapping[str, float]], *, engines_are_full: bool = False, filtered: Filtered | None = None
) -> str:
    return judge(shares, engines_are_full=engines_are_full, filtered=filtered).sentence


def engines_look_full(gauges: Mapping[str, Mapping[str, float]]) -> bool:
    """Whether engines have all the requests that they can compute at once. `gauges`: actor -> metric -> value."""
    engines = [values for name, values in gauges.items() if _role(name) == "rollout"]
    waiting = any(values.get("rollout/waiting", 0.0) > 0 for values in engines)
    reporting = [values for values in engines if values.get("rollout/max_running", 0.0) > 0]
    busy = [values.get("rollout/running", 0.0) >= values["rollout/max_running"] for values in reporting]
    return waiting or (bool(busy) and all(busy))


def judge(
    shares: Mapping[str, Mapping[str, float]],
    *,
    engines_are_full: bool = False,
    filtered: Filtered | None = None,
    disk: str = "",
) -> Bottleneck:
    """`shares`: actor name -> kind -> share of its time (0..1), over whatever window the caller cares about.
    `engines_are_full`: they compute as many sequences at once as they can, so more requests would only queue up.
    `disk`: why the ledger cannot be written just now, and what to do."""
    if disk:
        what, _, remedy = disk.partition(" -- ")
        return Bottleneck("disk", f"the run waits for a disk: {what}", remedy, 1.0)
    leader = leader_of(shares)
    rollouts = {name: without_start(kinds) for name, kinds in shares.items() if _role(name) == "rollout" and kinds}
    rollouts = {name: kinds for name, kinds in rollouts.items() if kinds}
    trainer = without_start(shares.get(leader, {}))
    if leader and not trainer:
        return Bottleneck("starting", f"{leader} is starting: no verdict yet")
    if not leader or not rollouts:
        return Bottleneck(
            "unknown", "nothing can be said yet: no time was measured for the trainer or the rollout actors"
        )
    kinds = {kind for actor in rollouts.values() for kind in actor}
    team = {kind: sum(actor.get(kind, 0.0) for actor in rollouts.values()) / len(rollouts) for kind in kinds}
    who = next(iter(rollouts)) if len(rollouts) == 1 else f"{len(rollouts)} rollout actors"
    if max(trainer.get("paused", 0.0), team.get("paused", 0.0)) >= 0.5:
        share = max(trainer.get("paused", 0.0), team.get("paused", 0.0))
        for_disk = max(trainer.get(FOR_DISK, 0.0), team.get(FOR_DISK, 0.0))
        if for_disk >= share / 2:
            text = f"the run waits for a disk ({leader} {_pct(trainer, FOR_DISK)}, {who} {_pct(team, FOR_DISK)})"
            return _verdict("disk", text, share)
        text = f"the run is paused ({leader} {_pct(trainer, 'paused')}, {who} {_pct(team, 'paused')})"
        return _verdict("paused", text, share)
    if trainer.get("other", 0.0) >= 0.5:
        sentence = f"{leader} spends {_pct(trainer, 'other')} of the time on start-up and other chores: no verdict yet"
        return Bottleneck("starting", sentence)
    wait = max(_TRAINER_WAITS, key=lambda kind: trainer.get(kind, 0.0))
    if trainer.get(wait, 0.0) < NOTABLE:
        return _busy_trainer(leader, trainer, who, team)
    if wait == "wait-data" and filtered is not None and filtered.is_nearly_all:
        return _thrown_away(leader, trainer, filtered)
    if wait == "wait-data":
        return _starved_trainer(leader, trainer, who, team, engines_are_full=engines_are_full)
    return _waits(leader, trainer, wait)


def without_start(kinds: Mapping[str, float]) -> dict[str, float]:
    """Shares of the time after start-up; empty while there is none worth speaking of."""
    start = sum(share for name, share in kinds.items() if name.startswith(START))
    total = sum(share for name, share in kinds.items() if "/" not in name)
    left = total - start
    if left <= 0.02 * total:
        return {}
    kept = {name: share / left for name, share in kinds.items() if not name.startswith(START)}
    if "other" in kept:
        kept["other"] = max(0.0, kinds["other"] - start) / left
    return kept


def leader_of(shares: Mapping[str, Mapping[str, float]]) -> str:
    """The lowest trainer rank that was measured: other ranks wait for it and would blame the wrong one."""
    ranks = [name for name, kinds in shares.items() if _role(name) == "trainer" and kinds]
    return min(ranks, key=lambda name: (len(name), name), default="")


def _busy_trainer(leader: str, trainer: Mapping[str, float], who: str, team: Mapping[str, float]) -> Bottleneck:
    works = f"{leader} computes {_pct(trainer, 'compute')} of the time"
    idle = max(_REASONS, key=lambda kind: team.get(kind, 0.0))
    if team.get(idle, 0.0) < NOTABLE:
        return Bottleneck("none", f"well balanced: {works}, {_do(who)} {_pct(team, 'compute')}")
    waits = f"{_verb(who, 'wait')} {_REASONS[idle]} {_pct(team, idle)} of the time"
    return _verdict("training", f"{works}: training is the bottleneck ({waits})", team.get(idle, 0.0))


def _thrown_away(leader: str, trainer: Mapping[str, float], filtered: Filtered) -> Bottleneck:
    if filtered.only_reward is not None:
        why = f"the reward is always {short(filtered.only_reward)}"
    elif filtered.flat >= NEARLY_ALL:
        shares = f"all wrong {percent(filtered.all_wrong)}, all right {percent(filtered.all_right)}"
        why = f"the answers of a group all get the same reward ({shares})"
    else:
        why = "see algo.group_filter"
    sentence = (
        f"{leader} waits for data {_pct(trainer, 'wait-data')} of the time: the filter leaves out "
        f"{percent(filtered.left_out)} of the newest {filtered.num_groups:.0f} groups: {why}"
    )
    return _verdict("filter", sentence, trainer.get("wait-data", 0.0))


def _starved_trainer(
    leader: str, trainer: Mapping[str, float], who: str, team: Mapping[str, float], *, engines_are_full: bool
) -> Bottleneck:
    """The trainer waits for data: what the rollout actors do most meanwhile is the cause."""
    rewards = sum(share for kind, share in team.items() if "/" in kind and "reward" in kind)
    at_limit = 0.0 if engines_are_full else team.get(AT_LIMIT, 0.0)
    causes: dict[Bound, float] = {
        "generation": max(0.0, team.get("compute", 0.0) - at_limit),
        "concurrency": at_limit,
        "reward": rewards,
        "environment": team.get("wait-env", 0.0),
        "capacity": team.get("wait-capacity", 0.0),
        "weights": team.get("wait-weights", 0.0),
        "data": max(0.0, team.get("wait-data", 0.0) - rewards),
    }
    cause = max(causes, key=lambda bound: causes[bound])
    waits = f"{leader} waits for data {_pct(trainer, 'wait-data')} of the time"
    if causes[cause] <= 0.0:
        return Bottleneck("unknown", f"{waits}, and {_verb(who, 'show')} nothing that explains it: see the logs")
    share = f"{causes[cause] * 100:.0f} %"
    parts = {name: lost for name, lost in team.items() if name.startswith("wait-env/")}
    environment = max(parts, key=lambda name: parts[name]).partition("/")[2] if parts else "it"  # function and file
    words = {"do": _do(who), "wait": _verb(who, "wait"), "share": share, "environment": environment}
    sentence = f"{waits}: {_CAUSES[cause].format(**words)}"
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


def _waits_for_weights(leader: str, trainer: Mapping[str, float]) -> Bottleneck:
    canary = trainer.get("wait-weights/canary", 0.0)
    if canary > trainer["wait-weights"] / 2:
        sentence = (
            f"{leader} waits {canary * 100:.0f} % of the time while an engine answers the canary prompts: "
            "the comparison of trainer and engines is the bottleneck"
        )
        return _verdict("guard", sentence, canary)
    sentence = (
        f"{leader} waits {_pct(trainer, 'wait-weights')} of the time until its weights are taken: "
        "publishing weights is the bottleneck"
    )
    return _verdict("weights", sentence, trainer["wait-weights"])


_TRAINER_WAITS = ("wait-data", "wait-weights", "wait-capacity", "wait-memory")


def _waits(leader: str, trainer: Mapping[str, float], wait: str) -> Bottleneck:
    """For weights, for the device, or for room."""
    if wait == "wait-weights":
        return _waits_for_weights(leader, trainer)
    bound: Bound = "memory" if wait == "wait-memory" else "capacity"
    what = "until the device has changed hands" if bound == "memory" else "for capacity"
    cause = "switching memory" if bound == "memory" else "room (memory)"
    sentence = f"{leader} waits {what} {_pct(trainer, wait)} of the time: {cause} is the bottleneck"
    remedy = REMEDIES[bound] if bound == "memory" else "`myxa mem` shows which actor holds the memory that is missing"
    return Bottleneck(bound, sentence, remedy, trainer[wait])


_REASONS = {
    "wait-capacity": "for the trainer to catch up",
    "wait-data": "for work",
    "wait-weights": "for weights",
    "wait-memory": "for the device",
    "wait-env": "for the environment",
}
"""What a rollout actor that does not generate waits for."""


def _verdict(bound: Bound, sentence: str, share: float) -> Bottleneck:
    return Bottleneck(bound, sentence, REMEDIES.get(bound, ""), share)


def _role(name: str) -> str:
    return name.partition("/")[0]


def _pct(shares: Mapping[str, float], kind: str) -> str:
    return percent(shares.get(kind, 0.0))


def _verb(who: str, verb: str) -> str:
    return f"{who} {verb}" if who.endswith("actors") else f"{who} {verb}s"


def _do(who: str) -> str:
    return _verb(who, "compute")
