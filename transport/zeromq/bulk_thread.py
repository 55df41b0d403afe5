"""Where cores are short, ZeroMQ's thread that moves bulk gives way to the loop and to the thread of small messages.

It has always something to do while bulk is under way, and the kernel would let it finish its slice of some milliseconds
before a small message is looked at. ZeroMQ's own option for the priority of its threads is one for all of them.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

NICE = 5
"""More than the rest of the process: a third of its weight, so bulk goes on beside one that uses all cores."""
_NAME = "/IO/1"
_TASKS = Path("/proc/self/task")


def thread_ids() -> frozenset[int]:
    """Of this process; none where they cannot be seen."""
    try:
        return frozenset(int(task.name) for task in _TASKS.iterdir())
    except OSError:
        return frozenset()


def lower_bulk_thread(others: frozenset[int]) -> None:
    """Of a context that was made after `others` were all threads and has sockets by now. Where it cannot be seen or
    lowered, nothing happens."""
    for thread in thread_ids() - others:
        with contextlib.suppress(OSError):
            if (_TASKS / str(thread) / "comm").read_text().strip().endswith(_NAME):
                os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICE))
