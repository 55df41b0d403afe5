"""Verbs about the run's processes: scale, drain, restart, kill; logs, stack, profile.

Decides what may be asked of which actor; the run supervisor and its rules carry it out. A process that answers reports
its own stacks; its node's agent finds out those of a process that does not.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from ...core.errors import CallError, ConfigError, LaunchError, MyxaError
from ...core.knobs import Operator
from ...core.refs import with_deadline
from ...core.suggestion import nearest, suggest
from .. import verbs
from ..contracts import LogChunk, ProcessContract, ProfileReply, StackReply, process_name
from ..supervisor.placement import START_ORDER, check_leaver, scale
from ..views.run_view import ActorFacts
from .server import Handler, VerbContext

T = TypeVar("T")

LOOK_S = 0.1
BACK_S = 600.0
"""How long a restarted actor may take before the next one is restarted."""


async def _scale(context: VerbContext, arguments: verbs.ScaleArguments, operator: Operator) -> dict[str, Any]:
    supervisor = context.supervisor
    if arguments.role not in START_ORDER:
        raise ConfigError(f"{arguments.role!r} is no role", remedy=suggest(arguments.role, START_ORDER))
    wish = arguments.devices, arguments.attach
    joining, leaving = scale(context.config, arguments.role, arguments.count, supervisor.present(), *wish)
    for actor in joining:
        supervisor.hire(actor)
    for name in leaving:
        supervisor.retire(name, _why(operator, arguments.reason))

    def is_done() -> bool:
        there = {record.name: record for record in supervisor.statuses()}
        is_up = all(actor.name in there and there[actor.name].state == "up" for actor in joining)
        return is_up and not set(leaving) & there.keys()

    return {
        "role": arguments.role,
        "count": arguments.count,
        "joining": [{"name": a.name, "node": a.node, "devices": list(a.devices)} for a in joining],
        "leaving": leaving,
        "is_done": await _until(is_done, arguments.wait_s),
    }


async def _drain(context: VerbContext, arguments: verbs.DrainArguments, operator: Operator) -> dict[str, Any]:
    supervisor = context.supervisor
    node = node_of(arguments.target)
    is_node = node is not None and node != 0 and node in supervisor.nodes
    statuses = supervisor.statuses()
    is_empty = is_node and all(record.node != node for record in statuses)
    actors = () if is_empty else find_targets(arguments.target, statuses)
    for role in {record.role for record in actors}:
        staying = {actor.name for actor in supervisor.present().actors if actor.role == role}
        check_leaver(context.config, role, len(staying - {record.name for record in actors}))
    names = [record.name for record in actors]
    if is_node and node is not None:
        await supervisor.leave_node(node, _why(operator, arguments.reason))
    else:
        for name in reversed(names):
            supervisor.retire(name, _why(operator, arguments.reason))

    def is_done() -> bool:
        is_gone = not (is_node and node in supervisor.nodes)
        return is_gone and not set(names) & {record.name for record in supervisor.statuses()}

    return {"leaving": names, "is_done": await _until(is_done, arguments.wait_s)}


async def _restart(context: VerbContext, arguments: verbs.DrainArguments, operator: Operator) -> dict[str, Any]:
    actors = find_targets(arguments.target, context.supervisor.statuses())
    for record in actors:
        if record.is_leaving:
            raise ConfigError(f"{record.name} is leaving the run", remedy="`myxa scale` starts a new one")
    names = [record.name for record in actors]
    attempts = {record.name: record.attempt for record in actors}
    context.supervisor.ctx.spawn(
        _restart_in_turn(context, actors, _why(operator, arguments.reason)), name=f"restart {arguments.target}"
    )

    def is_done() -> bool:
        there = {r.name: r for r in context.supervisor.statuses()}
        return all(n in there and there[n].state == "up" and there[n].attempt > attempts[n] for n in names)

    return {"restarting": names, "is_done": await _until(is_done, arguments.wait_s)}


async def _restart_in_turn(context: VerbContext, actors: Sequence[ActorFacts], reason: str) -> None:
    """Restarts one after another: the next when the one before is back. A gang restarts as a whole."""
    supervisor = context.supervisor
    gangs: set[str] = set()
    for record in actors:
        try:
            spec = supervisor.actors[record.name].spec
            gang = spec.rank.gang if spec.rank is not None else ""
            if gang in gangs:
                continue
            gangs |= {gang} - {""}
            if record.is_over:
                supervisor.hire(spec)
            else:
                supervisor.renew(record.name, reason)
        except (MyxaError, KeyError) as error:
            supervisor.ctx.log.warning("%s is not restarted: %s", record.name, error)
            continue
        await _until(lambda name=record.name, before=record.attempt: _is_back(context, name, before), BACK_S)


def _is_back(context: VerbContext, name: str, before: int) -> bool:
    """Also when it has left, or failed: then there is nothing to wait for."""
    record = next((r for r in context.supervisor.statuses() if r.name == name), None)
    return record is None or record.is_over or (record.state == "up" and record.attempt > before)


async def _kill(context: VerbContext, arguments: verbs.KillArguments, operator: Operator) -> dict[str, Any]:
    supervisor = context.supervisor
    actors = [record for record in find_targets(arguments.target, supervisor.statuses()) if record.pid]
    if not actors:
        raise ConfigError(f"{arguments.target!r}: none of them has a process now", remedy="see `myxa ps`")
    supervisor.ctx.log.warning("%s: SIGKILL to %s", _why(operator, arguments.reason), arguments.target)
    by = f"`myxa kill` by {operator.user or 'an unknown user'}" + (f" ({arguments.reason})" if arguments.reason else "")
    await supervisor.kill(actors, by)
    return {"killed": [record.name for record in actors]}


def _why(operator: Operator, reason: str) -> str:
    return reason or f"{operator.user or 'an unknown user'} asked for it"


async def _until(is_so: Callable[[], bool], wait_s: float) -> bool:
    waited_s = 0.0
    while not is_so():
        if waited_s >= wait_s:
            return False
        await asyncio.sleep(LOOK_S)
        waited_s += LOOK_S
    return True


# -- logs, stacks, profiles ------------------------------------------------------------------------------------------

LIVE_S = 2.0
"""How long a process may take to report its own stacks."""
WRITE_S = 60.0
"""A profile may take so much longer than it lasts, to be written."""
LAUNCHER = "launcher"


async def _logs(context: VerbContext, arguments: verbs.LogsArguments, operator: Operator) -> list[LogChunk]:
    reads = [
        context.supervisor.agent(node).read_logs(replace(arguments, target=name))
        for node, name in _log_owners(context, arguments.target)
    ]
    answers = await asyncio.gather(*reads, return_exceptions=True)
    chunks = [chunk for answer in answers if not isinstance(answer, BaseException) for chunk in answer]
    if not chunks:  # of several, those without a log are left out
        raise next(answer for answer in answers if isinstance(answer, BaseException))
    return chunks


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


# -- stacks ------------------------------------------------------------------------------------------------------------


async def _stack(context: VerbContext, arguments: verbs.TargetArguments, operator: Operator) -> list[StackReply]:
    actors = find_targets(arguments.target, context.supervisor.statuses())
    lookups = [(record, _stack_of(context, record)) for record in actors]
    return await _of_several(lookups, lambda record, why: StackReply(name=record.name, pid=0, text=why, how="refused"))


async def _stack_of(context: VerbContext, record: ActorFacts) -> list[StackReply]:
    try:
        return [await with_deadline(_process(context, record.name), LIVE_S).stacks()]
    except CallError as error:
        context.supervisor.ctx.log.info("%s does not report its own stacks: %s", record.name, error)
    return [await context.supervisor.agent(record.node).stacks_from_outside(record.name)]


async def _of_several(
    lookups: Sequence[tuple[ActorFacts, Awaitable[list[T]]]], refusal: Callable[[ActorFacts, str], T]
) -> list[T]:
    """Of several, one that refuses says why in its place; raises if all of them do."""
    answers = await asyncio.gather(*(look for _, look in lookups), return_exceptions=True)
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    for error in errors:
        if not isinstance(error, MyxaError) or len(errors) == len(answers):
            raise error
    replies: list[T] = []
    for (record, _), answer in zip(lookups, answers, strict=True):
        replies += [refusal(record, str(answer))] if isinstance(answer, BaseException) else answer
    return replies


async def _profile(context: VerbContext, arguments: verbs.ProfileArguments, operator: Operator) -> list[ProfileReply]:
    """Of several, one that refuses says why in its place; raises if all of them do."""
    actors = find_targets(arguments.target, context.supervisor.statuses())
    lookups = [(record, _own_profile(context, record, arguments.for_s)) for record in actors]

    def refusal(record: ActorFacts, why: str) -> ProfileReply:
        why = why.removeprefix(f"{record.name}: ")
        return ProfileReply(name=record.name, node=record.node, path="", top=(), refused=why)

    return await _of_several(lookups, refusal)


async def _own_profile(context: VerbContext, record: ActorFacts, duration_s: float) -> list[ProfileReply]:
    ref = with_deadline(_process(context, record.name), duration_s + WRITE_S)
    try:
        return [await ref.profile(duration_s)]
    except CallError as error:
        remedy = "`myxa stack` also works on a process that hangs"
        raise LaunchError(f"{record.name}: {error}", remedy=remedy) from error


def _process(context: VerbContext, name: str) -> ProcessContract:
    return context.node.ref(ProcessContract, process_name(name))


# -- targets --------------------------------------------------------------------------------------------------------

SHAPES = 'a role ("rollout"), an actor ("rollout/1"), "rollout/*", "node:0" or "all"'
MAX_SHOWN = 12

_NODE = re.compile(r"node:(\d{1,6})")


def find_targets(target: str, roster: Sequence[ActorFacts]) -> tuple[ActorFacts, ...]:
    """The actors that `target` means, in start order; never none. Raises ConfigError with the names there are."""
    word = target.strip()
    actors = tuple(record for record in roster if _names_actor(record, word))
    if actors:
        return actors
    names = [record.name for record in roster]
    groups = {record.role for record in roster} | {f"node:{record.node}" for record in roster}
    near = nearest(word.removesuffix("/*"), [*names, *sorted(groups), "all"])
    shown = ", ".join(names[:MAX_SHOWN]) + (f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else "")
    raise ConfigError(
        f"{word[:64]!r} names no actor of this run; there are {shown or 'none'}",
        remedy=f"did you mean {near!r}?" if near else f"give {SHAPES}",
    )


def node_of(target: str) -> int | None:
    """3 for "node:3"; None: it means no node."""
    match = _NODE.fullmatch(target.strip())
    return int(match[1]) if match else None


def _names_actor(record: ActorFacts, word: str) -> bool:
    if (node := node_of(word)) is not None:
        return record.node == node
    return word in ("all", "*", record.name, record.role, f"{record.role}/*")


PROCESS_HANDLERS: dict[verbs.Verb[Any], Handler] = {
    verbs.SCALE: _scale, verbs.DRAIN: _drain, verbs.RESTART: _restart, verbs.KILL: _kill,
    verbs.LOGS: _logs, verbs.STACK: _stack, verbs.PROFILE: _profile,
}  # fmt: skip
