"""Verbs that look into a run and change nothing: `ps`, `status`, logs, stack, facts, profile, `trace`.

A process that answers reports its own stacks; its node's agent finds out those of a process that does not. `ps` asks
the supervisor, the kernel and the monitor, and leaves blanks where one of them does not answer. `status` is everything
that the live view shows, in one answer. `trace` writes the timeline up to now and returns the file's path.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import psutil

from ...actors.contracts import BufferContract, MonitorContract, RolloutContract
from ...actors.sinks.chrome_trace import TRACE_FILE
from ...core.errors import CallError, ConfigError, LaunchError, MyxaError
from ...core.knobs import Operator
from ...core.messages import BufferStats, Record, RunStatus
from ...core.protocols import EngineTrace
from ...core.refs import with_deadline
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
from ..run_watch import RunWatch
from ..supervisor.run_actors import ActorStatus
from .verb import Arguments, Verb, VerbContext, find_targets

T = TypeVar("T")

LIVE_S = 2.0
"""How long a process may take to report its own stacks."""
FOLLOW_S = 0.5
"""Between two looks at a log that is followed."""
SPARE_S = 60.0
"""A profile may take so much longer than it lasts, to be written."""
ENGINE_SPARE_S = 80.0
"""The same of a server: it is waited for to begin (20 s at most), and to write (50 s)."""
LAUNCHER = "launcher"

Target = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class LogsArguments(Arguments, frozen=True, kw_only=True):
    """Arguments of `logs`."""

    target: Target
    """As everywhere, or "launcher", "launcher/1"."""
    num_lines: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 100
    grep: Annotated[str, msgspec.Meta(max_length=200)] = ""
    """Only lines that hold this text."""
    engine: bool = False
    """Of the server that the actor launched."""


class StackArguments(Arguments, frozen=True, kw_only=True):
    """Arguments of `stack`."""

    target: Target
    py_spy: bool = False
    """By py-spy, from outside."""


class TargetArguments(Arguments, frozen=True, kw_only=True):
    """Arguments of `facts`."""

    target: Target


class ProfileArguments(Arguments, frozen=True, kw_only=True):
    """Arguments of `profile`."""

    target: Target
    kind: Literal["stacks", "memory", "torch"] = "stacks"
    for_s: Annotated[float, msgspec.Meta(gt=0, le=600)] = 10.0
    interval_s: Annotated[float, msgspec.Meta(ge=0.001, le=1)] = 0.01
    engine: bool = True
    """Also of the servers behind rollout actors, by their own profiler; never with "memory"."""


# -- logs --------------------------------------------------------------------------------------------------------------


async def _logs(context: VerbContext, arguments: LogsArguments, who: Operator) -> list[LogChunk]:
    return [chunk for _, chunk in await _first_chunks(context, arguments)]


async def _follow(context: VerbContext, arguments: LogsArguments, who: Operator) -> AsyncIterator[LogChunk]:
    """The last lines, then what is added, until the caller goes away."""
    held = dict(await _first_chunks(context, arguments))
    for chunk in held.values():
        yield chunk
    while True:
        is_more = False
        for (node, name), last in list(held.items()):
            request = LogRequest(
                name=name, grep=arguments.grep, engine=arguments.engine, file=last.file, offset=last.offset
            )
            try:
                chunk = held[node, name] = await context.supervisor.agent(node).read_log(request)
            except MyxaError:  # the node is lost, or the log is; the others are still followed
                del held[node, name]
                continue
            is_more = is_more or chunk.is_more
            if chunk.lines:
                yield chunk
        if not held:
            return
        if not is_more:
            await asyncio.sleep(FOLLOW_S)


async def _first_chunks(context: VerbContext, arguments: LogsArguments) -> list[tuple[tuple[int, str], LogChunk]]:
    meant = _log_owners(context, arguments.target)
    requests = [
        context.supervisor.agent(node).read_log(
            LogRequest(name=name, num_lines=arguments.num_lines, grep=arguments.grep, engine=arguments.engine)
        )
        for node, name in meant
    ]
    answers = await asyncio.gather(*requests, return_exceptions=True)
    found = [(owner, answer) for owner, answer in zip(meant, answers, strict=True) if isinstance(answer, LogChunk)]
    if not found:  # of several, those without a log are left out
        raise next(answer for answer in answers if isinstance(answer, BaseException))
    return found


def _log_owners(context: VerbContext, target: str) -> list[tuple[int, str]]:
    """(node, name) of the logs that are meant; also those of actors that have left the run."""
    role, _, number = target.partition("/")
    if role == LAUNCHER and (not number or number.isdigit()):
        node = int(number or "0")
        if node not in context.supervisor.nodes:
            raise ConfigError(f"node {node} takes no part", remedy=f"there are {context.supervisor.nodes}")
        return [(node, LAUNCHER)]
    try:
        return [(record.node, record.name) for record in find_targets(target, context.supervisor.statuses())]
    except ConfigError:
        if "/" in target and (context.run_dir.logs / "latest" / f"{target.replace('/', '.')}.log").exists():
            return [(0, target)]
        raise


# -- stacks and facts --------------------------------------------------------------------------------------------------


async def _stack(context: VerbContext, arguments: StackArguments, who: Operator) -> list[StackReply]:
    meant = find_targets(arguments.target, context.supervisor.statuses())
    looks = [_stack_of(context, record.name, record.node, py_spy=arguments.py_spy) for record in meant]
    return await _all_answers(looks, [record.name for record in meant])


async def _stack_of(context: VerbContext, name: str, node: int, *, py_spy: bool) -> StackReply:
    if not py_spy:
        try:
            return await with_deadline(_process(context, name), LIVE_S).stacks()
        except CallError as error:
            context.supervisor.ctx.log.info("%s does not report its own stacks: %s", name, error)
    return await context.supervisor.agent(node).stacks_from_outside(name, py_spy)


async def _all_answers(looks: Sequence[Awaitable[StackReply]], names: list[str]) -> list[StackReply]:
    """Of several, one that cannot be looked at says why in its place; a single one raises."""
    answers = await asyncio.gather(*looks, return_exceptions=len(looks) > 1)
    replies: list[StackReply] = []
    for name, answer in zip(names, answers, strict=True):
        if isinstance(answer, MyxaError):
            replies.append(StackReply(name=name, pid=0, text=str(answer), how="refused"))
        elif isinstance(answer, BaseException):
            raise answer
        else:
            replies.append(answer)
    return replies


async def _facts(context: VerbContext, arguments: TargetArguments, who: Operator) -> list[ProcessFacts]:
    meant = find_targets(arguments.target, context.supervisor.statuses())
    return list(await asyncio.gather(*(_asked(r.name, _process(context, r.name).facts()) for r in meant)))


# -- profile -----------------------------------------------------------------------------------------------------------


async def _profile(context: VerbContext, arguments: ProfileArguments, who: Operator) -> list[ProfileReply]:
    """Of several, one that refuses says why in its place; raises if all of them do."""
    meant = find_targets(arguments.target, context.supervisor.statuses())
    order = ProfileOrder(kind=arguments.kind, duration_s=arguments.for_s, interval_s=arguments.interval_s)
    is_served = context.config.roles.rollout.kind == "sglang" and arguments.engine and arguments.kind != "memory"
    looks = [
        (record, look(context, record, order))
        for record in meant
        for look in ((_own_profile, _engine_profiles) if is_served and record.role == "rollout" else (_own_profile,))
    ]
    answers = await asyncio.gather(*(look for _, look in looks), return_exceptions=True)
    replies: list[ProfileReply] = []
    errors: list[MyxaError] = []
    for (record, _), answer in zip(looks, answers, strict=True):
        if isinstance(answer, MyxaError):
            errors.append(answer)
            replies.append(_refusal(record.name, record.node, str(answer).removeprefix(f"{record.name}: ")))
        elif isinstance(answer, BaseException):
            raise answer
        else:
            replies += answer
    if len(errors) == len(replies):
        raise errors[0]
    return replies


async def _own_profile(context: VerbContext, record: ActorStatus, order: ProfileOrder) -> list[ProfileReply]:
    ref = with_deadline(_process(context, record.name), order.duration_s + SPARE_S)
    return [await _asked(record.name, ref.profile(order))]


async def _engine_profiles(context: VerbContext, record: ActorStatus, order: ProfileOrder) -> list[ProfileReply]:
    """Never raises for a server: the profile of the actor's own process is kept."""
    ref = with_deadline(context.node.ref(RolloutContract, record.name), order.duration_s + ENGINE_SPARE_S)
    try:
        traces = await ref.profile_engine(order.duration_s)
    except CallError as error:
        traces = (EngineTrace(engine=record.name, refused=str(error)),)
    return [_of_engine(record, trace) for trace in traces]


