"""Runs one hosted actor: its mailbox, the order of its handlers, its background tasks, its end.

Serial handlers run one after another, re-entrant ones beside them. A handler's first step runs at once; a handler that
suspends becomes a task, which can be cancelled alone. Knows messages only as `Delivery`; never sees a socket.

    NEW -> STARTING -> RUNNING -> DRAINING -> STOPPED       (also STARTING | RUNNING | DRAINING -> STOPPED by failure)

Most handlers answer without waiting for anything; a task for each of them would cost more than the rest of the call.
`asyncio.current_task()` is right in the first step already (`asyncio.timeout`, task groups and the like need it):
`Eager` keeps a *stand-in* task ready, which takes over a coroutine that suspends, as if it had run it from the start.
Python 3.12's eager tasks were considered: they are made before it is known whether they are needed, and 3.11 has none.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from asyncio import tasks
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import Enum
from types import FrameType
from typing import Any, TypeVar

import msgspec

from ..core.actor import Actor, Mailbox, PeerEvent
from ..core.errors import BadRequest, CallError, Draining, MyxaError, PeerDied, UserCodeError, WouldDeadlock
from ..core.handlers import NO_SCOPE, CallScope, HandlerSpec, enter_scope, fresh_context, handlers_of
from ..core.ids import PeerKey
from .codec import Codecs, UndecodableError, codecs_of
from .session.links import Arrival
from .session.serving import Serving

T = TypeVar("T")

MAX_PER_TURN = 64
"""Waiting messages handled before the loop's other work gets its turn. A number, not a time: simulations repeat."""
STOP_LIMIT_S = 10.0
"""How long `on_stop`, or a task that was cancelled, may take before it is given up and named in the log."""


class RunnerState(Enum):
    """State of an actor."""

    NEW = "new"
    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPED = "stopped"


NEXT: dict[RunnerState, tuple[RunnerState, ...]] = {
    RunnerState.NEW: (RunnerState.STARTING,),
    RunnerState.STARTING: (RunnerState.RUNNING, RunnerState.STOPPED),
    RunnerState.RUNNING: (RunnerState.DRAINING, RunnerState.STOPPED),
    RunnerState.DRAINING: (RunnerState.STOPPED,),
    RunnerState.STOPPED: (),
}


class Delivery(msgspec.Struct, eq=False):
    """A call that arrived for a handler; it ends by exactly one of `reply` and `fail`."""

    spec: HandlerSpec
    chain: tuple[str, ...]
    deadline_at: float | None
    trace: bytes
    caller: PeerKey
    arrival: Arrival
    codecs: Codecs
    callee: str
    serving: Serving
    is_abandoned: bool = False

    def begin(self) -> msgspec.Struct:
        """It leaves the mailbox: its credit goes back, its request is decoded. Raises BadRequest, DeadlineExceeded."""
        arrival = self.arrival
        self.serving.begin(arrival)
        envelope = arrival.envelope
        try:
            return self.codecs.request.decode(envelope.body, envelope.frames)
        except UndecodableError as error:
            raise BadRequest(f"{self.callee}.{self.spec.name}: {error}", remedy="see the handler's types") from error

    def reply(self, value: Any) -> None:
        try:
            body, frames = self.codecs.reply.encode(value)
        except MyxaError as error:
            what = f"{self.callee}.{self.spec.name} returned what cannot travel: {error}"
            raise UserCodeError(what) from error
        self.serving.reply(self.arrival, body, frames)

    def fail(self, error: BaseException) -> None:
        self.serving.fail(self.arrival, error)


_RUNNING = RunnerState.RUNNING  # members of an Enum are looked up in Python
_TAKES = (RunnerState.RUNNING, RunnerState.DRAINING)
_REFUSES = (RunnerState.DRAINING, RunnerState.STOPPED)
_as_arguments = msgspec.structs.astuple

OnFailed = Callable[["ActorRunner", BaseException], None]


