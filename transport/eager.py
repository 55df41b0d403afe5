"""Runs a coroutine's first step at once and makes it a task only if it suspends.

Most handlers answer without waiting for anything; a task for each of them would cost more than the rest of the call.
`asyncio.current_task()` is right in the first step already (`asyncio.timeout`, task groups and the like need it): a
*stand-in* task is kept in readiness and takes the coroutine over when it suspends, as if it had run it from the start.
Python 3.12's eager tasks were considered: they are made before it is known whether they are needed, and 3.11 has none.
"""

from __future__ import annotations

import asyncio
import contextvars
from asyncio import tasks
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any

from ..core.scope import fresh_context

Coro = Coroutine[Any, Any, Any]

# Documented for those who make tasks of their own ("Extending asyncio"), but not in the stubs.
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
        """Step `coro` in `context`: None if it has ended (or was cancelled), else the task that goes on with it.

        What it raises in its first step passes through.
        """
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
        """Let the task that stands ready end."""
        self._is_closed = True
        stand_in, self._stand_in = self._stand_in, None
        if stand_in is not None:
            stand_in.task.cancel()


class _StandIn(Coroutine[Any, Any, Any]):
    """What the task in readiness runs: nothing, until there is a suspended coroutine to go on with."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._idle: asyncio.Future[None] = loop.create_future()
        self._coro: Coro | None = None
        self._context = contextvars.Context()
        self._waits_for: Any = None
        self._has_gone_on = False
        # The surroundings' context, not an empty one: a simulation tells by it whose task this is.
        self.task: asyncio.Task[Any] = loop.create_task(self, name="stands ready", context=fresh_context())

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
        if not self._has_gone_on:
            self._has_gone_on = True
            waits_for = self._waits_for
            if asyncio.isfuture(waits_for) and not waits_for.done():
                return _awaited(waits_for)
            if waits_for is not None and not asyncio.isfuture(waits_for):
                return waits_for  # nonsense; the task says so
        return self._context.run(self._coro.send, value)

    def throw(self, typ: Any, val: Any = None, tb: Any = None) -> Any:
        if self._coro is None:
            raise typ
        if not self._has_gone_on:  # cancelled before its task came to it
            self._has_gone_on = True
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
        """For `Task.get_stack`: where the coroutine stands."""
        return getattr(self._coro, "cr_frame", None)


def _awaited(future: Any) -> Any:
    future._asyncio_future_blocking = True  # as `Future.__await__` marks it
    return future
