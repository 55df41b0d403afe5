"""The launchers of all nodes but node 0: they lend their processes to the run, from its start or later.

They decide nothing, and all that they need to know they learn from node 0: its run file counts. A late node first asks
for its number, under a name of its own; then it joins like the others.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from rich.console import Console
from rich.text import Text

from ...core.clock import SystemClock
from ...core.config import RunConfig, load_config
from ...core.daemon_thread import in_daemon_thread
from ...core.errors import CallError, LaunchError, MyxaError
from ...core.refs import with_deadline
from ...core.retry import until_answered
from ..composition.weight_channels import choose_channel
from ..contracts import SUPERVISOR, EnlistReply, SupervisorContract, agent_name
from ..first_failure import RunEnd
from ..frozen_code import post_run
from ..run_dir import RunDir
from ..runtime_dir import RuntimeDir
from ..stop_signals import CTRL_C, stop_signals
from ..waiting import Waiting
from .agent import Agent
from .launch_options import LaunchOptions, facts_of, fork_server_of, made_ready, seen_gpus
from .rendezvous import NodeRendezvous, join_rendezvous

_log = logging.getLogger("myxa.launcher")

ASK_AGAIN_S = 1.0
"""How often a late node asks whether the run has started."""

T = TypeVar("T")
Stop = Callable[[str, int], Awaitable[None]]
"""Request to the run supervisor after a signal: the reason, the signal's number."""


async def follow(options: LaunchOptions) -> RunEnd:
    """Take part to the end. Raises ConfigError and LaunchError: cannot start, not reached, refused."""
    place, key, file, wait_s = options.place, options.job_key, options.rdzv_file, options.timeouts.gather_s
    reply: EnlistReply | None = None
    with RuntimeDir() as runtime:
        if options.is_late:
            name = f"late/{secrets.token_hex(6)}"
            async with join_rendezvous(place, runtime.path, key, file, wait_s, name=name) as rendezvous:
                reply = await _Follower(options, rendezvous).enlist()
            place = replace(place, rank=reply.node)
            options = replace(options, place=place)
        _say(f"this is node {place.rank} of the run at {place.endpoint or file}; the run file of node 0 counts")
        async with (
            join_rendezvous(place, runtime.path, key, file, wait_s) as rendezvous,
            runtime.kept([rendezvous.rdzv_path]),
        ):
            follower = _Follower(options, rendezvous)
            return await follower.take_part(runtime.path, reply or await follower.enlist())


class _Follower:
    """This node, as node 0 knows it."""

    def __init__(self, options: LaunchOptions, rendezvous: NodeRendezvous) -> None:
        self._options = options
        self._node = options.place.rank
        self._rendezvous = rendezvous
        self._facts = facts_of(options, rendezvous)
        supervisor = rendezvous.node.ref(SupervisorContract, SUPERVISOR)
        self._supervisor = with_deadline(supervisor, options.timeouts.lost_s)
        self._patience_s = options.timeouts.gather_s

    async def enlist(self) -> EnlistReply:
        """What node 0 says, which has its own deadlines for what comes before. Raises LaunchError, CallError."""
        with Waiting("asking node 0", sys.stdout) as waiting:
            while True:
                reply = await self._answer(lambda: self._supervisor.enlist(self._facts))
                if reply.node >= 0:
                    return reply
                if not reply.is_early:
                    raise LaunchError(f"node 0 refused this node: {reply.reason}")
                waiting.now(reply.reason)
                await asyncio.sleep(ASK_AGAIN_S)

    async def take_part(self, runtime: Path, reply: EnlistReply) -> RunEnd:
        options, node = replace(self._options, program=reply.program), self._node
        with Waiting("reading the run file of node 0", sys.stdout) as waiting:
            work = asyncio.get_running_loop().create_task(self._make_ready(reply, waiting))
            try:
                while not (await asyncio.wait({work}, timeout=ASK_AGAIN_S))[0]:
                    await self._join(doing=waiting.text)
            finally:
                work.cancel()
        config = work.result()
        gpus = await in_daemon_thread(partial(seen_gpus, reply.actors, node), "gpus")
        server = fork_server_of(config, reply.actors, reply.program, node, runtime)
        run_dir = RunDir(Path(reply.run_dir))
        agent = Agent(options, runtime, run_dir, key_for=self._rendezvous.key_for, fork_server=server)
        await self._rendezvous.node.start(agent, name=agent_name(node))
        await self._join(gpus=gpus)
        agent.mind_node_0()
        if not options.is_late:
            farewell = await _lend(agent, self._supervisor.stop_run)
        else:
            farewell = await _lend(agent, lambda reason, _: self._supervisor.leave_node(node, reason))
            if farewell.exit_code == 0 and farewell.reason == CTRL_C:
                farewell = replace(farewell, exit_code=128 + signal.SIGINT)  # as shells have it
        _say(f"ended: {farewell.reason}")
        return farewell

    async def _make_ready(self, reply: EnlistReply, waiting: Waiting) -> RunConfig:
        """The run's configuration, once this node has what its actors need. Node 0 hears of an error, too."""
        run_dir = RunDir(Path(reply.run_dir))
        try:
            config = load_config(run_dir.config, text=reply.config)
            if self._options.is_late and choose_channel(config) == "disk" and not run_dir.config.exists():
                cause = f"{run_dir.path} is not there on {socket.gethostname()}: weights travel through it"
                raise LaunchError(cause, remedy="have run.dir on a file system that all nodes share")
            post_run(run_dir, reply.config, reply.code)
            return await made_ready(config, reply.actors, reply.program, self._node, waiting)
        except MyxaError as error:
            _say(f"this node cannot take part and reports this to node 0: {error}", is_error=True)
            with suppress(CallError, LaunchError):  # node 0 may have failed for the same reason
                await self._join(problem=str(error))
            raise

    async def _join(self, **more: Any) -> None:
        facts = msgspec.structs.replace(self._facts, **more)
        if reason := await self._answer(lambda: self._supervisor.join(facts)):
            raise LaunchError(f"node 0 refused this node: {reason}")

    async def _answer(self, send: Callable[[], Awaitable[T]]) -> T:
        callee = f"node 0 at {self._rendezvous.endpoint}"
        answer = await until_answered(send, who=callee, clock=SystemClock(), log=_log, give_up_s=self._patience_s)
        self._patience_s = self._options.timeouts.lost_s  # it is there
        return answer


def _say(text: str, *, is_error: bool = False) -> None:
    Console(stderr=is_error).print(Text(text), soft_wrap=True)


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
