"""The launchers of all nodes but node 0: they lend their processes to the run, from its start or later.

They decide nothing, and all that they need to know they learn from node 0: its run file counts. A late node first asks
for its number, under a name of its own; then it joins like the others.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
from rich.console import Console
from rich.text import Text

from ...actors.hub import fetched
from ...core.clock import SystemClock
from ...core.config import load_config
from ...core.daemon_thread import in_daemon_thread
from ...core.errors import CallError, LaunchError, MyxaError
from ...core.retry import until_answered
from ..contracts import SUPERVISOR, EnlistReply, SupervisorContract, agent_name
from ..first_failure import RunEnd
from ..node_place import NodePlace
from ..runtime_dir import RuntimeDir
from .agent import Agent
from .launch_options import LaunchOptions, agent_options, check_own, facts_of, fork_server_of
from .rendezvous import NodeRendezvous, join_rendezvous
from .stop_signals import CTRL_C, stop_signals

_log = logging.getLogger("myxa.launcher")

ASK_AGAIN_S = 1.0
"""How often a late node asks whether the run has started."""

T = TypeVar("T")
Stop = Callable[[str, int], Awaitable[None]]
"""Request to the run supervisor after a signal: the reason, the signal's number."""


async def follow(options: LaunchOptions) -> RunEnd:
    """Take part to the end. Raises ConfigError and LaunchError: cannot start, not reached, refused."""
    deadline = time.monotonic() + options.timeouts.gather_s
    place, key, file = options.place, options.job_key, options.rdzv_file
    told: EnlistReply | None = None
    with RuntimeDir() as runtime:
        if options.is_late:
            name = f"late/{secrets.token_hex(6)}"
            async with join_rendezvous(place, runtime.path, key, file, deadline, name=name) as rendezvous:
                told = await _enlist(options, place, rendezvous, deadline)
            place = replace(place, rank=told.node)
        _say(f"this is node {place.rank} of the run at {place.endpoint or file}; the run file of node 0 counts")
        async with (
            join_rendezvous(place, runtime.path, key, file, deadline) as rendezvous,
            runtime.kept([rendezvous.rdzv_path]),
        ):
            told = told or await _enlist(options, place, rendezvous, deadline)
            return await _take_part(options, place, rendezvous, runtime.path, deadline, told)


async def _enlist(options: LaunchOptions, place: NodePlace, rendezvous: NodeRendezvous, deadline: float) -> EnlistReply:
    supervisor = rendezvous.node.ref(SupervisorContract, SUPERVISOR)
    facts = facts_of(place, rendezvous, is_late=options.is_late)
    while True:
        reply = await _answer(lambda: supervisor.enlist(facts), rendezvous, deadline)
        if reply.node >= 0:
            return reply
        if not reply.is_early or time.monotonic() > deadline:
            raise LaunchError(f"node 0 refused this node: {reply.reason}")
        await asyncio.sleep(ASK_AGAIN_S)


async def _take_part(
    options: LaunchOptions,
    place: NodePlace,
    rendezvous: NodeRendezvous,
    runtime: Path,
    deadline: float,
    told: EnlistReply,
) -> RunEnd:
    supervisor = rendezvous.node.ref(SupervisorContract, SUPERVISOR)
    options = replace(options, program=told.program)
    facts = facts_of(place, rendezvous, is_late=options.is_late)
    try:
        path = runtime / "run.toml"
        path.write_text(told.config, encoding="utf-8")
        has_data = any(actor.role == "buffer" and actor.node == place.rank for actor in told.actors)
        fetch = partial(fetched, load_config(path), has_data=has_data, say=_say)
        config = await in_daemon_thread(fetch, "hub")
        check_own(config, told.actors, told.program, place.rank)
    except MyxaError as error:
        _say(f"this node cannot take part and reports this to node 0: {error}", is_error=True)
        unable = msgspec.structs.replace(facts, problem=str(error))
        with suppress(CallError, LaunchError):  # node 0 may have failed for the same reason
            await _answer(lambda: supervisor.join(unable), rendezvous, deadline)
        raise
    server = fork_server_of(config, told.actors, told.program, place.rank, runtime)
    agent = Agent(agent_options(options, place, rendezvous, runtime, config, server), rendezvous.exit_seen)
    await rendezvous.node.start(agent, name=agent_name(place.rank))
    if reason := await _answer(lambda: supervisor.join(facts), rendezvous, deadline):
        raise LaunchError(f"node 0 refused this node: {reason}")
    agent.mind_node_0()
    if not options.is_late:
        farewell = await _lend(agent, supervisor.stop_run)
    else:
        farewell = await _lend(agent, lambda reason, _: supervisor.leave_node(place.rank, reason))
        if farewell.exit_code == 0 and farewell.reason == CTRL_C:
            farewell = replace(farewell, exit_code=128 + signal.SIGINT)  # as shells have it
    _say(f"ended: {farewell.reason}")
    return farewell


def _say(text: str, *, is_error: bool = False) -> None:
    Console(stderr=is_error).print(Text(text), soft_wrap=True)


async def _answer(send: Callable[[], Awaitable[T]], rendezvous: NodeRendezvous, deadline: float) -> T:
    return await until_answered(
        send,
        who=f"node 0 at {rendezvous.endpoint}",
        clock=SystemClock(),
        log=_log,
        give_up_s=max(0.0, deadline - time.monotonic()),
    )


async def _lend(agent: Agent, stop: Stop) -> RunEnd:
    """Serve node 0 until it says that the run is over or that this node may go, or is gone."""
    asks: set[asyncio.Task[None]] = set()

    async def ask(reason: str, number: int) -> None:
        try:
            await stop(reason, number)
        except MyxaError as error:
            _say(f"node 0 does not release this node: {error}", is_error=True)

    async with asyncio.TaskGroup() as group:
        with stop_signals(lambda reason, number: asks.add(group.create_task(ask(reason, number)))) as forced:
            await asyncio.wait({agent.left, forced}, return_when=asyncio.FIRST_COMPLETED)
            await agent.kill_all()
            for asking in asks:
                asking.cancel()  # the answer is not needed any more
            if agent.left.done():
                return agent.left.result()
            return RunEnd(128 + forced.result(), "ended at once")
