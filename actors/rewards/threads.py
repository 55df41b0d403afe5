"""Blocking calls beside a running loop, each in a daemon thread of its own.

`loop.run_in_executor` is not used: its threads are joined at the interpreter's end, so that one hung call would keep
the process from ever ending.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class ThreadsBusy(Exception):
    """Every thread was still in an earlier call, or the system has none left."""


class BlockingCalls(Generic[T]):
    """At most `max_threads` calls at a time. A call that is given up keeps its place until it ends."""

    def __init__(self, max_threads: int, name: str) -> None:
        self._room = asyncio.Semaphore(max_threads)
        self._name = name

    async def run(self, call: Callable[[], T], timeout_s: float) -> T:
        """The call's result or exception. Raises TimeoutError when it takes too long (the thread cannot be stopped),
        ThreadsBusy when there was no thread for it for so long, or none can be started."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._room.acquire()
        except TimeoutError:
            raise ThreadsBusy from None
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()
        thread = threading.Thread(target=self._work, args=(loop, call, result), name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the process, or the user, may have no more of them
            self._room.release()
            raise ThreadsBusy from error
        async with asyncio.timeout(timeout_s):
            return await result

    def _work(self, loop: asyncio.AbstractEventLoop, call: Callable[[], T], result: asyncio.Future[T]) -> None:
        try:
            value = call()
        except BaseException as error:  # noqa: BLE001 -- it is handed to the caller, whatever it is
            self._tell(loop, lambda error=error: _fail(result, error))
        else:
            self._tell(loop, lambda: _finish(result, value))

    def _tell(self, loop: asyncio.AbstractEventLoop, settle: Callable[[], None]) -> None:
        try:
            loop.call_soon_threadsafe(settle)
            loop.call_soon_threadsafe(self._room.release)
        except RuntimeError:
            return  # the loop was closed while the call ran; nobody waits for it any more


def _finish(result: asyncio.Future[T], value: T) -> None:
    if not result.done():
        result.set_result(value)


def _fail(result: asyncio.Future[T], error: BaseException) -> None:
    if not result.done():
        # A future cannot carry StopIteration, and the end of the thread must not end the loop.
        ordinary = isinstance(error, Exception) and not isinstance(error, StopIteration)
        result.set_exception(error if ordinary else RuntimeError(f"{type(error).__name__}: {error}"))
