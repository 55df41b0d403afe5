"""Runs one hosted actor: its mailbox, the order of its handlers, its background tasks, its end.

Serial handlers run one after another, re-entrant ones beside them; each is a task, which can be cancelled alone. Never
sees a socket.

    NEW -> STARTING -> RUNNING -> DRAINING -> STOPPED       (also STARTING | RUNNING | DRAINING -> STOPPED by failure)
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Literal, TypeVar

import msgspec

from ..core.actor import Actor, PeerEvent
from ..core.errors import BadRequest, CallError, Draining, MyxaError, Overloaded, PeerDied, UserCodeError
from ..core.handlers import NO_SCOPE, CallScope, HandlerSpec, enter_scope, fresh_context, handlers_of
from ..core.timeouts import TIMEOUTS
from .codec import UndecodableError, codecs_of
from .session.links import Arrival
from .session.serving import Serving

T = TypeVar("T")


RunnerState = Literal["new", "starting", "running", "draining", "stopped"]
NEXT: dict[RunnerState, tuple[RunnerState, ...]] = {
    "new": ("starting",),
    "starting": ("running", "stopped"),
    "running": ("draining", "stopped"),
    "draining": ("stopped",),
    "stopped": (),
}
_TAKES = ("running", "draining")
_as_arguments = msgspec.structs.astuple

OnFailed = Callable[["ActorRunner", BaseException], None]


class ActorRunner:
    """Runs one actor."""

    def __init__(self, actor: Actor, name: str, serving: Serving, log: logging.Logger, on_failed: OnFailed) -> None:
        self._serving = serving
        self.actor = actor
        self.name = name
        self.table = handlers_of(type(actor))
        self.codecs = tuple(codecs_of(spec) for spec in self.table.specs)
        self.state: RunnerState = "new"
        self.error: BaseException | None = None
        self._log = log
        self._on_failed = on_failed
        self._waiting: deque[Arrival | PeerEvent] = deque()
        self.num_held = 0
        """Messages that wait or are being handled, without events."""
        self._running: dict[int, tuple[Arrival | PeerEvent, asyncio.Task[None]]] = {}
        """By the identity of the message."""
        self._is_busy = False
        """A serial handler is among them."""
        self._context = fresh_context()
        self._background: dict[asyncio.Task[Any], None] = {}  # in order: a simulated run repeats itself
        self._quiet = asyncio.Event()
        self._has_ended = asyncio.Event()

    # -- start and end

    async def start(self) -> None:
        """Run `on_start`; what it raises (or what failed the actor meanwhile) passes through and the actor is gone."""
        self._become("starting")
        task = asyncio.get_running_loop().create_task(
            self.actor.on_start(), name=f"{self.name}: on_start", context=fresh_context()
        )
        try:
            await task
        except BaseException as error:
            task.cancel()
            await self._end(f"on_start failed: {error}", has_started=False)
            raise
        if self.state != "starting":
            raise self.error or Draining(f"{self.name} was stopped while it started")
        self._become("running")
        self._next()

    async def drain(self, grace_s: float) -> bool:
        """Refuse new messages, finish those accepted; False if `grace_s` was not enough."""
        if self.state == "running":
            self._become("draining")
        self._quiet.clear()
        self._note_quiet()
        try:
            async with asyncio.timeout(grace_s):
                await self._quiet.wait()
        except TimeoutError:
            names = ", ".join(sorted({task.get_name() for _, task in self._running.values()}))
            self._log.warning("still running after %.1f s of grace: %s", grace_s, names)
            return False
        return True

    async def stop(self, why: str) -> None:
        """Cancel what runs, refuse what waits, call `on_stop`. Never raises; a second call waits for the first one's
        end, so that closing the node does not cut an actor's `on_stop` short."""
        if self.state == "stopped":
            await self._has_ended.wait()
        elif self.state != "new":
            await self._end(why)

    def fail(self, error: BaseException) -> None:
        """The actor cannot continue; its node hears of it once and stops it."""
        if self.error is not None or self.state == "stopped":
            return
        self.error = error
        self._log.error("%s failed: %s", self.name, error, exc_info=error)
        self._on_failed(self, error)

    def _become(self, state: RunnerState) -> None:
        if state not in NEXT[self.state]:
            raise RuntimeError(f"{self.name}: an actor that is {self.state} cannot become {state}")
        self.state = state

    async def _end(self, why: str, *, has_started: bool = True) -> None:
        self._become("stopped")
        try:
            await self._wind_up(why, has_started=has_started)
        finally:
            self._has_ended.set()

    async def _wind_up(self, why: str, *, has_started: bool) -> None:
        waiting, self._waiting = self._waiting, deque()
        for item in (*waiting, *(item for item, _ in self._running.values())):
            if not isinstance(item, PeerEvent) and not item.has_begun:
                self._serving.fail(item, Draining(f"{self.name} stopped before it came to {_spec(item).name}: {why}"))
        tasks: list[asyncio.Task[Any]] = [task for _, task in self._running.values()]
        tasks += self._background
        await self._cancel([t for t in tasks if t is not asyncio.current_task()])
        if not has_started:
            return
        try:
            async with asyncio.timeout(
                TIMEOUTS.wire.stop_s
            ):  # wait_for would lose a cancellation that comes at its end
                await self.actor.on_stop(why)
        except Exception:  # noqa: BLE001  # the actor's own code, at its end: logged with its traceback
            self._log.exception("%s: on_stop failed", self.name)

    async def _cancel(self, tasks: list[asyncio.Task[Any]]) -> None:
        for task in tasks:
            task.cancel()
        if tasks:
            _, stubborn = await asyncio.wait(tasks, timeout=TIMEOUTS.wire.stop_s)
            for task in stubborn:
                self._log.error("%s: task %s ignores its cancellation", self.name, task.get_name())

    # -- background tasks

    def spawn(self, coro: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        if self.state == "stopped":
            coro.close()
            raise Draining(f"{self.name} has stopped; it starts no task {name!r}")
        loop = asyncio.get_running_loop()
        task = loop.create_task(coro, name=f"{self.name}: {name}", context=fresh_context())
        self._background[task] = None
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._background.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    # -- messages

    def accept(self, inbound: Arrival) -> None:
        """Take a message; raises Draining or Overloaded and then will not touch it again."""
        spec = _spec(inbound)
        is_serial = not spec.declaration.is_reentrant
        if self.state in ("draining", "stopped"):
            raise Draining(f"{self.name} is shutting down and takes no {spec.name}")
        if self.num_held >= self.actor.mailbox_size:
            raise Overloaded(
                f"{self.name}: mailbox is full ({self.num_held} messages)",
                remedy="come back later, or give its class a larger mailbox_size",
            )
        self.num_held += 1
        if is_serial or self.state != "running":
            self._waiting.append(inbound)
            self._next()
        else:
            self._run(inbound)

    def post(self, event: PeerEvent) -> None:
        """Queue a peer event; never refused before the actor stops."""
        if self.state in ("starting", "running"):
            self._waiting.append(event)
            self._next()

    def abandon(self, inbound: Arrival) -> None:
        if inbound.spec is None or not inbound.spec.declaration.is_cancellable:
            return
        if inbound in self._waiting:
            self._waiting.remove(inbound)
            self.num_held -= 1
            self._note_quiet()
        elif inbound.has_begun and (run := self._running.get(id(inbound))) is not None:
            run[1].cancel()

    def _next(self) -> None:
        """Begin what may begin of what waits."""
        while not self._is_busy and self.state in _TAKES and self._waiting:
            self._run(self._waiting.popleft())

    def _run(self, item: Arrival | PeerEvent) -> None:
        if isinstance(item, PeerEvent):
            name, is_serial, scope, work = f"on_peer {item.name}", True, NO_SCOPE, self._tell(item)
        else:
            spec = _spec(item)
            name, is_serial = spec.name, not spec.declaration.is_reentrant
            scope = CallScope(item.deadline_at, item.link.key)
            work = self._serve(item, spec, is_serial)
        self._is_busy = self._is_busy or is_serial
        context = self._context.copy()
        context.run(enter_scope, scope)
        task = asyncio.get_running_loop().create_task(work, name=f"{self.name}: {name}", context=context)
        self._running[id(item)] = item, task

    def _finish(self, item: Arrival | PeerEvent, is_serial: bool) -> None:
        del self._running[id(item)]
        if type(item) is not PeerEvent:
            self.num_held -= 1
        if is_serial:
            self._is_busy = False
            self._next()
        self._note_quiet()

    def _note_quiet(self) -> None:
        if not self._running and not (self._waiting and self.state in _TAKES):
            self._quiet.set()

    async def _tell(self, event: PeerEvent) -> None:
        try:
            await self.actor.on_peer(event)
        except Exception as error:  # noqa: BLE001  # the actor's own code: its error fails the actor
            self.fail(error)
        finally:
            self._finish(event, True)

    async def _serve(self, inbound: Arrival, spec: HandlerSpec, is_serial: bool) -> None:
        serving, codecs, envelope = self._serving, self.codecs[spec.index], inbound.envelope
        try:
            if inbound.is_answered and spec.declaration.is_cancellable:
                return
            try:
                serving.begin(inbound)
                request = codecs.request.decode(envelope.body, envelope.frames)
            except UndecodableError as error:
                serving.fail(inbound, BadRequest(f"{self.name}.{spec.name}: {error}", remedy="see the handler's types"))
                return
            except (CallError, MemoryError) as error:
                serving.fail(inbound, error)
                return
            value = await getattr(self.actor, spec.name)(*_as_arguments(request))
            try:
                body, frames = codecs.reply.encode(value)
            except MyxaError as error:
                message = f"{self.name}.{spec.name} returned what cannot travel: {error}"
                raise UserCodeError(message) from error
            serving.reply(inbound, body, frames)
        except asyncio.CancelledError:
            if not inbound.is_answered:
                serving.fail(inbound, PeerDied(f"{self.name} stopped while it ran {spec.name}"))
            raise
        except Exception as error:  # noqa: BLE001  # the actor's own code: its error goes to the caller
            serving.fail(inbound, error)
        except BaseException as error:  # not even an Exception: the caller hears of it all the same
            serving.fail(inbound, error)
            raise
        finally:
            self._finish(inbound, is_serial)


def _spec(inbound: Arrival) -> HandlerSpec:
    assert inbound.spec is not None  # the host has looked it up
    return inbound.spec
