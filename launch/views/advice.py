"""Advice: turns a bottleneck into one live knob with a value, or one line of the run file. Pure.

Each rule makes one careful move and names its reason; the next verdict shows whether it helped. Where no rule has a
move, the text of `bottleneck.REMEDIES` is shown.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from ...core.knobs import KnobState, KnobValue
from .bottleneck import Bottleneck, Bound
from .knob_table import declared

_LARGEST_FACTOR = 4
"""No move makes a number larger than so many times what it was: shares say the direction well, the distance badly."""

_WORKERS_BY_ITSELF = 4
"""Reward workers that a rollout actor starts at most when the run file names no number."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a rule needs to know of the run. 0: not known."""

    knobs: Mapping[str, KnobState] = field(default_factory=dict[str, KnobState])
    num_rollouts: int = 1
    num_samples: int = 1
    max_running: int = 0
    slots_total: int = 0
    reward_workers: int = 0
    """As the run file says; 0: up to four, if the function needs any."""
    is_data_endless: bool = False
    cores: int = 0
    """Of the machine that asks."""
    most_rollouts: int = 0
    """Rollout actors that the cores or GPUs of the run have room for."""
    more_devices: str = ""
    """Unused GPUs that more rollout actors would need."""
    is_over: bool = False
    """No knob can be turned any more: the next run can."""


