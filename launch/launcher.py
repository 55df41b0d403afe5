"""One launcher per node: node 0 hosts the registry and conducts the run, the others lend their processes.

The control sockets are open from the registry's start to the end of the last process. No torch here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import random
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import uvloop
from rich.console import Console
from rich.text import Text

from .. import __version__
from ..actors.coordinator.audit import AUDIT_FILE, append_audit
from ..actors.hub import fetched
from ..core.clock import SystemClock
from ..core.config import RunConfig, load_config
from ..core.daemon_thread import in_daemon_thread
from ..core.errors import CallError, ConfigError, LaunchError, MyxaError, TrainError
from ..core.process import adopting_orphans, adopts_orphans, boot_id
from ..core.refs import with_deadline
from ..core.retry import until_answered
from ..core.timeouts import TIMEOUTS, LauncherTimeouts
from ..transport.descriptors import raise_limit
from .actor_spec import ActorSpec
from .composition.weight_channels import choose_channel
from .contracts import SUPERVISOR, EnlistReply, NodeFacts, SupervisorContract, agent_name
from .control.client import NOTE, ControlNote
from .first_failure import RunEnd
from .frozen_code import Frozen, freeze, post_run
from .host import look_at_gpus
from .node_place import ALONE, NodePlace
from .nodes.agent import Agent
from .nodes.fork_server import ForkServer, preloaded
from .nodes.rendezvous import NodeRendezvous, host_rendezvous, join_rendezvous
from .run_dir import RunDir
from .run_lineage.origin import RunOrigin
from .run_lineage.resume_point import named_checkpoint
from .run_watch import RunWatch
from .runtime_dir import RuntimeDir
from .supervisor.membership import Membership
from .supervisor.placement import place as place_actors
from .supervisor.run_supervisor import RunSupervisor, StopRequest
from .views.live import lasting
from .views.run_view import RunView
from .views.screen import Screen, ShownWarnings
from .waiting import Waiting
from .worker_spec import DEFAULT_PROGRAM

if TYPE_CHECKING:
    from .control.server import VerbContext

_log = logging.getLogger("myxa.launcher")

CONTROL_SOCKET = "control.sock"
NCCL_WITHIN_HOST = {"NCCL_SOCKET_IFNAME": "lo"}
"""NCCL's processes meet over sockets; it takes the host's own address otherwise. gloo: actors/torch_store.py."""


@contextlib.asynccontextmanager
async def open_control(context: VerbContext, runtime: Path) -> AsyncGenerator[str]:
    """The control socket of the run, open inside; the URL of its dashboard. Empty: the run file switches it off.

    Raises LaunchError if the socket cannot be made, ConfigError if the port of the dashboard is taken.
    """
    if not context.config.control.socket:
        yield ""
        return
    from .control.handlers import HANDLERS
    from .control.server import ControlServer
    from .web.dashboard import Dashboard

    append = partial(append_audit, context.run_dir.path / AUDIT_FILE)
    note = ControlNote(
        run_dir=str(context.run_dir.path.resolve()), control=str(runtime / CONTROL_SOCKET), pid=os.getpid()
    )
    server = ControlServer(context, HANDLERS, append, Path(note.control))
    try:
        await server.open()
        for folder in (runtime, context.run_dir.path):
            note.save(folder)
        link = context.run_dir.path / CONTROL_SOCKET
        link.unlink(missing_ok=True)
        link.symlink_to(note.control)  # the path of a Unix socket is short: callers name it from their own folder
        async with Dashboard(server, context.run_dir.path) as dashboard:
            port = context.config.control.dashboard_port
            yield await dashboard.opened(port) if port >= 0 else ""
    finally:
        for name in (NOTE, CONTROL_SOCKET):
            (context.run_dir.path / name).unlink(missing_ok=True)
        await server.close()


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How to launch; what to launch is the run's configuration."""

    place: NodePlace = ALONE
    program: str = DEFAULT_PROGRAM
    is_quiet: bool = False
    timeouts: LauncherTimeouts = TIMEOUTS.launcher
    run_dir: RunDir | None = None
    """An existing directory, held by the caller, whose configuration names the checkpoint; None: a new one is made."""
    prepare: Callable[[], object] | None = None
    """Prepares the directory once it is clear that this node can take part."""


