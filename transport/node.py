"""A process's part in the actor system: hosts actors, carries their calls, knows who else is there.

Attaches to a running loop; installs no loop policy, no signal handler, no logging handler. Everything that runs here is
ended by `close`. Knows transports only through `opening.open_transport`; the rules are in `session.py`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from ..core.actor import Actor, Caller, PeerEvent, make_ref, with_deadline
from ..core.clock import Clock, SystemClock
from ..core.errors import CallError, ConfigError, MyxaError, NoSuchActor, StaleEpoch
from ..core.ids import PeerKey, check_name
from .address import Rendezvous
from .cell import STOP_LIMIT_S, ActorCell
from .context import NodeContext
from .courier import Courier
from .hosting import Hosting
from .inproc import InprocNetwork
from .joining import join, registry_location
from .mirror import Mirror
from .opening import Opened, open_transport
from .registry import REGISTRY, RegistryActor, RegistryContract
from .security import JobKey
from .session import Session
from .wheel import TICK_S

A = TypeVar("A")

PARKED_RETRY_TICKS = 20
LEAVE_S = 2.0
LINGER_S = 2.0

_log = logging.getLogger("myxa.transport")


class Node:
    """Use `await Node.attach(...)`; the constructor is internal."""

    def __init__(self, *, name: str, key: PeerKey, rdzv: Rendezvous, opened: Opened, clock: Clock) -> None:
        loop = asyncio.get_running_loop()
        self.name = name
        self.rendezvous = rdzv
        """What others need to join the same registry."""
        self.failed: asyncio.Future[BaseException] = loop.create_future()
        """Resolves (never raises) with the first error that failed an actor of this node or the node itself."""
        self.on_failure: Callable[[str, BaseException], None] | None = None
        """Called with the actor's (or node's) name and the error, each time one fails."""
        self._clock = clock
        self._key = key
        self._opened = opened
        self._hosting = Hosting(self)
        self._session = Session(own=key, name=name, transport=opened.transport, host=self._hosting, clock=clock)
        self._hosting.serve_with(self._session)
        registry = registry_location(rdzv)
        self._mirror = Mirror(registry, self._session, clock, self._hosting.tell, self.node_failed)
        self._courier = Courier(self._session.calls, self._mirror, clock)
        self._mirror.call_with(self._courier)
        self._registry: RegistryActor | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._endings: set[asyncio.Task[None]] = set()
        """Ends of failed actors; a node that closes lets them finish."""
        self._reasons: dict[str, str] = {}
        self._num_ticks = 0
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._is_fenced = False

    # -- life

    @classmethod
    async def attach(  # keyword-only, and nearly all have a default
        cls,
        *,
        name: str,
        rdzv: Rendezvous | None = None,
        run_dir: Path | str | None = None,
        node_rank: int = 0,
        clock: Clock | None = None,
        key: JobKey | None = None,
        tcp: str = "",
        network: InprocNetwork | None = None,
        timeout_s: float = 10.0,
    ) -> Node:
        """Join the system on the running loop.

        `rdzv` None: this node hosts the registry and `node.rendezvous` is what the others need. `run_dir`: where the
        sockets' directory is made (short path; None: the system's place for temporary files). `tcp`: "host:port" (0:
        any port) of an own interface, to listen on encrypted tcp besides ipc; nodes of other hosts need it. It needs
        `key`, or a key file named by `rdzv`; with a key and a registry on tcp the interface is found by itself.
        `network`: no sockets at all, other nodes are in this process.
        Raises LaunchError naming the registry's endpoint if it does not answer within `timeout_s`.
        """
        check_name(name)
        clock = clock or SystemClock()
        folder = Path(run_dir) if run_dir else None
        opened = open_transport(
            rdzv=rdzv, run_dir=folder, node_rank=node_rank, key=key, listen=tcp, network=network
        )  # fmt: skip
        try:
            if rdzv is None:
                return await cls._found(name, opened, clock)
            record = await join(rdzv, name, opened.transport, clock, timeout_s)
            node = cls(name=name, key=record.key, rdzv=rdzv, opened=opened, clock=clock)
        except BaseException:
            await opened.close(0.0)
            raise
        try:
            node._run()
            await node._in_step(record.epoch, timeout_s)
        except BaseException:
            await node.close(grace_s=0.0)
            raise
        return node

    @classmethod
    async def _found(cls, name: str, opened: Opened, clock: Clock) -> Node:
        registry = RegistryActor()
        record = registry.state.register(name, opened.transport.endpoints, os.getpid())
        rdzv = Rendezvous(
            endpoints=record.endpoints, node_id=record.node_id, epoch=record.epoch, socket_dir=opened.socket_dir,
            key_file=opened.key_file,
        )  # fmt: skip
        node = cls(name=name, key=record.key, rdzv=rdzv, opened=opened, clock=clock)
        node._registry = registry
        node._run()
        await node.start(registry, REGISTRY)
        return node

    def _run(self) -> None:
        self._opened.transport.start(self._session)
        self._tick()
        self._spawn(self._mirror.follow(), "the registry's updates")

    async def _in_step(self, epoch: int, timeout_s: float) -> None:
        def knows_itself() -> bool:
            record = self._mirror.directory.node(self.name)
            return record is not None and record.epoch >= epoch

        if not await self._mirror.wait_until(knows_itself, timeout_s):
            raise CallError(f"{self.name}: the registry sends no updates")

    async def close(self, grace_s: float = 5.0) -> None:
        """Finish what was accepted (within `grace_s`), stop the actors in reverse order of start, leave."""
        if self._is_closed:
            return
        self._is_closed = True
        give_up_at = self._clock.monotonic() + grace_s
        if self._endings:
            await asyncio.wait(self._endings, timeout=grace_s + STOP_LIMIT_S)
        for cell in reversed(self._hosting.cells()):
            if cell.name != REGISTRY:
                await cell.drain(max(0.0, give_up_at - self._clock.monotonic()))
                await cell.stop("shutdown")
                self._hosting.remove(cell)
        if self._registry is None and not self._is_fenced:
            await self._leave()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for cell in self._hosting.cells():
            await cell.stop("shutdown")
            self._hosting.remove(cell)
        if self._timer is not None:
            self._timer.cancel()
        self._session.close()
        await self._opened.close(LINGER_S)

    async def _leave(self) -> None:
        try:
            registry = with_deadline(self._mirror.registry, LEAVE_S)
            await registry.leave(self.name, self._key.epoch, "it was closed")
        except MyxaError as error:
            _log.info("%s could not tell the registry that it leaves: %s", self.name, error)

    # -- actors

    async def start(self, actor: A, name: str) -> A:
        """Host an actor: `on_start`, then everybody may call it. Returns a reference to it.

        What `on_start` raises passes through, and the actor is not there. Raises ConfigError for a name that is taken.
        """
        if not isinstance(actor, Actor):
            raise ConfigError(f"{type(actor).__name__} is no actor", remedy="derive it from core.actor.Actor")
        log = logging.getLogger(f"myxa.{name.replace('/', '.')}")
        cell = ActorCell(actor, check_name(name), self._key.epoch, log, self._on_failed)
        actor.ctx = NodeContext(self, cell, self._key.epoch, log)
        self._hosting.add(cell)
        try:
            await cell.start()
            await self._announce()
        except BaseException:
            await cell.stop("it did not start")
            self._hosting.remove(cell)
            raise
        return make_ref(self._courier, type(actor), name)

    async def stop(self, name: str, why: str = "stopped", grace_s: float = 5.0) -> None:
        """Stop one actor in good order. Raises NoSuchActor if it is not here."""
        cell = next((c for c in self._hosting.cells() if c.name == name), None)
        if cell is None:
            raise NoSuchActor(f"{self.name} hosts no actor {name!r}")
        await cell.drain(grace_s)
        await self._retire(cell, why)

    def ref(self, contract: type[A], name: str) -> A:
        """A proxy for the actor of that name, wherever it lives and whether or not it is there yet."""
        return make_ref(self._courier, contract, name)

    async def _announce(self) -> None:
        reasons, self._reasons = self._reasons, {}
        version = await self._mirror.registry.announce(self.name, self._key.epoch, self._hosting.records(), reasons)
        await self._mirror.wait_until(lambda: self._mirror.directory.version >= version, LEAVE_S)

    def _on_failed(self, cell: ActorCell, error: BaseException) -> None:
        self._report(cell.name, error)
        if not self._is_closed:
            self._endings.add(self._spawn(self._retire(cell, f"it failed: {error}"), f"end of {cell.name}"))

    async def _retire(self, cell: ActorCell, why: str) -> None:
        await cell.stop(why)
        self._hosting.remove(cell)
        self._reasons[cell.name] = why
        try:
            await self._announce()
        except MyxaError as error:
            _log.warning("%s: the registry could not be told that %s ended: %s", self.name, cell.name, error)

    # -- surroundings

    @property
    def epoch(self) -> int:
        """Of this incarnation; issued by the registry."""
        return self._key.epoch

    @property
    def clock(self) -> Clock:
        return self._clock

    @property
    def caller(self) -> Caller:
        return self._courier

    @property
    def registry(self) -> RegistryContract:
        """A reference to the registry."""
        return self._mirror.registry

    def peers(self, prefix: str) -> tuple[str, ...]:
        """Actor names registered now that start with `prefix`, sorted."""
        return self._mirror.directory.names(prefix)

    def watch(self, cell: ActorCell, prefix: str) -> None:
        self._hosting.watch(cell, prefix)

    async def wait_for(self, *names: str, timeout_s: float) -> None:
        """Until all these actors are registered; LaunchError naming the missing ones."""
        await self._mirror.wait_for(*names, timeout_s=timeout_s)

    def counters(self) -> dict[str, int]:
        """What was dropped, refused or repeated, for a monitor: all zero in a healthy run."""
        session = self._session
        return {
            **session.counters,
            "late_answers": session.calls.num_late,
            "casts_refused": session.calls.num_casts_refused,
            "puts_replayed": session.serving.num_replayed,
        }

    def peer_unreachable(self, key: PeerKey, why: str) -> None:
        _log.warning("%s: gave up %s: %s", self.name, key, why)
        if self._registry is not None:
            self._registry.unreachable(key, why)

    def node_failed(self, error: BaseException) -> None:
        if self._is_closed:
            return
        self._is_fenced = self._is_fenced or isinstance(error, StaleEpoch)
        _log.error("%s failed: %s", self.name, error, exc_info=error)
        self._report(self.name, error)

    def _report(self, name: str, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_result(error)
        if self.on_failure is not None:
            self.on_failure(name, error)

    # -- time and tasks

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        self._session.tick()
        self._num_ticks += 1
        if self._num_ticks % PARKED_RETRY_TICKS == 0:
            for target in self._session.calls.parked_targets:
                self._session.calls.on_located(target, self._mirror.reroute)

    def _spawn(self, coro: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coro, name=f"{self.name}: {name}")
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._endings.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.node_failed(error)


__all__ = ["InprocNetwork", "JobKey", "Node", "PeerEvent", "Rendezvous"]