class Advice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One move."""

    knob: str
    """Live knob; empty: it can only be changed in the run file, or by a command."""
    old: KnobValue
    new: KnobValue
    why: str
    key: str = ""
    """Key of the run file that says the same."""
    command: str = ""
    """What to type; empty: change the run file."""


def advise(verdict: Bottleneck, facts: Facts) -> Advice | None:
    found = (rule(verdict, facts) for rule in _RULES.get(verdict.bound, ()))
    return next((advice for advice in found if advice is not None), None)


def what_to_try(verdict: Bottleneck, facts: Facts) -> str:
    """The one line that every view shows with a verdict: a command or a line of the run file, and why."""
    advice = advise(verdict, facts)
    if advice is not None:
        return f"{change_of(advice, is_over=facts.is_over)}: {advice.why}"
    if verdict.bound == "generation" and facts.most_rollouts:
        cores = f" ({facts.cores} cores)" if facts.cores else ""
        return (
            f"this machine has no room for more than {facts.most_rollouts} rollout actors{cores}: shorter answers "
            "(`myxa set max_new_tokens=N`), a faster engine, or one more machine (`myxa launch --join HOST:PORT`)"
        )
    return verdict.remedy


def change_of(advice: Advice, *, is_over: bool = False) -> str:
    in_file = f"in the run file: {advice.key} = {advice.new}" if advice.key else ""
    return (in_file or advice.command) if is_over else (f"`{advice.command}`" if advice.command else in_file)


def facts_of_file(config: Mapping[str, Any], num_rollouts: int, cores: int) -> Facts:
    """Of a run of which only files are left: the knobs as its resolved run file has them."""
    knobs: dict[str, KnobState] = {}
    for tunable in declared():
        value = _value(config, tunable.key)
        if value is not None:
            knobs[tunable.name] = KnobState(tunable=tunable, value=value, first=value)
    samples, workers, running = (
        _value(config, key) for key in ("rollout.num_samples", "reward.workers", "engine.max_running")
    )
    is_on_gpus = _value(config, "roles.rollout.devices") not in (None, "cpu")
    return Facts(
        knobs=knobs,
        num_rollouts=max(num_rollouts, 1),
        num_samples=int(samples or 1),
        max_running=int(running or 0),
        reward_workers=int(workers or 0),
        is_data_endless=not _value(config, "data.max_passes"),
        cores=cores,
        most_rollouts=0 if is_on_gpus else most_on_cores(cores, int(_value(config, "roles.rollout.threads") or 1)),
        is_over=True,
    )


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def most_on_cores(cores: int, threads: int) -> int:
    """Engines of so many threads that compute at the same time."""
    return max(1, cores // max(threads, 1)) if cores else 0


def _value(config: Mapping[str, Any], key: str) -> Any:
    """Of a dotted key; None where it is not there, or no plain value."""
    found: Any = config
    for part in key.split(".") if key else ():
        found = cast("Mapping[str, Any]", found).get(part) if isinstance(found, Mapping) else None
    return found if isinstance(found, bool | int | float | str) else None


def _number(facts: Facts, knob: str) -> int | None:
    state = facts.knobs.get(knob)
    if state is None:
        return None
    value = state.value if state.pending is None else state.pending
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _turn(facts: Facts, knob: str, new: int, why: str) -> Advice | None:
    """To `new`, or as far as the knob goes; None when it has that value."""
    old = _number(facts, knob)
    if old is None:
        return None
    tunable = facts.knobs[knob].tunable
    new = min(new, math.floor(tunable.high)) if tunable.high is not None else new
    new = max(new, math.ceil(tunable.low)) if tunable.low is not None else new
    if new == old:
        return None
    return Advice(knob, old, new, why, tunable.key, f"myxa set {knob}={new}")


def _more_concurrency(verdict: Bottleneck, facts: Facts) -> Advice | None:
    """As much more as the trainer misses, within what engines and slots have room for."""
    old = _number(facts, "concurrency")
    if old is None:
        return None
    wanted = math.ceil(old / max(0.05, 1.0 - verdict.share))
    rooms = [wanted, _LARGEST_FACTOR * max(old, 1)]
    if facts.max_running:
        rooms.append(math.ceil(facts.max_running / max(facts.num_samples, 1)))
    if facts.slots_total:
        rooms.append(math.ceil(facts.slots_total / max(facts.num_rollouts, 1)))
    new = max(min(rooms), 1)
    if new <= old:
        return None
    why = f"the trainer waits {verdict.share * 100:.0f} % for data and the engines have room for more groups at once"
    return _turn(facts, "concurrency", new, why)


def _more_staleness(verdict: Bottleneck, facts: Facts) -> Advice | None:
    old = _number(facts, "max_staleness")
    if old is None:
        return None
    reasons: dict[Bound, str] = {
        "weights": "engines may keep generating with their version while the next one travels",
        "capacity": "the rollout actors may run one version further ahead of the trainer",
        "concurrency": "more groups may be under way at once",
    }
    return _turn(facts, "max_staleness", old + 1, reasons.get(verdict.bound, "generation may run further ahead"))


def _more_reward_workers(verdict: Bottleneck, facts: Facts) -> Advice | None:
    old = facts.reward_workers or _WORKERS_BY_ITSELF
    new = min(2 * old, facts.cores // facts.num_rollouts) if facts.cores else 2 * old
    if new <= facts.reward_workers:
        return None
    why = "answers wait for their rewards; worker processes compute them side by side"
    return Advice("", facts.reward_workers, new, why, "reward.workers")


def _more_rollouts(verdict: Bottleneck, facts: Facts) -> Advice | None:
    new = min(math.ceil(facts.num_rollouts / max(0.05, 1.0 - verdict.share)), _LARGEST_FACTOR * facts.num_rollouts)
    new = max(new, facts.num_rollouts + 1)
    new = min(new, facts.most_rollouts) if facts.most_rollouts else new
    if new <= facts.num_rollouts:
        return None
    why = f"the trainer waits {verdict.share * 100:.0f} % for data, and no knob makes the engines compute faster"
    devices = f" --devices {facts.more_devices}" if facts.more_devices else ""
    return Advice("", facts.num_rollouts, new, why, "roles.rollout.count", f"myxa scale rollout={new}{devices}")


def _more_data(verdict: Bottleneck, facts: Facts) -> Advice | None:
    if facts.is_data_endless:
        return None
    return Advice(
        "", "", 0, "the rollout actors get no prompts; 0 goes through the data without end", "data.max_passes"
    )


def _larger_microbatches(verdict: Bottleneck, facts: Facts) -> Advice | None:
    old = _number(facts, "max_tokens_per_microbatch")
    why = "the trainer computes all the time; larger micro-batches use the device better, where memory allows"
    return None if old is None else _turn(facts, "max_tokens_per_microbatch", 2 * old, why)


def _rarer_weights(verdict: Bottleneck, facts: Facts) -> Advice | None:
    """Only as far as the staleness bound has room for: samples grow older by it."""
    every, bound = _number(facts, "weights_every"), _number(facts, "max_staleness")
    if every is None or bound is None or 2 * every > bound:
        return None
    return _turn(facts, "weights_every", 2 * every, "fewer versions travel; max_staleness has room for older samples")


def _rarer_checks(verdict: Bottleneck, facts: Facts) -> Advice | None:
    every = _number(facts, "guard_every")
    why = f"comparing trainer and engines takes {verdict.share * 100:.0f} % of the trainer's time"
    return None if not every else _turn(facts, "guard_every", _LARGEST_FACTOR * every, why)


def _advise_resume(verdict: Bottleneck, facts: Facts) -> Advice | None:
    return Advice("", "", "", "an operator or the guard paused the run", command="myxa resume")


Rule = Callable[[Bottleneck, Facts], Advice | None]

_RULES: dict[Bound, tuple[Rule, ...]] = {
    "concurrency": (_more_concurrency, _more_staleness),
    "capacity": (_more_staleness,),
    "weights": (_rarer_weights, _more_staleness),
    "guard": (_rarer_checks,),
    "reward": (_more_reward_workers,),
    "generation": (_more_rollouts,),
    "data": (_more_data,),
    "training": (_larger_microbatches,),
    "paused": (_advise_resume,),
}
