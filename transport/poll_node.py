"""A node that its host polls: for programs with their own busy loop, such as an engine's scheduler.

    node = PollNode(name="scheduler/0", rdzv=Rendezvous.load(path))
    node.start(Engine(), "engine/0")
    while True:
        node.poll(max_messages=64)      # takes what has come, never waits
        ...                             # the host's own step

No thread is needed, and no loop of the host. A host that waits in `select` or `epoll` adds `node.fileno()` and polls
when it is readable; any other host polls at least some twenty times a second, because deadlines expire by it.

`SteppedLoop` is an ordinary asyncio loop with a selector that knows when to stop it: the loop asks its selector to
wait, and the wait it asks for says whether work is left. It is never installed as the current loop; while it turns
inside a running loop, that loop is put back afterwards. A loop of our own was considered: all of asyncio's tasks,
timers and readers would have to be written again for it. `TimerFd` wraps Linux timerfd; Python has it from 3.13 on.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import math
import os
import select
import selectors
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar, Unpack

from ..core.errors import CallError, DeadlineExceeded, LaunchError, NotSent, WouldDeadlock
from .node import Node, guard, release
from .sync_node import AttachOptions, HomeCaller, SyncNode, check_options

T = TypeVar("T")
P = ParamSpec("P")

MAX_MESSAGES = 256
CLOSE_SLACK_S = 30.0


class PollNode(SyncNode):
    """A node that its host polls, in the thread that made it; other threads and its own handlers are refused."""

    def __init__(self, **options: Unpack[AttachOptions]) -> None:
        """Join the system; arguments and errors as of `Node.attach`. Waits until that is done."""
        check_options(options)
        self._is_closed = False
        self._loop = SteppedLoop(options["name"])
        try:
            limit_s = options.get("timeout_s", 10.0) + CLOSE_SLACK_S
            self._node = self._loop.run(Node.attach(**options), limit_s)
        except BaseException:
            self._is_closed = True
            self._loop.close()
            raise
        self._caller = HomeCaller(self._node, self._loop.loop)
        self._turn = self._node.turn
        guard(self)

    def poll(self, max_messages: int = MAX_MESSAGES, timeout_s: float = 0.0) -> int:
        """Do what is to be done and return the number of messages taken in.

        Takes at most `max_messages` and runs for `turn_budget_s` at most; the next call does the rest.
        Waits up to `timeout_s` for the first message, 0: not at all. What handlers do between two awaits is done in
        here: a host that must not be held up keeps them short.
        """
        self._refuse_closed()
        if max_messages < 1 or timeout_s < 0:
            raise ValueError(f"max_messages = {max_messages} and timeout_s = {timeout_s:g} leave nothing to do")
        turn = self._turn
        before = turn.num_taken
        turn.max_taken = before + max_messages

        give_back_at = math.inf

        def has_enough(is_idle: bool) -> bool:
            nonlocal give_back_at
            num_taken = turn.num_taken - before
            if is_idle:
                return num_taken > 0
            now = time.monotonic()
            give_back_at = min(give_back_at, now + turn.turn_s)
            return num_taken >= max_messages or now >= give_back_at

        try:
            self._loop.step(timeout_s, has_enough)
        finally:
            turn.max_taken = turn.UNLIMITED
        return turn.num_taken - before

    def fileno(self) -> int:
        """A descriptor that is readable when `poll` has something to do, deadlines included; for select or epoll."""
        self._refuse_closed()
        return self._loop.fileno()

    def submit(
        self, method: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> concurrent.futures.Future[T]:
        """Begin a call; polling carries it on. `future.done()` says whether it has ended."""
        self._refuse_closed()
        future: PolledFuture[T] = PolledFuture()

        async def work() -> T:
            return await method(*args, **kwargs)

        self._loop.start(work(), future)
        return future

    def run(self, make: Callable[[], Coroutine[Any, Any, T]], timeout_s: float) -> T:
        """Poll until that coroutine has ended; other messages are handled meanwhile."""
        self._refuse_closed()
        try:
            return self._loop.run(make(), timeout_s)
        except TimeoutError as error:
            if error.args:
                raise
            raise DeadlineExceeded(
                f"{self.name}: no answer within {timeout_s:g} s", remedy="is a handler of this node blocking?"
            ) from None

    def close(self, grace_s: float = 5.0) -> None:
        if self._is_closed:
            return
        self.run(lambda: self._node.close(grace_s), grace_s + CLOSE_SLACK_S)
        self._is_closed = True
        release(self)
        self._loop.close()

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise NotSent("this node is closed")


class PolledFuture(concurrent.futures.Future[T]):
    """Outcome of a call that only progresses while its node is polled; a blocking wait would never end."""

    def result(self, timeout: float | None = None) -> T:
        self._check(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._check(timeout)
        return super().exception(0)

    def _check(self, timeout: float | None) -> None:
        del timeout
        if not self.done():
            raise CallError("this call has not ended", remedy="poll() the node until done(), or use call()")


NESTS = sys.version_info < (3, 14)
"""From 3.14 on asyncio forbids a task to run while one of another loop does on the same thread."""
CLOSE_LIMIT_S = 30.0
LONGEST_WAIT_S = 3600.0
"""The kernel knows no infinity."""


class SteppedLoop:
    """An asyncio loop that turns only inside `step`. Belongs to the thread that made it."""

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
    """The loop's descriptors and its next timer behind one descriptor."""

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


_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC
_SOONEST_S = 1e-9
"""Zero would disarm it."""


class _TimeSpec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class _TimerSpec(ctypes.Structure):
    _fields_ = [("interval", _TimeSpec), ("value", _TimeSpec)]


class TimerFd:
    """Readable from the moment it was armed for, until it is armed again."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor: int = self._libc.timerfd_create(time.CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC)
        if self._descriptor < 0:
            why = os.strerror(ctypes.get_errno())
            raise LaunchError(f"the kernel gives no timer descriptor: {why}", remedy="call poll() without fileno()")

    def fileno(self) -> int:
        return self._descriptor

    def arm(self, delay_s: float) -> None:
        """From now on readable in `delay_s` seconds (0: at once; inf: never)."""
        value = _TimeSpec(0, 0)
        if math.isfinite(delay_s):
            seconds, rest = divmod(max(delay_s, _SOONEST_S), 1.0)
            value = _TimeSpec(int(seconds), max(1, int(rest * 1e9)))
        spec = _TimerSpec(_TimeSpec(0, 0), value)
        self._libc.timerfd_settime(self._descriptor, 0, ctypes.byref(spec), None)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