def launch(config: RunConfig | None, options: LaunchOptions) -> RunEnd:
    """This node's part of a run to its end; `config` of node 0. Raises ConfigError, LaunchError at the start."""
    raise_limit()
    with adopting_orphans(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(follow(options) if config is None else _lead(config, options))


# -- what a node needs before, and how it introduces itself ------------------------------------------------------------


def check_own(config: RunConfig, actors: Sequence[ActorSpec], program: str, node: int) -> tuple[str, ...]:
    """Whether this node has what its actors need, by our own composition root. Raises and returns as `check_node`."""
    if program == DEFAULT_PROGRAM:
        from .checks.all_checks import check_node  # while a fork server does its imports

        return check_node(config, actors, node)
    module = program.partition(":")[0]
    with contextlib.suppress(ValueError):
        if module.endswith(".py") or find_spec(module.partition(".")[0]) is not None:
            return ()
    raise ConfigError(f"--program: there is no module {module!r}", remedy="install it, or put it on PYTHONPATH")


async def made_ready(
    config: RunConfig, actors: Sequence[ActorSpec], program: str, node: int, waiting: Waiting
) -> RunConfig:
    """The configuration once this node has what its actors need: of the hub, and by the checks. Raises MyxaError."""
    has_data = node == 0 or any(actor.role == "buffer" and actor.node == node for actor in actors)
    fetch = partial(fetched, config, has_data=has_data, say=waiting.say, doing=waiting.now)
    config = await in_daemon_thread(fetch, "hub")
    waiting.now("checking what its actors need")
    for text in await in_daemon_thread(partial(check_own, config, actors, program, node), "checks"):
        waiting.say(f"warning: {text}")
    return config


def fork_server_of(
    config: RunConfig, actors: Sequence[ActorSpec], program: str, node: int, folder: Path
) -> ForkServer | None:
    """Of a node, which begins with its imports on that order; None: no actor is forked. `folder`: for its log."""
    modules = preloaded(config, program, [actor for actor in actors if actor.node == node], os.environ)
    if not modules or not adopts_orphans():  # in a program that hosts us a forked process would not become our child
        return None
    return ForkServer(modules, folder, _log)


def with_start(config: RunConfig, options: LaunchOptions) -> RunConfig:
    """For node 0: resolve `trainer.resume` to a checkpoint, for the run that it names may write newer ones, and all
    actors have to begin from the same. Raises ConfigError if there is none."""
    if options.run_dir is not None or not config.trainer.resume:
        return config
    try:
        start = named_checkpoint(config.trainer.resume).absolute()
    except TrainError as error:
        if options.program != DEFAULT_PROGRAM:  # it may interpret the key otherwise
            return config
        raise ConfigError(f"trainer.resume: {error.message}", remedy=error.remedy) from error
    trainer = config.trainer.model_copy(update={"resume": str(start)})
    return config.model_copy(update={"trainer": trainer})


def facts_of(options: LaunchOptions, rendezvous: NodeRendezvous, actors: Sequence[ActorSpec] = ()) -> NodeFacts:
    """`actors`: none where they are not known yet."""
    node = options.place.rank
    return NodeFacts(
        node=node, version=__version__, host=socket.gethostname(), address=rendezvous.address, machine=boot_id(),
        is_late=options.place.is_late, nonce=secrets.token_hex(8), gpus=seen_gpus(actors, node),
    )  # fmt: skip


def seen_gpus(actors: Sequence[ActorSpec], node: int) -> tuple[str, ...]:
    """UUIDs of the GPUs that actors of this node see. Asks the driver."""
    numbers = {number for actor in actors if actor.node == node for number in actor.visible_devices}
    gpus = look_at_gpus().found if numbers else ()
    return tuple(gpus[number].uuid for number in sorted(numbers) if number < len(gpus))


# -- node 0 ----------------------------------------------------------------------------------------------------------


async def _lead(config: RunConfig, options: LaunchOptions) -> RunEnd:
    actors = place_actors(config, options.place.num_nodes)
    async with contextlib.AsyncExitStack() as stack:
        runtime = stack.enter_context(RuntimeDir())
        fork_server = fork_server_of(config, actors, options.program, 0, runtime.path)
        if fork_server is not None:  # its imports and the checks take about as long
            stack.push_async_callback(fork_server.close)
            fork_server.warm()
            await asyncio.sleep(0)
        from .control.server import VerbContext  # a quarter of a second, while the fork server does its imports

        async with host_rendezvous(options.place, runtime.path) as rendezvous:
            frozen, run_dir = await _prepared(config, actors, options, rendezvous, stack)
            config = frozen.config
            screen = Screen(Console(file=lasting(sys.stdout)), run_dir.path, is_quiet=options.is_quiet)
            with _logging(run_dir, 0, screen), screen, rendezvous.posted(run_dir.rdzv):
                welcome = EnlistReply(
                    run_dir=str(run_dir.path), config=frozen.text, code=dict(frozen.files), program=options.program,
                    actors=actors,
                )  # fmt: skip
                membership = Membership(options.place.num_nodes, welcome, config, options.place.max_nodes)
                supervisor = RunSupervisor(
                    membership, rendezvous.exit_seen, jitter=random.Random().random, timeouts=options.timeouts
                )
                screen.say(f"run directory: {run_dir.path}")
                if options.place.num_nodes > 1:
                    screen.say(f"waiting for {options.place.num_nodes} nodes at {rendezvous.endpoint}")
                elif not options.place.is_alone:
                    screen.say(f"other nodes may join: myxa launch --join {rendezvous.endpoint}")
                context = VerbContext(rendezvous.node, run_dir, config, supervisor, time.time())
                is_alone = options.place.is_alone
                agent = Agent(
                    0, runtime.path, run_dir, program=options.program, fork_server=fork_server,
                    key_for=None if is_alone else rendezvous.key_for,
                    base_env=NCCL_WITHIN_HOST if is_alone and not config.engine.attach else {},
                )  # fmt: skip
                ending = await _conduct(context, rendezvous, runtime, agent, options, screen)
    screen.finish(ending)
    return replace(ending, run_dir=run_dir.path)


class _NotReady(SupervisorContract):
    """In the supervisor's place until node 0 has what the run needs: other nodes hear what they wait for."""

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting

    async def enlist(self, facts: NodeFacts) -> EnlistReply:
        return EnlistReply(reason=f"node 0 is not ready: {self._waiting.text}", is_early=True)


async def _prepared(
    config: RunConfig,
    actors: Sequence[ActorSpec],
    options: LaunchOptions,
    rendezvous: NodeRendezvous,
    stack: contextlib.AsyncExitStack,
) -> tuple[Frozen, RunDir]:
    """Fetch what is of the hub, check what this node's actors need, and make the run directory, held by the stack."""
    with Waiting("checking what the run needs", sys.stdout, is_quiet=options.is_quiet) as waiting:
        if not options.place.is_alone:
            await rendezvous.node.start(_NotReady(waiting), name=SUPERVISOR)
        config = await made_ready(config, actors, options.program, 0, waiting)
        waiting.now("copying code, and making the rows of environments")
        if options.run_dir is not None:  # refuse before anything there is changed
            await in_daemon_thread(partial(freeze, config, options.run_dir.path), "freeze")
        config = with_start(config, options)
        run_dir = stack.enter_context(_run_dir(config, options))
        frozen = await in_daemon_thread(partial(freeze, config, run_dir.path), "freeze")
        post_run(run_dir, frozen.text, frozen.files)
        if not options.place.is_alone:
            await rendezvous.node.stop(SUPERVISOR)
    return frozen, run_dir


@contextlib.contextmanager
def _run_dir(config: RunConfig, options: LaunchOptions) -> Generator[RunDir]:
    if options.run_dir is not None:
        if options.prepare is not None:
            options.prepare()
        yield RunDir.join(str(options.run_dir.path))
        return
    run_dir = RunDir.create(config.run.dir, config.run.name, datetime.now())
    with run_dir.held():
        RunOrigin(program=options.program).save(run_dir.path)
        yield run_dir


async def _conduct(
    context: VerbContext,
    rendezvous: NodeRendezvous,
    runtime: RuntimeDir,
    agent: Agent,
    options: LaunchOptions,
    screen: Screen,
) -> RunEnd:
    supervisor = context.supervisor
    await rendezvous.node.start(supervisor, name=SUPERVISOR)
    await rendezvous.node.start(agent, name=agent_name(0))
    facts = partial(facts_of, options, rendezvous, supervisor.actors.specs)
    await supervisor.join(await in_daemon_thread(facts, "facts"))
    lead = Lead(supervisor, RunWatch(rendezvous.node), screen, options.timeouts)

    def on_request(reason: str, number: int) -> None:
        screen.say(f"{reason}: ending the run; a second signal ends it at once")
        supervisor.request_stop(reason, number)

    ending = RunEnd(1, "the launcher failed")
    try:
        async with open_control(context, runtime.path) as url:
            if url:
                screen.say(f"dashboard: {url}")
            with stop_signals(on_request) as forced:
                async with runtime.kept([rendezvous.rdzv_path, runtime.path / NOTE]):
                    run = await race(lead.run(), forced, rendezvous.node.failed)
                    if not run.cancelled():
                        ending = run.result()
                    elif forced.done():
                        ending = RunEnd(128 + forced.result(), "ended at once")
                    else:
                        cause = f"the launcher itself failed: {rendezvous.node.failed.result()}"
                        raise LaunchError(cause, remedy="this is a bug; report it")
    except LaunchError as error:
        ending = RunEnd(error.exit_code, str(error))
        raise
    finally:
        await supervisor.kill_all()
        for node in supervisor.nodes[1:]:  # node 0 is this one
            await supervisor.order_leave(node, ending.exit_code, ending.reason)
    return ending


@contextlib.contextmanager
def _logging(run_dir: RunDir, node: int, screen: Screen) -> Generator[None]:
    """The launcher's log goes to a file; warnings are also shown."""
    logger = logging.getLogger("myxa")
    file = logging.FileHandler(run_dir.logs / f"launcher.{node}.log", encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    shown = ShownWarnings(screen.say)
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


# -- from the gathering of nodes to the end of the last process: when a run is over, and how --------------------------

LOOK_EVERY_S = 0.5
ASK_TO_STOP_S = 10.0
"""How long one request for an orderly end may take; it is repeated."""
VERDICT_S = 1.5
"""After the coordinator reports a failure: how long to wait for the failing process's own exit status."""
CONSEQUENCES_S = 0.5
"""How long the report of a failure waits for consequences. With the two above, the report comes within 3 s."""


async def race(work: Coroutine[Any, Any, T], *others: asyncio.Future[Any]) -> asyncio.Task[T]:
    """The work's task, done; cancelled if one of the others was done first."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        await asyncio.wait({task, *others}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    return task


@dataclass(eq=False)
class Lead:
    """Conducts one run."""

    supervisor: RunSupervisor
    watch: RunWatch
    screen: Screen
    timeouts: LauncherTimeouts

    def __post_init__(self) -> None:
        self._failures = self.supervisor.failures

    def _now(self) -> float:
        return self.supervisor.ctx.clock.monotonic()

    async def run(self) -> RunEnd:
        """Gather, start, watch, end. Raises LaunchError if the nodes do not meet."""
        start = await race(self._start(), self.supervisor.stop_requested)
        if start.cancelled():
            wish = self.supervisor.stop_requested.result()
            ending = RunEnd(wish.exit_code(is_orderly=True), wish.reason)
        else:
            start.result()
            ending = await self._until_over()
        await self._report()
        await self.supervisor.stop_all()
        failure = self._failures.first if ending.exit_code else None
        return RunEnd(ending.exit_code, ending.reason, self.watch.last.status, failure)

    async def _start(self) -> None:
        await self.supervisor.membership.gather(self.timeouts.gather_s, self.screen.say)
        await self.supervisor.start_all()

    async def _report(self) -> None:
        """Report a failure now: an orderly end takes longer than a person should wait for the reason."""
        if self._failures.first is None:
            return
        await asyncio.sleep(CONSEQUENCES_S)
        status = self.watch.last.status
        if status is not None and status.phase == "failed" and status.error:
            self._failures.add(f"the coordinator ended the run: {status.error}", self._now())
        self.screen.tell(self._failures.first)

    async def _until_over(self) -> RunEnd:
        deadline, is_heard = 0.0, False
        while True:
            state = await self._look()
            if (ending := self._judge(state)) is not None:
                return await self._settle(ending)
            if (wish := self._wish()) is not None:
                deadline = deadline or self._now() + self.timeouts.finish_s
                if not is_heard:  # a coordinator that is being restarted gets the next request
                    is_heard = await self.watch.ask_to_stop(wish.reason, min(ASK_TO_STOP_S, self.timeouts.finish_s))
                if self._now() > deadline:
                    waited = f"the run had no orderly end within {self.timeouts.finish_s:g} s"
                    why = waited if is_heard else "the coordinator did not answer"
                    return RunEnd(wish.exit_code(is_orderly=False), f"{wish.reason}; {why}")
            await asyncio.wait({self.supervisor.failed}, timeout=LOOK_EVERY_S)

    async def _look(self) -> RunView:
        """State of the run; a failure does not wait for answers of others."""
        waiting = ", ".join(self.supervisor.starting)
        look = await race(self.watch.look(f"waiting for {waiting}" if waiting else ""), self.supervisor.failed)
        if look.cancelled():
            return self.watch.last
        state = look.result()
        self.screen.show(state)
        return state

    def _wish(self) -> StopRequest | None:
        return self.supervisor.stop_requested.result() if self.supervisor.stop_requested.done() else None

    def _judge(self, state: RunView) -> RunEnd | None:
        """Whether the run is over. An actor's death counts more than the coordinator's status."""
        if self.supervisor.failed.done():
            verdict = self.supervisor.failed.result()
            return RunEnd(verdict.exit_code, verdict.reason)
        if state.status is None or state.status.phase not in ("finished", "failed"):
            return None
        if state.status.phase == "failed":
            return RunEnd(1, state.status.error or state.status.reason or "the coordinator ended the run")
        wish = self._wish()
        return RunEnd(wish.exit_code(is_orderly=True) if wish else 0, state.status.reason)

    async def _settle(self, ending: RunEnd) -> RunEnd:
        """The cause of a failed run: a process that fails by itself now, else the actor that the error names."""
        if ending.exit_code != 1 or self.supervisor.failed.done():
            return ending
        await asyncio.wait({self.supervisor.failed}, timeout=VERDICT_S)
        if self.supervisor.failed.done():
            verdict = self.supervisor.failed.result()
            return RunEnd(verdict.exit_code, ending.reason)
        name = ending.reason.partition(":")[0]
        name = name if name in self.supervisor.actors else "coordinator"
        self._failures.blame(name, ending.reason, self._now())
        return ending


# -- the other nodes ---------------------------------------------------------------------------------------------------
#
# Their launchers lend their processes to the run, from its start or later. They decide nothing, and learn all that they
# need to know from node 0: its run file counts. A late node first asks for its number, under a name of its own; then it
# joins like the others.

ASK_AGAIN_S = 1.0
"""How often a late node asks whether the run has started."""

Stop = Callable[[str, int], Awaitable[None]]
"""Request to the run supervisor after a signal: the reason, the signal's number."""


async def follow(options: LaunchOptions) -> RunEnd:
    """Take part to the end. Raises ConfigError and LaunchError: cannot start, not reached, refused."""
    place, wait_s = options.place, options.timeouts.gather_s
    reply: EnlistReply | None = None
    with RuntimeDir() as runtime:
        if place.is_late:
            name = f"late/{secrets.token_hex(6)}"
            async with join_rendezvous(place, runtime.path, wait_s, name=name) as rendezvous:
                reply = await _Follower(options, rendezvous).enlist()
            place = replace(place, rank=reply.node)
            options = replace(options, place=place)
        _say(f"this is node {place.rank} of the run at {place.endpoint or place.file}; the run file of node 0 counts")
        async with (
            join_rendezvous(place, runtime.path, wait_s) as rendezvous,
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
        options, node = self._options, self._node
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
        agent = Agent(
            node, runtime, run_dir, program=reply.program, lost_s=options.timeouts.lost_s,
            key_for=self._rendezvous.key_for, fork_server=server,
        )  # fmt: skip
        await self._rendezvous.node.start(agent, name=agent_name(node))
        await self._join(gpus=gpus)
        agent.mind_node_0()
        if not options.place.is_late:
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
            if self._options.place.is_late and choose_channel(config) == "disk" and not run_dir.config.exists():
                cause = f"{run_dir.path} is not there on {socket.gethostname()}: weights travel through it"
                raise LaunchError(cause, remedy="have run.dir on a file system that all nodes share")
            post_run(run_dir, reply.config, reply.code)
            return await made_ready(config, reply.actors, reply.program, self._node, waiting)
        except MyxaError as error:
            _say(f"this node cannot take part and reports this to node 0: {error}", is_error=True)
            with contextlib.suppress(CallError, LaunchError):  # node 0 may have failed for the same reason
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


# -- signals -----------------------------------------------------------------------------------------------------------
#
# Ctrl-C, a scheduler's signal and a closed terminal: the first requests an orderly end, the second ends everything at
# once. `timeout` and `uv run` send one signal twice, so one that follows within `TWICE_S` counts as the same. Kernel
# and shell may both report a closed terminal, and batch scripts choose SIGUSR1 or SIGUSR2 for Slurm's warning
# (`--signal`), which SIGTERM may precede: these never count as the second. nohup has SIGHUP ignored.

WARNINGS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
SIGNALS = (signal.SIGINT, signal.SIGTERM, *WARNINGS)
CTRL_C = "Ctrl-C"
TWICE_S = 0.5


@contextlib.contextmanager
def stop_signals(on_request: Callable[[str, int], None]) -> Generator[asyncio.Future[int]]:
    """`on_request(reason, signal number)` is called for the first signal; the future gets the second one's number."""
    loop = asyncio.get_running_loop()
    forced: asyncio.Future[int] = loop.create_future()
    outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    caught = [number for number in SIGNALS if not (outlives and number is signal.SIGHUP)]
    first_s = math.inf

    def on_signal(number: signal.Signals) -> None:
        nonlocal first_s
        if first_s == math.inf:
            first_s = loop.time()
            on_request(CTRL_C if number is signal.SIGINT else number.name, int(number))
        elif number not in WARNINGS and loop.time() > first_s + TWICE_S and not forced.done():
            forced.set_result(int(number))

    for number in caught:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield forced
    finally:
        for number in caught:
            loop.remove_signal_handler(number)
