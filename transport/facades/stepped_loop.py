"""A private event loop that turns only when it is told to, on the thread of whoever tells it.

For hosts that own their thread and have a loop of another kind (an engine's scheduler, `select`). It is an ordinary
asyncio loop with a selector that knows when to stop it: the loop asks its selector to wait, and how long it wants to
wait says whether anything is left to do. It is never installed as the current loop, and while it turns inside a running
one, that one is put back afterwards. Knows nothing of nodes and sockets.

A loop of our own was considered: all of asyncio's tasks, timers and readers would have to be written again for it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import select
import selectors
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ...core.errors import LaunchError, WouldDeadlock
from .timer_fd import TimerFd

T = TypeVar("T")

NESTS = sys.version_info < (3, 14)
"""From 3.14 on asyncio forbids a task to run while one of another loop does on the same thread."""
CLOSE_LIMIT_S = 30.0
LONGEST_WAIT_S = 3600.0
"""The kernel knows no infinity."""


class SteppedLoop:
    """See the module's head. Belongs to the thread that made it."""

    def __init__(self, whose: str) -> None:
        self._whose = whose
        self._selector = _Selector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._selector.stop = self._loop.stop
        self._thread = threading.get_ident()
        self._watch: _Watch | None = None
        self._started: set[asyncio.Task[Any]] = set()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def step(self, timeout_s: float, has_enough: Callable[[bool], bool]) -> None:
        """Let the loop turn until `has_enough(is_idle)` says so, at most for `timeout_s` once it has nothing to do.

        Raises LaunchError on a foreign thread, WouldDeadlock inside one of the loop's own tasks.
        """
        self._check()
        self._selector.until = time.monotonic() + timeout_s
        self._selector.has_enough = has_enough
        outer = asyncio._get_running_loop()  # made for event loops
        asyncio._set_running_loop(None)
        try:
            self._loop.run_forever()
        finally:
            asyncio._set_running_loop(outer)
            if self._watch is not None:
                self._watch.arm(self._selector.next_s)

    def start(self, work: Coroutine[Any, Any, T], outcome: concurrent.futures.Future[T]) -> None:
        """Begin `work`; as the loop turns it ends, and `outcome` with it. Cancelling one cancels the other."""
        try:
            self._check()
        except BaseException:
            work.close()
            raise
        task = self._loop.create_task(work)
        self._started.add(task)

        def end(task: asyncio.Task[T]) -> None:
            self._started.discard(task)
            if task.cancelled():
                outcome.cancel()
            elif outcome.cancelled():
                _ = task.exception()  # of no use to anybody any more
            elif (error := task.exception()) is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(task.result())

        task.add_done_callback(end)
        outcome.add_done_callback(lambda done: task.cancel() if done.cancelled() else None)
        if self._watch is not None:
            self._watch.arm(0.0)

    def run(self, work: Coroutine[Any, Any, T], limit_s: float) -> T:
        """Let the loop turn until `work` has ended; after `limit_s` it is cancelled and TimeoutError raised."""
        try:
            self._check()
        except BaseException:
            work.close()
            raise
        task = self._loop.create_task(work)
        give_up_at = time.monotonic() + limit_s
        try:
            while not task.done() and (left_s := give_up_at - time.monotonic()) > 0:
                self.step(left_s, lambda _: task.done())
        finally:
            if not task.done():
                task.cancel()
                self.step(CLOSE_LIMIT_S, lambda _: task.done())
        if task.cancelled():
            raise TimeoutError
        return task.result()

    def fileno(self) -> int:
        """A descriptor that is readable whenever there is something to do, timers included."""
        if self._watch is None:
            self._check()
            self._watch = _Watch(self._selector)
        return self._watch.fileno()

    def close(self) -> None:
        """Cancel what still runs and release everything."""
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        if left:
            self.step(CLOSE_LIMIT_S, lambda _: all(task.done() for task in left))
        self.run(self._loop.shutdown_asyncgens(), CLOSE_LIMIT_S)
        if self._watch is not None:
            self._watch.close()
        self._loop.close()

    def _check(self) -> None:
        if threading.get_ident() != self._thread:
            raise LaunchError(
                f"{self._whose} belongs to the thread that opened it",
                remedy="poll it there; NodeThread can be used from every thread",
            )
        if self._loop.is_running():
            raise WouldDeadlock(
                f"{self._whose} is being polled already: an actor of it cannot poll it again",
                remedy="await references inside handlers",
            )
        if not NESTS and asyncio._get_running_loop() is not None:
            raise LaunchError(
                f"{self._whose} cannot be polled inside a running event loop",
                remedy="use `await Node.attach()` there, or NodeThread",
            )


class _Selector(selectors.EpollSelector):
    """Waits as long as the loop wants and its host allows, and ends the loop's run when there is nothing to do."""

    def __init__(self) -> None:
        super().__init__()
        self.until = 0.0
        self.has_enough: Callable[[bool], bool] = bool
        self.stop: Callable[[], None] = lambda: None
        self.next_s = 0.0
        """Seconds to the loop's next timer, as it said last; 0: it has something to do, inf: it has no timer."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        is_idle = timeout is None or timeout > 0
        if self.has_enough(is_idle):
            events = super().select(0)
            self.next_s = 0.0 if events or not is_idle else _due_in(timeout)
            self.stop()
            return events
        if not is_idle:
            return super().select(0)
        left_s = min(self.until - time.monotonic(), LONGEST_WAIT_S)
        events = super().select(max(0.0, left_s if timeout is None else min(timeout, left_s)))
        if not events and time.monotonic() >= self.until:
            self.next_s = _due_in(timeout)
            self.stop()
        return events


def _due_in(timeout: float | None) -> float:
    return math.inf if timeout is None else timeout


class _Watch:
    """The loop's descriptors and its next timer behind one descriptor of its own."""

    def __init__(self, selector: selectors.EpollSelector) -> None:
        self._timer = TimerFd()
        self._all = select.epoll()
        self._all.register(selector.fileno(), select.EPOLLIN)
        self._all.register(self._timer.fileno(), select.EPOLLIN)
        self.arm(0.0)

    def fileno(self) -> int:
        return self._all.fileno()

    def arm(self, delay_s: float) -> None:
        self._timer.arm(delay_s)

    def close(self) -> None:
        self._all.close()
        self._timer.close()
