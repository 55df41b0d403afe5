"""The event loop of a worker process that runs many calls of user code side by side: rewards and workflows.

`within` awaits a user's coroutine so that it cannot harm its caller: it ends by its deadline, and whatever it raises is
an ordinary exception. `asyncio.timeout` alone is not enough: a coroutine that swallows its cancellation
would run for ever, and one that raises CancelledError, SystemExit or KeyboardInterrupt would end the caller's own task.

main thread   the loop: async parts of all calls, and the traffic with the actor
threads       one for each `asyncio.to_thread`; daemons, so that a hanging one neither delays others nor keeps the
              process from ending
watch thread  interrupts (SIGUSR1) code that holds the loop too long: that call fails, with its place
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import signal
import sys
import sysconfig
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, Generic, TypeVar

import msgspec

from .functions import PACKAGE
from .process import Cancel, Stuck, read_frame, write_frame

T = TypeVar("T")

GRACE_S = 2.0
"""For a cancelled coroutine to clean up; then it is left alone."""
_LEFT_ALONE: set[asyncio.Task[Any]] = set()


class TookTooLong(Exception):
    """The coroutine did not end by its deadline. `hangs`: not even when it was cancelled."""

    def __init__(self, *, hangs: bool) -> None:
        super().__init__("still runs although it was cancelled" if hangs else "was cancelled")
        self.hangs = hangs


class UserRaised(Exception):
    """The coroutine raised `cause`, which is none of Exception's kind."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(type(cause).__name__)
        self.cause = cause


