"""The handlers of all verbs: about the run and its knobs, about its processes.

A call waits for a coordinator that is being restarted. One that dies during a call may have carried it out; the error
says so.
"""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import tomllib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from ...actors.contracts import CoordinatorContract, MemoryContract, MonitorContract, RolloutContract
from ...actors.coordinator.audit import AUDIT_FILE, read_audit
from ...core.config import RunConfig
from ...core.config.loading import key_lines
from ...core.config.section import walk
from ...core.device_memory import MemoryView
from ...core.errors import CallError, ConfigError, LaunchError, MyxaError, NoSuchActor, NotSent, PeerDied
from ...core.knobs import AuditRecord, ChangeReply, ChangeRequest, KnobTable, Operator, Tunable
from ...core.messages import RolloutNow
from ...core.refs import with_deadline
from ...core.suggestion import nearest, suggest
from .. import verbs
from ..composition.memory_parts import manager_name, takes_turns
from ..contracts import LogChunk, ProcessContract, ProfileReply, StackReply, process_name
from ..run_watch import RunWatch, answer_or_none
from ..supervisor.placement import START_ORDER, check_leaver, scale
from ..views.changes import value_text
from ..views.numbers import doing, name_order
from ..views.run_files import CONFIG_FILE
from ..views.run_view import ActorFacts, RunView
from ..views.why import Reason, explain, judge, slowest
from .server import Handler, VerbContext

T = TypeVar("T")

NAME = "coordinator"
WAIT_S = 5.0


@asynccontextmanager
async def coordinator_call(context: VerbContext, seconds: float) -> AsyncGenerator[CoordinatorContract]:
    """A reference with that deadline. Raises NotSent while it is away, PeerDied when it ends meanwhile."""
    try:
        await context.node.wait_for(NAME, timeout_s=WAIT_S)
    except LaunchError as error:
        raise _away(context) from error
    try:
        yield with_deadline(context.node.ref(CoordinatorContract, NAME), seconds)
    except PeerDied as error:
        raise PeerDied(
            "the coordinator ended over this request and is being restarted; it may or may not have been carried out",
            remedy="look at `myxa history` and `myxa get`; then ask again",
        ) from error
    except (NoSuchActor, NotSent) as error:
        raise _away(context) from error


def _away(context: VerbContext) -> NotSent:
    record = next((record for record in context.supervisor.statuses() if record.name == NAME), None)
    state = f"{record.state}, attempt {record.attempt}" if record is not None else "not there"
    return NotSent(f"the coordinator is restarting ({state}): nothing was asked of it", remedy="ask again in a moment")


async def _pause(context: VerbContext, arguments: verbs.WithReason, operator: Operator) -> dict[str, int]:
    async with coordinator_call(context, verbs.PAUSE.ask_s) as coordinator:
        return {"rests_at": await coordinator.set_pause("pause", operator, arguments.reason)}


async def _resume(context: VerbContext, arguments: verbs.WithReason, operator: Operator) -> dict[str, bool]:
    async with coordinator_call(context, verbs.RESUME.ask_s) as coordinator:
        await coordinator.set_pause("resume", operator, arguments.reason)
    return {"resumed": True}


async def _step(context: VerbContext, arguments: verbs.StepArguments, operator: Operator) -> dict[str, int]:
    async with coordinator_call(context, verbs.STEP.ask_s) as coordinator:
        return {"pauses_at": await coordinator.set_pause("step", operator, arguments.reason, arguments.num_steps)}


async def _checkpoint(context: VerbContext, arguments: verbs.CheckpointArguments, operator: Operator) -> dict[str, str]:
    async with coordinator_call(context, verbs.CKPT.ask_s) as coordinator:
        return {"folder": await coordinator.checkpoint_now(arguments.export)}


async def _evaluate(context: VerbContext, arguments: verbs.EvalArguments, operator: Operator) -> dict[str, float]:
    async with coordinator_call(context, verbs.EVAL.ask_s) as coordinator:
        result = await coordinator.evaluate_now(arguments.name)
    return {"eval_reward": result.mean_reward, **result.metrics}


