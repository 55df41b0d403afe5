"""Verbs that look at the run as a whole and change nothing: `status`, `ps`, `why`, `trace`.

`status` is one `RunView`: with `whole` everything that `top` and the dashboard show. An actor that does not answer is
left out: without the coordinator there is still a verdict, only no knob to turn. `trace` writes the timeline up to now
and returns the file's path.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import msgspec
import psutil

from ...actors.contracts import CoordinatorContract, MonitorContract
from ...actors.coordinator.audit import AUDIT_FILE, read_audit
from ...actors.sinks.chrome_trace import TRACE_FILE
from ...core.errors import ConfigError, LaunchError
from ...core.knobs import KnobState, KnobTable, Operator
from ...core.refs import with_deadline
from ..run_watch import RunWatch
from ..views.numbers import doing, name_order
from ..views.run_view import ActorFacts, RunView
from ..views.why import Facts, Reason, actors_of, explain, explain_actors
from . import verbs
from .server import Handler, VerbContext, answer_or_none

ASK_S = 2.0
SHOWN_RECORDS = 50


async def _status(context: VerbContext, arguments: verbs.StatusArguments, who: Operator) -> RunView:
    del who
    view = await RunWatch(context.node, context.node.clock).look()
    view = msgspec.structs.replace(view, run_dir=str(context.run_dir.path), started_wall_s=context.started_wall_s)
    if not arguments.whole:
        return view
    table = await _knob_table(context)
    shares = view.shares()
    reason = explain(shares, facts_of(context, view, table))
    told = {"coordinator": view.status, "buffer": view.buffer, "monitor": view.snapshot or None}
    return msgspec.structs.replace(
        view,
        actors=_actors(context, view),
        knobs=table,
        history=await asyncio.to_thread(read_audit, context.run_dir.path / AUDIT_FILE, SHOWN_RECORDS),
        why=reason.sentence if shares else "",
        remedy=reason.to_try,
        troubles=tuple(f"{name} does not answer" for name, answer in told.items() if answer is None),
    )


async def _knob_table(context: VerbContext) -> KnobTable | None:
    if not context.node.peers("coordinator"):
        return None
    return await answer_or_none(with_deadline(context.node.ref(CoordinatorContract, "coordinator"), ASK_S).knob_table())


async def _ps(context: VerbContext, arguments: verbs.Arguments, who: Operator) -> tuple[ActorFacts, ...]:
    return _actors(context, await RunWatch(context.node, context.node.clock).look())


def _actors(context: VerbContext, view: RunView) -> tuple[ActorFacts, ...]:
    """What the supervisor knows, and what the kernel and the monitor say; blanks where one of them does not."""
    here, shares, disk = socket.gethostname(), view.shares(), view.buffer.disk if view.buffer is not None else ""
    return tuple(
        msgspec.convert(
            {
                **msgspec.to_builtins(actor),
                "uptime_s": max(0.0, view.now_wall_s - actor.started_wall_s)
                if actor.pid and actor.started_wall_s
                else 0.0,
                "memory_bytes": _memory(actor.pid) if actor.pid and actor.host in ("", here) else 0,
                "doing": doing(shares.get(actor.name, {})),
                "note": disk if actor.name == "buffer" else "",
            },
            ActorFacts,
        )
        for actor in sorted(context.supervisor.statuses(), key=lambda actor: (actor.node, name_order(actor.name)))
    )


def _memory(pid: int) -> int:
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0


async def _why(context: VerbContext, arguments: verbs.WhyArguments, who: Operator) -> Reason:
    monitor = with_deadline(context.node.ref(MonitorContract, "monitor"), verbs.WHY.ask_s)
    view, shares, table = await asyncio.gather(
        RunWatch(context.node, context.node.clock).look(),
        answer_or_none(monitor.shares(arguments.window_s)),
        _knob_table(context),
    )
    if shares is None:
        raise LaunchError("the monitor does not answer: the time shares are not known", remedy="`myxa ps`")
    facts = facts_of(context, view, table)
    if not arguments.target:
        return explain(shares, facts, window_s=arguments.window_s)
    return explain_actors(actors_of(arguments.target, shares), shares, facts, window_s=arguments.window_s)


def facts_of(context: VerbContext, view: RunView, table: KnobTable | None) -> Facts:
    """Numbers of the run as they are now; where an answer is missing, as the run file has them."""
    knobs: dict[str, KnobState] = {}
    for state in (state for sheet in (table.sheets if table is not None else ()) for state in sheet.knobs):
        knobs.setdefault(state.tunable.name, state)
    samples = knobs.get("num_samples")
    return Facts(
        gauges=view.snapshot,
        disk=view.buffer.disk if view.buffer is not None else "",
        knobs=knobs,
        num_samples=int(samples.value) if samples is not None else context.config.rollout.num_samples,
        max_running=context.config.engine.max_running,
    )


async def _trace(context: VerbContext, arguments: verbs.Arguments, who: Operator) -> dict[str, Any]:
    if not context.config.monitor.trace:
        raise ConfigError("this run writes no trace", remedy="set monitor.trace = true in the run file")
    await with_deadline(context.node.ref(MonitorContract, "monitor"), verbs.TRACE.ask_s).finish()
    path = context.run_dir.path.resolve() / TRACE_FILE
    return {"file": str(path), "num_bytes": path.stat().st_size}


LOOK_HANDLERS: dict[verbs.Verb[Any], Handler] = {
    verbs.STATUS: _status, verbs.PS: _ps, verbs.WHY: _why, verbs.TRACE: _trace,
}  # fmt: skip
