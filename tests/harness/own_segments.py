"""What lies in the host's shared memory and is of this process's tests: other workers of the suite have theirs there."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

SHARED = Path("/dev/shm")
OURS = ("myxa", "psm_")
"""How names begin that could be ours; other programs of the machine have theirs there too."""
WORKER = "PYTEST_XDIST_WORKER"
"""Ours too (workers.py)."""


def own_segments() -> set[str]:
    """Names that no process of another worker answers for: each is removed by a process that has it in its arguments."""
    try:
        found = {path.name for path in SHARED.iterdir() if path.name.startswith(OURS)}
    except OSError:
        return set()
    return found - _of_others(found) if found else found


def _of_others(names: set[str]) -> set[str]:
    here, others = os.environ.get(WORKER), set[str]()
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
            if any(name in line for name in names) and process.environ().get(WORKER) != here:
                others |= {name for name in names if name in line}
        except psutil.Error:
            continue
    return others
