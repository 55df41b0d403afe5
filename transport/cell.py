"""The life of one hosted actor: its mailbox, the order of its handlers, its background tasks, its end.

Serial handlers run one after another, each in a task of its own so that it can be cancelled alone; re-entrant ones run
beside them. Knows messages only as `Inbound`; never sees a socket.

    NEW -> STARTING -> RUNNING -> DRAINING -> STOPPED       (also STARTING | RUNNING | DRAINING -> STOPPED by failure)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeVar

import msgspec

from ..core.actor import Actor, PeerEvent
from ..core.errors import CallError, Draining, PeerDied, WouldDeadlock
from ..core.handlers import HandlerSpec, handlers_of
from ..core.mailbox import Mailbox
from ..core.scope import NO_SCOPE, CallScope, fresh_context

T = TypeVar("T")

STOP_LIMIT_S = 10.0
"""How long `on_stop`, or a task that was cancelled, may take before it is given up and named in the log."""


class Inbound(Protocol):
    """A message for a handler, as the transport hands it over. Exactly one of reply, fail, or the end of a stream."""

    spec: HandlerSpec
    chain: tuple[str, ...]
    deadline_at: float | None
    trace: bytes
    is_abandoned: bool
    """Nobody waits for the answer any more."""

    def begin(self) -> msgspec.Struct:
        """It leaves the mailbox: its credit goes back, its request is decoded. Raises BadRequest, DeadlineExceeded."""
        ...

    def reply(self, value: Any) -> None: ...

    def fail(self, error: BaseException) -> None: ...

    async def send_items(self, items: AsyncIterator[Any]) -> None:
        """Answer of a stream handler: all items as the consumer asks for them, then the end."""
        ...


class CellState(Enum):
    """Where an actor stands."""

    NEW = "new"
    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPED = "stopped"


_NEXT: dict[CellState, tuple[CellState, ...]] = {
    CellState.NEW: (CellState.STARTING,),
    CellState.STARTING: (CellState.RUNNING, CellState.STOPPED),
    CellState.RUNNING: (CellState.DRAINING, CellState.STOPPED),
    CellState.DRAINING: (CellState.STOPPED,),
    CellState.STOPPED: (),
}


OnFailed = Callable[["ActorCell", BaseException], None]


class ActorCell:
    """Runs one actor."""

    def __init__(self, actor: Actor, name: str, epoch: int, log: logging.Logger, on_failed: OnFailed) -> None:
        self.actor = actor
        self.name = name
        self.tag = f"{name}@{epoch}"
        self.table = handlers_of(type(actor))
        self.state = CellState.NEW
        self.error: BaseException | None = None
        self._log = log
        self._on_failed = on_failed
        self._mailbox: Mailbox[Inbound | PeerEvent] = Mailbox(name, actor.mailbox)
        self._running: dict[int, _Turn] = {}
        self._is_busy = False
        self._background: set[asyncio.Task[Any]] = set()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._has_ended = asyncio.Event()

    # -- life

    async def start(self) -> None:
        """Run `on_start`; what it raises (or what failed the actor meanwhile) passes through and the actor is gone."""
        self._become(CellState.STARTING)
        task = asyncio.get_running_loop().create_task(
            self.actor.on_start(), name=f"{self.name}: on_start", context=fresh_context(CallScope(chain=(self.tag,)))
        )
        try:
            await task
        except BaseException as error:
            task.cancel()
            await self._end(f"on_start failed: {error}", has_started=False)
            raise
        if self.state is not CellState.STARTING:
            raise self.error or Draining(f"{self.name} was stopped while it started")
        self._become(CellState.RUNNING)
        self._next()

    async def drain(self, grace_s: float) -> bool:
        """Refuse new messages, finish those accepted; False if `grace_s` was not enough."""
        if self.state is CellState.RUNNING:
            self._become(CellState.DRAINING)
        try:
            await asyncio.wait_for(self._quiet.wait(), grace_s)
        except TimeoutError:
            names = ", ".join(sorted({_label(turn.item) for turn in self._running.values()}))
            self._log.warning("%s: still running after %.1f s of grace: %s", self.name, grace_s, names)
            return False
        return True

    async def stop(self, why: str) -> None:
        """Cancel what runs, refuse what waits, call `on_stop`. Never raises; a second call waits for the first one's
        end, so that whoever closes the node does not cut an actor's `on_stop` short."""
        if self.state is CellState.STOPPED:
            await self._has_ended.wait()
        elif self.state is not CellState.NEW:
            await self._end(why)

    def fail(self, error: BaseException) -> None:
        """The actor cannot go on; its node hears of it once and stops it."""
        if self.error is not None or self.state is CellState.STOPPED:
            return
        self.error = error
        self._log.error("%s failed: %s", self.name, error, exc_info=error)
        self._on_failed(self, error)

    def _become(self, state: CellState) -> None:
        if state not in _NEXT[self.state]:
            raise RuntimeError(f"{self.name}: an actor that is {self.state.value} cannot become {state.value}")
        self.state = state

    async def _end(self, why: str, *, has_started: bool = True) -> None:
        self._become(CellState.STOPPED)
        try:
            await self._wind_up(why, has_started=has_started)
        finally:
            self._has_ended.set()

    async def _wind_up(self, why: str, *, has_started: bool) -> None:
        for item in self._mailbox.clear():
            if not isinstance(item, PeerEvent):
                self._mailbox.release()
                item.fail(Draining(f"{self.name} stopped before it came to {item.spec.name}: {why}"))
        tasks: list[asyncio.Task[Any]] = [turn.task for turn in self._running.values()]
        tasks += self._background
        await self._cancel([t for t in tasks if t is not asyncio.current_task()])
        if not has_started:
            return
        try:
            async with asyncio.timeout(STOP_LIMIT_S):  # wait_for would lose a cancellation that comes at its end
                await self.actor.on_stop(why)
        except Exception:  # noqa: BLE001  # the actor's own code, at its end: logged with its traceback
            self._log.exception("%s: on_stop failed", self.name)

    async def _cancel(self, tasks: list[asyncio.Task[Any]]) -> None:
        for task in tasks:
            task.cancel()
        if tasks:
            _, stubborn = await asyncio.wait(tasks, timeout=STOP_LIMIT_S)
            for task in stubborn:
                self._log.error("%s: task %s ignores its cancellation", self.name, task.get_name())

    # -- background tasks

    def spawn(self, coro: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        if self.state is CellState.STOPPED:
            coro.close()
            raise Draining(f"{self.name} has stopped; it starts no task {name!r}")
        loop = asyncio.get_running_loop()
        task = loop.create_task(coro, name=f"{self.name}: {name}", context=fresh_context(NO_SCOPE))
        self._background.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    # -- messages

    def accept(self, inbound: Inbound) -> None:
        """Take a message; raises Draining, Overloaded or WouldDeadlock and then will not touch it again."""
        if self.state in (CellState.DRAINING, CellState.STOPPED):
            raise Draining(f"{self.name} is shutting down and takes no {inbound.spec.name}")
        is_reentrant = inbound.spec.declaration.is_reentrant
        if not is_reentrant and self.tag in inbound.chain:
            path = " -> ".join([*inbound.chain, self.tag])
            raise WouldDeadlock(
                f"{self.name}.{inbound.spec.name} was called by an actor that {self.name} itself waits for: {path}",
                remedy="make the handler reentrant, or answer before calling back",
            )
        self._mailbox.admit()
        if is_reentrant and self.state is CellState.RUNNING:
            self._run(inbound)
            return
        self._mailbox.put(inbound)
        self._next()

    def post(self, event: PeerEvent) -> None:
        """Queue a peer event; never refused while the actor lives."""
        if self.state in (CellState.STARTING, CellState.RUNNING):
            self._mailbox.put_event(event)
            self._next()

    def abandon(self, inbound: Inbound) -> None:
        """The caller does not wait any more: drop the message, or cancel its handler if that may be cancelled."""
        inbound.is_abandoned = True
        if not inbound.spec.declaration.is_cancellable:
            return
        if self._mailbox.remove(inbound):
            self._mailbox.release()
            return
        turn = self._running.get(id(inbound))
        if turn is not None:
            turn.task.cancel()

    def _next(self) -> None:
        while self.state in (CellState.RUNNING, CellState.DRAINING) and not self._is_busy:
            item = self._mailbox.take()
            if item is None:
                return
            self._run(item)

    def _run(self, item: Inbound | PeerEvent) -> None:
        is_event = isinstance(item, PeerEvent)
        is_serial = is_event or not item.spec.declaration.is_reentrant
        chain = () if is_event else item.chain
        deadline_at, trace = (None, b"") if is_event else (item.deadline_at, item.trace)
        scope = CallScope(deadline_at, (*chain, self.tag) if is_serial else chain, trace)
        self._is_busy = self._is_busy or is_serial
        self._quiet.clear()
        turn = self._tell(item) if is_event else self._serve(item)
        loop = asyncio.get_running_loop()
        task = loop.create_task(turn, name=f"{self.name}: {_label(item)}", context=fresh_context(scope))
        self._running[id(item)] = _Turn(item, task, is_serial)
        task.add_done_callback(lambda _: self._finish(item))

    def _finish(self, item: Inbound | PeerEvent) -> None:
        """End of a turn; also called for a task that was cancelled before its first step, hence idempotent."""
        turn = self._running.pop(id(item), None)
        if turn is None:
            return
        if turn.is_serial:
            self._is_busy = False
        if not isinstance(item, PeerEvent):
            self._mailbox.release()
            if not (turn.has_begun or item.is_abandoned):
                item.fail(Draining(f"{self.name} stopped before it came to {item.spec.name}"))
        self._next()
        if not self._running:
            self._quiet.set()

    async def _tell(self, event: PeerEvent) -> None:
        try:
            await self.actor.on_peer(event)
        except Exception as error:  # noqa: BLE001  # the actor's own code: its error fails the actor
            self.fail(error)
        finally:
            self._finish(event)

    async def _serve(self, inbound: Inbound) -> None:
        self._running[id(inbound)].has_begun = True
        try:
            request = inbound.begin()
        except CallError as error:
            inbound.fail(error)
            self._finish(inbound)
            return
        try:
            await self._handle(inbound, request)
        except asyncio.CancelledError:
            if not inbound.is_abandoned:
                inbound.fail(PeerDied(f"{self.name} stopped while it ran {inbound.spec.name}"))
            raise
        except Exception as error:  # noqa: BLE001  # the actor's own code: its error goes to the caller
            inbound.fail(error)
            if inbound.spec.declaration.kind == "cast":
                self.fail(error)
        finally:
            self._finish(inbound)

    async def _handle(self, inbound: Inbound, request: msgspec.Struct) -> None:
        outcome = getattr(self.actor, inbound.spec.name)(*msgspec.structs.astuple(request))
        if inbound.spec.declaration.kind == "stream":
            await inbound.send_items(outcome)
        else:
            inbound.reply(await outcome)


@dataclass(slots=True)
class _Turn:
    """One message being handled."""

    item: Inbound | PeerEvent
    task: asyncio.Task[None]
    is_serial: bool
    has_begun: bool = False


def _label(item: Inbound | PeerEvent) -> str:
    return f"on_peer {item.name}" if isinstance(item, PeerEvent) else item.spec.name
