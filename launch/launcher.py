"""One launcher per node: node 0 hosts the registry and conducts the run, the others (follower.py) lend their processes.

No torch here. Puts the parts together: meeting, agent, run supervisor, signals, view, report.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import sys
import time
from collections.abc import Generator
from datetime import datetime

import uvloop
from rich.console import Console

from .. import __version__
from ..core.clock import SystemClock
from ..core.config import RunConfig, dump_config
from ..core.errors import CallError, LaunchError
from ..core.process import adopting_orphans
from ..transport.descriptors import raise_limit
from .contracts import SUPERVISOR, AgentContract, RunPlan, agent_name
from .control.client import NOTE
from .control.verb import VerbContext
from .frozen_code import freeze
from .lives.named_checkpoint import kept_meanwhile
from .lives.origin import Origin
from .nodes.agent import Agent
from .nodes.follower import follow, follow_late
from .nodes.launch_options import LaunchOptions, Outcome, agent_options, check_own, facts_of, with_start
from .nodes.lead import Ending, Lead
from .nodes.meeting import Meeting, host_meeting
from .nodes.race import race
from .nodes.stop_signals import StopSignals
from .run_dir import RunDir
from .run_watch import RunWatch
from .runtime_dir import RuntimeDir
from .screen import Screen
from .seat import control_seat
from .supervisor.placement import place as place_actors
from .supervisor.run_supervisor import RunPlace, RunSupervisor
from .views.live import lasting

_log = logging.getLogger("myxa.launcher")

__all__ = ["LaunchOptions", "Outcome", "launch", "launch_late"]


def launch(config: RunConfig, options: LaunchOptions) -> Outcome:
    """Run this node's part of a run to its end. Raises ConfigError and LaunchError for what cannot start."""
    raise_limit()
    part = _lead if options.place.rank == 0 else follow
    with adopting_orphans(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(part(config, options))


def launch_late(config: RunConfig | None, options: LaunchOptions) -> Outcome:
    """Lend this machine to a run that goes on; `config` None: as the run has it. Raises ConfigError and LaunchError."""
    raise_limit()
    with adopting_orphans(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(follow_late(config, options))


# -- node 0 ----------------------------------------------------------------------------------------------------------


async def _lead(config: RunConfig, options: LaunchOptions) -> Outcome:
    """Nodes compare what they were told; what they run is that, from the checkpoint that this node chose."""
    actors = place_actors(config, options.place.num_nodes)
    check_own(config, actors, options, 0)
    if options.run_dir is not None:  # what it refuses is refused before anything there is changed
        freeze(config, options.run_dir.path)
    text, config = dump_config(config), with_start(config, options)
    with RuntimeDir() as runtime, contextlib.ExitStack() as stack:
        if options.run_dir is None:  # a run that goes on deletes its own when it has newer ones
            stack.enter_context(kept_meanwhile(config.trainer.resume))
        async with host_meeting(options.place, runtime.path, options.job_key, options.rdzv_file) as meeting:
            run_dir = stack.enter_context(_run_dir(config, options))
            frozen = freeze(config, run_dir.path)
            config = frozen.config
            screen = Screen(Console(file=lasting(sys.stdout)), run_dir.path, is_quiet=options.is_quiet)
            with _logging(run_dir, 0, screen), screen, meeting.posted(run_dir.rdzv):
                run_place = RunPlace(
                    actors=actors,
                    num_nodes=options.place.num_nodes,
                    version=__version__,
                    config=text,
                    plan=RunPlan(
                        run_id=run_dir.path.name,
                        run_dir=str(run_dir.path),
                        config=frozen.text,
                        code=dict(frozen.files),
                    ),
                    run=config,
                    max_nodes=options.place.max_nodes,
                )
                supervisor = RunSupervisor(run_place, lot=random.Random().random, patience=options.patience)
                screen.say(f"run directory: {run_dir.path}")
                if options.place.num_nodes > 1:
                    screen.say(f"waiting for {options.place.num_nodes} nodes at {meeting.endpoint}")
                elif not options.place.is_alone:
                    screen.say(f"other nodes may come: myxa launch --join {meeting.endpoint}")
                context = VerbContext(meeting.node, run_dir, config, supervisor, time.time())
                ending = await _conduct(context, meeting, runtime, text, options, screen)
    screen.finish(ending, options.next_steps)
    version = ending.status.version if ending.status is not None else -1
    return Outcome(ending.exit_code, ending.reason, run_dir.path, version)


@contextlib.contextmanager
def _run_dir(config: RunConfig, options: LaunchOptions) -> Generator[RunDir]:
    """The run's directory, this launcher's alone."""
    if options.run_dir is not None:
        if options.prepare is not None:
            options.prepare()
        yield RunDir.join(str(options.run_dir.path))
        return
    run_dir = RunDir.create(config.run.dir, config.run.name, datetime.now())
    with run_dir.held():
        Origin(program=options.program).save(run_dir.path)
        yield run_dir


async def _conduct(
    context: VerbContext, meeting: Meeting, runtime: RuntimeDir, text: str, options: LaunchOptions, screen: Screen
) -> Ending:
    supervisor = context.supervisor
    clock = SystemClock()
    own = agent_options(options, options.place, meeting, runtime.path, context.config)
    agent = Agent(own, meeting.exit_seen)
    await meeting.node.start(supervisor, name=SUPERVISOR)
    await meeting.node.start(agent, name=agent_name(0))
    await supervisor.join(facts_of(options.place, text))
    lead = Lead(
        supervisor, RunWatch(meeting.node, clock), clock=clock, patience=options.patience, show=screen.show,
        tell=screen.tell,
    )  # fmt: skip

    def asked(reason: str, number: int) -> None:
        screen.say(f"{reason}: ending in good order; once more ends at once")
        supervisor.wish_stop(reason, number)

    ending = Ending(1, "the launcher failed")
    try:
        async with control_seat(context, runtime.path) as note:
            if note is not None and note.dashboard:
                screen.say(f"dashboard: {note.dashboard}")
            files = [meeting.rdzv_path, runtime.path / NOTE]
            async with runtime.kept(files):
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
    for node in supervisor.nodes[1:]:  # node 0 is this one
        agent = meeting.node.ref(AgentContract, agent_name(node))
        try:
            await agent.leave(ending.exit_code, ending.reason)
        except CallError as error:
            _log.info("node %d was not told of the end: %s", node, error)


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
