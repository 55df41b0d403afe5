"""One launcher per node: node 0 hosts the registry and conducts the run, the others lend their processes to it.

No torch here. Puts the parts together: meeting, agent, run supervisor, signals, view, report.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import uvloop
from rich.console import Console
from rich.text import Text

from .. import __version__
from ..core.clock import SystemClock
from ..core.config import RunConfig, dump_config
from ..core.errors import CallError, LaunchError, MyxaError
from ..core.patience import until_answered
from ..transport.zeromq.descriptors import raise_limit
from .actor_spec import ActorSpec
from .agent import Agent, AgentOptions, Farewell
from .contracts import SUPERVISOR, AgentContract, NodeFacts, RunPlan, SupervisorContract, agent_name
from .lead import Ending, Lead
from .meeting import Meeting, host_meeting, join_meeting
from .node_place import NodePlace
from .placement import place as place_actors
from .preflight import check_node
from .race import race
from .run_dir import RunDir
from .run_supervisor import Patience, RunPlace, RunSupervisor
from .run_watch import RunWatch
from .runtime_dir import RuntimeDir
from .screen import Screen
from .stop_signals import StopSignals
from .worker_spec import DEFAULT_PROGRAM

_log = logging.getLogger("myxa.launcher")

CLOSE_S = 5.0
DECLINE_S = 60.0
"""How long a node that cannot take part looks for node 0 to say so."""


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How to launch; what to launch is the run's configuration."""

    place: NodePlace
    rdzv_file: Path | None = None
    job_key: Path | None = None
    program: str = DEFAULT_PROGRAM
    is_quiet: bool = False
    patience: Patience = field(default_factory=Patience)
    next_steps: tuple[str, ...] = ()
    """What to suggest at a good end."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the run ended, as this node's launcher saw it."""

    exit_code: int
    reason: str
    run_dir: Path | None = None


def launch(config: RunConfig, options: LaunchOptions) -> Outcome:
    """Run this node's part of a run to its end. Raises ConfigError and LaunchError for what cannot start."""
    raise_limit()
    part = _lead if options.place.rank == 0 else _follow
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(part(config, options))


# -- node 0 ----------------------------------------------------------------------------------------------------------


async def _lead(config: RunConfig, options: LaunchOptions) -> Outcome:
    actors = place_actors(config, options.place.num_nodes)
    _check(config, actors, options)
    text = dump_config(config)
    with RuntimeDir() as runtime:
        async with host_meeting(options.place, runtime.path, options.job_key, options.rdzv_file) as meeting:
            run_dir = RunDir.create(config.run.dir, config.run.name, datetime.now())
            screen = Screen(Console(), run_dir.path, is_quiet=options.is_quiet)
            with _logging(run_dir, 0, screen), screen, meeting.posted(run_dir.rdzv):
                run_place = RunPlace(
                    actors=actors,
                    num_nodes=options.place.num_nodes,
                    version=__version__,
                    config=text,
                    plan=RunPlan(run_id=run_dir.path.name, run_dir=str(run_dir.path)),
                )
                supervisor = RunSupervisor(run_place, lot=random.Random().random, patience=options.patience)
                screen.say(f"run directory: {run_dir.path}")
                if options.place.num_nodes > 1:
                    screen.say(f"waiting for {options.place.num_nodes} nodes at {meeting.endpoint}")
                ending = await _conduct(supervisor, meeting, runtime, text, options, screen)
    screen.finish(ending, options.next_steps)
    return Outcome(ending.exit_code, ending.reason, run_dir.path)


async def _conduct(
    supervisor: RunSupervisor, meeting: Meeting, runtime: RuntimeDir, text: str, options: LaunchOptions, screen: Screen
) -> Ending:
    clock = SystemClock()
    agent = Agent(_agent_options(options, meeting, runtime, text), meeting.exit_seen)
    await meeting.node.start(supervisor, name=SUPERVISOR)
    await meeting.node.start(agent, name=agent_name(0))
    await supervisor.join(_facts(options.place, text))
    lead = Lead(
        supervisor, RunWatch(meeting.node, clock), clock=clock, patience=options.patience, show=screen.show,
        tell=screen.tell,
    )  # fmt: skip

    def asked(reason: str, number: int) -> None:
        screen.say(f"{reason}: ending in good order; once more ends at once")
        supervisor.wish_stop(reason, number)

    ending = Ending(1, "the launcher failed")
    try:
        with StopSignals(asked) as signals:
            ending = await _until_forced(lead, supervisor, meeting, signals)
    except LaunchError as error:
        ending = Ending(error.exit_code, str(error))
        raise
    finally:
        await supervisor.kill_all(ending.reason)
        await _dismiss(supervisor, meeting, ending)
    return ending