async def _down(context: VerbContext, arguments: verbs.WithReason, operator: Operator) -> dict[str, str]:
    """The launcher's own loop ends the run, as after Ctrl-C; this only asks for it."""
    reason = arguments.reason or f"{operator.user} asked for it (myxa down)"
    context.supervisor.request_stop(reason, signal.SIGTERM)
    return {"ending": reason}


async def _memory(context: VerbContext, arguments: verbs.Arguments, operator: Operator) -> MemoryView:
    if not takes_turns(context.config):
        raise ConfigError(
            "this run has no memory manager",
            remedy='trainer and engines have their own memory there; see memory.share = "switch"',
        )
    name = manager_name(context.config)
    await context.node.wait_for(name, timeout_s=WAIT_S)
    return await with_deadline(context.node.ref(MemoryContract, name), WAIT_S).view()


async def _verbs(context: VerbContext, arguments: verbs.Arguments, operator: Operator) -> list[dict[str, Any]]:
    return [verbs.describe(verb) for verb in verbs.ALL]


# -- knobs ------------------------------------------------------------------------------------------------------------


async def knob_table(context: VerbContext) -> KnobTable:
    """All knobs of the run. Raises CallError while there is no coordinator."""
    async with coordinator_call(context, verbs.GET.ask_s) as coordinator:
        return await coordinator.knob_table()


def check_names(names: Sequence[str], table: KnobTable, context: VerbContext) -> None:
    """Raises ConfigError for a knob that does not exist, with what may be meant: another name, or a key of the file."""
    knobs = {state.tunable.name: state.tunable for sheet in table.sheets for state in sheet.knobs}
    keys = {knob.key: name for name, knob in knobs.items()}
    for name in names:
        if name in knobs:
            continue
        fixed = [key for path, _ in walk(RunConfig) if name in (key := ".".join(path), path[-1])]
        if live := [keys[key] for key in (name, *fixed) if key in keys]:
            raise ConfigError(f"{name!r} is a key of the run file", remedy=f"the knob is {live[0]!r}")
        if table.silent:  # it may be theirs
            text = f"{name[:128]!r} is no knob of any actor that answers"
            raise ConfigError(text, remedy=f"no answer from {', '.join(table.silent)}")
        if fixed:
            raise ConfigError(
                f"{name!r} is no knob: it is {' or '.join(fixed)} of the run file, and fixed while a run works",
                remedy=f"`myxa down`, then `myxa resume {context.run_dir.path} --set {fixed[0]}=...`; or `myxa fork`",
            )
        raise ConfigError(f"{name[:128]!r} is no knob", remedy=_hint(name, knobs))


def _hint(name: str, knobs: Mapping[str, Tunable]) -> str:
    if nearest(name, knobs):
        return suggest(name, knobs)
    wish = name.replace("_", " ").replace("-", " ").lower()
    found = (knob for knob in knobs.values() if len(wish) > 2 and wish in knob.help.lower())
    return next((f'did you mean "{knob.name}"? it is "{knob.help}"' for knob in found), "`myxa get` lists them all")


async def _get(context: VerbContext, arguments: verbs.GetArguments, operator: Operator) -> KnobTable:
    table = await knob_table(context)
    if not arguments.names:
        return table
    check_names(arguments.names, table, context)
    sheets = (
        msgspec.structs.replace(sheet, knobs=tuple(s for s in sheet.knobs if s.tunable.name in arguments.names))
        for sheet in table.sheets
    )
    table = msgspec.structs.replace(table, sheets=tuple(sheet for sheet in sheets if sheet.knobs))
    return msgspec.structs.replace(table, origins=await asyncio.to_thread(_origins, context.run_dir.path, table))


