"""Work that may be overtaken. `asyncio.TaskGroup` was considered: it wraps the work's own error into a group, and
callers here map single errors to exit statuses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def race(work: Coroutine[Any, Any, T], *others: asyncio.Future[Any]) -> asyncio.Task[T]:
    """Run `work` until it ends or one of `others` is done; then it is cancelled, and has ended either way.

    The returned task is done; `cancelled()` says that it was overtaken.
    """
    task = asyncio.get_running_loop().create_task(work)
    try:
        await asyncio.wait({task, *others}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    return task
