"""Verbs that look into a run and change nothing: `ps`, `status`, logs, stack, facts, profile, `trace`.

A process that answers reports its own stacks; its node's agent finds out those of a process that does not. `ps` asks
the supervisor, the kernel and the monitor, and leaves blanks where one of them does not answer. `status` is everything
that the live view shows, in one answer. `trace` writes the timeline up to now and returns the file's path.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import psutil

from ...actors.contracts import BufferContract, MonitorContract, RolloutContract
from ...actors.sinks.chrome_trace import TRACE_FILE
from ...core.errors import CallError, ConfigError, LaunchError, MyxaError
from ...core.knobs import Operator
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
from ..views.run_view import RunView
from . import verbs
from .server import Answer, Handler, VerbContext, answer_or_none
from .targets import find_targets

C = TypeVar("C")
T = TypeVar("T")

LIVE_S = 2.0
"""How long a process may take to report its own stacks."""
FOLLOW_S = 0.5
"""Between two looks at a log that is followed."""
WRITE_S = 60.0
"""A profile may take so much longer than it lasts, to be written."""
ENGINE_WRITE_S = 80.0
"""The same of a server: it is waited for to begin (20 s at most), and to write (50 s)."""
LAUNCHER = "launcher"


def _logs(context: VerbContext, arguments: verbs.LogsArguments, who: Operator) -> Answer:
    return _follow(context, arguments) if arguments.follow else _tails(context, arguments)


async def _tails(context: VerbContext, arguments: verbs.LogsArguments) -> list[LogChunk]:
    return [chunk for _, chunk in await _first_chunks(context, arguments)]


async def _follow(context: VerbContext, arguments: verbs.LogsArguments) -> AsyncIterator[LogChunk]:
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


async def _first_chunks(context: VerbContext, arguments: verbs.LogsArguments) -> list[tuple[tuple[int, str], LogChunk]]:
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


async def _stack(context: VerbContext, arguments: verbs.TargetArguments, who: Operator) -> list[StackReply]:
    meant = find_targets(arguments.target, context.supervisor.statuses())
    looks = [(record, _stack_of(context, record)) for record in meant]
    return await _of_several(looks, lambda record, why: StackReply(name=record.name, pid=0, text=why, how="refused"))


async def _stack_of(context: VerbContext, record: ActorStatus) -> list[StackReply]:
    try:
        return [await with_deadline(_process(context, record.name), LIVE_S).stacks()]
    except CallError as error:
        context.supervisor.ctx.log.info("%s does not report its own stacks: %s", record.name, error)
    return [await context.supervisor.agent(record.node).stacks_from_outside(record.name)]


async def _of_several(
    looks: Sequence[tuple[ActorStatus, Awaitable[list[T]]]], refusal: Callable[[ActorStatus, str], T]
) -> list[T]:
    """Of several, one that refuses says why in its place; raises if all of them do."""
    answers = await asyncio.gather(*(look for _, look in looks), return_exceptions=True)
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    for error in errors:
        if not isinstance(error, MyxaError) or len(errors) == len(answers):
            raise error
    replies: list[T] = []
    for (record, _), answer in zip(looks, answers, strict=True):
        replies += [refusal(record, str(answer))] if isinstance(answer, BaseException) else answer
    return replies


async def _facts(context: VerbContext, arguments: verbs.TargetArguments, who: Operator) -> list[ProcessFacts]:
    meant = find_targets(arguments.target, context.supervisor.statuses())
    return list(await asyncio.gather(*(_asked(r.name, _process(context, r.name).facts()) for r in meant)))


async def _profile(context: VerbContext, arguments: verbs.ProfileArguments, who: Operator) -> list[ProfileReply]:
    """Of several, one that refuses says why in its place; raises if all of them do."""
    meant = find_targets(arguments.target, context.supervisor.statuses())
    order = ProfileOrder(kind=arguments.kind, duration_s=arguments.for_s, interval_s=arguments.interval_s)
    is_served = context.config.roles.rollout.kind == "sglang" and arguments.engine and arguments.kind != "memory"
    looks = [
        (record, look(context, record, order))
        for record in meant
        for look in ((_own_profile, _engine_profiles) if is_served and record.role == "rollout" else (_own_profile,))
    ]
    return await _of_several(
        looks, lambda record, why: _refusal(record.name, record.node, why.removeprefix(f"{record.name}: "))
    )


async def _own_profile(context: VerbContext, record: ActorStatus, order: ProfileOrder) -> list[ProfileReply]:
    ref = with_deadline(_process(context, record.name), order.duration_s + WRITE_S)
    return [await _asked(record.name, ref.profile(order))]


async def _engine_profiles(context: VerbContext, record: ActorStatus, order: ProfileOrder) -> list[ProfileReply]:
    """Never raises for a server: the profile of the actor's own process is kept."""
    ref = with_deadline(context.node.ref(RolloutContract, record.name), order.duration_s + ENGINE_WRITE_S)
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


PS_ASK_S = 2.0
TIME_PREFIX = "time/"


async def _ps(context: VerbContext, arguments: verbs.Arguments, who: Operator) -> list[dict[str, Any]]:
    """`ActorStatus` of each, and what it takes and does."""
    now, here = context.node.clock.wall(), socket.gethostname()
    told, stats = await asyncio.gather(
        _asked_if_there(context, MonitorContract, "monitor", lambda monitor: monitor.snapshot()),
        _asked_if_there(context, BufferContract, "buffer", lambda buffer: buffer.stats()),
    )
    shares, disk = told or {}, stats.disk if stats is not None else ""
    return [
        {
            **msgspec.to_builtins(actor),
            "uptime_s": max(0.0, now - actor.started_wall_s) if actor.pid and actor.started_wall_s else 0.0,
            "memory_bytes": _memory(actor.pid) if actor.pid and actor.host in ("", here) else 0,
            "doing": doing(shares.get(f"{TIME_PREFIX}{actor.name}", {})),
            "note": disk if actor.name == "buffer" else "",
        }
        for actor in context.supervisor.statuses()
    ]


async def _asked_if_there(
    context: VerbContext, contract: type[C], name: str, question: Callable[[C], Awaitable[T]]
) -> T | None:
    if not context.node.peers(name):
        return None
    return await answer_or_none(question(with_deadline(context.node.ref(contract, name), PS_ASK_S)))


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


async def _run_status(context: VerbContext, arguments: verbs.Arguments, who: Operator) -> RunView:
    del arguments, who
    view = await RunWatch(context.node, context.node.clock).look()
    return msgspec.structs.replace(view, run_dir=str(context.run_dir.path), started_wall_s=context.started_wall_s)


async def _trace(context: VerbContext, arguments: verbs.Arguments, who: Operator) -> dict[str, Any]:
    if not context.config.monitor.trace:
        raise ConfigError("this run writes no trace", remedy="set monitor.trace = true in the run file")
    await with_deadline(context.node.ref(MonitorContract, "monitor"), verbs.TRACE.ask_s).finish()
    path = context.run_dir.path.resolve() / TRACE_FILE
    return {"file": str(path), "num_bytes": path.stat().st_size}


LOOK_HANDLERS: dict[verbs.Verb[Any], Handler] = {
    verbs.PS: _ps, verbs.STATUS: _run_status, verbs.LOGS: _logs, verbs.STACK: _stack, verbs.FACTS: _facts,
    verbs.PROFILE: _profile, verbs.TRACE: _trace,
}  # fmt: skip
