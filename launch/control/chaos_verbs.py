"""Verbs that make a run fail on purpose, and show what was done. Only in runs with `run.chaos = true`."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec

from ...core.chaos import MARKS, POINTS
from ...core.config.chaos import FaultName
from ...core.errors import ConfigError
from ...core.knobs import Operator
from ..chaos.lots import Lots
from ..chaos.partition import LAUNCHER
from ..supervisor.roster import ActorRecord
from .process_verbs import Reason
from .targets import find_targets
from .verb import Arguments, Room, Verb

MIB = 1 << 20
MAX_MB = 1 << 20
Stretch = Annotated[float, msgspec.Meta(gt=0, le=3600)]
"""Seconds."""
Pattern = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class ChaosArguments(Arguments, frozen=True, kw_only=True):
    """Of `chaos`."""

    act: Literal["kill", "stop", "cont", "delay", "partition", "fill-disk", "random", "end"]
    """"stop" is for good (SIGSTOP), "delay" for `for_s`; "random": faults every `every_s`, until "end"."""
    target: Annotated[str, msgspec.Meta(max_length=200)] = ""
    """Of "kill", "stop", "cont", "delay" and "partition", which need one."""
    others: Annotated[str, msgspec.Meta(max_length=200)] = ""
    """Of "partition": from whom the target is cut off, "launcher" or actors; empty: from everybody."""
    for_s: Stretch = 2.0
    """How long "delay" holds a process, "partition" its connections, and "fill-disk" the space."""
    size_mb: Annotated[int, msgspec.Meta(ge=0, le=MAX_MB)] = 0
    """Of "fill-disk": so much of the run directory's file system on node 0, or what is left of it."""
    every_s: Stretch = 10.0
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 1
    faults: Annotated[tuple[FaultName, ...], msgspec.Meta(min_length=1, max_length=8)] = ("kill",)
    targets: Annotated[tuple[Pattern, ...], msgspec.Meta(max_length=64)] = ()
    """Of "random": shell patterns; empty: those of the run file."""
    reason: Reason = ""


async def _chaos(room: Room, arguments: ChaosArguments, who: Operator) -> dict[str, Any]:
    del who  # the desk notes it
    room.chaos.check(room.config)
    match arguments.act:
        case "random":
            targets = arguments.targets or room.config.chaos.targets
            lots = Lots(arguments.seed, arguments.faults, targets)
            room.chaos.begin_series(room, arguments.every_s, lots, arguments.for_s)
            return {"act": "random", "every_s": arguments.every_s, "seed": arguments.seed, "targets": list(targets)}
        case "end":
            return {"act": "end", "was_on": room.chaos.end_series()}
        case "fill-disk":
            if not arguments.size_mb:
                raise ConfigError("fill-disk: how much?", remedy="say --mb, such as --mb 64")
            taken = await room.chaos.fill_disk(room, arguments.size_mb * MIB, arguments.for_s)
            return {"act": "fill-disk", "num_bytes": taken, "for_s": arguments.for_s}
        case "kill" | "stop" | "cont" | "delay" | "partition":
            meant, others = _meant(room, arguments), _others(room, arguments.others)
            met = await room.chaos.strike(room, arguments.act, meant, arguments.for_s, others)
            told = {"others": others, "for_s": arguments.for_s} if arguments.act == "partition" else {}
            return {"act": arguments.act, "actors": list(met), **told}


def _meant(room: Room, arguments: ChaosArguments) -> list[ActorRecord]:
    if not arguments.target:
        raise ConfigError(f"chaos {arguments.act}: of whom?", remedy="name an actor, such as rollout/1")
    return [record for record in find_targets(arguments.target, room.supervisor.roster()) if record.pid]


def _others(room: Room, text: str) -> list[str]:
    if text == LAUNCHER:
        return [LAUNCHER]
    return [r.name for r in find_targets(text, room.supervisor.roster()) if r.pid] if text else []


async def _acts(room: Room, arguments: Arguments, who: Operator) -> dict[str, Any]:
    del arguments, who
    marks = sorted((room.run_dir.path / MARKS).glob("*.json"))
    return {
        "may_fail": room.config.run.chaos,
        "has_series": room.chaos.has_series,
        "acts": tuple(room.chaos.acts),
        "planned": list(room.config.chaos.strikes),
        "struck": [json.loads(mark.read_bytes()) for mark in marks],
    }


async def _points(room: Room, arguments: Arguments, who: Operator) -> dict[str, str]:
    del room, arguments, who
    return dict(POINTS)


VERBS: tuple[Verb[Any], ...] = (
    Verb("chaos", "operate", ChaosArguments, "make actors fail, now or at random", run=_chaos),
    Verb("chaos-acts", "view", Arguments, "what was made to fail so far", run=_acts),
    Verb("chaos-points", "view", Arguments, "points of actors' lives for chaos.strikes", run=_points),
)
