"""Blocking work in its own daemon thread: for work that may hang in foreign code, and must not hang its process.

An executor's threads are joined when the interpreter ends, and one of them that hangs keeps others waiting for a turn.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def begin_in_daemon_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Of what `work` returns or raises. It cannot be cancelled: the work has begun."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            value = work()
        except StopIteration as error:  # asyncio takes it for the end of a generator, and never answers
            stopped = RuntimeError(f"{name} raised StopIteration")
            stopped.__cause__ = error
            future.set_exception(stopped)
        except BaseException as error:  # noqa: BLE001 -- raised where the result is wanted
            future.set_exception(error)
        else:
            future.set_result(value)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


async def in_daemon_thread(work: Callable[[], T], name: str) -> T:
    """What `work` returns or raises. When the caller is cancelled, the work continues and its result is dropped."""
    return await asyncio.wrap_future(begin_in_daemon_thread(work, name))
