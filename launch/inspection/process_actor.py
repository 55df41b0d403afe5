"""What every actor's process answers beside its actor (stacks, profiles), and the watch of its event loop.

The loop watch notices a user's function that blocks where it should await. Such a process neither answers nor ends, and
no `asyncio.timeout` in it fires. A thread asks the loop for a sign once a second. It counts missing signs, not seconds,
so that a process is not blamed for the time that it was stopped. asyncio's debug mode was considered: it reports a slow
callback only after it has ended.
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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType

from ...actors.daemon_thread import in_daemon_thread
from ...core.errors import ConfigError
from ..contracts import ProcessContract, ProfileOrder, ProfileReply, StackReply
from .profilers import profile_torch, sample_stacks, task_stacks, thread_stacks, trace_memory

MAX_PROFILE_S = 600.0
NUM_TOP = 10

Profiler = Callable[[Path], tuple[int, tuple[str, ...]]]
"""Blocks, writes that file, returns the number of samples and where most was seen."""


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

    async def profile(self, order: ProfileOrder) -> ProfileReply:
        if not 0.05 <= order.duration_s <= MAX_PROFILE_S:
            raise ConfigError(f"a profile of {order.duration_s:g} s", remedy=f"choose 0.05 to {MAX_PROFILE_S:g} s")
        if not 0.001 <= order.interval_s <= 1.0:
            raise ConfigError(f"a look every {order.interval_s:g} s", remedy="choose 0.001 to 1 s")
        if self._is_profiling:
            raise ConfigError(f"{self._name} is being profiled already", remedy="wait until that has ended")
        self._is_profiling = True
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path, work = self._chosen(order)
            num_samples, top = await in_daemon_thread(partial(work, path), name=f"profile {order.kind}")
        except ConfigError as error:
            raise ConfigError(f"{self._name}: {error.message}", remedy=error.remedy) from error
        finally:
            self._is_profiling = False
        return ProfileReply(name=self._name, node=self._node, path=str(path), num_samples=num_samples, top=top)

    def _chosen(self, order: ProfileOrder) -> tuple[Path, Profiler]:
        match order.kind:
            case "stacks":
                return self._path("collapsedstack.txt"), partial(self._sample, order)
            case "memory":
                return self._path("memory.txt"), partial(trace_memory, order.duration_s)
            case "torch":
                return self._path("torch.json"), partial(profile_torch, order.duration_s)

    def _sample(self, order: ProfileOrder, path: Path) -> tuple[int, tuple[str, ...]]:
        seen = sample_stacks(order.duration_s, order.interval_s)
        seen.write(path)
        return seen.num_looks, seen.top(NUM_TOP)

    def _path(self, ending: str) -> Path:
        stem = f"{self._name.replace('/', '.')}.{time.strftime('%Y%m%d-%H%M%S')}"
        number = 1
        while (path := self._folder / f"{stem}{f'-{number}' if number > 1 else ''}.{ending}").exists():
            number += 1
        return path


TICK_S = 1.0
WARN_S = 10.0

OURS = str(Path(__file__).parents[1])
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