def _origins(folder: Path, table: KnobTable) -> dict[str, str]:
    file = folder / CONFIG_FILE
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    lines, fields = key_lines(text, tomllib.loads(text)), {".".join(path): field for path, field in walk(RunConfig)}
    changes = {move.name: record for record in read_audit(folder / AUDIT_FILE) for move in record.moves
               if record.result == "done"}  # fmt: skip
    origins: dict[str, str] = {}
    for state in (state for sheet in table.sheets for state in sheet.knobs):
        knob, field = state.tunable, fields.get(state.tunable.key)
        is_default = field is not None and state.first == field.get_default(call_default_factory=True)
        line = lines.get(tuple(knob.key.split(".")))
        place = "the default" if is_default else f"line {line} of {file}" if line else "chosen at the start"
        texts = [f"{knob.key} = {value_text(state.first)}, {place}" if knob.key else "it has no key in the run file"]
        if state.value != state.first and (change := changes.get(knob.name)) is not None:
            texts.append(f"set by {change.who.user or change.who.via}, epoch {change.epoch}")
        origins[knob.name] = "; ".join(texts)
    return origins


async def _set(context: VerbContext, request: ChangeRequest, operator: Operator) -> ChangeReply:
    async with coordinator_call(context, verbs.SET.ask_s) as coordinator:
        reply = await coordinator.change_knobs(request)
    if reply.refused:
        # says better what was meant; asked only now, a good change is fast
        check_names((*request.values, *request.expect), await knob_table(context), context)
    return reply


async def _undo(context: VerbContext, arguments: verbs.UndoArguments, operator: Operator) -> ChangeReply:
    async with coordinator_call(context, verbs.UNDO.ask_s) as coordinator:
        return await coordinator.undo(operator, arguments.reason, arguments.epoch)


async def _history(
    context: VerbContext, arguments: verbs.HistoryArguments, operator: Operator
) -> tuple[AuditRecord, ...]:
    """From the file: process verbs are in it too, and it can be read while the coordinator is away."""
    return await asyncio.to_thread(read_audit, context.run_dir.path / AUDIT_FILE, arguments.limit)


# -- looking: an actor that does not answer is left out ----------------------------------------------------------------

LOOK_S = 2.0
SHOWN_RECORDS = 50
MAX_ASKED = 64
"""Rollout actors, for what their rollouts do."""


async def _status(context: VerbContext, arguments: verbs.StatusArguments, operator: Operator) -> RunView:
    view = await RunWatch(context.node).look()
    view = msgspec.structs.replace(view, run_dir=str(context.run_dir.path), started_wall_s=context.started_wall_s)
    if not arguments.whole:
        return view
    table, under_way = await asyncio.gather(_knob_table(context), _under_way(context))
    shares = view.shares()
    reason = judge(shares, view.facts)
    answers = {"coordinator": view.status, "buffer": view.buffer, "monitor": view.snapshot or None}
    return msgspec.structs.replace(
        view, actors=_actors(context, view), knobs=table,
        history=await asyncio.to_thread(read_audit, context.run_dir.path / AUDIT_FILE, SHOWN_RECORDS),
        why=reason.sentence if shares else "", remedy=reason.remedy, under_way=slowest(under_way),
        troubles=tuple(f"{name} does not answer" for name, answer in answers.items() if answer is None),
    )  # fmt: skip


async def _under_way(context: VerbContext) -> tuple[RolloutNow, ...]:
    names = [actor.name for actor in context.supervisor.statuses() if actor.role == "rollout"][:MAX_ASKED]
    refs = [context.node.ref(RolloutContract, name) for name in names if context.node.peers(name)]
    answers = await asyncio.gather(*(answer_or_none(with_deadline(ref, LOOK_S).under_way()) for ref in refs))
    return tuple(rollout for answer in answers if answer is not None for rollout in answer)


async def _knob_table(context: VerbContext) -> KnobTable | None:
    if not context.node.peers("coordinator"):
        return None
    return await answer_or_none(
        with_deadline(context.node.ref(CoordinatorContract, "coordinator"), LOOK_S).knob_table()
    )


async def _ps(context: VerbContext, arguments: verbs.Arguments, operator: Operator) -> tuple[ActorFacts, ...]:
    return _actors(context, await RunWatch(context.node).look())


