"""A whole system of nodes in one thread and in virtual time, with the faults that can hit it.

    async with Sim(seed=7, net=Net(drop=0.01, delay_s=(0, 0.2))) as sim:
        shop = await sim.node("shop", boot=open_shop)       # boot(node) starts actors; run again at each restart
        await sim.crash("shop")
        await sim.restart("shop")

`run` starts a scenario on a `SimLoop`; `sweep` runs it for many seeds and names the seed that failed. The registry's
node is never crashed. `Nemesis` draws a schedule of faults from a seed: a value that can be printed, shortened by hand
and carried out again. Every fault of a schedule ends, so the system must work again afterwards.

`Audit` checks every run. While it runs, no sender exceeds its credit, so memory is bounded. At the end no call is
under way and all credit is back. After closing, no task and no timer of a process is left. A workload checks what only it can
know (executed twice, lost, out of order) and reports it by `audit.find`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, get_args

from tests.simulation.sim_loop import (
    LIMIT_S,
    EventLog,
    Process,
    ProcessState,
    SimClock,
    SimLoop,
    SimulationError,
    owner_of,
    simulated_loop,
)
from tests.simulation.sim_network import Net, SimNetwork

from myxa.core.errors import CallError, LaunchError, StaleEpoch
from myxa.transport.node import Node
from myxa.transport.registry.registry import REGISTRY
from myxa.transport.session import pending
from myxa.transport.wire import Lane

if TYPE_CHECKING:
    from myxa.transport.session.links import Link
    from myxa.transport.session.pending import PendingCall

MAX_FINDINGS_SHOWN = 20


class Audit:
    """Collects what is wrong; `verdict` raises."""

    def __init__(self, sim: Sim) -> None:
        self._sim = sim
        self.findings: list[str] = []

    def look(self) -> None:
        """What must hold at any time."""
        for node in self._sim.nodes.values():
            if node.current is None:
                continue
            for link in _links_of(node.current):
                for lane in Lane:
                    units = link.windows[lane].num_units
                    if not 0 <= units <= pending.WINDOW_UNITS:
                        self.find(f"{node.name} has {units} units under way to {link.key} on {lane.name}")

    def before_closing(self) -> None:
        """What must hold once everything that was asked for has ended."""
        self.look()
        self.findings += self.under_way()

    def under_way(self) -> list[str]:
        """Calls that have not ended, on either side; without the registry's own."""
        found: list[str] = []
        for node in self._sim.nodes.values():
            if node.current is None:
                continue
            found += [
                f"{node.name}: {call} has not ended" for call in _calls_of(node.current) if call.target != REGISTRY
            ]
            for link in _links_of(node.current):
                found += [
                    f"{node.name}: {link.key} has not answered {sorted(lost)}"
                    for window in link.windows
                    if (lost := window.unanswered.keys() - link.pending.keys())
                ]
                callees = [arrival.callee or "?" for arrival in link.served.values()]
                found += [
                    f"{node.name}: a call of {link.key} to {callee} is still open"
                    for callee in callees
                    if callee != REGISTRY
                ]
        return found

    def after_closing(self, process: Process, loop: SimLoop) -> None:
        """A process that was closed has no task and no timer left."""
        tasks = sorted(task.get_name() for task in process.tasks if not task.done())
        if tasks:
            self.find(f"{process} left tasks: {', '.join(tasks)}")
        timers = [h for h in loop.timers(process) if owner_of(h) is not self._sim.network]
        if timers:
            self.find(f"{process} left timers: {', '.join(map(repr, timers))}")

    def find(self, text: str) -> None:
        """Report a finding; workloads call this too."""
        self.findings.append(text)

    def verdict(self) -> None:
        """Raises SimulationError with the findings, if there are any."""
        if self.findings:
            shown = "\n  ".join(self.findings[:MAX_FINDINGS_SHOWN])
            raise SimulationError(f"{len(self.findings)} invariants are broken:\n  {shown}")


