"""Verbs that look at the run as a whole and change nothing: `status`, `ps`, `why`.

`status` is one `RunView`: with `whole` everything that `top` and the dashboard show. An actor that does not answer is
left out: without the coordinator there is still a verdict.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import msgspec
import psutil

from ...actors.contracts import CoordinatorContract, MonitorContract
from ...actors.coordinator.audit import AUDIT_FILE, read_audit
from ...core.errors import LaunchError
from ...core.knobs import KnobTable, Operator
from ...core.refs import with_deadline
from ..run_watch import RunWatch
from ..views.numbers import doing, name_order
from ..views.run_view import ActorFacts, RunView
from ..views.why import Facts, Reason, explain, judge
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
    reason = judge(shares, _facts_of(view))
    told = {"coordinator": view.status, "buffer": view.buffer, "monitor": view.snapshot or None}
    return msgspec.structs.replace(
        view,
        actors=_actors(context, view),
        knobs=table,
        history=await asyncio.to_thread(read_audit, context.run_dir.path / AUDIT_FILE, SHOWN_RECORDS),
        why=reason.sentence if shares else "",
        remedy=reason.remedy,
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
    view, shares = await asyncio.gather(
        RunWatch(context.node, context.node.clock).look(), answer_or_none(monitor.shares(arguments.window_s))
    )
    if shares is None:
        raise LaunchError("the monitor does not answer: the time shares are not known", remedy="`myxa ps`")
    return explain(shares, _facts_of(view), window_s=arguments.window_s)


def _facts_of(view: RunView) -> Facts:
    return Facts(gauges=view.snapshot, disk=view.buffer.disk if view.buffer is not None else "")


LOOK_HANDLERS: dict[verbs.Verb[Any], Handler] = {
    verbs.STATUS: _status, verbs.PS: _ps, verbs.WHY: _why,
}  # fmt: skip
