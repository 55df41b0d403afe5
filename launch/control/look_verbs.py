"""Verbs that look into the run's processes and change nothing there: logs, stack, facts, profile.

A process that answers tells its stacks itself; of one that does not, its node's agent finds them out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from ...actors.contracts.roles import RolloutContract
from ...core.actor import with_deadline
from ...core.engine_profile import EngineTrace
from ...core.errors import CallError, ConfigError, LaunchError, MyxaError
from ...core.knobs import Operator
from ..contracts import (
    LogChunk,
    LogRequest,
    ProcessContract,
    ProcessFacts,
    ProfileOrder,
    ProfileReply,
    StackReply,
    process_name,
)
from ..supervisor.roster import ActorRecord
from .targets import find_targets
from .verb import Arguments, Room, Verb

T = TypeVar("T")

LIVE_S = 2.0
"""How long a process may take to tell its own stacks."""
FOLLOW_S = 0.5
"""Between two looks at a log that is followed."""
SPARE_S = 60.0
"""A profile may take so much longer than it lasts, to be written."""
ENGINE_SPARE_S = 80.0
"""The same of a server: it is waited for to begin (20 s at most), and to write (50 s)."""
LAUNCHER = "launcher"

Target = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class LogsArguments(Arguments, frozen=True, kw_only=True):
    """Whose log, and how much of it."""

    target: Target
    """As everywhere, or "launcher", "launcher/1"."""
    num_lines: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 100
    grep: Annotated[str, msgspec.Meta(max_length=200)] = ""
    """Only lines that hold this text."""
    engine: bool = False
    """Of the server that the actor launched."""


class StackArguments(Arguments, frozen=True, kw_only=True):
    """Whose stacks."""

    target: Target
    py_spy: bool = False
    """By py-spy, from outside."""


class TargetArguments(Arguments, frozen=True, kw_only=True):
    """Whose facts."""

    target: Target


class ProfileArguments(Arguments, frozen=True, kw_only=True):
    """Whom to look at for how long."""

    target: Target
    kind: Literal["stacks", "memory", "torch"] = "stacks"
    for_s: Annotated[float, msgspec.Meta(gt=0, le=600)] = 10.0
    interval_s: Annotated[float, msgspec.Meta(ge=0.001, le=1)] = 0.01
    engine: bool = True
    """Also of the servers behind rollout actors, by their own profiler; never with "memory"."""


# -- logs --------------------------------------------------------------------------------------------------------------


async def _logs(room: Room, arguments: LogsArguments, who: Operator) -> list[LogChunk]:
    return [chunk for _, chunk in await _first_chunks(room, arguments)]


async def _follow(room: Room, arguments: LogsArguments, who: Operator) -> AsyncIterator[LogChunk]:
    """The last lines, then what is added, until the caller goes away."""
    held = dict(await _first_chunks(room, arguments))
    for chunk in held.values():
        yield chunk
    while True:
        is_more = False
        for (node, name), last in list(held.items()):
            request = LogRequest(
                name=name, grep=arguments.grep, engine=arguments.engine, file=last.file, offset=last.offset
            )
            try:
                chunk = held[node, name] = await room.supervisor.agent(node).read_log(request)
            except MyxaError:  # the node is lost, or the log is; the others go on
                del held[node, name]
                continue
            is_more = is_more or chunk.is_more
            if chunk.lines:
                yield chunk
        if not held:
            return
        if not is_more:
            await asyncio.sleep(FOLLOW_S)


async def _first_chunks(room: Room, arguments: LogsArguments) -> list[tuple[tuple[int, str], LogChunk]]:
    meant = _log_owners(room, arguments.target)
    requests = [
        room.supervisor.agent(node).read_log(
            LogRequest(name=name, num_lines=arguments.num_lines, grep=arguments.grep, engine=arguments.engine)
        )
        for node, name in meant
    ]
    answers = await asyncio.gather(*requests, return_exceptions=True)
    found = [(owner, answer) for owner, answer in zip(meant, answers, strict=True) if isinstance(answer, LogChunk)]
    if not found:  # of several, those without a log are left out
        raise next(answer for answer in answers if isinstance(answer, BaseException))
    return found


def _log_owners(room: Room, target: str) -> list[tuple[int, str]]:
    """(node, name) of the logs that are meant; also those of actors that have left the run."""
    role, _, number = target.partition("/")
    if role == LAUNCHER and (not number or number.isdigit()):
        node = int(number or "0")
        if node not in room.supervisor.nodes:
            raise ConfigError(f"node {node} takes no part", remedy=f"there are {room.supervisor.nodes}")
        return [(node, LAUNCHER)]
    try:
        return [(record.node, record.name) for record in find_targets(target, room.supervisor.roster())]
    except ConfigError:
        if "/" in target and (room.run_dir.logs / "latest" / f"{target.replace('/', '.')}.log").exists():
            return [(0, target)]
        raise


# -- stacks and facts --------------------------------------------------------------------------------------------------


async def _stack(room: Room, arguments: StackArguments, who: Operator) -> list[StackReply]:
    meant = find_targets(arguments.target, room.supervisor.roster())
    looks = [_stack_of(room, record.name, record.node, py_spy=arguments.py_spy) for record in meant]
    return await _all_or_told(looks, [record.name for record in meant])


async def _stack_of(room: Room, name: str, node: int, *, py_spy: bool) -> StackReply:
    if not py_spy:
        try:
            return await with_deadline(_process(room, name), LIVE_S).stacks()
        except CallError as error:
            room.supervisor.ctx.log.info("%s does not tell its stacks itself: %s", name, error)
    return await room.supervisor.agent(node).stacks_from_outside(name, py_spy)


async def _all_or_told(looks: Sequence[Awaitable[StackReply]], names: list[str]) -> list[StackReply]:
    """Of several, one that cannot be looked at says why in its place; a single one raises."""
    answers = await asyncio.gather(*looks, return_exceptions=len(looks) > 1)
    told: list[StackReply] = []
    for name, answer in zip(names, answers, strict=True):
        if isinstance(answer, MyxaError):
            told.append(StackReply(name=name, pid=0, text=str(answer), how="refused"))
        elif isinstance(answer, BaseException):
            raise answer
        else:
            told.append(answer)
    return told


async def _facts(room: Room, arguments: TargetArguments, who: Operator) -> list[ProcessFacts]:
    meant = find_targets(arguments.target, room.supervisor.roster())
    return list(await asyncio.gather(*(_asked(r.name, _process(room, r.name).facts()) for r in meant)))


# -- profile -----------------------------------------------------------------------------------------------------------


async def _profile(room: Room, arguments: ProfileArguments, who: Operator) -> list[ProfileReply]:
    """Of several, one that refuses says why in its place; raises if all of them do."""
    meant = find_targets(arguments.target, room.supervisor.roster())
    order = ProfileOrder(kind=arguments.kind, duration_s=arguments.for_s, interval_s=arguments.interval_s)
    is_served = room.config.roles.rollout.kind == "sglang" and arguments.engine and arguments.kind != "memory"
    looks = [
        (record, look(room, record, order))
        for record in meant
        for look in ((_own_profile, _engine_profiles) if is_served and record.role == "rollout" else (_own_profile,))
    ]
    answers = await asyncio.gather(*(look for _, look in looks), return_exceptions=True)
    told: list[ProfileReply] = []
    errors: list[MyxaError] = []
    for (record, _), answer in zip(looks, answers, strict=True):
        if isinstance(answer, MyxaError):
            errors.append(answer)
            told.append(_refusal(record.name, record.node, str(answer).removeprefix(f"{record.name}: ")))
        elif isinstance(answer, BaseException):
            raise answer
        else:
            told += answer
    if len(errors) == len(told):
        raise errors[0]
    return told


async def _own_profile(room: Room, record: ActorRecord, order: ProfileOrder) -> list[ProfileReply]:
    ref = with_deadline(_process(room, record.name), order.duration_s + SPARE_S)
    return [await _asked(record.name, ref.profile(order))]


async def _engine_profiles(room: Room, record: ActorRecord, order: ProfileOrder) -> list[ProfileReply]:
    """Never raises for a server's sake: what the actor's own process did is told all the same."""
    ref = with_deadline(room.node.ref(RolloutContract, record.name), order.duration_s + ENGINE_SPARE_S)
    try:
        traces = await ref.profile_engine(order.duration_s)
    except CallError as error:
        traces = (EngineTrace(engine=record.name, refused=str(error)),)
    return [_of_engine(record, trace) for trace in traces]


def _of_engine(record: ActorRecord, trace: EngineTrace) -> ProfileReply:
    name = f"{record.name}, its server{'' if trace.engine == record.name else f' {trace.engine}'}"
    if trace.refused:
        return _refusal(name, record.node, trace.refused)
    return ProfileReply(name=name, node=record.node, path=trace.place, num_samples=len(trace.files), top=trace.files)


def _refusal(name: str, node: int, why: str) -> ProfileReply:
    return ProfileReply(name=name, node=node, path="", num_samples=0, top=(), refused=why)


async def _asked(name: str, answer: Awaitable[T]) -> T:
    """An error of a process that does not answer names the way that needs no answer."""
    try:
        return await answer
    except CallError as error:
        raise LaunchError(f"{name}: {error}", remedy="`myxa stack` also works on a process that hangs") from error


def _process(room: Room, name: str) -> ProcessContract:
    return room.node.ref(ProcessContract, process_name(name))


VERBS: tuple[Verb[Any], ...] = (
    Verb("logs", "view", LogsArguments, "the last lines of an actor's log, on whatever node", run=_logs),
    Verb("logs-follow", "view", LogsArguments, "the same, and what is added", stream=_follow),
    Verb("stack", "view", StackArguments, "where an actor's process is: threads and tasks", run=_stack),
    Verb("facts", "view", TargetArguments, "what an actor's process holds: memory, descriptors, threads", run=_facts),
    Verb("profile", "operate", ProfileArguments, "where an actor's process spends its time", run=_profile),
)