async def _until_forced(lead: Lead, supervisor: RunSupervisor, meeting: Meeting, signals: StopSignals) -> Ending:
    """The run to its end, or to the second signal, or to a failure of this launcher itself."""
    run = await race(lead.run(), signals.forced, meeting.node.failed)
    if not run.cancelled():
        return run.result()
    if signals.forced.done():
        return Ending(128 + signals.forced.result(), "ended at once")
    raise LaunchError(f"the launcher itself failed: {meeting.node.failed.result()}", remedy="this is a bug; report it")


async def _dismiss(supervisor: RunSupervisor, meeting: Meeting, ending: Ending) -> None:
    for node in supervisor.other_nodes:
        agent = meeting.node.ref(AgentContract, agent_name(node))
        try:
            await agent.leave(ending.exit_code, ending.reason)
        except CallError as error:
            _log.info("node %d was not told of the end: %s", node, error)


# -- the other nodes -------------------------------------------------------------------------------------------------


async def _follow(config: RunConfig, options: LaunchOptions) -> Outcome:
    try:
        _check(config, place_actors(config, options.place.num_nodes), options)
    except MyxaError as error:
        await _decline(options, str(error))
        raise
    text = dump_config(config)
    clock = SystemClock()
    deadline = time.monotonic() + options.patience.gather_s
    with RuntimeDir() as runtime:
        async with join_meeting(options.place, runtime.path, options.job_key, options.rdzv_file, deadline) as meeting:
            agent = Agent(_agent_options(options, meeting, runtime, text), meeting.exit_seen)
            await meeting.node.start(agent, name=agent_name(options.place.rank))
            supervisor = meeting.node.ref(SupervisorContract, SUPERVISOR)
            reply = await until_answered(
                lambda: supervisor.join(_facts(options.place, text)),
                who=f"node 0 at {meeting.endpoint}",
                clock=clock,
                log=_log,
                give_up_s=max(0.0, deadline - time.monotonic()),
            )
            if not reply.accepted:
                raise LaunchError(f"node 0 refused this node: {reply.reason}")
            farewell = await _lend(agent, supervisor)
    Console().print(Text(f"ended: {farewell.reason}"), soft_wrap=True)
    return Outcome(farewell.exit_code, farewell.reason)


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


async def _lend(agent: Agent, supervisor: SupervisorContract) -> Farewell:
    """Serve node 0 until it says that the run is over, or is gone."""
    asks: set[asyncio.Task[None]] = set()

    async def ask(reason: str, number: int) -> None:
        with contextlib.suppress(CallError):
            await supervisor.stop_run(reason, number)

    async with asyncio.TaskGroup() as group:
        with StopSignals(lambda reason, number: asks.add(group.create_task(ask(reason, number)))) as signals:
            await asyncio.wait({agent.left, signals.forced}, return_when=asyncio.FIRST_COMPLETED)
            await agent.kill_all()
            if agent.left.done():
                return agent.left.result()
            return Farewell(128 + signals.forced.result(), "ended at once")


# -- common ----------------------------------------------------------------------------------------------------------


def _check(config: RunConfig, actors: tuple[ActorSpec, ...], options: LaunchOptions) -> None:
    """Somebody's own composition root may need none of what ours needs."""
    if options.program == DEFAULT_PROGRAM:
        check_node(config, [actor for actor in actors if actor.node == options.place.rank])


def _facts(place: NodePlace, text: str) -> NodeFacts:
    return NodeFacts(
        node=place.rank, num_nodes=place.num_nodes, version=__version__, config=text, host=socket.gethostname()
    )


def _agent_options(options: LaunchOptions, meeting: Meeting, runtime: RuntimeDir, text: str) -> AgentOptions:
    return AgentOptions(
        node=options.place.rank,
        address=meeting.address,
        runtime_dir=runtime.path,
        config_text=text,
        rdzv_path=str(meeting.rdzv_path),
        lost_s=options.patience.lost_s,
        program=options.program,
        key_for=meeting.key_for if options.place.num_nodes > 1 else None,
    )


@contextlib.contextmanager
def _logging(run_dir: RunDir, node: int, screen: Screen) -> Generator[None]:
    """The launcher's log goes to a file; warnings are also shown."""
    logger = logging.getLogger("myxa")
    file = logging.FileHandler(run_dir.logs / f"launcher.{node}.log", encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    shown = screen.handler()
    before = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(file)
    logger.addHandler(shown)
    try:
        yield
    finally:
        logger.removeHandler(shown)
        logger.removeHandler(file)
        file.close()
        logger.setLevel(before[0])
        logger.propagate = before[1]
