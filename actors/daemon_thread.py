"""Blocking work in its own daemon thread: for work that may hang in foreign code, and must not hang its process.

An executor's threads are joined when the interpreter ends, and one of them that hangs keeps others waiting for a turn.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_daemon_thread(work: Callable[[], T], name: str) -> T:
    """What `work` returns or raises. When the caller is cancelled, the work continues and its result is dropped."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(value)  # pyright: ignore[reportArgumentType] -- there is a value where there is no error

    def run() -> None:
        value: T | None = None
        error: BaseException | None = None
        try:
            value = work()
        except BaseException as err:  # noqa: BLE001 -- raised where the result is awaited
            error = err
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await answer
