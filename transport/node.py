"""A process's part in the actor system: hosts actors, carries their calls, knows the other processes.

Attaches to a running loop; installs no loop policy, no signal handler, no logging handler. `close` ends everything that
runs here. A forked child must not touch its copy of a node.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import logging
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

from ..core.actor import CLOSED, FAILED, Actor, PeerEvent
from ..core.clock import Clock, SystemClock
from ..core.errors import CallError, ConfigError, Draining, MyxaError, NoSuchActor, NoSuchMethod, StaleEpoch
from ..core.handlers import remaining_s
from ..core.ids import PeerKey, check_name
from ..core.refs import make_ref, with_deadline
from ..core.timeouts import TIMEOUTS
from .actor_runner import ActorRunner
from .address import Rendezvous
from .registry.bootstrap import Mirror, host_registry, join
from .registry.directory import HostedActor, keys_of
from .registry.registry import REGISTRY, RegistryActor
from .security import JobKey, KeyPair
from .session.links import Arrival, Verdict
from .session.session import LOOPBACK, Session
from .socket_transport import open_transport
from .wire import Lane, Transport

A = TypeVar("A")


_log = logging.getLogger("myxa.transport")


class Node:
    """Use `await Node.attach(...)`; the constructor is internal. Implements `SessionHost`."""

    def __init__(self, *, name: str, key: PeerKey, rdzv: Rendezvous, transport: Transport, clock: Clock) -> None:
        loop = asyncio.get_running_loop()
        self.name = name
        self.rendezvous = rdzv
        self.failed: asyncio.Future[BaseException] = loop.create_future()
        """Resolves (never raises) with the first error that failed an actor of this node or the node itself."""
        self.clock = clock
        self.epoch = key.epoch
        self._key = key
        self._transport = transport
        self._cells: dict[int, ActorRunner] = {}
        self._next_index = 0
        self._watched: list[tuple[str, ActorRunner]] = []
        self._is_draining = False
        """This process is shutting down: calls of others are refused."""
        self.fenced = self.crashed = self.node_failed
        self._session = Session(own=key, name=name, transport=transport, host=self, clock=clock)
        self._mirror = Mirror(rdzv, self._session, clock, self._tell_actors, self.node_failed)
        self._mirror.on_update = lambda directory: transport.follow(keys_of(directory.nodes()))
        self._registry: RegistryActor | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}  # in order: a simulated run repeats itself
        self._endings: set[asyncio.Task[None]] = set()
        self._reasons: dict[str, str] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._is_fenced = False

    # -- start and end

    @classmethod
    async def attach(  # keyword-only, and nearly all have a default
        cls,
        *,
        name: str,
        rdzv: Rendezvous | None = None,
        run_dir: Path | str | None = None,
        node_rank: int = 0,
        clock: Clock | None = None,
        key: KeyPair | None = None,
        tcp: str = "",
        network: Callable[[], Transport] | None = None,
        timeout_s: float = 10.0,
    ) -> Node:
        """Join the system on the running loop.

        `rdzv` None: this node hosts the registry and `node.rendezvous` is what the others need. `run_dir`: where the
        sockets' directory is made (short path; None: the system's place for temporary files). `tcp`: "host:port" (0:
        any port) of an own interface, to listen on encrypted tcp besides ipc; nodes of other hosts need it. It needs
        `key`, or a key file named by `rdzv`; with a key and a registry on tcp the interface is found by itself. `key`:
        the job's, or one that was announced to the registry (`RegistryActor.expect`) and that fits this name only.
        `network`: makes a transport without sockets, for tests.
        Raises LaunchError naming the registry's endpoint if it does not answer within `timeout_s`.
        """
        check_name(name)
        clock = clock or SystemClock()
        transport = open_transport(
            rdzv=rdzv, run_dir=Path(run_dir) if run_dir else None, node_rank=node_rank, key=key, listen=tcp,
            network=network,
        )  # fmt: skip
        registry: RegistryActor | None = None
        try:
            if rdzv is None:
                registry, record, rdzv = host_registry(name, transport)
            else:
                record = await join(rdzv, name, transport, clock, timeout_s)
            node = cls(name=name, key=record.key, rdzv=rdzv, transport=transport, clock=clock)
        except BaseException:
            await transport.close(0.0)
            raise
        try:
            node._registry = registry
            node._session.heartbeat.watches_all = registry is not None
            node._run()
            await (node._in_step(record.epoch, timeout_s) if registry is None else node.start(registry, REGISTRY))
        except BaseException:
            await node.close(grace_s=0.0)
            raise
        return node

    def _run(self) -> None:
        self._transport.joined()
        self._transport.start(self._session)
        self._tick()
        self._spawn(self._mirror.follow(), "the registry's updates")

    async def _in_step(self, epoch: int, timeout_s: float) -> None:
        if not await self._mirror.changes.until(lambda: self._mirror.directory.epoch_of(self.name) >= epoch, timeout_s):
            raise CallError(f"{self.name}: the registry sends no updates")

    async def close(self, grace_s: float = 5.0) -> None:
        """Finish what was accepted (within `grace_s`), stop the actors in reverse order of start, leave."""
        if self._is_closed:
            return
        self._is_closed = True
        await self._drain(grace_s)
        if self._registry is None and not self._is_fenced:
            await self._leave()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for cell in tuple(self._cells.values()):
            await cell.stop("shutdown")
            self._remove(cell)
        if self._timer is not None:
            self._timer.cancel()
        self._session.close()
        await self._transport.close(TIMEOUTS.wire.linger_s)

    async def _drain(self, grace_s: float) -> None:
        give_up_at = self.clock.monotonic() + grace_s
        if self._endings:
            await asyncio.wait(self._endings, timeout=grace_s + TIMEOUTS.wire.stop_s)
        if self._registry is None:  # of that one the others still take their leave
            self._is_draining = True
        for cell in reversed(tuple(self._cells.values())):
            if cell.name != REGISTRY:
                await cell.drain(max(0.0, give_up_at - self.clock.monotonic()))
                await cell.stop("shutdown")
                self._remove(cell)

    async def _leave(self) -> None:
        try:
            registry = with_deadline(self._mirror.registry, TIMEOUTS.wire.leave_s)
            await registry.leave(self.name, self._key.epoch, CLOSED)
        except MyxaError as error:
            _log.info("the registry did not hear that %s leaves: %s", self.name, error)

    # -- actors

    async def start(self, actor: A, name: str) -> A:
        """Host an actor after `on_start`, whose error passes through. Raises ConfigError for a name that is taken."""
        if not isinstance(actor, Actor):
            raise ConfigError(f"{type(actor).__name__} is no actor", remedy="derive it from core.actor.Actor")
        log = logging.getLogger(f"myxa.{name.replace('/', '.')}")
        cell = ActorRunner(actor, check_name(name), self._session.serving, log, self._on_failed)
        actor.ctx = NodeContext(self, cell, log)
        self._add(cell)
        try:
            await cell.start()
            await self._announce()
        except BaseException:
            await cell.stop("it did not start")
            self._remove(cell)
            raise
        return make_ref(self._mirror, type(actor), name)

    async def stop(self, name: str, why: str = "stopped", grace_s: float = 5.0) -> None:
        """Stop one actor cleanly. Raises NoSuchActor if it is not here."""
        cell = next((c for c in self._cells.values() if c.name == name), None)
        if cell is None:
            raise NoSuchActor(f"{self.name} hosts no actor {name!r}")
        await cell.drain(grace_s)
        await self._retire(cell, why)

    def ref(self, contract: type[A], name: str) -> A:
        """A proxy for the actor of that name, in any process, whether or not it is there yet."""
        return make_ref(self._mirror, contract, name)

    async def _announce(self) -> None:
        reasons, self._reasons = self._reasons, {}

        def hosted() -> tuple[HostedActor, ...]:
            cells = self._cells.items()
            return tuple(HostedActor(name=cell.name, index=n, handlers=cell.table.names) for n, cell in cells)

        await self._mirror.announce(self.name, self._key.epoch, hosted, reasons)

    def _on_failed(self, cell: ActorRunner, error: BaseException) -> None:
        self._report(error)
        if not self._is_closed:
            self._endings.add(self._spawn(self._retire(cell, f"{FAILED}: {error}"), f"end of {cell.name}"))

    async def _retire(self, cell: ActorRunner, why: str) -> None:
        await cell.stop(why)
        self._remove(cell)
        self._reasons[cell.name] = why
        try:
            await self._announce()
        except MyxaError as error:
            _log.warning("%s: the registry did not hear that %s ended: %s", self.name, cell.name, error)

    # -- surroundings

    @property
    def registry(self) -> RegistryActor:
        return self._mirror.registry

    def peers(self, prefix: str) -> tuple[str, ...]:
        return self._mirror.directory.names(prefix)

    async def wait_for(self, *names: str, timeout_s: float) -> None:
        """Until all these actors are registered; LaunchError naming the missing ones."""
        await self._mirror.wait_for(*names, timeout_s=timeout_s)

    def busy(self, name: str, limit_s: float, why: str) -> AbstractContextManager[None]:
        """See `ActorContext.busy`; `name`: who declares it. For hosts that block their own loop."""
        return self._session.heartbeat.busy(name, limit_s, why)

    @property
    def busy_s(self) -> float:
        """For how long this process has declared to be busy; 0: not at all. May be read from any thread."""
        return self._session.heartbeat.busy_s

    def counters(self) -> dict[str, int]:
        """What was dropped, refused or repeated, for a monitor: all zero in a healthy run."""
        return {**self._transport.counters, **self._session.counters}

    def unreachable(self, key: PeerKey, why: str) -> None:
        _log.warning("%s: gave up %s: %s", self.name, key, why)
        if self._registry is not None:
            self._registry.unreachable(key, why)

    def judged(self, key: PeerKey, verdict: Verdict, reason: str) -> None:
        """One event for each of its actors; before there are any, one with its node's name."""
        record = next((node for node in self._mirror.directory.nodes() if node.key == key), None)
        if record is not None:
            _log.info("%s: %s is %s: %s", self.name, record.name, verdict, reason)
            for name in tuple(actor.name for actor in record.actors) or (record.name,):
                self._tell_actors(PeerEvent(verdict, name, key.epoch, reason))

    def node_failed(self, error: BaseException) -> None:
        if self._is_closed or (self._is_fenced and isinstance(error, StaleEpoch)):
            return  # everybody who is asked says so again
        self._is_fenced = self._is_fenced or isinstance(error, StaleEpoch)
        _log.error("%s failed: %s", self.name, error, exc_info=error)
        self._report(error)

    def _report(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_result(error)

    # -- its actors, for the session

    def _add(self, cell: ActorRunner) -> None:
        """Give an actor a number; it is never given again in this incarnation."""
        if any(other.name == cell.name for other in self._cells.values()):
            raise ConfigError(f"there is an actor {cell.name!r} in this process already", remedy="names are unique")
        self._cells[self._next_index] = cell
        self._next_index += 1

    def _remove(self, cell: ActorRunner) -> None:
        self._cells = {index: other for index, other in self._cells.items() if other is not cell}
        self._watched = [(prefix, other) for prefix, other in self._watched if other is not cell]

    def watch(self, cell: ActorRunner, prefix: str) -> None:
        if (prefix, cell) not in self._watched:
            self._watched.append((prefix, cell))

    def _tell_actors(self, event: PeerEvent) -> None:
        notified: list[ActorRunner] = []
        for prefix, cell in self._watched:
            if event.name.startswith(prefix) and cell.name != event.name and cell not in notified:
                notified.append(cell)
                cell.post(event)

    def deliver(self, arrival: Arrival) -> None:
        envelope = arrival.envelope
        cell = self._cells.get(envelope.actor)
        if cell is None:
            raise NoSuchActor(f"there is no actor {envelope.actor} in this process (any more)")
        specs, method = cell.table.specs, envelope.method
        if method >= len(specs):
            raise NoSuchMethod(f"{cell.name} has no handler {method}")
        spec = specs[method]
        if self._is_draining and arrival.peer != self._session.own:
            raise Draining(f"{cell.name}: its process is shutting down and takes no {spec.name}")
        arrival.spec, arrival.callee = spec, cell.name
        cell.accept(arrival)

    def abandon(self, arrival: Arrival) -> None:
        cell = self._cells.get(arrival.envelope.actor)
        if cell is not None:
            cell.abandon(arrival)

    def loop_back(self, lane: Lane, data: bytes | bytearray) -> None:
        asyncio.get_running_loop().call_soon(self._session.received, LOOPBACK, lane, memoryview(data))

    def num_waiting(self) -> int:
        return sum(cell.num_held for cell in self._cells.values())

    # -- time and tasks

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TIMEOUTS.wire.tick_s, self._tick)
        self._session.tick()

    def _spawn(self, coro: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coro, name=f"{self.name}: {name}")
        self._tasks[task] = None
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        self._endings.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.node_failed(error)


__all__ = ["JobKey", "KeyPair", "Node", "PeerEvent", "Rendezvous"]


class NodeContext:
    """`ActorContext` of an actor hosted by a node."""

    def __init__(self, node: Node, cell: ActorRunner, log: logging.Logger) -> None:
        self.name = cell.name
        self.epoch = node.epoch
        self.clock = node.clock
        self.log = log
        self.ref = node.ref
        self.peers = node.peers
        self.wait_for = node.wait_for
        self.spawn, self.fail = cell.spawn, cell.fail
        self.watch = functools.partial(node.watch, cell)
        self.busy = functools.partial(node.busy, cell.name)

    def deadline(self) -> float | None:
        return remaining_s(None, self.clock.monotonic())


CHOSEN_BY = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Environment variables by which the starter of a process decides it."""
KEPT_BYTES = 64 << 20
"""Freed memory at the end of a heap that is not given back to the kernel; there is one heap for some threads each."""
MAPPED_FROM_BYTES = 4 << 20
"""What is asked for in one piece of this size gets its own pages and gives them back. Chunks of the bulk lane are
smaller."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)


def keep_freed_memory() -> None:
    """Set it for this process; nothing happens with a C library that knows no such thing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, MAPPED_FROM_BYTES)
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
