"""What torch does in this process, operator by operator, by torch's own profiler. Only where torch is loaded."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError

NUM_SHOWN = 10


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
    return sum(int(row.count) for row in rows), top[:NUM_SHOWN]


def _own_time(row: Any) -> float:
    return float(row.self_cpu_time_total)
