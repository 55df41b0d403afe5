"""Where each asyncio task of this process stands, for the report of a test that ran into its time limit."""

from __future__ import annotations

import asyncio
import gc
from typing import Any


def pending_tasks() -> str:
    """One paragraph per task that is not done, innermost frame last. Of all loops, running or not."""
    found = [one for one in gc.get_objects() if isinstance(one, asyncio.Task)]
    tasks = sorted((task for task in found if not task.done()), key=asyncio.Task.get_name)
    return "\n".join(f"{task.get_name()}\n" + "\n".join(_frames(task.get_coro())) for task in tasks)


def _frames(at: Any) -> list[str]:
    """Of a coroutine and of what it awaits; `Task.get_stack` stops at the first generator."""
    found: list[str] = []
    while at is not None:
        kind = next((kind for kind in ("cr", "ag", "gi") if hasattr(at, f"{kind}_frame")), "")
        frame = getattr(at, f"{kind}_frame", None)
        if frame is not None:
            found.append(f"  {frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        at = getattr(at, "gi_yieldfrom" if kind == "gi" else f"{kind}_await", None)
    return found
