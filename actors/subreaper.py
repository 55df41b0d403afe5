"""A process between an actor and a program that it starts: all that the program started ends with it.

    python -m myxa.actors.subreaper <pid of the actor> <grace> [--server] <program and its arguments>

    actor ── subreaper ── worker with user code, or inference server ── what it starts, in whatever session

Orphans of the program become the subreaper's children. It ends when the program ended, on the actor's SIGTERM, or when
the actor died (then after `grace` seconds): it kills the program and every descendant, and then ends as the program
did. On the actor's SIGINT the program gets it, too. If the subreaper itself is killed with SIGKILL, the kernel ends the
program too, but not what that started. A program that begins with `:` is a module of this package, whose `main` is
called: a worker, whose scratch folders (`core/files.py`) are removed at the end. Slurm may send SIGTERM, SIGUSR1 or
SIGUSR2 to every process of a job, which is the launcher's to act on: from others than the actor these do nothing here,
in a worker, or in a server, for which they stay blocked.
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
from collections.abc import Callable
from pathlib import Path

from ..core.errors import LaunchError
from ..core.process import SCHEDULERS, die_with_parent

_PR_SET_CHILD_SUBREAPER = 36
_PAUSE_S = 0.02
_END_LIMIT_S = 5.0
"""For killed processes to be gone; only one that waits for a dead device takes longer, which cannot be helped."""
OOM_SCORE_ADJ = 500
"""Where memory runs out, the kernel is to take the worker and its tools, not the actor with its engine."""
_ORPHANED = signal.SIGHUP
_WATCHED = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, _ORPHANED})
SERVER = "--server"


def keep(parent_pid: int, grace_s: float, tidy: Callable[[], None], *, is_server: bool) -> None:
    """Fork. Returns in the child, the program; the subreaper itself never returns: it calls `tidy` once all have ended.
    Call it while there is one thread.

    Raises LaunchError where the kernel refuses.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED.union(SCHEDULERS))
    die_with_parent(parent_pid, _ORPHANED)
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0) != 0:
        raise LaunchError("prctl(PR_SET_CHILD_SUBREAPER) failed", remedy="allow prctl in the container's policy")
    subreaper = os.getpid()
    worker = os.fork()
    if worker == 0:
        signal.pthread_sigmask(
            signal.SIG_UNBLOCK, _WATCHED.difference(SCHEDULERS) if is_server else _WATCHED.union(SCHEDULERS)
        )
        die_with_parent(subreaper)
        return
    status = _until_end(worker, parent_pid, grace_s)
    _end_all(subreaper)
    tidy()
    _end_like(status)


def _until_end(worker: int, actor: int, grace_s: float) -> int:
    """The worker's wait status; as if it was killed when the subreaper had to end."""
    until_s = math.inf
    while True:
        left_s = until_s - time.monotonic()
        info = signal.sigtimedwait(_WATCHED, max(left_s, 0.0)) if left_s < math.inf else signal.sigwaitinfo(_WATCHED)
        if info is None:
            return int(signal.SIGKILL)
        if info.si_signo == _ORPHANED:
            until_s = min(until_s, time.monotonic() + grace_s)
        elif info.si_signo == signal.SIGCHLD:
            if (status := _reaped(worker)) is not None:
                return status
        elif info.si_pid == actor:
            if info.si_signo == signal.SIGTERM:
                return int(signal.SIGKILL)
            os.kill(worker, signal.SIGINT)


def _reaped(worker: int) -> int | None:
    """Its wait status, where it is among the children that have ended."""
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == worker:
                return ended[1]
    except ChildProcessError:
        return 0
    return None


def _end_all(subreaper: int) -> None:
    """Kill all descendants until there are none: those of a killed one fall back to the subreaper."""
    until_s = time.monotonic() + _END_LIMIT_S
    while time.monotonic() < until_s:
        for pid in descendants(subreaper):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        signal.sigtimedwait({signal.SIGCHLD}, _PAUSE_S)


def descendants(pid: int) -> list[int]:
    """Everything below a process, by the parents that /proc shows at this moment."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            # The name in parentheses may hold anything; the parent is the second field after it.
            parent = int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    pids = list(children.get(pid, ()))
    for descendant in pids:
        pids.extend(children.get(descendant, ()))
    return pids


def _end_like(status: int) -> None:
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def run(program: list[str]) -> None:
    """In the child."""
    if program[0].startswith(":"):
        worker = os.getpid()

        def pass_by(number: int, _: object) -> None:
            if os.getpid() != worker:  # a process that user code has forked ends as others do
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)

        for scheduled in SCHEDULERS:
            signal.signal(scheduled, pass_by)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE_ADJ))
        importlib.import_module(program[0][1:]).main()
        return
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.exit(f"{program[0]} cannot be started: {error.strerror}")


def tidy_for(program: str) -> Callable[[], None]:
    """A worker of ours has folders for jobs, which it cannot remove when it is killed. Others start without this."""
    if not program.startswith(":"):
        return lambda: None
    from ..core.files import remove_dead_scratch  # the worker needs the module, too

    return remove_dead_scratch


if __name__ == "__main__":
    is_a_server = sys.argv[3] == SERVER
    command = sys.argv[3 + is_a_server :]
    keep(int(sys.argv[1]), float(sys.argv[2]), tidy_for(command[0]), is_server=is_a_server)
    run(command)