def _of_engine(record: ActorStatus, trace: EngineTrace) -> ProfileReply:
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


def _process(context: VerbContext, name: str) -> ProcessContract:
    return context.node.ref(ProcessContract, process_name(name))


LOOK_VERBS: tuple[Verb[Any], ...] = (
    Verb("logs", "view", LogsArguments, "the last lines of an actor's log, on whatever node", run=_logs),
    Verb("logs-follow", "view", LogsArguments, "the same, and what is added", stream=_follow),
    Verb("stack", "view", StackArguments, "where an actor's process is: threads and tasks", run=_stack),
    Verb("facts", "view", TargetArguments, "what an actor's process holds: memory, descriptors, threads", run=_facts),
    Verb("profile", "operate", ProfileArguments, "where an actor's process spends its time", run=_profile),
)


PS_ASK_S = 2.0
TIME_PREFIX = "time/"


class ActorRow(msgspec.Struct, frozen=True, kw_only=True):
    """One actor."""

    name: str
    role: str
    node: int
    host: str
    state: str
    """Of the supervision: waiting, starting, up, hung, draining, ending, exited, backing-off, failed, stopped."""
    pid: int
    """0: it has no process now."""
    attempt: int
    """0 is the first start."""
    epoch: int
    """Of its process in the registry; 0: it is not registered."""
    restarts_left: int
    """How often it may fail and be started again now."""
    devices: tuple[int, ...]
    """GPU numbers on its node."""
    uptime_s: float
    """Of its process; 0: it has none."""
    memory_bytes: int
    """Resident memory, of processes of this host; 0: not known."""
    doing: str
    """What it spent most of the last minute with, such as "wait-data 62 %"."""
    note: str = ""
    """Why it waits now, where a person must act: its disk."""


