"""Where this process is, told by itself: a stack per thread, and per asyncio task down to what it waits for.

`asyncio.Task.print_stack` was considered: of a task that waits it shows the outermost function only.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

MAX_TASKS = 2000
MAX_DEPTH = 100
MAX_TEXT = 512 * 1024


def thread_stacks() -> str:
    """Of all threads, the calling one last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] - documented, and there is no other way
    order = sorted(frames, key=lambda ident: ident == threading.get_ident())
    parts = [f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frames[ident]))}" for ident in order]
    return _cut("\n".join(parts))


def task_stacks(loop: asyncio.AbstractEventLoop) -> str:
    """Of all tasks of that loop; equal ones are told once, with how many there are."""
    own = asyncio.current_task(loop)
    told: dict[str, list[str]] = {}
    tasks = sorted((task for task in asyncio.all_tasks(loop) if task is not own), key=lambda task: task.get_name())
    for task in tasks[:MAX_TASKS]:
        lines = "".join(
            f'  File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_qualname}\n'
            for frame in _frames(task.get_coro())
        )
        told.setdefault(lines or "  (has not begun)\n", []).append(task.get_name())
    parts = [f"task {_names(names)}\n{lines}" for lines, names in told.items()]
    if len(tasks) > MAX_TASKS:
        parts.append(f"and {len(tasks) - MAX_TASKS} tasks more")
    return _cut("\n".join(parts))


def _frames(awaited: Any) -> Iterator[FrameType]:
    """From the task's own function to the innermost one that waits."""
    for _ in range(MAX_DEPTH):
        frame = next((f for name in ("cr_frame", "gi_frame", "ag_frame") if (f := getattr(awaited, name, None))), None)
        if frame is None:
            return
        yield frame
        inner = (getattr(awaited, name, None) for name in ("cr_await", "gi_yieldfrom", "ag_await"))
        awaited = next((each for each in inner if each is not None), None)


def _names(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more ({len(names)} of them)" if len(names) > 4 else "")


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}\n..."