class ActorRunner:
    """Runs one actor."""

    def __init__(self, actor: Actor, name: str, epoch: int, log: logging.Logger, on_failed: OnFailed) -> None:
        self.actor = actor
        self.name = name
        self.tag = f"{name}@{epoch}"
        self.table = handlers_of(type(actor))
        self.codecs = tuple(codecs_of(spec) for spec in self.table.specs)
        self.state = RunnerState.NEW
        self.error: BaseException | None = None
        self._log = log
        self._on_failed = on_failed
        self._mailbox: Mailbox[Delivery | PeerEvent] = Mailbox(name, actor.mailbox)
        self._running: dict[int, _Turn] = {}
        """Handlers that wait for something."""
        self._num_begun = 0
        self._is_busy = False
        """A serial handler is among them."""
        self._is_turning = False
        self._is_turn_due = False
        self._own_chain = (self.tag,)
        self._context = fresh_context()
        self._eager = Eager(asyncio.get_running_loop())
        self._background: dict[asyncio.Task[Any], None] = {}  # in order: a simulated run repeats itself
        self._quiet = asyncio.Event()
        self._is_awaited = False
        self._has_ended = asyncio.Event()

    @property
    def num_held(self) -> int:
        """Messages that wait or are being handled."""
        return self._mailbox.num_held

    # -- start and end

    async def start(self) -> None:
        """Run `on_start`; what it raises (or what failed the actor meanwhile) passes through and the actor is gone."""
        self._become(RunnerState.STARTING)
        task = asyncio.get_running_loop().create_task(
            self.actor.on_start(), name=f"{self.name}: on_start", context=fresh_context(CallScope(chain=(self.tag,)))
        )
        try:
            await task
        except BaseException as error:
            task.cancel()
            await self._end(f"on_start failed: {error}", has_started=False)
            raise
        if self.state is not RunnerState.STARTING:
            raise self.error or Draining(f"{self.name} was stopped while it started")
        self._become(RunnerState.RUNNING)
        self._turn_soon()

    async def drain(self, grace_s: float) -> bool:
        """Refuse new messages, finish those accepted; False if `grace_s` was not enough."""
        if self.state is RunnerState.RUNNING:
            self._become(RunnerState.DRAINING)
        if self._is_quiet():
            return True
        self._quiet.clear()
        self._is_awaited = True
        try:
            async with asyncio.timeout(grace_s):
                await self._quiet.wait()
        except TimeoutError:
            names = ", ".join(sorted({_label(turn.item) for turn in self._running.values()}))
            self._log.warning("%s: still running after %.1f s of grace: %s", self.name, grace_s, names)
            return False
        return True

    async def stop(self, why: str) -> None:
        """Cancel what runs, refuse what waits, call `on_stop`. Never raises; a second call waits for the first one's
        end, so that closing the node does not cut an actor's `on_stop` short."""
        if self.state is RunnerState.STOPPED:
            await self._has_ended.wait()
        elif self.state is not RunnerState.NEW:
            await self._end(why)

    def fail(self, error: BaseException) -> None:
        """The actor cannot continue; its node hears of it once and stops it."""
        if self.error is not None or self.state is RunnerState.STOPPED:
            return
        self.error = error
        self._log.error("%s failed: %s", self.name, error, exc_info=error)
        self._on_failed(self, error)

    def _become(self, state: RunnerState) -> None:
        if state not in NEXT[self.state]:
            raise RuntimeError(f"{self.name}: an actor that is {self.state.value} cannot become {state.value}")
        self.state = state

    async def _end(self, why: str, *, has_started: bool = True) -> None:
        self._become(RunnerState.STOPPED)
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
        self._eager.close()
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
        if self.state is RunnerState.STOPPED:
            coro.close()
            raise Draining(f"{self.name} has stopped; it starts no task {name!r}")
        loop = asyncio.get_running_loop()
        task = loop.create_task(coro, name=f"{self.name}: {name}", context=fresh_context(NO_SCOPE))
        self._background[task] = None
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._background.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    # -- messages

    def accept(self, inbound: Delivery) -> None:
        """Take a message; raises Draining, Overloaded or WouldDeadlock and then will not touch it again."""
        state, chain, is_serial = self.state, inbound.chain, not inbound.spec.declaration.is_reentrant
        if state is not _RUNNING and state in _REFUSES:
            raise Draining(f"{self.name} is shutting down and takes no {inbound.spec.name}")
        if chain and is_serial and self.tag in chain:
            path = " -> ".join([*chain, self.tag])
            raise WouldDeadlock(
                f"{self.name}.{inbound.spec.name} was called by an actor that {self.name} itself waits for: {path}",
                remedy="make the handler reentrant, or answer before calling back",
            )
        mailbox = self._mailbox
        mailbox.admit()
        if state is not _RUNNING or (is_serial and (self._is_busy or self._is_turning or mailbox.waiting)):
            mailbox.put(inbound)
            self._turn_soon()
            return
        self._run(inbound, is_serial)

    def post(self, event: PeerEvent) -> None:
        """Queue a peer event; never refused before the actor stops."""
        if self.state in (RunnerState.STARTING, RunnerState.RUNNING):
            self._mailbox.put_event(event)
            self._turn_soon()

    def abandon(self, inbound: Delivery) -> None:
        inbound.is_abandoned = True
        if not inbound.spec.declaration.is_cancellable:
            return
        if self._mailbox.remove(inbound):
            self._mailbox.release()
            self._note_quiet()
            return
        turn = self._running.get(id(inbound))
        if turn is not None:
            turn.task.cancel()

    def _turn_soon(self) -> None:
        if not (self._is_turn_due or self._is_turning or self._is_busy):
            self._is_turn_due = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._is_turn_due = False
        self._is_turning = True
        try:
            for _ in range(MAX_PER_TURN):
                if self._is_busy or self.state not in _TAKES:
                    return
                item = self._mailbox.take()
                if item is None:
                    return
                if isinstance(item, PeerEvent):
                    self._run_event(item)
                else:
                    self._run(item, not item.spec.declaration.is_reentrant)
        finally:
            self._is_turning = False
            self._note_quiet()
        if len(self._mailbox):
            self._turn_soon()

    def _run(self, inbound: Delivery, is_serial: bool) -> None:
        chain = inbound.chain
        if is_serial:
            self._is_busy = True
            chain = (*chain, self.tag) if chain else self._own_chain
        self._num_begun += 1
        scope = CallScope(inbound.deadline_at, chain, inbound.trace, inbound.caller)
        task = self._eager.start(self._serve(inbound, is_serial, scope), self._context.copy())
        if task is not None:
            self._note_running(inbound, task)

    def _run_event(self, event: PeerEvent) -> None:
        self._is_busy = True
        self._num_begun += 1
        task = self._eager.start(self._tell(event), self._context.copy())
        if task is not None:
            self._note_running(event, task)

    def _note_running(self, item: Delivery | PeerEvent, task: asyncio.Task[Any]) -> None:
        task.set_name(f"{self.name}: {_label(item)}")
        self._running[id(item)] = _Turn(item, task)

    def _finish(self, item: Delivery | PeerEvent, is_serial: bool) -> None:
        if self._running:
            self._running.pop(id(item), None)
        self._num_begun -= 1
        if type(item) is not PeerEvent:
            self._mailbox.release()
        if is_serial:
            self._is_busy = False
            if self._mailbox.waiting:
                self._turn_soon()
        if self._is_awaited:
            self._note_quiet()

    def _is_quiet(self) -> bool:
        return not (self._num_begun or (len(self._mailbox) and self.state in _TAKES))

    def _note_quiet(self) -> None:
        if not self._quiet.is_set() and self._is_quiet():
            self._quiet.set()

    async def _tell(self, event: PeerEvent) -> None:
        enter_scope(CallScope(chain=self._own_chain))
        try:
            await self.actor.on_peer(event)
        except Exception as error:  # noqa: BLE001  # the actor's own code: its error fails the actor
            self.fail(error)
        finally:
            self._finish(event, True)

    async def _serve(self, inbound: Delivery, is_serial: bool, scope: CallScope) -> None:
        enter_scope(scope)  # the context is this coroutine's own
        spec = inbound.spec
        try:
            request = inbound.begin()
        except (CallError, MemoryError) as error:
            inbound.fail(error)
            self._finish(inbound, is_serial)
            return
        try:
            inbound.reply(await getattr(self.actor, spec.name)(*_as_arguments(request)))
        except asyncio.CancelledError:
            if not inbound.is_abandoned:
                inbound.fail(PeerDied(f"{self.name} stopped while it ran {spec.name}"))
            raise
        except Exception as error:  # noqa: BLE001  # the actor's own code: its error goes to the caller
            inbound.fail(error)
            if spec.declaration.kind == "cast":
                self.fail(error)
        except BaseException as error:  # not even an Exception: the caller hears of it all the same
            inbound.fail(error)
            raise
        finally:
            self._finish(inbound, is_serial)


