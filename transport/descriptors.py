"""File descriptors: a libzmq that runs out of them aborts the whole process, so there is a look before each socket.

The limit is raised only in processes that are ours (`raise_limit`, called by launchers and workers); a host of an
embedded node decides for itself. psutil was considered for counting: it lists /proc, which takes a millisecond.
"""

from __future__ import annotations

import errno
import os
import resource
from contextlib import suppress

from ..core.errors import LaunchError

SPARE = 12
"""Descriptors that must be free: a ZeroMQ socket takes two or three, its connection and its monitor the rest."""


def raise_limit() -> int:
    """Raise this process's limit to what the system allows it; returns the limit that holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return hard
    return soft


def check_room(purpose: str) -> None:
    """Raises LaunchError if there are not enough free descriptors to make `purpose`."""
    copies: list[int] = []
    try:
        for _ in range(SPARE):
            copies.append(os.dup(2))  # noqa: PERF401  # what was taken before an error must be given back
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            return  # no standard error to copy: nothing can be said
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise LaunchError(
            f"no file descriptors are left for {purpose} (the limit is {limit})",
            remedy="raise it (ulimit -n, LimitNOFILE=), or find out who leaks them: ls -l /proc/<pid>/fd",
        ) from error
    finally:
        for descriptor in copies:
            os.close(descriptor)