def _links_of(node: Node) -> list[Link]:
    return node._session._links.all()


def _calls_of(node: Node) -> list[PendingCall]:
    return list(node._session.calls._pending.values())


T = TypeVar("T")

Boot = Callable[[Node], Awaitable[None]]

REGISTRY_HOST = "launcher/0"
AGAIN_S = 0.5
AUDIT_S = 0.5
QUIET_S = 0.25
BURIAL_S = 60.0
REPORT_S = 0.05
"""After so long the registry hears of a crash, as from a launcher that watches its children."""
SIGKILL = -9

_log = logging.getLogger("myxa.simulation")


class ProcessCrashed(SimulationError):
    """What was waited for will never end: its process crashed."""


class SimNode:
    """One node over its incarnations."""

    def __init__(self, name: str, boot: Boot | None, clock: SimClock) -> None:
        self.name = name
        self.boot = boot
        self.clock = clock
        self.num_incarnations = 0
        self.process: Process | None = None
        self.current: Node | None = None
        self.is_wanted = True
        """It should be up; if it is not, it is being started."""
        self.is_starting = False
        self.is_up = asyncio.Event()
        self.down_s = 0.0
        """When it crashed last, in virtual seconds."""

    @property
    def node(self) -> Node:
        """The incarnation that lives now. Raises SimulationError while there is none."""
        if self.current is None:
            raise SimulationError(f"{self.name} is down")
        return self.current

    @property
    def is_alive(self) -> bool:
        """It is up, though perhaps paused."""
        return self.current is not None


