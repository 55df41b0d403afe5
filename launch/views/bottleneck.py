"""What holds the run back, in one sentence.

Knows: the time shares of each actor (kinds as in `ActivityKind`, and parts such as "wait-data/reward").
Must not know: where they come from. Pure; every branch is planted in tests/monitor/test_bottleneck.py.

The trainer is the judge: a run is as fast as its trainer is busy. If it works nearly all the time, training is the
bottleneck. If it waits, whatever its rollout actors do meanwhile is what it waits for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Bound = Literal[
    "unknown", "starting", "paused", "generation", "reward", "data", "training", "weights", "capacity", "memory", "none"
]

_NOTABLE = 0.25
"""A wait below this share of the time is not worth a sentence."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What holds the run back and what to do about it."""

    bound: Bound
    sentence: str
    remedy: str = ""


def bottleneck(shares: Mapping[str, Mapping[str, float]]) -> str:
    """One sentence for people; `judge` gives the same with its kind and a remedy."""
    return judge(shares).sentence


def judge(shares: Mapping[str, Mapping[str, float]]) -> Verdict:
    """`shares`: actor name -> kind -> share of its time (0..1), over whatever window the caller cares about."""
    leader = _leader(shares)
    rollouts = {name: kinds for name, kinds in shares.items() if _role(name) == "rollout" and kinds}
    if not leader or not rollouts:
        return Verdict("unknown", "nothing can be said yet: no time was measured for the trainer or the rollout actors")
    trainer, team = shares[leader], _mean(rollouts)
    who = next(iter(rollouts)) if len(rollouts) == 1 else f"{len(rollouts)} rollout actors"
    if max(trainer.get("paused", 0.0), team.get("paused", 0.0)) >= 0.5:
        return Verdict(
            "paused", f"the run is paused ({leader} {_pct(trainer, 'paused')}, {who} {_pct(team, 'paused')})"
        )
    if trainer.get("other", 0.0) >= 0.5:
        sentence = f"{leader} spends {_pct(trainer, 'other')} of the time on start-up and other chores: no verdict yet"
        return Verdict("starting", sentence)
    wait = max(_TRAINER_WAITS, key=lambda kind: trainer.get(kind, 0.0))
    if trainer.get(wait, 0.0) < _NOTABLE:
        return _busy_trainer(leader, trainer, who, team)
    if wait == "wait-data":
        return _starved_trainer(leader, trainer, who, team)
    return _WAITING[wait](leader, trainer)


def _busy_trainer(leader: str, trainer: Mapping[str, float], who: str, team: Mapping[str, float]) -> Verdict:
    works = f"{leader} computes {_pct(trainer, 'compute')} of the time"
    idle = max(_REASONS, key=lambda kind: team.get(kind, 0.0))
    if team.get(idle, 0.0) < _NOTABLE:
        return Verdict("none", f"well balanced: {works}, {_do(who)} {_pct(team, 'compute')}")
    reason = _REASONS[idle]
    return Verdict(
        "training",
        f"{works}: training is the bottleneck ({_verb(who, 'wait')} {reason} {_pct(team, idle)} of the time)",
        "more trainer ranks, fewer mini-batches or a larger trainer.max_tokens_per_microbatch; "
        "or give rollout devices to the trainer",
    )


def _starved_trainer(leader: str, trainer: Mapping[str, float], who: str, team: Mapping[str, float]) -> Verdict:
    """The trainer waits for data: what the rollout actors do most meanwhile is the cause."""
    rewards = sum(share for kind, share in team.items() if "/" in kind and "reward" in kind)
    draws = max(0.0, team.get("wait-data", 0.0) - rewards)
    causes: dict[Bound, float] = {
        "generation": team.get("compute", 0.0),
        "reward": rewards,
        "capacity": team.get("wait-capacity", 0.0),
        "weights": team.get("wait-weights", 0.0),
        "data": draws,
    }
    cause = max(causes, key=lambda bound: causes[bound])
    waits = f"{leader} waits for data {_pct(trainer, 'wait-data')} of the time"
    if causes[cause] <= 0.0:
        return Verdict("unknown", f"{waits}, and {_verb(who, 'show')} nothing that explains it: see the logs")
    clause, remedy = _CAUSES[cause]
    share = f"{causes[cause] * 100:.0f} %"
    return Verdict(cause, f"{waits}: {clause.format(do=_do(who), wait=_verb(who, 'wait'), share=share)}", remedy)


