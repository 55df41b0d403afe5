"""The launchers of all nodes but node 0: they lend their processes to the run, from its start or later.

They decide nothing. A late node first asks for its number, under its own name; then it joins like the others.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.text import Text

from ...core.clock import SystemClock
from ...core.config import RunConfig, dump_config, load_config
from ...core.errors import CallError, LaunchError, MyxaError
from ...core.retry import until_answered
from ..actor_spec import ActorSpec
from ..contracts import SUPERVISOR, EnlistReply, JoinReply, SupervisorContract, agent_name
from ..first_failure import RunEnd
from ..node_place import NodePlace
from ..runtime_dir import RuntimeDir
from ..supervisor.placement import place as place_actors
from .agent import Agent
from .launch_options import LaunchOptions, agent_options, check_own, facts_of
from .rendezvous import NodeRendezvous, join_rendezvous
from .stop_signals import CTRL_C, stop_signals

_log = logging.getLogger("myxa.launcher")

DECLINE_S = 60.0
"""How long a node that cannot take part tries to report this to node 0."""
ASK_AGAIN_S = 1.0
"""How often a late node asks whether the run has started."""

T = TypeVar("T")
Stop = Callable[[str, int], Awaitable[None]]
"""Request to the run supervisor after a signal: the reason, the signal's number."""


async def follow(config: RunConfig, options: LaunchOptions) -> RunEnd:
    """Take part from the start. Raises ConfigError and LaunchError for what cannot start."""
    try:
        actors = place_actors(config, options.place.num_nodes)
        check_own(config, actors, options, options.place.rank)
    except MyxaError as error:
        await _decline(options, str(error))
        raise
    deadline = time.monotonic() + options.timeouts.gather_s
    where = options.place.endpoint or options.rdzv_file
    Console().print(Text(f"node {options.place.rank} looks for node 0 at {where}"), soft_wrap=True)
    with RuntimeDir() as runtime:
        async with (
            join_rendezvous(options.place, runtime.path, options.job_key, options.rdzv_file, deadline) as rendezvous,
            runtime.kept([rendezvous.rdzv_path]),
        ):
            return await _take_part(config, options, options.place, rendezvous, runtime.path, deadline, actors)


async def follow_late(config: RunConfig | None, options: LaunchOptions) -> RunEnd:
    """Join a live run; `config` None: use the run's. Raises LaunchError if the run cannot be reached or refuses this
    node, with the reason."""
    deadline = time.monotonic() + options.timeouts.gather_s
    with RuntimeDir() as runtime:
        reply = await _enlist(config, options, runtime.path, deadline)
        config = config if config is not None else _run_config(reply.config, runtime.path)
        check_own(config, reply.actors, options, reply.node)
        place = replace(options.place, rank=reply.node)
        Console().print(Text(f"this is node {reply.node} of the run at {place.endpoint or options.rdzv_file}"))
        async with (
            join_rendezvous(place, runtime.path, options.job_key, options.rdzv_file, deadline) as rendezvous,
            runtime.kept([rendezvous.rdzv_path]),
        ):
            return await _take_part(config, options, place, rendezvous, runtime.path, deadline, reply.actors)


async def _enlist(config: RunConfig | None, options: LaunchOptions, runtime: Path, deadline: float) -> EnlistReply:
    facts = facts_of(options.place, "" if config is None else dump_config(config), options.late)
    name = f"late/{secrets.token_hex(6)}"
    async with join_rendezvous(
        options.place, runtime, options.job_key, options.rdzv_file, deadline, name=name
    ) as rendezvous:
        supervisor = rendezvous.node.ref(SupervisorContract, SUPERVISOR)
        while True:
            reply = await _answer(lambda: supervisor.enlist(facts), rendezvous, deadline)
            if reply.node >= 0:
                return reply
            if not reply.is_early or time.monotonic() > deadline:
                raise LaunchError(f"node 0 refused this node: {reply.reason}")
            await asyncio.sleep(ASK_AGAIN_S)


def _run_config(text: str, runtime: Path) -> RunConfig:
    path = runtime / "run.toml"
    path.write_text(text, encoding="utf-8")
    return load_config(path)


async def _take_part(
    config: RunConfig,
    options: LaunchOptions,
    place: NodePlace,
    rendezvous: NodeRendezvous,
    runtime: Path,
    deadline: float,
    actors: Sequence[ActorSpec],
) -> RunEnd:
    text = dump_config(config)
    agent = Agent(agent_options(options, place, rendezvous, runtime, config, actors), rendezvous.exit_seen)
    await rendezvous.node.start(agent, name=agent_name(place.rank))
    supervisor = rendezvous.node.ref(SupervisorContract, SUPERVISOR)
    facts = facts_of(place, text, options.late)
    reply: JoinReply = await _answer(lambda: supervisor.join(facts), rendezvous, deadline)
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
    return farewell


async def _answer(send: Callable[[], Awaitable[T]], rendezvous: NodeRendezvous, deadline: float) -> T:
    return await until_answered(
        send,
        who=f"node 0 at {rendezvous.endpoint}",
        clock=SystemClock(),
        log=_log,
        give_up_s=max(0.0, deadline - time.monotonic()),
    )


async def _decline(options: LaunchOptions, reason: str) -> None:
    """Report to node 0 that it need not wait for this node. Limited in time: node 0 may fail for the same reason."""
    Console(stderr=True).print(Text(f"this node cannot take part and reports this to node 0: {reason}"), soft_wrap=True)
    deadline = time.monotonic() + min(DECLINE_S, options.timeouts.gather_s)
    try:
        with RuntimeDir() as runtime:
            async with join_rendezvous(
                options.place, runtime.path, options.job_key, options.rdzv_file, deadline
            ) as rendezvous:
                supervisor = rendezvous.node.ref(SupervisorContract, SUPERVISOR)
                await supervisor.decline(options.place.rank, socket.gethostname(), reason)
    except (LaunchError, CallError) as error:
        _log.warning("node 0 could not be reached: %s", error)


async def _lend(agent: Agent, stop: Stop) -> RunEnd:
    """Serve node 0 until it says that the run is over or that this node may go, or is gone."""
    asks: set[asyncio.Task[None]] = set()

    async def ask(reason: str, number: int) -> None:
        try:
            await stop(reason, number)
        except MyxaError as error:
            Console(stderr=True).print(Text(f"node 0 does not release this node: {error}"), soft_wrap=True)

    async with asyncio.TaskGroup() as group:
        with stop_signals(lambda reason, number: asks.add(group.create_task(ask(reason, number)))) as forced:
            await asyncio.wait({agent.left, forced}, return_when=asyncio.FIRST_COMPLETED)
            await agent.kill_all()
            for asking in asks:
                asking.cancel()  # the answer is not needed any more
            if agent.left.done():
                return agent.left.result()
            return RunEnd(128 + forced.result(), "ended at once")
