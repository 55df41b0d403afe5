"""What this process does: stacks of threads and tasks, sampled stacks, allocations, torch's profiler. Free until used.

Sampling uses `sys._current_frames` in a thread. Libraries were considered: py-spy and austin need ptrace, which
containers forbid; viztracer, yappi and cProfile slow an event loop down several times; pyinstrument samples one thread.
Stacks of tasks go down to what a task waits for; `asyncio.Task.print_stack` shows the outermost function only. torch's
memory snapshot is a pickle, so its content is written as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
import traceback
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from ...core.errors import ConfigError

MAX_DEPTH = 200
MAX_STACKS = 50_000
"""Different stacks that are counted; further ones count as "(others)"."""

Place = tuple[CodeType, int]


@dataclass(frozen=True, slots=True)
class Samples:
    """What was seen."""

    counts: Counter[tuple[str, tuple[Place, ...]]]
    """(thread, stack from the outermost function to the innermost) -> how often."""
    num_looks: int
    duration_s: float

    def top(self, limit: int) -> tuple[str, ...]:
        """The innermost functions, those seen most first: "43.0 %  MainThread  file.py:12 name"."""
        leaves: Counter[str] = Counter()
        for (thread, stack), count in self.counts.items():
            leaves[f"{thread}  {_where(stack[-1]) if stack else '(others)'}"] += count
        looks = max(1, self.num_looks)
        return tuple(f"{100 * count / looks:5.1f} %  {name}" for name, count in leaves.most_common(limit))

    def write(self, path: Path) -> None:
        """As collapsed stacks, one a line, which speedscope.app and flamegraph.pl read."""
        lines = (
            f"{';'.join(name.replace(';', ',') for name in (thread, *map(_where, stack)))} {count}\n"
            for (thread, stack), count in self.counts.items()
        )
        path.write_text("".join(lines), encoding="utf-8")


def sample_stacks(duration_s: float, interval_s: float) -> Samples:
    """Blocks the calling thread, which is left out, for `duration_s`."""
    counts: Counter[tuple[str, tuple[Place, ...]]] = Counter()
    own = threading.get_ident()
    begun = time.monotonic()
    num_looks = 0
    while (passed := time.monotonic() - begun) < duration_s:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] - documented, and there is no other way
        for ident, frame in frames.items():
            if ident != own:
                key = (names.get(ident, f"thread {ident}"), _stack(frame))
                counts[key if key in counts or len(counts) < MAX_STACKS else (key[0], ())] += 1
        del frames
        num_looks += 1
        threading.Event().wait(min(interval_s, max(0.0, duration_s - passed)))
    return Samples(counts, num_looks, time.monotonic() - begun)


def _stack(frame: FrameType | None) -> tuple[Place, ...]:
    places: list[Place] = []
    while frame is not None and len(places) < MAX_DEPTH:
        places.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(reversed(places))


def _where(place: Place) -> str:
    code, line = place
    return f"{code.co_filename}:{line} {code.co_qualname}"


NUM_FRAMES = 8
NUM_SHOWN = 50
MIB = 1 << 20


def trace_memory(duration_s: float, path: Path) -> tuple[int, tuple[str, ...]]:
    """Watch allocations for so long (the process is slower meanwhile) and write a report; number of allocations that
    are still there, and the lines that hold most. Blocks the calling thread. One at a time."""
    tracemalloc.start(NUM_FRAMES)
    try:
        threading.Event().wait(duration_s)
        taken = tracemalloc.take_snapshot().filter_traces((tracemalloc.Filter(False, tracemalloc.__file__),))
    finally:
        tracemalloc.stop()
    by_line = taken.statistics("lineno")
    lines = [
        f"{stat.size / MIB:10.3f} MiB in {stat.count:8d} blocks  {place.filename}:{place.lineno}"
        for stat in by_line[:NUM_SHOWN]
        for place in (stat.traceback[0],)
    ]
    head = f"Python memory that was allocated within {duration_s:g} s and is still held, by line\n"
    parts = [head, *(f"{line}\n" for line in lines), "\nby stack, innermost last\n"]
    for stat in taken.statistics("traceback")[:NUM_SHOWN]:
        stack = "\n".join(f"    {line}" for line in stat.traceback.format())
        parts.append(f"{stat.size / MIB:10.3f} MiB in {stat.count} blocks\n{stack}\n")
    path.write_text("".join(parts), encoding="utf-8")
    if (cuda := _cuda()) is not None:
        found = json.dumps(cuda.memory.memory_snapshot(), default=str)
        path.with_suffix(".cuda.json").write_text(found, encoding="utf-8")
    return sum(stat.count for stat in by_line), tuple(lines[:10])


def _cuda() -> Any:
    """torch.cuda where it is in use already: looking must not make a context."""
    torch: Any = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


NUM_OPS_SHOWN = 10


def profile_torch(duration_s: float, path: Path) -> tuple[int, tuple[str, ...]]:
    """Record for so long and write a Chrome trace (opens in Perfetto); number of events, and the operators that took
    most. Blocks the calling thread. Raises ConfigError in a process without torch, or with one that is too old."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        raise ConfigError("this process does not use torch", remedy="leave --torch out")
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
    rows: list[Any] = sorted(seen.key_averages(), key=_own_time, reverse=True)
    top = tuple(f"{row.self_cpu_time_total / 1e3:10.1f} ms in {row.count:7d} calls  {row.key}" for row in rows)
    return sum(int(row.count) for row in rows), top[:NUM_OPS_SHOWN]


def _own_time(row: Any) -> float:
    return float(row.self_cpu_time_total)


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
    own = asyncio.current_task(loop)
    by_stack: dict[str, list[str]] = {}
    tasks = sorted((task for task in asyncio.all_tasks(loop) if task is not own), key=lambda task: task.get_name())
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
        awaited = next((each for each in inner if each is not None), None)


def _names(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more ({len(names)} of them)" if len(names) > 4 else "")


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}\n..."