@dataclass(slots=True)
class _Turn:
    item: Delivery | PeerEvent
    task: asyncio.Task[Any]


def _label(item: Delivery | PeerEvent) -> str:
    return f"on_peer {item.name}" if isinstance(item, PeerEvent) else item.spec.name


Coro = Coroutine[Any, Any, Any]

# Documented for those who make their own tasks ("Extending asyncio"), but not in the stubs.
_enter: Callable[[asyncio.AbstractEventLoop, Any], None] = getattr(tasks, "_enter_task")  # noqa: B009
_current = asyncio.current_task
_leave: Callable[[asyncio.AbstractEventLoop, Any], None] = getattr(tasks, "_leave_task")  # noqa: B009


class Eager:
    """Starts coroutines of one loop."""

    __slots__ = ("_is_closed", "_loop", "_stand_in")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._stand_in: _StandIn | None = None
        self._is_closed = False

    def start(self, coro: Coro, context: contextvars.Context) -> asyncio.Task[Any] | None:
        """Step `coro` in `context`: None if it has ended (or was cancelled), else the task that continues it. What it
        raises in its first step passes through."""
        loop, stand_in = self._loop, self._stand_in
        self._stand_in = None
        if stand_in is None or (task := stand_in.task).done() or task.cancelling():
            stand_in = _StandIn(loop)
            task = stand_in.task
        outer: asyncio.Task[Any] | None = None
        try:
            _enter(loop, task)
        except RuntimeError:  # it is called from within a task
            outer = _current(loop)
            if outer is None:
                raise
            _leave(loop, outer)
            _enter(loop, task)
        try:
            waits_for = context.run(coro.send, None)
        except (StopIteration, asyncio.CancelledError):
            if self._stand_in is None and not self._is_closed:
                self._stand_in = stand_in
            else:
                stand_in.task.cancel()
            return None
        except BaseException:
            stand_in.task.cancel()
            raise
        finally:
            _leave(loop, task)
            if outer is not None:
                _enter(loop, outer)
        stand_in.take_over(coro, context, waits_for)
        return task

    def close(self) -> None:
        self._is_closed = True
        stand_in, self._stand_in = self._stand_in, None
        if stand_in is not None:
            stand_in.task.cancel()


