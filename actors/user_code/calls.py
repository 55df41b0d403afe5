"""Awaiting a user's coroutine so that it cannot harm the actor: it ends by its deadline, and whatever it raises is an
ordinary exception for the caller.

`asyncio.timeout` alone is not enough: a coroutine that swallows its cancellation would run for ever, and one that
raises CancelledError, SystemExit or KeyboardInterrupt would end the actor's own task. Out of reach: code that blocks
the loop, and tasks that the coroutine starts beside itself; functions that do so belong into worker processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

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
