"""What every actor's process answers beside its actor (stacks, profiles), and the watch of its event loop.

The loop watch notices a user's function that blocks where it should await. A thread asks the loop for a sign once a
second and counts missing signs, not seconds, so that a process is not blamed for the time that it was stopped.
Stacks of tasks go down to what a task waits for; `asyncio.Task.print_stack` shows the outermost function only.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from ..core.daemon_thread import in_daemon_thread
from ..core.errors import ConfigError
from .contracts import ProcessContract, ProfileReply, StackReply


class ProcessActor(ProcessContract):
    """Beside the actor `name` on node number `node`."""

    def __init__(self, name: str, node: int, run_dir: Path) -> None:
        self._name = name
        self._node = node
        self._folder = run_dir / "profiles"
        self._is_profiling = False

    async def stacks(self) -> StackReply:
        text = f"{task_stacks(asyncio.get_running_loop())}\n{thread_stacks()}"
        return StackReply(name=self._name, pid=os.getpid(), text=text, how="process")

    async def profile(self, duration_s: float) -> ProfileReply:
        if self._is_profiling:
            raise ConfigError(f"{self._name} is being profiled already", remedy="wait until that has ended")
        self._is_profiling = True
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"{self._name.replace('/', '.')}.{time.time_ns()}.torch.json"
            top = await in_daemon_thread(partial(profile_torch, duration_s, path), name="profile")
        except ConfigError as error:
            raise ConfigError(f"{self._name}: {error.message}", remedy=error.remedy) from error
        finally:
            self._is_profiling = False
        return ProfileReply(name=self._name, node=self._node, path=str(path), top=top)


NUM_OPS_SHOWN = 10


def profile_torch(duration_s: float, path: Path) -> tuple[str, ...]:
    """Record, write a Chrome trace; the operators that took most. Blocks. Raises ConfigError without torch."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        raise ConfigError("this process does not use torch", remedy="py-spy shows where it is: py-spy record --pid")
    import torch.profiler as profiler  # in memory already, or nearly

    activities = [profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        activities.append(profiler.ProfilerActivity.CUDA)
    try:  # without it only the thread that starts the profiler is seen, and that one does nothing
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except TypeError as error:
        raise ConfigError(
            f"torch {torch.__version__} profiles its own thread only", remedy="use torch 2.8 or newer, or leave it out"
        ) from error
    with profiler.profile(activities=activities, experimental_config=config) as seen:
        threading.Event().wait(duration_s)
    seen.export_chrome_trace(str(path))
    rows: list[Any] = sorted(seen.key_averages(), key=lambda row: float(row.self_cpu_time_total), reverse=True)
    return tuple(
        f"{row.self_cpu_time_total / 1e3:10.1f} ms in {row.count:7d} calls  {row.key}" for row in rows[:NUM_OPS_SHOWN]
    )


MAX_TASKS = 2000
MAX_AWAITS = 100
MAX_TEXT = 512 * 1024


def thread_stacks() -> str:
    """Of all threads, the calling one last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] - documented, and there is no other way
    order = sorted(frames, key=lambda ident: ident == threading.get_ident())
    parts = [f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frames[ident]))}" for ident in order]
    return _cut("\n".join(parts))


def task_stacks(loop: asyncio.AbstractEventLoop) -> str:
    """Of all tasks of that loop; equal ones are written once, with their number."""
    asking = asyncio.current_task(loop)
    by_stack: dict[str, list[str]] = {}
    tasks = sorted((task for task in asyncio.all_tasks(loop) if task is not asking), key=lambda task: task.get_name())
    for task in tasks[:MAX_TASKS]:
        lines = "".join(
            f'  File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_qualname}\n'
            for frame in _frames(task.get_coro())
        )
        by_stack.setdefault(lines or "  (has not begun)\n", []).append(task.get_name())
    parts = [f"task {_names(names)}\n{lines}" for lines, names in by_stack.items()]
    if len(tasks) > MAX_TASKS:
        parts.append(f"and {len(tasks) - MAX_TASKS} tasks more")
    return _cut("\n".join(parts))


def _frames(awaited: Any) -> Iterator[FrameType]:
    """From the task's own function to the innermost one that waits."""
    for _ in range(MAX_AWAITS):
        frame = next((f for name in ("cr_frame", "gi_frame", "ag_frame") if (f := getattr(awaited, name, None))), None)
        if frame is None:
            return
        yield frame
        inner = (getattr(awaited, name, None) for name in ("cr_await", "gi_yieldfrom", "ag_await"))
        awaited = next((part for part in inner if part is not None), None)


def _names(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more ({len(names)} of them)" if len(names) > 4 else "")


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}\n..."


TICK_S = 1.0
WARN_S = 10.0

OURS = str(Path(__file__).parent)
INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {OURS})

_log = logging.getLogger("myxa.worker")


class LoopWatch:
    """Watches the loop of the thread that makes it, from `start` to `stop`. `give_up` is called in its own thread,
    once, with the line that holds the loop up. `busy_s` says for how long it has been declared that this may be."""

    def __init__(
        self, limit_s: float, give_up: Callable[[str], object], busy_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._watched = threading.get_ident()
        self._limit_s = limit_s
        self._give_up = give_up
        self._busy_s = busy_s
        self._sign = threading.Event()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loop watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join(TICK_S)

    def _watch(self) -> None:
        missed_s = 0.0
        self._ask()
        while not self._is_over.wait(TICK_S):
            if self._sign.is_set():
                missed_s = 0.0
                self._ask()
                continue
            if self._busy_s() > 0:
                continue
            missed_s += TICK_S
            if missed_s == WARN_S:
                _log.warning("the event loop has been held up for %g s:\n%s", missed_s, self._stack())
            if missed_s >= self._limit_s:
                _log.error("the event loop has been held up for %g s:\n%s", missed_s, self._stack())
                # the innermost line of a file that is neither ours nor installed; else the innermost of all
                places = [(frame.filename, frame.lineno) for frame in traceback.extract_stack(self._frame())]
                foreign = [place for place in places if not place[0].startswith((*INSTALLED, "<"))]
                filename, line = (foreign or places)[-1]
                self._give_up(f"{filename}:{line}")
                return

    def _ask(self) -> None:
        self._sign.clear()
        try:
            self._loop.call_soon_threadsafe(self._sign.set)
        except RuntimeError:  # the loop is closed
            self._is_over.set()

    def _stack(self) -> str:
        return "".join(traceback.format_stack(self._frame()))

    def _frame(self) -> FrameType | None:
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] - documented, and there is no other way
        return frames.get(self._watched)
