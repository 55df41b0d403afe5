"""The launchers of all nodes but node 0: they lend their processes to the run, from its start or from later on.

Knows the meeting, the agent and the contract of the run supervisor. Decides nothing. A node that comes late first asks
for its number, under a name of its own; with that number it joins as the others did.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.text import Text

from ...core.clock import SystemClock
from ...core.config import RunConfig, dump_config, load_config
from ...core.errors import CallError, LaunchError, MyxaError
from ...core.retry import until_answered
from ..contracts import SUPERVISOR, EnlistReply, JoinReply, SupervisorContract, agent_name
from ..node_place import NodePlace
from ..runtime_dir import RuntimeDir
from ..supervisor.placement import place as place_actors
from .agent import Agent, Farewell
from .launch_options import LaunchOptions, Outcome, agent_options, check_own, facts_of
from .meeting import Meeting, join_meeting
from .stop_signals import CTRL_C, StopSignals

_log = logging.getLogger("myxa.launcher")

DECLINE_S = 60.0
"""How long a node that cannot take part looks for node 0 to say so."""
ASK_AGAIN_S = 1.0
"""How often a late node asks whether the run has started."""

T = TypeVar("T")
Stop = Callable[[str, int], Awaitable[None]]
"""What a signal asks of the run supervisor: the reason, the signal's number."""


async def follow(config: RunConfig, options: LaunchOptions) -> Outcome:
    """Take part from the start. Raises ConfigError and LaunchError for what cannot start."""
    try:
        check_own(config, place_actors(config, options.place.num_nodes), options, options.place.rank)
    except MyxaError as error:
        await _decline(options, str(error))
        raise
    deadline = time.monotonic() + options.patience.gather_s
    where = options.place.endpoint or options.rdzv_file
    Console().print(Text(f"node {options.place.rank} looks for node 0 at {where}"), soft_wrap=True)
    with RuntimeDir() as runtime:
        async with (
            join_meeting(options.place, runtime.path, options.job_key, options.rdzv_file, deadline) as meeting,
            runtime.kept([meeting.rdzv_path]),
        ):
            return await _take_part(config, options, options.place, meeting, runtime.path, deadline)


async def follow_late(config: RunConfig | None, options: LaunchOptions) -> Outcome:
    """Come to a run that goes on; `config` None: as the run has it. Raises LaunchError: it cannot be reached, or will
    not have this node, with the reason."""
    deadline = time.monotonic() + options.patience.gather_s
    with RuntimeDir() as runtime:
        reply = await _enlist(config, options, runtime.path, deadline)
        config = config if config is not None else _as_told(reply.config, runtime.path)
        check_own(config, reply.actors, options, reply.node)
        place = replace(options.place, rank=reply.node)
        Console().print(Text(f"this is node {reply.node} of the run at {place.endpoint or options.rdzv_file}"))
        async with (
            join_meeting(place, runtime.path, options.job_key, options.rdzv_file, deadline) as meeting,
            runtime.kept([meeting.rdzv_path]),
        ):
            return await _take_part(config, options, place, meeting, runtime.path, deadline)


async def _enlist(config: RunConfig | None, options: LaunchOptions, runtime: Path, deadline: float) -> EnlistReply:
    facts = facts_of(options.place, "" if config is None else dump_config(config), options.late)
    name = f"late/{secrets.token_hex(6)}"
    async with join_meeting(options.place, runtime, options.job_key, options.rdzv_file, deadline, name=name) as meeting:
        supervisor = meeting.node.ref(SupervisorContract, SUPERVISOR)
        while True:
            reply = await _answer(lambda: supervisor.enlist(facts), meeting, deadline)
            if reply.node >= 0:
                return reply
            if not reply.is_early or time.monotonic() > deadline:
                raise LaunchError(f"node 0 refused this node: {reply.reason}")
            await asyncio.sleep(ASK_AGAIN_S)


def _as_told(text: str, runtime: Path) -> RunConfig:
    path = runtime / "run.toml"
    path.write_text(text, encoding="utf-8")
    return load_config(path)


async def _take_part(
    config: RunConfig, options: LaunchOptions, place: NodePlace, meeting: Meeting, runtime: Path, deadline: float
) -> Outcome:
    text = dump_config(config)
    agent = Agent(agent_options(options, place, meeting, runtime, config), meeting.exit_seen)
    await meeting.node.start(agent, name=agent_name(place.rank))
    supervisor = meeting.node.ref(SupervisorContract, SUPERVISOR)
    facts = facts_of(place, text, options.late)
    reply: JoinReply = await _answer(lambda: supervisor.join(facts), meeting, deadline)
    if not reply.accepted:
        raise LaunchError(f"node 0 refused this node: {reply.reason}")
    agent.mind_node_0()
    if options.late is None:
        farewell = await _lend(agent, supervisor.stop_run)
    else:
        farewell = await _lend(agent, lambda reason, _: supervisor.leave_node(place.rank, reason))
        if farewell.exit_code == 0 and farewell.reason == CTRL_C:
            farewell = replace(farewell, exit_code=128 + signal.SIGINT)  # as shells have it
    Console().print(Text(f"ended: {farewell.reason}"), soft_wrap=True)
    return Outcome(farewell.exit_code, farewell.reason)


async def _answer(send: Callable[[], Awaitable[T]], meeting: Meeting, deadline: float) -> T:
    return await until_answered(
        send,
        who=f"node 0 at {meeting.endpoint}",
        clock=SystemClock(),
        log=_log,
        give_up_s=max(0.0, deadline - time.monotonic()),
    )


async def _decline(options: LaunchOptions, reason: str) -> None:
    """Tell node 0 that it need not wait for this node; not for ever, for what is wrong there may be wrong here too."""
    Console(stderr=True).print(Text(f"this node cannot take part, node 0 is told: {reason}"), soft_wrap=True)
    deadline = time.monotonic() + min(DECLINE_S, options.patience.gather_s)
    try:
        with RuntimeDir() as runtime:
            async with join_meeting(
                options.place, runtime.path, options.job_key, options.rdzv_file, deadline
            ) as meeting:
                supervisor = meeting.node.ref(SupervisorContract, SUPERVISOR)
                await supervisor.decline(options.place.rank, socket.gethostname(), reason)
    except (LaunchError, CallError) as error:
        _log.warning("node 0 could not be told: %s", error)


async def _lend(agent: Agent, stop: Stop) -> Farewell:
    """Serve node 0 until it says that the run is over or that this node may go, or is gone."""
    asks: set[asyncio.Task[None]] = set()

    async def ask(reason: str, number: int) -> None:
        try:
            await stop(reason, number)
        except MyxaError as error:
            Console(stderr=True).print(Text(f"node 0 does not let this node go: {error}"), soft_wrap=True)

    async with asyncio.TaskGroup() as group:
        with StopSignals(lambda reason, number: asks.add(group.create_task(ask(reason, number)))) as signals:
            await asyncio.wait({agent.left, signals.forced}, return_when=asyncio.FIRST_COMPLETED)
            await agent.kill_all()
            for asking in asks:
                asking.cancel()  # nobody waits for the answer any more
            if agent.left.done():
                return agent.left.result()
            return Farewell(128 + signals.forced.result(), "ended at once")
