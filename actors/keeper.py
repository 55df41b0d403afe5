"""A process between a rollout actor and a worker with user code: whatever that code started ends with the worker.
`python -m myxa.actors.keeper <pid of the actor> <module of the worker> <grace>` starts both.

    rollout actor ── keeper ── worker ── tools that the code runs, whatever session they put themselves in

The keeper is what orphans of the worker fall back to (a sub-reaper). When the worker ends, when the keeper is told to
(SIGTERM) or when the rollout actor dies (then `grace` seconds later, which the worker has to clean up), it kills the
worker and every descendant, and then ends as the worker did, so that whoever waits for it learns the worker's exit code
or signal. A keeper that is itself killed with SIGKILL takes the worker along (the kernel sees to that), but the tools
are then nobody's and go on. Knows processes; must not know what a worker does.

A process group was not enough: a tool may start a session of its own, and a group has no owner once its leader is dead.
Cgroups need rights that a container rarely gives.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import math
import os
import resource
import signal
import sys
import time
from pathlib import Path

from ..core.errors import LaunchError
from ..core.process import die_with_parent

_PR_SET_CHILD_SUBREAPER = 36
_PAUSE_S = 0.02
_END_LIMIT_S = 5.0
"""For killed processes to be gone; only one that waits for a dead device takes longer, and nobody can help that."""
OOM_SCORE_ADJ = 500
"""Where memory runs out, the kernel is to take the worker and its tools, not the actor with its engine."""
_ORPHANED = signal.SIGHUP
_WATCHED = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, _ORPHANED})


def keep(parent_pid: int, grace_s: float) -> None:
    """Fork. Returns in the child, the worker; the keeper itself never returns. Call it while there is one thread.

    Raises LaunchError where the kernel refuses.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    die_with_parent(parent_pid, _ORPHANED)
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0) != 0:
        raise LaunchError("prctl(PR_SET_CHILD_SUBREAPER) failed", remedy="allow prctl in the container's policy")
    keeper = os.getpid()
    worker = os.fork()
    if worker == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
        die_with_parent(keeper)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE_ADJ))
        return
    status = _until_end(worker, grace_s)
    _end_all(keeper)
    _end_like(status)


def _until_end(worker: int, grace_s: float) -> int:
    """The worker's wait status; as if it was killed when the keeper was told to end."""
    until_s = math.inf
    while True:
        left_s = until_s - time.monotonic()
        told = signal.sigtimedwait(_WATCHED, max(left_s, 0.0)) if left_s < math.inf else signal.sigwaitinfo(_WATCHED)
        if told is None:
            return int(signal.SIGKILL)
        if told.si_signo == _ORPHANED:
            until_s = min(until_s, time.monotonic() + grace_s)
            continue
        if told.si_signo != signal.SIGCHLD:
            return int(signal.SIGKILL)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return 0
            if pid == worker:
                return status
            if pid == 0:
                break


def _end_all(keeper: int) -> None:
    """Kill all descendants until there are none: those of a killed one fall back to the keeper."""
    until_s = time.monotonic() + _END_LIMIT_S
    while time.monotonic() < until_s:
        for pid in descendants(keeper):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        signal.sigtimedwait({signal.SIGCHLD}, _PAUSE_S)


def descendants(pid: int) -> list[int]:
    """Everything below a process, by the parents that /proc tells at this moment."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            # The name in parentheses may hold anything; the parent is the second field after it.
            parent = int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    found = list(children.get(pid, ()))
    for one in found:
        found.extend(children.get(one, ()))
    return found


def _end_like(status: int) -> None:
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


if __name__ == "__main__":
    keep(int(sys.argv[1]), float(sys.argv[3]))
    importlib.import_module(sys.argv[2]).main()  # only now: the keeper stays small, and libraries may start threads