class _StandIn(Coroutine[Any, Any, Any]):
    """What the task in readiness runs: nothing, until there is a suspended coroutine to continue."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._idle: asyncio.Future[None] = loop.create_future()
        self._coro: Coro | None = None
        self._context = contextvars.Context()
        self._waits_for: Any = None
        self._was_resumed = False
        # The surroundings' context, not an empty one: a simulation sees by it whose task this is.
        self.task: asyncio.Task[Any] = loop.create_task(self, name="stand-in", context=fresh_context())

    def take_over(self, coro: Coro, context: contextvars.Context, waits_for: Any) -> None:
        """`coro` is suspended and waits for that future, or (None) for the next turn of the loop."""
        self._coro, self._context, self._waits_for = coro, context, waits_for
        if asyncio.isfuture(waits_for):
            waits_for._asyncio_future_blocking = False  # others may await it before our task comes to it
        if not self._idle.done():
            self._idle.set_result(None)
        del self.task  # it holds on to us: the two would wait for the collector, with all that the coroutine has held

    def send(self, value: Any) -> Any:
        if self._coro is None:
            return _awaited(self._idle)
        if not self._was_resumed:
            self._was_resumed = True
            waits_for = self._waits_for
            if asyncio.isfuture(waits_for) and not waits_for.done():
                return _awaited(waits_for)
            if waits_for is not None and not asyncio.isfuture(waits_for):
                return waits_for  # nonsense; the task says so
        return self._context.run(self._coro.send, value)

    def throw(self, typ: Any, val: Any = None, tb: Any = None) -> Any:
        if self._coro is None:
            raise typ
        if not self._was_resumed:  # cancelled before its task came to it
            self._was_resumed = True
            if asyncio.isfuture(self._waits_for) and self._waits_for.cancel():
                return _awaited(self._waits_for)
        return self._context.run(self._coro.throw, typ)

    def close(self) -> None:
        if self._coro is not None:
            self._coro.close()

    def __await__(self) -> Any:
        raise TypeError("only its own task runs it")

    @property
    def cr_frame(self) -> FrameType | None:
        """For `Task.get_stack`: where the coroutine is suspended."""
        return getattr(self._coro, "cr_frame", None)


def _awaited(future: Any) -> Any:
    future._asyncio_future_blocking = True  # as `Future.__await__` marks it
    return future
