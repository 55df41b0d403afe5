"""What one actor's time goes into, in one sentence. Pure: shares in, words out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...core.activity import ACTIVITY_KINDS
from .bottleneck import AT_LIMIT, without_start

_NUM_PARTS = 2
_LEAST = 0.02
"""Parts below this share of the time are not worth a word."""

_WORDS: dict[str, str] = {
    "compute": "computes",
    "wait-data": "waits for data",
    "wait-weights": "waits for weights",
    "wait-capacity": "waits for room",
    "wait-memory": "waits for the device's memory",
    "wait-env": "waits for the environment",
    "paused": "is paused",
    "other": "does what nobody accounts for",
}
_ROLE_WORDS: dict[tuple[str, str], str] = {
    ("rollout", "compute"): "generates",
    ("rollout", "wait-capacity"): "waits for the trainer to catch up",
    ("rollout", "wait-data"): "waits for prompts",
    ("trainer", "wait-weights"): "waits for engines to take its weights",
    ("buffer", "wait-data"): "waits for somebody to ask",
    ("coordinator", "wait-data"): "waits for something to do",
    ("coordinator", "wait-weights"): "waits for engines to adopt a version",
    ("monitor", "wait-data"): "waits for telemetry",
    ("memory", "wait-data"): "waits for somebody to ask",
}
_PART_WORDS: dict[str, str] = {
    AT_LIMIT: "with as many groups as its concurrency allows",
    "wait-data/reward": "for rewards",
    "wait-data/claim": "for a whole batch",
    "wait-data/ranks": "for other trainer ranks",
    "wait-data/next step": "for the leader",
    "wait-weights/canary": "for an engine's answer to the canary prompts",
    "wait-weights/first weights": "for its first weights",
    "wait-weights/adopt": "for a version that is made but not yet here",
}


@dataclass(frozen=True, slots=True)
class Idleness:
    """How an actor spends its time."""

    sentence: str
    largest: str
    """Kind with the largest share."""
    share: float
    """Of the largest kind that is not work; 0..1."""


def idleness(name: str, kinds: Mapping[str, float]) -> Idleness:
    """`kinds`: kind, or "kind/name" -> share of the actor's time, start-up included."""
    shares = without_start(kinds)
    if not shares:
        return Idleness(f"{name} is starting", "other", 0.0)
    order = sorted(ACTIVITY_KINDS, key=lambda kind: -shares.get(kind, 0.0))
    said = [_phrase(name, kind, shares) for kind in order if shares.get(kind, 0.0) >= _LEAST]
    idle = max(shares.get(kind, 0.0) for kind in ACTIVITY_KINDS if kind != "compute")
    return Idleness(f"{name} " + ", ".join(said or ["does nothing that was measured"]), order[0], idle)


def unattributed(kinds: Mapping[str, float]) -> float:
    """Share of an actor's time after start-up that is booked to nothing better than "other"."""
    return without_start(kinds).get("other", 0.0)


def _phrase(name: str, kind: str, shares: Mapping[str, float]) -> str:
    words = _ROLE_WORDS.get((name.partition("/")[0], kind), _WORDS[kind])
    named = [(share, part) for part, share in shares.items() if part.startswith(f"{kind}/") and share >= _LEAST]
    parts = sorted(named, reverse=True)
    told = [_PART_WORDS.get(part, part.partition("/")[2]) for _, part in parts[:_NUM_PARTS]]
    detail = f" ({', '.join(told)})" if told else ""
    return f"{words} {shares[kind] * 100:.0f} %{detail}"
