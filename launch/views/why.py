"""Why the run is not faster, and what to do about it: verdict, advice and each actor's time in one record.

Knows: time shares, facts of the run. Must not know: how they were got, how they are shown. Pure, but for
`explain_files`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from ...core.activity import ACTIVITY_KINDS
from ...core.errors import ConfigError
from ...core.messages import Record
from ...core.suggestion import suggest
from .advice import Advice, Facts, advise, facts_of_file, num_cores, what_to_try
from .bottleneck import Filtered, engines_look_full, judge, without_start
from .idle import idleness
from .run_files import load_run


class Reason(Record, frozen=True):
    """The answer of `myxa why`."""

    target: str
    """Actor that was asked about; empty: the run."""
    bound: str
    """Kind of the bottleneck: generation, reward, training, ..."""
    sentence: str
    share: float
    """Of the time that is lost by it (0..1)."""
    remedy: str
    """What may be changed, in words."""
    to_try: str = ""
    """The same with its command, on one line, as all views show it."""
    knob: str = ""
    """Live knob to turn; empty: there is none."""
    old: bool | int | float | str = ""
    new: bool | int | float | str = ""
    key: str = ""
    """Key of the run file."""
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
    """Of the whole run."""
    verdict = judge(shares, engines_are_full=engines_are_full, filtered=filtered, disk=disk)
    return _with_advice(
        Reason(
            target="",
            bound=verdict.bound,
            sentence=verdict.sentence,
            share=verdict.share,
            remedy=what_to_try(verdict, facts),
            to_try=what_to_try(verdict, facts),
            window_s=window_s,
            shares=_kinds(shares),
            details=tuple(idleness(name, shares[name]).sentence for name in sorted(shares)),
        ),
        advise(verdict, facts),
    )


def explain_actors(
    names: list[str],
    shares: Mapping[str, Mapping[str, float]],
    facts: Facts,
    *,
    window_s: float,
    engines_are_full: bool = False,
    filtered: Filtered | None = None,
    disk: str = "",
) -> Reason:
    """Of some actors: what each does, and what of it the run's own bottleneck explains."""
    whole = explain(shares, facts, window_s=window_s, engines_are_full=engines_are_full, filtered=filtered, disk=disk)
    told = [idleness(name, shares.get(name, {})) for name in names]
    return Reason(
        target=", ".join(names),
        bound=whole.bound,
        sentence="; ".join(each.sentence for each in told),
        share=max((each.share for each in told), default=0.0),
        remedy=f"the run as a whole: {whole.sentence}",
        to_try=whole.to_try,
        knob=whole.knob,
        old=whole.old,
        new=whole.new,
        key=whole.key,
        command=whole.command,
        window_s=window_s,
        shares=_kinds({name: shares.get(name, {}) for name in names}),
    )


def explain_files(run_dir: Path, target: str = "") -> Reason:
    """Of a run that is over, or that nobody answers for: over all of it. Raises ConfigError for a folder of no run, or
    an actor that was not in it."""
    run = load_run(run_dir)
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


def _with_advice(reason: Reason, advice: Advice | None) -> Reason:
    if advice is None:
        return reason
    return msgspec.structs.replace(
        reason,
        remedy=advice.why,
        knob=advice.knob,
        old=advice.old,
        new=advice.new,
        key=advice.key,
        command=advice.command,
    )


def _kinds(shares: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for name, kinds in shares.items():
        left = without_start(kinds)
        found[name] = {kind: round(left.get(kind, 0.0), 4) for kind in ACTIVITY_KINDS} if left else {}
    return found
