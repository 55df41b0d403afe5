"""What this process allocates: Python objects by line, from tracemalloc, and the segments of torch's GPU allocator.

torch's own snapshot file is a pickle; its content is written as JSON instead.
"""

from __future__ import annotations

import json
import sys
import threading
import tracemalloc
from pathlib import Path
from typing import Any

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
    _write_cuda(path.with_suffix(".cuda.json"))
    return sum(stat.count for stat in by_line), tuple(lines[:10])


def cuda_bytes() -> dict[str, int]:
    """What torch holds on the GPUs that it uses; empty where it uses none, or is not loaded."""
    cuda = _cuda()
    if cuda is None:
        return {}
    names = ("allocated_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.current",
             "reserved_bytes.all.peak")  # fmt: skip
    stats: dict[str, Any] = cuda.memory_stats()
    return {name: int(stats.get(name, 0)) for name in names}


def _write_cuda(path: Path) -> None:
    cuda = _cuda()
    if cuda is not None:
        path.write_text(json.dumps(cuda.memory.memory_snapshot(), default=str), encoding="utf-8")


def _cuda() -> Any:
    """torch.cuda where it is in use already: looking must not make a context."""
    torch: Any = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None
