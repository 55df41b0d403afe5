"""Waiting for a condition, with a limit and a name: `until` on an event loop, `wait_until` in a thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import psutil

WAIT_S = 40.0


async def until(condition: Callable[[], object], what: str | Callable[[], str] = "", timeout_s: float = WAIT_S) -> None:
    """Poll a condition on this loop. Raises `AssertionError` that names it after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, _late(condition, what, timeout_s)
        await asyncio.sleep(0.005)


def wait_until(condition: Callable[[], object], what: str | Callable[[], str] = "", timeout_s: float = 120.0) -> None:
    """Poll a condition in this thread. Raises `AssertionError` that names it after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, _late(condition, what, timeout_s)
        time.sleep(0.02)


def _late(condition: Callable[[], object], what: str | Callable[[], str], timeout_s: float) -> str:
    code = getattr(condition, "__code__", None)
    place = f"{code.co_filename}:{code.co_firstlineno}" if code else repr(condition)
    return f"not within {timeout_s:g} s: {(what() if callable(what) else what) or place}"


def is_running(pid: int) -> bool:
    """Whether that process is there and has not ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def until_gone(*pids: int) -> None:
    """Until none of these processes runs."""
    await until(lambda: not any(map(is_running, pids)), f"the end of {pids}")
