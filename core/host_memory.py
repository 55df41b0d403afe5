"""How much memory this process may still take of the host: the machine counts, and the control group that the process
runs in (containers, batch systems), whichever is tighter."""

from __future__ import annotations

from pathlib import Path

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUPS = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
"""(limit, usage, breakdown) of control groups version 2 and 1, as a process inside a container sees them."""
RECLAIMABLE = ("inactive_file", "active_file")
"""Page cache: counted as usage, given back on demand."""


def available_bytes(cgroup_root: Path = CGROUP_ROOT) -> int:
    """Bytes that can be allocated without swapping and without meeting the control group's limit."""
    room = int(psutil.virtual_memory().available)
    for limit_name, usage_name, stat_name in CGROUPS:
        limit = _number(cgroup_root / limit_name)
        if limit is not None:
            used = (_number(cgroup_root / usage_name) or 0) - _reclaimable(cgroup_root / stat_name)
            room = min(room, max(limit - max(used, 0), 0))
    return room


def _number(path: Path) -> int | None:
    """The file's number; None when there is no such file or no limit ("max")."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _reclaimable(path: Path) -> int:
    try:
        lines = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    except (OSError, ValueError):
        return 0
    return sum(int(words[1]) for words in lines if len(words) == 2 and words[0] in RECLAIMABLE)
