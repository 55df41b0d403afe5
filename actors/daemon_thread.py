"""Blocking work in its own daemon thread, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from ..core.daemon_thread import begin_in_daemon_thread

T = TypeVar("T")


async def in_daemon_thread(work: Callable[[], T], name: str) -> T:
    """What `work` returns or raises. When the caller is cancelled, the work continues and its result is dropped."""
    return await asyncio.wrap_future(begin_in_daemon_thread(work, name))