def _actors(context: VerbContext, view: RunView) -> tuple[ActorFacts, ...]:
    """What the supervisor knows, and what the kernel and the monitor say; blanks where one of them does not."""
    here, shares, disk = socket.gethostname(), view.shares(), view.buffer.disk if view.buffer is not None else ""
    return tuple(
        msgspec.structs.replace(
            actor,
            uptime_s=max(0.0, view.now_wall_s - actor.started_wall_s) if actor.pid and actor.started_wall_s else 0.0,
            memory_bytes=_resident_bytes(actor.pid) if actor.pid and actor.host in ("", here) else 0,
            doing=doing(shares.get(actor.name, {})),
            note=disk if actor.name == "buffer" else "",
        )
        for actor in sorted(context.supervisor.statuses(), key=lambda actor: (actor.node, name_order(actor.name)))
    )


def _resident_bytes(pid: int) -> int:
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0


async def _why(context: VerbContext, arguments: verbs.WhyArguments, operator: Operator) -> Reason:
    monitor = with_deadline(context.node.ref(MonitorContract, "monitor"), verbs.WHY.ask_s)
    view, shares, under_way = await asyncio.gather(
        RunWatch(context.node).look(),
        answer_or_none(monitor.shares(arguments.window_s)),
        _under_way(context),
    )
    if shares is None:
        raise LaunchError("the monitor does not answer: the time shares are not known", remedy="`myxa ps`")
    return explain(shares, view.facts, window_s=arguments.window_s, target=arguments.target, under_way=under_way)


# -- processes ---------------------------------------------------------------------------------------------------------
#
# This decides what may be asked of which actor; the run supervisor and its rules carry it out. A process that answers
# reports its own stacks; its node's agent finds out those of a process that does not.

AGAIN_S = 0.1
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
        supervisor.retire(name, _reason(operator, arguments.reason))

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
        await supervisor.leave_node(node, _reason(operator, arguments.reason))
    else:
        for name in reversed(names):
            supervisor.retire(name, _reason(operator, arguments.reason))

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
        _restart_in_turn(context, actors, _reason(operator, arguments.reason)), name=f"restart {arguments.target}"
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
    supervisor.ctx.log.warning("%s: SIGKILL to %s", _reason(operator, arguments.reason), arguments.target)
    by = f"`myxa kill` by {operator.user or 'an unknown user'}" + (f" ({arguments.reason})" if arguments.reason else "")
    await supervisor.kill(actors, by)
    return {"killed": [record.name for record in actors]}


def _reason(operator: Operator, reason: str) -> str:
    return reason or f"{operator.user or 'an unknown user'} asked for it"


async def _until(is_so: Callable[[], bool], wait_s: float) -> bool:
    waited_s = 0.0
    while not is_so():
        if waited_s >= wait_s:
            return False
        await asyncio.sleep(AGAIN_S)
        waited_s += AGAIN_S
    return True


# -- logs, stacks, profiles ------------------------------------------------------------------------------------------

LIVE_S = 2.0
"""How long a process may take to report its own stacks."""
WRITE_S = 60.0
"""A profile may take so much longer than it lasts, to be written."""
LAUNCHER = "launcher"


async def _logs(context: VerbContext, arguments: verbs.LogsArguments, operator: Operator) -> list[LogChunk]:
    reads = [
        context.supervisor.agent(node).read_logs(msgspec.structs.replace(arguments, target=name))
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


HANDLERS: dict[verbs.Verb[Any], Handler] = {
    verbs.VERBS: _verbs, verbs.MEM: _memory, verbs.PAUSE: _pause, verbs.RESUME: _resume, verbs.STEP: _step,
    verbs.CKPT: _checkpoint, verbs.EVAL: _evaluate, verbs.DOWN: _down,
    verbs.GET: _get, verbs.SET: _set,
    verbs.UNDO: _undo, verbs.HISTORY: _history, verbs.STATUS: _status, verbs.PS: _ps, verbs.WHY: _why,
    verbs.SCALE: _scale, verbs.DRAIN: _drain, verbs.RESTART: _restart, verbs.KILL: _kill,
    verbs.LOGS: _logs, verbs.STACK: _stack, verbs.PROFILE: _profile,
}  # fmt: skip