async def _ps(context: VerbContext, arguments: Arguments, who: Operator) -> list[ActorRow]:
    roster = context.supervisor.statuses()
    now = context.node.clock.wall()
    here = socket.gethostname()
    shares, disk = await asyncio.gather(_shares(context), _disk(context))
    return [
        ActorRow(
            name=actor.name,
            role=actor.role,
            node=actor.node,
            host=actor.host,
            state=actor.state,
            pid=actor.pid,
            attempt=actor.attempt,
            epoch=actor.epoch,
            uptime_s=max(0.0, now - actor.started_wall_s) if actor.pid and actor.started_wall_s else 0.0,
            restarts_left=actor.restarts_left,
            devices=actor.devices,
            memory_bytes=_memory(actor.pid) if actor.pid and actor.host in ("", here) else 0,
            doing=doing(shares.get(f"{TIME_PREFIX}{actor.name}", {})),
            note=disk if actor.name == "buffer" else "",
        )
        for actor in roster
    ]


async def _shares(context: VerbContext) -> Mapping[str, Mapping[str, float]]:
    if not context.node.peers("monitor"):
        return {}
    try:
        return await with_deadline(context.node.ref(MonitorContract, "monitor"), PS_ASK_S).snapshot()
    except CallError:
        return {}


async def _disk(context: VerbContext) -> str:
    if not context.node.peers("buffer"):
        return ""
    try:
        return (await with_deadline(context.node.ref(BufferContract, "buffer"), PS_ASK_S).stats()).disk
    except CallError:
        return ""


def _memory(pid: int) -> int:
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0


def doing(shares: Mapping[str, float]) -> str:
    """Parts of a kind ("wait-data/reward") say more than the kind, where they are most of it."""
    kinds = {name: share for name, share in shares.items() if "/" not in name}
    if not kinds:
        return ""
    kind = max(kinds, key=lambda name: kinds[name])
    parts = {name: share for name, share in shares.items() if name.startswith(f"{kind}/") and share > kinds[kind] / 2}
    return f"{max(parts, key=lambda name: parts[name]) if parts else kind} {kinds[kind] * 100:.0f} %"


PS_VERBS: tuple[Verb[Any], ...] = (
    Verb("ps", "view", Arguments, "every actor, where it runs and what it does", run=_ps),
)


class StatusReply(Record, frozen=True):
    """One look at the run; an actor that did not answer in time is None or empty."""

    run_dir: str
    started_wall_s: float
    now_wall_s: float
    status: RunStatus | None
    """Coordinator."""
    buffer: BufferStats | None
    snapshot: dict[str, dict[str, float]]
    """Monitor: see `MonitorContract.snapshot`."""


async def _run_status(context: VerbContext, arguments: Arguments, who: Operator) -> StatusReply:
    del arguments, who
    state = await RunWatch(context.node, context.node.clock).look()
    return StatusReply(
        run_dir=str(context.run_dir.path),
        started_wall_s=context.started_wall_s,
        now_wall_s=state.now_wall_s,
        status=state.status,
        buffer=state.buffer,
        snapshot={source: dict(values) for source, values in state.snapshot.items()},
    )


STATUS_VERBS = (
    Verb(
        name="status",
        access="view",
        arguments=Arguments,
        help="phase, step, engines, buffer and newest metrics in one answer",
        run=_run_status,
    ),
)


FLUSH_S = 20.0


async def _trace(context: VerbContext, arguments: Arguments, who: Operator) -> dict[str, Any]:
    if not context.config.monitor.trace:
        raise ConfigError("this run writes no trace", remedy="set monitor.trace = true in the run file")
    await with_deadline(context.node.ref(MonitorContract, "monitor"), FLUSH_S).finish()
    path = context.run_dir.path.resolve() / TRACE_FILE
    return {"file": str(path), "num_bytes": path.stat().st_size}


TRACE_VERBS: tuple[Verb[Any], ...] = (
    Verb("trace", "view", Arguments, "write the trace up to now; the file opens in ui.perfetto.dev", run=_trace),
)
