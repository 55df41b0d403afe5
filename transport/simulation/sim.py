"""A whole system of nodes in one thread and in virtual time, with everything that can happen to it at hand.

    async with Sim(seed=7, net=Net(drop=0.01, delay_s=(0, 0.2))) as sim:
        shop = await sim.node("shop", boot=open_shop)       # boot(node) starts actors; run again at each restart
        await sim.crash("shop")
        await sim.restart("shop")

Runs on a `SimLoop` only: start it with `run`. The registry lives in a node of its own that is never touched. Whatever
a node leaves behind at the end (tasks, timers, calls) is an error. Decides nothing at random: `nemesis.py` does.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from types import TracebackType
from typing import Any, Self, TypeVar

from ...core.errors import CallError, LaunchError, SimulationError, StaleEpoch
from ..node import Node
from .audit import Audit
from .clock import SimClock
from .event_log import EventLog
from .loop import simulated_loop
from .network import Net, SimNetwork
from .process import Process, ProcessState

T = TypeVar("T")

Boot = Callable[[Node], Awaitable[None]]

REGISTRY_HOST = "launcher/0"
AGAIN_S = 0.5
AUDIT_S = 0.5
QUIET_S = 0.25
BURIAL_S = 60.0
SIGKILL = -9

_log = logging.getLogger("myxa.simulation")


class ProcessCrashed(SimulationError):
    """What was waited for will never end: its process crashed."""


class SimNode:
    """One node over its incarnations."""

    def __init__(self, name: str, boot: Boot | None, on_crash: Callable[[], None] | None, clock: SimClock) -> None:
        self.name = name
        self.boot = boot
        self.on_crash = on_crash
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
    """See the module's head."""

    def __init__(self, seed: int | None = None, net: Net | None = None, *, report_s: float | None = 0.05) -> None:
        """`seed` None: that of the loop. `report_s`: after so long the registry hears of a crash, as from a launcher
        that watches its children; None: never."""
        self._loop = simulated_loop()
        self.seed = self._loop.seed if seed is None else seed
        self.log = EventLog(self._loop)
        self.network = SimNetwork(self._loop, net or Net(), self.log)
        self.nodes: dict[str, SimNode] = {}
        self.failures: list[tuple[str, BaseException]] = []
        """Actors and nodes that failed by themselves; a failed node is crashed and started again."""
        self.audit = Audit(self)
        self._report_s = report_s
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

    async def node(
        self,
        name: str,
        boot: Boot | None = None,
        *,
        on_crash: Callable[[], None] | None = None,
        clock_offset_s: float = 0.0,
    ) -> SimNode:
        """Start a process with a node of that name; returns when `boot(node)` has. `on_crash` is called when it is
        killed, to do what the kernel does: release files and locks, nothing else."""
        if name in self.nodes:
            raise SimulationError(f"there is a node {name} already", remedy="restart it, or choose another name")
        made = self.nodes[name] = SimNode(name, boot, on_crash, SimClock(self._loop, offset_s=clock_offset_s))
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
            process.become(ProcessState.PAUSED)
            process.stopped_at = self._loop.time()
            self.network.stopped(process)

    def resume(self, name: str) -> None:
        """As SIGCONT."""
        process = self._known(name).process
        if process is not None and process.state is ProcessState.PAUSED:
            self.log.add("resume", str(process))
            process.become(ProcessState.RUNNING)
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
        """Somebody sets a node's wall clock."""
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
        """Its end, for somebody outside."""
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
                ended.exception()  # not everybody waits

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
        process.become(ProcessState.DEAD)
        self._loop.drop_timers(process)
        self._graveyard.append(process)
        node.current = None
        node.is_up.clear()
        node.down_s = self._loop.time()
        self.network.process_ended(process)
        for told in process.on_death:
            told()
        process.on_death.clear()
        if node.on_crash is not None:
            node.on_crash()
        if current is not None and self._report_s is not None and not self._is_closing:
            self._chore(self._report(node.name, current.epoch, self._report_s), f"report of {process}")

    async def _report(self, name: str, epoch: int, after_s: float) -> None:
        await asyncio.sleep(after_s)
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
                process.become(ProcessState.DEAD)
                self._loop.drop_timers(process)
                self._graveyard.append(process)
                self.network.process_ended(process)
        for process in self._graveyard:
            process.become(ProcessState.ENDING)
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