_CAUSES: dict[Bound, tuple[str, str]] = {
    "generation": (
        "generation is the bottleneck ({do} {share})",
        "more rollout actors (roles.rollout.count), a smaller rollout.max_new_tokens, or a faster engine",
    ),
    "reward": (
        "the reward function is the bottleneck ({wait} for rewards {share})",
        "set reward.workers to spread it over processes, or make it cheaper",
    ),
    "capacity": (
        "the staleness bound holds both back ({wait} for capacity {share})",
        "raise async.max_staleness or async.window, or lower algo.batch_size",
    ),
    "weights": (
        "weight adoption is the bottleneck ({wait} for weights {share})",
        "a faster weight channel, or fewer and larger steps (algo.batch_size)",
    ),
    "data": (
        "the rollout actors have nothing to do ({wait} for prompts {share})",
        "more data or data.max_passes = 0; if the data is there, look at the buffer",
    ),
}


def _waits_for_weights(leader: str, trainer: Mapping[str, float]) -> Verdict:
    sentence = (
        f"{leader} waits {_pct(trainer, 'wait-weights')} of the time until its weights are taken: "
        "publishing weights is the bottleneck"
    )
    return Verdict("weights", sentence, "a faster weight channel, or fewer and larger steps (algo.batch_size)")


def _waits_for_capacity(leader: str, trainer: Mapping[str, float]) -> Verdict:
    sentence = (
        f"{leader} waits for capacity {_pct(trainer, 'wait-capacity')} of the time: room (memory) is the bottleneck"
    )
    return Verdict("capacity", sentence, "see which actor holds the memory that the trainer asks for")


def _waits_for_memory(leader: str, trainer: Mapping[str, float]) -> Verdict:
    sentence = (
        f"{leader} waits {_pct(trainer, 'wait-memory')} of the time until the device has changed hands: "
        "switching memory is the bottleneck"
    )
    return Verdict("memory", sentence, "larger steps (algo.batch_size), or see `myxa mem` for what is moved each time")


_TRAINER_WAITS = ("wait-data", "wait-weights", "wait-capacity", "wait-memory")
_WAITING = {
    "wait-weights": _waits_for_weights,
    "wait-capacity": _waits_for_capacity,
    "wait-memory": _waits_for_memory,
}
_REASONS = {
    "wait-capacity": "for the trainer to catch up",
    "wait-data": "for work",
    "wait-weights": "for weights",
    "wait-memory": "for the device",
}
"""What a rollout actor that does not generate waits for."""


def _leader(shares: Mapping[str, Mapping[str, float]]) -> str:
    """The lowest rank that was measured: other ranks wait for it and would blame the wrong one."""
    ranks = [name for name, kinds in shares.items() if _role(name) == "trainer" and kinds]
    return min(ranks, key=lambda name: (len(name), name), default="")


def _role(name: str) -> str:
    return name.partition("/")[0]


def _mean(actors: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    kinds = {kind for shares in actors.values() for kind in shares}
    return {kind: sum(shares.get(kind, 0.0) for shares in actors.values()) / len(actors) for kind in kinds}


def _pct(shares: Mapping[str, float], kind: str) -> str:
    return f"{shares.get(kind, 0.0) * 100:.0f} %"


def _verb(who: str, verb: str) -> str:
    return f"{who} {verb}" if who.endswith("actors") else f"{who} {verb}s"


def _do(who: str) -> str:
    return _verb(who, "compute")
