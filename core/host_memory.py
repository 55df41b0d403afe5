"""How much memory this process may still take of the host: the machine counts, and the control groups that the process
runs in (containers, batch systems), whichever is tightest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
CGROUPS = (
    ("", "memory.max", "memory.current", ("inactive_file", "active_file")),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)
"""(controller, limit, usage, page cache) of control groups version 2 and 1. The cache counts as usage; it is given back
on demand."""


def available_bytes(cgroup_root: Path = CGROUP_ROOT, own_cgroups: Path = OWN_CGROUPS) -> int:
    """Bytes that can be allocated without swapping and without meeting a control group's limit."""
    room = int(psutil.virtual_memory().available)
    for controller, limit_name, usage_name, caches in CGROUPS:
        for folder in _groups(cgroup_root / controller, _own_group(own_cgroups, controller)):
            limit = _number(folder / limit_name)
            if limit is not None:
                used = (_number(folder / usage_name) or 0) - _sum(folder / "memory.stat", caches)
                room = min(room, max(limit - max(used, 0), 0))
    return room


def _own_group(own_cgroups: Path, controller: str) -> str:
    """The path of this process's group; a container may see the host's path, which is not there, or "/"."""
    try:
        lines = [line.split(":", 2) for line in own_cgroups.read_text(errors="replace").splitlines()]
    except OSError:
        return ""
    return next((line[2] for line in lines if len(line) == 3 and controller in line[1].split(",")), "")


def _groups(root: Path, group: str) -> Iterator[Path]:
    """A group and those above it, each of which may have a limit."""
    folder = root / group.strip("/")
    yield from (above for above in (folder, *folder.parents) if above.is_relative_to(root))


def _number(path: Path) -> int | None:
    """The file's number; None when there is no such file or no limit ("max")."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _sum(path: Path, names: tuple[str, ...]) -> int:
    try:
        entries = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    except (OSError, ValueError):
        return 0
    return sum(int(entry[1]) for entry in entries if len(entry) == 2 and entry[0] in names)
