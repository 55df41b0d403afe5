"""A child process that ends when its parent does, even if the parent was killed with SIGKILL. Linux.

Knows one system call. Must not know who the parent is or why it ended. psutil and python-prctl were considered: the
first cannot set it, the second is one more compiled package for one call.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from .errors import LaunchError

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, sig: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process `sig` when the thread that started it ends; call it first thing.

    `parent_pid` is what the parent told of itself: if the parent is gone already, the kernel would never tell, so
    this process ends here. Raises LaunchError where the kernel refuses.
    """
    if not sys.platform.startswith("linux"):
        raise LaunchError(f"myxa's processes run on Linux, this is {sys.platform}", remedy="use a Linux machine")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(sig), 0, 0, 0) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise LaunchError(f"prctl(PR_SET_PDEATHSIG) failed: {reason}", remedy="allow prctl in the container's policy")
    if os.getppid() != parent_pid:
        raise SystemExit(128 + sig)