async def within(call: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """The coroutine's result or Exception. Raises TookTooLong and UserRaised, and CancelledError only if the caller is
    cancelled; the coroutine is then cancelled too and waited for, though not for ever."""
    task = asyncio.ensure_future(_guarded(call))  # noqa: TID251 -- awaited, or kept in a set, below
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            raise TookTooLong(hangs=not await _ended(task))
    except asyncio.CancelledError:
        await _ended(task)
        raise
    return task.result()


async def _guarded(call: Coroutine[Any, Any, T]) -> T:
    try:
        return await call
    except Exception:
        raise
    except BaseException as error:
        if is_the_callers(error):
            raise
        raise UserRaised(error) from error


async def _ended(task: asyncio.Task[Any]) -> bool:
    """Cancel; True once it has ended."""
    task.cancel()
    await asyncio.wait({task}, timeout=GRACE_S)
    if not task.done():
        _LEFT_ALONE.add(task)
        task.add_done_callback(_forget)
        return False
    _forget(task)
    return True


def _forget(task: asyncio.Task[Any]) -> None:
    _LEFT_ALONE.discard(task)
    if not task.cancelled():
        task.exception()  # looked at, so that asyncio does not complain of it


def is_the_callers(error: BaseException) -> bool:
    """Whether this ends the task itself (it is cancelled, or its coroutine is closed), and is not the user's doing."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return False
    if task is None:
        return isinstance(error, GeneratorExit)
    return isinstance(error, asyncio.CancelledError) and task.cancelling() > 0


MAX_INTERRUPTS = 3
"""Of one stretch in which the loop is held, before this process is given up."""
STUCK_EXIT = 70
FLUSH_S = 5.0
_LIBRARIES = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib"))


class UserCall(ABC):
    """One of those that share the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.threads: list[threading.Thread] = []
        """That it started."""
        self._doing: asyncio.Task[Any] | None = None
        self._is_cancelled = False
        self.task = loop.create_task(self._begun())  # kept with the call until that has reported its end

    async def _begun(self) -> None:
        CALL.set(self)
        await self.run()

    @abstractmethod
    async def run(self) -> None:
        """All of it, and the report of its end."""

    async def within(self, part: Awaitable[T], limit_s: float) -> T:
        """The result of a part that is the user's. Raises as the function `within`."""

        async def doing() -> T:
            self._doing = asyncio.current_task()
            try:
                return await part
            finally:
                self._doing = None

        return await within(doing(), limit_s)

    def cancel(self) -> None:
        if not self._is_cancelled:
            self._is_cancelled = True
            self.task.cancel()

    @property
    def tasks(self) -> tuple[asyncio.Task[Any] | None, ...]:
        """That its code runs in, those left out that it made itself."""
        return self.task, self._doing

    @property
    def is_hanging(self) -> bool:
        """Whether a thread of it still runs."""
        return any(thread.is_alive() for thread in self.threads)


CALL: ContextVar[UserCall | None] = ContextVar("call", default=None)
"""That the running code belongs to."""


class Outgoing:
    """Frames leave in their own thread, so that nothing here waits for an actor that is busy."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._pid = os.getpid()
        self._frames: queue.SimpleQueue[object] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="outgoing", daemon=True).start()

    def put(self, message: object) -> None:
        """Send it; from any thread."""
        if os.getpid() != self._pid:  # a copy that the user's code forked and let return
            os._exit(0)
        self._frames.put(message)

    def flush(self) -> None:
        """Wait until all is sent, though not for ever."""
        done = threading.Event()
        self._frames.put(done)
        done.wait(FLUSH_S)

    def _run(self) -> None:
        while True:
            message = self._frames.get()
            if isinstance(message, threading.Event):
                message.set()
                continue
            with contextlib.suppress(OSError):  # the actor is gone; the end of the input says so too
                write_frame(self._stream, message)


class Blocked(BaseException):
    """Raised into code that holds the loop. No Exception, so that user code does not take it for one of its own."""


class DaemonThreads(ThreadPoolExecutor):
    """The loop's executor: `asyncio.to_thread` gets its own thread, whatever else hangs."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        call = CALL.get()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 -- raised where the future is awaited
                with contextlib.suppress(Exception):
                    future.set_exception(error)

        thread = threading.Thread(target=run, name="to_thread", daemon=True)
        if call is not None:
            call.threads.append(thread)
        thread.start()
        return future


def awaited(coro: Any) -> Iterator[FrameType]:
    """The frames of a coroutine and of what it awaits, innermost first."""
    frames: list[FrameType] = []
    while coro is not None:
        found = getattr(coro, "cr_frame", None) or getattr(coro, "gi_frame", None) or getattr(coro, "ag_frame", None)
        if found is not None:
            frames.append(found)
        coro = getattr(coro, "cr_await", None) or getattr(coro, "gi_yieldfrom", None) or getattr(coro, "ag_await", None)
    return reversed(frames)


def frames_above(frame: FrameType | None) -> Iterator[FrameType]:
    """It, and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def user_place(frames: Iterator[FrameType]) -> str:
    """`Env.step (env.py:22)`: the innermost frame of the user's own code, else of a library; empty: there is none."""
    outside = [frame for frame in frames if not frame.f_code.co_filename.startswith(PACKAGE)]
    own = [frame for frame in outside if not frame.f_code.co_filename.startswith(_LIBRARIES)]
    for frame in own or outside:
        return f"{frame.f_code.co_qualname} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
    return ""


class Watch:
    """Interrupts code that holds the loop. Its own thread; the signal's handler runs in the main one, where that code
    is."""

    def __init__(self, loop: asyncio.AbstractEventLoop, max_block_s: float, on_stuck: Callable[[str], None]) -> None:
        """`on_stuck` gets the place of code that cannot be interrupted, before this process ends."""
        self._loop, self._max_block_s, self._on_stuck = loop, max_block_s, on_stuck
        self._main = threading.get_ident()
        self._num_interrupts = 0
        self._never = threading.Event()
        self._last: UserCall | None = None
        """That was interrupted."""
        self._beat()
        signal.signal(signal.SIGUSR1, self._interrupt)
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def _beat(self) -> None:
        self._at_s = time.monotonic()
        self._num_interrupts = 0
        self._loop.call_later(self._max_block_s / 4, self._beat)

    def _is_silent(self) -> bool:
        return time.monotonic() - self._at_s > self._max_block_s

    def _run(self) -> None:
        while True:
            self._never.wait(self._max_block_s / 4)
            if not self._is_silent():
                continue
            if self._num_interrupts >= MAX_INTERRUPTS:
                frame = sys._current_frames().get(self._main)  # pyright: ignore[reportPrivateUsage]
                self._on_stuck(user_place(frames_above(frame)))
                os._exit(STUCK_EXIT)
            self._num_interrupts += 1
            self._at_s = time.monotonic()  # so long it has to clean up
            signal.pthread_kill(self._main, signal.SIGUSR1)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        call = CALL.get()
        if not self._num_interrupts or call is None:  # the loop turned meanwhile, or it is none of theirs
            return
        if call is not self._last:  # the loop runs what is due before it beats again: each has its own count
            self._last, self._num_interrupts = call, 1
        place = user_place(frames_above(frame))
        raise Blocked(f"blocked its process for {self._max_block_s:g} s at {place}")


C = TypeVar("C", bound=UserCall)


class SharedLoop(ABC, Generic[C]):
    """The calls of this process."""

    def __init__(self, max_block_s: float, outgoing: BinaryIO, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        """`max_block_s`: 0 for code that may hold the loop. `decoder`: of the actor's messages."""
        self._max_block_s = max_block_s
        self._decoder = decoder
        self.out = Outgoing(outgoing)
        self.calls: dict[int, C] = {}

    async def run(self, incoming: BinaryIO) -> None:
        """Until the input ends."""
        self.loop = asyncio.get_running_loop()
        self.loop.set_default_executor(DaemonThreads())
        if self._max_block_s:
            Watch(self.loop, self._max_block_s, self._tell_stuck)
        over = asyncio.Event()

        def read() -> None:
            while (body := read_frame(incoming)) is not None:
                self.loop.call_soon_threadsafe(self._take, body)
            self.loop.call_soon_threadsafe(over.set)

        threading.Thread(target=read, name="incoming", daemon=True).start()
        await self.serve(over)

    async def serve(self, over: asyncio.Event) -> None:
        """Until that is set."""
        await over.wait()

    @abstractmethod
    def take(self, message: Any) -> None:
        """What the actor says, but for `Cancel`."""

    def _take(self, body: bytes) -> None:
        message = self._decoder.decode(body)
        if not isinstance(message, Cancel):
            self.take(message)
        elif (call := self.calls.get(message.call)) is not None:
            call.cancel()

    def _tell_stuck(self, place: str) -> None:
        task = asyncio.current_task(self.loop)  # asked from another thread
        number = next((number for number, call in list(self.calls.items()) if task in call.tasks), -1)
        self.out.put(Stuck(place, number))
        self.out.flush()