class Sim:
    """One simulation: its nodes, its network, its audit."""

    def __init__(self, seed: int, net: Net | None = None) -> None:
        self._loop = simulated_loop()
        self.seed = seed
        self.log = EventLog(self._loop)
        self.network = SimNetwork(self._loop, net or Net(), self.log)
        self.nodes: dict[str, SimNode] = {}
        self.failures: list[tuple[str, BaseException]] = []
        """Actors and nodes that failed by themselves; a failed node is crashed and started again."""
        self.audit = Audit(self)
        self._chores: dict[asyncio.Task[Any], None] = {}
        self._graveyard: list[Process] = []
        self._is_closing = False

    async def __aenter__(self) -> Self:
        await self.node(REGISTRY_HOST)
        self._chore(self._audit_now_and_then(), "audit")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closing = True
        self.heal()
        for task in list(self._chores):
            task.cancel()
        if self._chores:
            await asyncio.wait(self._chores)
        for name in list(self.nodes):
            self.resume(name)
            self.slow(name, 0)
        if error is None:
            await self._close()
        await self._bury()
        if error is None:
            self.audit.verdict()

    # -- nodes

    async def node(self, name: str, boot: Boot | None = None, *, clock_offset_s: float = 0.0) -> SimNode:
        """Start a process with a node of that name; returns when `boot(node)` has."""
        if name in self.nodes:
            raise SimulationError(f"there is a node {name} already", remedy="restart it, or choose another name")
        made = self.nodes[name] = SimNode(name, boot, SimClock(self._loop, offset_s=clock_offset_s))
        await self._bring_up(made)
        return made

    async def crash(self, name: str) -> None:
        """As SIGKILL: nothing of it runs any more. It stays down until `restart`."""
        self._known(name).is_wanted = False
        self._kill(self._known(name), "crash")

    async def restart(self, name: str) -> SimNode:
        """A new incarnation, after the end of the old one if there is one; tries until it is up."""
        node = self._known(name)
        node.is_wanted = True
        self._kill(node, "restart")
        if node.is_starting:
            await node.is_up.wait()
        else:
            await self._bring_up(node)
        return node

    def pause(self, name: str) -> None:
        """As SIGSTOP: its callbacks wait, messages for it pile up."""
        process = self._known(name).process
        if process is not None and process.state is ProcessState.RUNNING:
            self.log.add("pause", str(process))
            process.state = ProcessState.PAUSED
            process.stopped_at = self._loop.time()
            self.network.stopped(process)

    def resume(self, name: str) -> None:
        """As SIGCONT."""
        process = self._known(name).process
        if process is not None and process.state is ProcessState.PAUSED:
            self.log.add("resume", str(process))
            process.state = ProcessState.RUNNING
            process.paused_s += self._loop.time() - process.stopped_at
            self._loop.resume(process)

    # -- the network

    def partition(self, one: Iterable[str], other: Iterable[str], *, one_way: bool = False) -> None:
        """Nothing gets from one group of nodes to the other (`one_way`: but back it does)."""
        left, right = sorted(set(one)), sorted(set(other))
        pairs = [(a, b) for a in left for b in right if a != b]
        pairs += [] if one_way else [(b, a) for a, b in pairs]
        self.log.add("partition", " ".join(f"{a}>{b}" for a, b in pairs))
        self.network.partition(pairs)

    def degrade(self, net: Net) -> None:
        """From now on the network behaves like this."""
        self.log.add("net", str(net))
        self.network.net = net

    def heal(self) -> None:
        """Let everything through again."""
        self.log.add("heal", "")
        self.network.heal()

    def reset(self, one: str, other: str) -> None:
        """Break the connections between two nodes; they are made again."""
        self.log.add("reset", f"{one} {other}")
        self.network.reset(one, other)

    def slow(self, name: str, envelopes_per_s: float) -> None:
        """A node reads no faster than this (0: as fast as it can)."""
        self.log.add("slow", f"{name} {envelopes_per_s:g}")
        self.network.slow(name, envelopes_per_s)

    def step_clock(self, name: str, seconds: float) -> None:
        """Set a node's wall clock forward or back."""
        self.log.add("clock", f"{name} {seconds:g}")
        self._known(name).clock.step(seconds)

    # -- doing things

    def spawn(self, name: str, work: Coroutine[Any, Any, T], what: str = "work") -> asyncio.Future[T]:
        """Run something as part of a node's process. The future fails with ProcessCrashed if the process does."""
        process = self._known(name).process
        if process is None or process.state in (ProcessState.DEAD, ProcessState.ENDING):
            work.close()
            raise SimulationError(f"{name} is down")
        return self._within(process, work, f"{name}: {what}")

    async def quiet(self, timeout_s: float = 60.0) -> None:
        """Until nothing is under way between the nodes. Raises SimulationError naming what is, after `timeout_s`."""
        give_up_at = self._loop.time() + timeout_s
        while found := self.audit.under_way():
            if self._loop.time() > give_up_at:
                raise SimulationError(f"after {timeout_s:g} s still under way: {'; '.join(found)}")
            await asyncio.sleep(QUIET_S)

    def rng(self, name: str) -> random.Random:
        """A stream of random numbers of the run's own, independent of what else is drawn."""
        return random.Random(f"{self.seed}/{name}")

    # -- inside

    def _known(self, name: str) -> SimNode:
        if name not in self.nodes:
            raise SimulationError(f"there is no node {name!r}", remedy=f"there are {', '.join(self.nodes)}")
        return self.nodes[name]

    def _within(self, process: Process, work: Coroutine[Any, Any, T], what: str) -> asyncio.Future[T]:
        """A future for the end of `work`, for a caller outside the process."""
        ended: asyncio.Future[T] = self._loop.create_future()
        task = self._loop.create_task(work, name=what, context=process.context())

        def over(_: asyncio.Task[T]) -> None:
            if ended.done():
                if not task.cancelled():
                    task.exception()
            elif task.cancelled():
                ended.cancel()
            elif (error := task.exception()) is not None:
                ended.set_exception(error)
            else:
                ended.set_result(task.result())

        def died() -> None:
            if not ended.done():
                ended.set_exception(ProcessCrashed(f"{process} crashed during {what}"))
                ended.exception()  # the future may have no reader

        task.add_done_callback(over)
        process.on_death.append(died)
        return ended

    async def _bring_up(self, node: SimNode) -> None:
        """Start it until it is up; a start that is interrupted by another crash is begun again."""
        if node.is_starting:
            return
        node.is_starting = True
        try:
            while node.is_wanted and not await self._start(node):
                await asyncio.sleep(AGAIN_S)
        finally:
            node.is_starting = False

    async def _start(self, node: SimNode) -> bool:
        """One attempt."""
        node.num_incarnations += 1
        process = node.process = Process(node.name, node.num_incarnations)
        self.log.add("start", str(process))
        try:
            await self._within(process, self._attach(node, process), f"{process}: start")
        except (CallError, LaunchError, ProcessCrashed) as error:
            self.log.add("no start", f"{process} {type(error).__name__}")
            if node.name == REGISTRY_HOST:
                raise
            self._kill(node, "no start")
            return False
        node.is_up.set()
        return True

    async def _attach(self, node: SimNode, process: Process) -> None:
        rdzv = None if node.name == REGISTRY_HOST else self.nodes[REGISTRY_HOST].node.rendezvous
        made = await Node.attach(name=node.name, rdzv=rdzv, network=self.network, clock=node.clock)
        made.failed.add_done_callback(lambda failed: self._on_failed(node, process, failed.result()))
        node.current = made
        if node.boot is not None:
            await node.boot(made)
        self.log.add("up", f"{process} epoch {made.epoch}")

    def _on_failed(self, node: SimNode, process: Process, error: BaseException) -> None:
        if node.process is not process or process.state is ProcessState.DEAD:
            return
        self.log.add("failed", f"{process} {type(error).__name__}")
        if not isinstance(error, StaleEpoch):
            self.failures.append((node.name, error))
        if not self._is_closing:
            self._loop.call_soon(self._start_again, node, process, context=Process.outside())

    def _start_again(self, node: SimNode, process: Process) -> None:
        """What a supervisor does with a process that failed."""
        if node.process is process and process.state is not ProcessState.DEAD and node.is_up.is_set():
            self._kill(node, "failed")
            self._chore(self._bring_up(node), f"restart of {node.name}")

    def _kill(self, node: SimNode, why: str) -> None:
        process, current = node.process, node.current
        if process is None or process.state in (ProcessState.DEAD, ProcessState.ENDING):
            return
        if node.name == REGISTRY_HOST:
            raise SimulationError("the registry's node is never touched")
        self.log.add("kill", f"{process} {why}")
        process.state = ProcessState.DEAD
        self._loop.drop_timers(process)
        self._graveyard.append(process)
        node.current = None
        node.is_up.clear()
        node.down_s = self._loop.time()
        self.network.process_ended(process)
        for callback in process.on_death:
            callback()
        process.on_death.clear()
        if current is not None and not self._is_closing:
            self._chore(self._report(node.name, current.epoch), f"report of {process}")

    async def _report(self, name: str, epoch: int) -> None:
        await asyncio.sleep(REPORT_S)
        host = self.nodes[REGISTRY_HOST].node
        await self.spawn(REGISTRY_HOST, host.registry.process_exited(name, epoch, SIGKILL), f"end of {name}")

    def _chore(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        """Something that the world outside does, at most until the end of the simulation."""
        task = self._loop.create_task(work, name=what, context=Process.outside())
        self._chores[task] = None
        task.add_done_callback(self._chore_done)
        return task

    def _chore_done(self, task: asyncio.Task[Any]) -> None:
        self._chores.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None and not self._is_closing:
            _log.error("%s: %s", task.get_name(), error, exc_info=error)
            self.failures.append((task.get_name(), error))

    async def _audit_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(AUDIT_S)
            self.audit.look()

    # -- the end

    async def _close(self) -> None:
        self.audit.before_closing()
        for node in reversed(list(self.nodes.values())):
            if node.current is not None and node.process is not None:
                await self._within(node.process, node.current.close(grace_s=1.0), f"{node.process}: close")
        await asyncio.sleep(2 * self.network.net.delay_s[1] + 0.1)
        for node in self.nodes.values():
            if node.current is not None and node.process is not None:
                self.audit.after_closing(node.process, self._loop)

    async def _bury(self) -> None:
        """Clear away what is left of processes that did not end by themselves."""
        for node in self.nodes.values():
            process = node.process
            if process is not None and process.state in (ProcessState.RUNNING, ProcessState.PAUSED):
                process.state = ProcessState.DEAD
                self._loop.drop_timers(process)
                self._graveyard.append(process)
                self.network.process_ended(process)
        for process in self._graveyard:
            process.state = ProcessState.ENDING
            for task in process.tasks:
                task.cancel()
            self._loop.resume(process)
        give_up_at = self._loop.time() + BURIAL_S
        while left := [task for process in self._graveyard for task in process.tasks if not task.done()]:
            if self._loop.time() > give_up_at:
                raise SimulationError(f"dead, and still at work: {', '.join(sorted(t.get_name() for t in left))}")
            for task in left:  # the end of one may begin another: the next message of a mailbox
                task.cancel()
            await asyncio.wait(left, timeout=BURIAL_S)
        for process in self._graveyard:
            self._loop.drop_timers(process)


SEED_VARIABLE = "SIM_SEED"
COLLECT_EVERY = 50
"""Seeds between two rounds of the garbage collector, which rests within a run: its moments are not the seed's."""


def run(scenario: Callable[[int], Coroutine[Any, Any, T]], seed: int, *, limit_s: float = LIMIT_S) -> T:
    """The result of `scenario(seed)` on a fresh simulated loop.

    Raises what it raises, and SimulationError if the run stands still, does not end within `limit_s` virtual seconds,
    leaves tasks behind, or an exception was never retrieved.
    """
    loop = SimLoop(seed, limit_s=limit_s)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        result = loop.run_until_complete(scenario(seed))
        left = sorted(task.get_name() for task in asyncio.all_tasks(loop))
        if left:
            raise SimulationError(f"tasks are left: {', '.join(left)}")
        if loop.errors:
            first = loop.errors[0]
            raise SimulationError(f"never retrieved: {first.get('message')}") from first.get("exception")
    except BaseException as error:
        for context in loop.errors[:3]:
            error.add_note(f"and never retrieved: {context.get('message')}: {context.get('exception')!r}")
        raise
    else:
        return result
    finally:
        _clear(loop)
        if was_enabled:
            gc.enable()


def _clear(loop: SimLoop) -> None:
    """End what a failed run left, without a word: its error is on its way already."""
    tasks = [task for task in asyncio.all_tasks(loop) if not task.done()]
    for task in tasks:
        task._log_destroy_pending = False  # pyright: ignore[reportAttributeAccessIssue]  # as asyncio does in run_until_complete
        task.cancel()
    if tasks:
        try:
            loop.run_until_complete(asyncio.wait(tasks, timeout=60.0))
        except SimulationError:
            pass  # they wait for a process that will not run any more
    loop.close()


def sweep(
    scenario: Callable[[int], Coroutine[Any, Any, Any]], seeds: Iterable[int], *, repro: str, limit_s: float = LIMIT_S
) -> int:
    """Run every seed and return how many there were; the first failure carries the line that repeats it alone.

    `repro`: the command that runs this scenario, e.g. "python -m pytest tests/simulation -k durable".
    """
    count = 0
    for seed in seeds:
        try:
            run(scenario, seed, limit_s=limit_s)
        except BaseException as error:
            error.add_note(f"{SEED_VARIABLE}={seed} {repro}")
            raise
        count += 1
        if count % COLLECT_EVERY == 0:
            gc.collect()
    return count


def seeds(count: int, environ: Mapping[str, str], *, first: int = 0) -> range:
    """`count` seeds from `first` on, or only the one that the environment names."""
    chosen = environ.get(SEED_VARIABLE, "")
    return range(int(chosen), int(chosen) + 1) if chosen else range(first, first + count)


Verb = Literal["crash", "pause", "partition", "one-way", "reset", "slow", "clock"]
VERBS: tuple[Verb, ...] = get_args(Verb)


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault."""

    at_s: float
    """After the beginning of the schedule."""
    lasts_s: float
    verb: Verb
    targets: tuple[str, ...]
    """crash, pause, slow, clock: the node. Else the nodes of one side; the other side is everybody else."""
    strength: float = 0.0
    """slow: envelopes per second; clock: seconds."""


@dataclass(frozen=True, slots=True)
class Nemesis:
    """What to draw from, and how often."""

    verbs: tuple[Verb, ...] = VERBS
    every_s: tuple[float, float] = (0.2, 2.0)
    """Least and most time between two strikes."""
    lasts_s: tuple[float, float] = (0.05, 3.0)
    """Least and most time until it is over (crash: until it is started again)."""
    slow_per_s: tuple[float, float] = (20.0, 400.0)
    clock_s: tuple[float, float] = (-3600.0, 3600.0)

    def schedule(self, rng: random.Random, names: Sequence[str], for_s: float) -> tuple[Strike, ...]:
        """Strikes against the nodes `names` (resets and partitions: from each other and from the rest)."""
        strikes: list[Strike] = []
        at_s = rng.uniform(*self.every_s)
        while at_s < for_s and names and self.verbs:
            verb = rng.choice(self.verbs)
            strength = 0.0
            if verb == "slow":
                strength = rng.uniform(*self.slow_per_s)
            elif verb == "clock":
                strength = rng.uniform(*self.clock_s)
            num_targets = rng.randint(1, max(1, len(names) // 2)) if verb in ("partition", "one-way") else 1
            targets = tuple(sorted(rng.sample(list(names), num_targets)))
            strikes.append(Strike(at_s, rng.uniform(*self.lasts_s), verb, targets, strength))
            at_s += rng.uniform(*self.every_s)
        return tuple(strikes)


async def carry_out(sim: Sim, schedule: Sequence[Strike]) -> None:
    """All strikes at their times; returns when the last is over and every node is up again."""
    deeds = [asyncio.get_running_loop().create_task(_strike(sim, strike), name=str(strike)) for strike in schedule]
    try:
        for deed in deeds:
            await deed
    finally:
        for deed in deeds:
            deed.cancel()
    sim.heal()
    for node in sim.nodes.values():
        if not node.is_wanted:
            await sim.restart(node.name)
        await node.is_up.wait()


async def _strike(sim: Sim, strike: Strike) -> None:
    await asyncio.sleep(strike.at_s)
    name, others = strike.targets[0], [each for each in sim.nodes if each not in strike.targets]
    match strike.verb:
        case "crash":
            await sim.crash(name)
            await asyncio.sleep(strike.lasts_s)
            if not sim.nodes[name].is_wanted:  # the scenario may have restarted it meanwhile
                await sim.restart(name)
        case "pause":
            sim.pause(name)
            await asyncio.sleep(strike.lasts_s)
            sim.resume(name)
        case "partition" | "one-way":
            sim.partition(strike.targets, others, one_way=strike.verb == "one-way")
            await asyncio.sleep(strike.lasts_s)
            sim.heal()
        case "reset":
            for other in others:
                sim.reset(name, other)
        case "slow":
            sim.slow(name, strike.strength)
            await asyncio.sleep(strike.lasts_s)
            sim.slow(name, 0)
        case "clock":
            sim.step_clock(name, strike.strength)
