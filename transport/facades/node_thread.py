"""A node in a thread of its own, for hosts without an event loop: calls block, from any number of the host's threads.

    with NodeThread(name="judge", rdzv=Rendezvous.load(path)) as node:
        stats = node.call(node.ref(BufferContract, "buffer").stats)

Touches nothing of the host: its loop is not the current one of any thread, no signal handler, no atexit. A host that
forgets to close it and ends: the thread sees that the main thread has ended and closes the node, so that Python, which
waits for threads, can end.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import math
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar, Unpack

import uvloop

from ...core.errors import CallError, DeadlineExceeded, NotSent, WouldDeadlock
from ..node import Node, guard, release
from .sync_node import AttachOptions, HomeCaller, SyncNode, check_options

T = TypeVar("T")
P = ParamSpec("P")

HOST_LOOK_S = 0.1
"""How often the thread looks whether its host has ended."""
FORGOTTEN_GRACE_S = 1.0
CLOSE_SLACK_S = 30.0

LoopFactory = Callable[[], asyncio.AbstractEventLoop]

_log = logging.getLogger("myxa.transport")
_threads: set[threading.Thread] = set()
"""Of all nodes of this process: they wait for the host's threads, not for each other."""


class NodeThread(SyncNode):
    """See the module's head."""

    def __init__(self, *, loop_factory: LoopFactory = uvloop.new_event_loop, **options: Unpack[AttachOptions]) -> None:
        """Start the thread and join the system; arguments and errors as of `Node.attach`.

        `loop_factory`: uvloop is faster, but its first loop leaves a pipe (two descriptors) in the process;
        `asyncio.SelectorEventLoop` leaves nothing.
        """
        check_options(options)
        self._gate = threading.Lock()
        self._is_closing = False
        self._grace_s = 0.0
        self._wakes: asyncio.Event
        self._loop: asyncio.AbstractEventLoop
        attached: concurrent.futures.Future[None] = concurrent.futures.Future()
        name = f"myxa {options['name']}"
        self._thread = threading.Thread(target=self._main, args=(loop_factory, options, attached), name=name)
        _threads.add(self._thread)
        self._thread.start()
        try:
            attached.result()
        except BaseException:
            self._is_closing = True  # seen as soon as attaching has ended, which has a limit
            self._thread.join()
            raise
        guard(self)

    # -- for the host's threads

    def submit(
        self, method: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> concurrent.futures.Future[T]:
        async def work() -> T:
            return await method(*args, **kwargs)

        return self._submit(work)

    def run(self, make: Callable[[], Coroutine[Any, Any, T]], timeout_s: float) -> T:
        if threading.current_thread() is self._thread:
            raise WouldDeadlock(
                f"the thread of {self.name} would wait for itself", remedy="await references inside handlers"
            )
        future = self._submit(make)
        try:
            return future.result(None if timeout_s == math.inf else timeout_s)
        except TimeoutError:
            if future.done():
                return future.result()  # it came in the last moment, or this error is its own
            raise DeadlineExceeded(
                f"{self.name}: no answer within {timeout_s:g} s; its thread is at {self._place()}",
                remedy="a handler that blocks holds up all of the node's work",
            ) from None
        except concurrent.futures.CancelledError:
            raise CallError(f"{self.name} was closed while the call was under way") from None
        finally:
            future.cancel()

    def close(self, grace_s: float = 5.0) -> None:
        if threading.current_thread() is self._thread:
            raise WouldDeadlock(f"{self._thread.name} cannot wait for its own end", remedy="close it from the host")
        with self._gate:
            if not self._is_closing:
                self._is_closing = True
                self._grace_s = grace_s
                with contextlib.suppress(RuntimeError):  # the loop ended by itself
                    self._loop.call_soon_threadsafe(self._wakes.set)
        self._thread.join(grace_s + CLOSE_SLACK_S)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"{self._thread.name} does not end; it is at {self._place()}")

    def _submit(self, make: Callable[[], Coroutine[Any, Any, T]]) -> concurrent.futures.Future[T]:
        async def work() -> T:
            return await make()

        with self._gate:
            coro = work()
            try:
                if self._is_closing:
                    raise RuntimeError
                return asyncio.run_coroutine_threadsafe(coro, self._loop)
            except RuntimeError:
                coro.close()
                raise NotSent(f"{self._thread.name} is closed") from None

    def _place(self) -> str:
        """Where the thread is, for an error message."""
        frame = sys._current_frames().get(self._thread.ident or 0)  # pyright: ignore[reportPrivateUsage]  # no other way
        if frame is None:
            return "its end"
        innermost = traceback.extract_stack(frame)[-1]
        return f"{innermost.filename}:{innermost.lineno}"

    # -- the thread

    def _main(
        self, loop_factory: LoopFactory, options: AttachOptions, attached: concurrent.futures.Future[None]
    ) -> None:
        try:
            with asyncio.Runner(loop_factory=loop_factory) as runner:
                runner.run(self._live(options, attached))
        except BaseException as error:  # noqa: BLE001  # told to the host's thread, or logged
            if attached.done():
                _log.exception("%s ended", self._thread.name)
            else:
                attached.set_exception(error)
        finally:
            _threads.discard(self._thread)

    async def _live(self, options: AttachOptions, attached: concurrent.futures.Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._wakes = asyncio.Event()
        self._node = await Node.attach(**options)
        self._caller = HomeCaller(self._node, self._loop)
        attached.set_result(None)
        try:
            while not self._is_closing and not self._host_has_ended():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(HOST_LOOK_S):
                        await self._wakes.wait()
        finally:
            await self._end()

    async def _end(self) -> None:
        with self._gate:
            if not self._is_closing:
                _log.warning("%s: the program ended without closing it", self._thread.name)
                self._is_closing = True
                self._grace_s = FORGOTTEN_GRACE_S
        release(self)
        await self._node.close(self._grace_s)

    def _host_has_ended(self) -> bool:
        """The main thread is over and no other of the host's keeps the process alive."""
        if threading.main_thread().is_alive():
            return False
        return not any(t.is_alive() and not t.daemon and t not in _threads for t in threading.enumerate())
