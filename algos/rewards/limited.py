"""A computation that ends by its time whatever it does: in a forked copy of this process, which is killed.

A signal does not interrupt one long operation in C, such as 9**9**9, and the copy's memory is bounded too.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

MAX_MEMORY_BYTES = 2 << 30
"""That the copy may take more than there was."""
Say = Callable[[bytes], object]
ENDED = b"-"
"""The copy ended without a word: it raised, or had no memory left."""


def last_byte(compute: Callable[[Say], None], deadline_s: float) -> bytes:
    """What the computation said last, one byte at a time, before it ended or its time was over; `ENDED` if it ended
    without a word, nothing if it had said nothing by then. `deadline_s`: of the monotonic clock."""
    mine, its = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of threads: the copy uses none, and locks none that they hold
        pid = os.fork()
    if pid == 0:
        _in_the_copy(compute, its)
    os.close(its)
    said = b""
    try:
        while (left_s := deadline_s - time.monotonic()) > 0:
            if select.select([mine], [], [], left_s)[0]:
                more = os.read(mine, 1)
                if not more:
                    return said or ENDED
                said = more
        return said
    finally:
        os.close(mine)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _in_the_copy(compute: Callable[[Say], None], its: int) -> NoReturn:
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        used = _address_space()
        resource.setrlimit(resource.RLIMIT_AS, (used + MAX_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        compute(lambda byte: os.write(its, byte))
    finally:
        os._exit(0)


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
