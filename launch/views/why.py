"""Why a run is not faster and what to do about it: bottleneck, advice, and a sentence about each actor's time.

Pure, except `explain_files`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ...core.activity import ACTIVITY_KINDS
from ...core.errors import ConfigError
from ...core.messages import Record
from ...core.suggestion import suggest
from .advice import Facts, advise, facts_of_file, num_cores, what_to_try
from .bottleneck import AT_LIMIT, Filtered, engines_look_full, judge, without_start
from .run_files import RunFiles, load_run

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
    "other": "does what is not accounted for",
}
_ROLE_WORDS: dict[tuple[str, str], str] = {
    ("rollout", "compute"): "generates",
    ("rollout", "wait-capacity"): "waits for the trainer to catch up",
    ("rollout", "wait-data"): "waits for prompts",
    ("trainer", "wait-weights"): "waits for engines to take its weights",
    ("buffer", "wait-data"): "waits for requests",
    ("coordinator", "wait-data"): "waits for something to do",
    ("coordinator", "wait-weights"): "waits for engines to adopt a version",
    ("monitor", "wait-data"): "waits for telemetry",
    ("memory", "wait-data"): "waits for requests",
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
    """Share of an actor's time after start-up that is booked as "other"."""
    return without_start(kinds).get("other", 0.0)


def _phrase(name: str, kind: str, shares: Mapping[str, float]) -> str:
    words = _ROLE_WORDS.get((name.partition("/")[0], kind), _WORDS[kind])
    named = [(share, part) for part, share in shares.items() if part.startswith(f"{kind}/") and share >= _LEAST]
    parts = sorted(named, reverse=True)
    named_parts = [_PART_WORDS.get(part, part.partition("/")[2]) for _, part in parts[:_NUM_PARTS]]
    detail = f" ({', '.join(named_parts)})" if named_parts else ""
    return f"{words} {shares[kind] * 100:.0f} %{detail}"


class Reason(Record, frozen=True):
    """The answer of `myxa why`."""

    target: str
    """Actor that was asked about; empty: the run."""
    bound: str
    sentence: str
    share: float
    """Of the time that is lost by it (0..1)."""
    remedy: str
    to_try: str = ""
    """The same with its command, on one line, as all views show it."""
    knob: str = ""
    """Live knob to turn; empty: there is none."""
    old: bool | int | float | str = ""
    new: bool | int | float | str = ""
    key: str = ""
    command: str = ""
    """What to type; empty: change the run file."""
    window_s: float = 0.0
    shares: dict[str, dict[str, float]] = {}
    """Actor -> kind -> share of its time in the window, start-up left out."""
    details: tuple[str, ...] = ()
    """A sentence about each actor that was asked about."""


def explain(
    shares: Mapping[str, Mapping[str, float]],
    facts: Facts,
    *,
    window_s: float,
    engines_are_full: bool = False,
    filtered: Filtered | None = None,
    disk: str = "",
) -> Reason:
    verdict = judge(shares, engines_are_full=engines_are_full, filtered=filtered, disk=disk)
    advice, to_try = advise(verdict, facts), what_to_try(verdict, facts)
    return Reason(
        target="",
        bound=verdict.bound,
        sentence=verdict.sentence,
        share=verdict.share,
        remedy=advice.why if advice else to_try,
        to_try=to_try,
        knob=advice.knob if advice else "",
        old=advice.old if advice else "",
        new=advice.new if advice else "",
        key=advice.key if advice else "",
        command=advice.command if advice else "",
        window_s=window_s,
        shares=_kinds(shares),
        details=tuple(idleness(name, shares[name]).sentence for name in sorted(shares)),
    )


def explain_actors(
    names: list[str], shares: Mapping[str, Mapping[str, float]], facts: Facts, *, window_s: float, **known: Any
) -> Reason:
    whole = explain(shares, facts, window_s=window_s, **known)
    idle = [idleness(name, shares.get(name, {})) for name in names]
    return msgspec.structs.replace(
        whole,
        target=", ".join(names),
        sentence="; ".join(each.sentence for each in idle),
        share=max((each.share for each in idle), default=0.0),
        remedy=f"the run as a whole: {whole.sentence}",
        shares=_kinds({name: shares.get(name, {}) for name in names}),
        details=(),
    )


def explain_files(run_dir: Path, target: str = "") -> Reason:
    """Of a run that has ended or does not answer: over all of it. Raises ConfigError for a folder of no run, or an
    actor that was not in it."""
    return explain_run(load_run(run_dir), target)


def explain_run(run: RunFiles, target: str = "") -> Reason:
    shares, gauges = run.shares(), run.gauges()
    facts = facts_of_file(run.config, sum(name.startswith("rollout/") for name in shares), num_cores())
    span = run.wall_range_s
    window_s = span[1] - span[0] if span else 0.0
    full, filtered = engines_look_full(gauges), Filtered.of(gauges)
    if not target:
        return explain(shares, facts, window_s=window_s, engines_are_full=full, filtered=filtered)
    names = actors_of(target, shares)
    return explain_actors(names, shares, facts, window_s=window_s, engines_are_full=full, filtered=filtered)


def actors_of(target: str, shares: Mapping[str, object]) -> list[str]:
    """Measured actors that a target names. Raises ConfigError for one that names none."""
    role = target.removesuffix("/*")
    found = sorted(name for name in shares if name == role or (name.startswith(f"{role}/") and "/" not in role))
    if not found:
        raise ConfigError(f"no actor of this run is called {target!r}", remedy=suggest(target, shares))
    return found


def change_text(reason: Reason) -> str:
    """What to do, on one line: a command, or a line of the run file; empty where nothing can be named."""
    if reason.command:
        return reason.command
    if reason.key:
        return f"in the run file: {reason.key} = {reason.new}"
    return ""


def _kinds(shares: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for name, kinds in shares.items():
        left = without_start(kinds)
        found[name] = {kind: round(left.get(kind, 0.0), 4) for kind in ACTIVITY_KINDS} if left else {}
    return found
