"""The first steps of a process that was forked by the fork server: it becomes what a fresh interpreter would be.

Knows what a fork shares and a fresh start does not: session, parent, descriptors, variables, random numbers, numbers of
threads, how it looks from outside. Must not know what the process is for.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import secrets
import select
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from ...core.process import die_with_parent, name_process
from ..child_env import WORKER_MODULE
from .fork_wire import GO, ForkReply, ForkRequest, pack
from .preloads import SET_PER_ACTOR
from .process_look import look_like

ADOPT_S = 10.0
"""How long the kernel may take to make the launcher our parent: until the process between us has ended."""
GO_S = 60.0
"""How long the launcher may take to say that we are wanted. It closes its end when we are not."""
OPENBLAS_NAMES = tuple(
    f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_", "_64")
)


def be_born(request: ForkRequest, own_end: socket.socket, log: int) -> bool:
    """Leave the server's session, get the launcher for a parent, and ask it; whether we are wanted."""
    os.setsid()
    if not _is_adopted_by(request.launcher_pid):
        return False
    die_with_parent(request.launcher_pid)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    own_end.settimeout(GO_S)
    try:
        own_end.send(pack(ForkReply(pid=os.getpid())))
        is_wanted = own_end.recv(len(GO)) == GO
    except OSError:  # the time is over, or the launcher is
        return False
    own_end.settimeout(None)
    return is_wanted


def be_actor(request: ForkRequest) -> int:
    """Become the worker; returns its exit status, if it returns."""
    name_process(request.name)
    os.environb.clear()
    os.environb.update(dict(request.env))
    worker = importlib.import_module(WORKER_MODULE)
    sys.argv = [str(worker.__file__)]
    sys.orig_argv = [sys.executable, "-m", WORKER_MODULE]
    look_like(sys.orig_argv, request.env)
    for name in ("__main__", "__mp_main__"):  # what children of `multiprocessing` import again
        if name in sys.modules:
            sys.modules[name] = worker
    importlib.invalidate_caches()  # users' files may have come since the server looked
    draw_anew()
    use_threads(os.environ)
    gc.enable()
    try:
        return worker.main()
    except SystemExit as error:  # nobody above us does what the interpreter would
        if error.code is None or isinstance(error.code, int):
            return worker.leave((error.code or 0) & 0xFF)
        print(error.code, file=sys.stderr)
        return worker.leave(1)


def draw_anew() -> None:
    """Random numbers that a fresh process would not share with its siblings. Python's own `random` sees to itself."""
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
    if (processes := sys.modules.get("multiprocessing.process")) is not None:
        processes.current_process().authkey = secrets.token_bytes(32)


def use_threads(env: Mapping[str, str]) -> None:
    """The server's libraries were loaded for one thread. `threadpoolctl` was considered: a dependency for one call."""
    wanted = env.get(SET_PER_ACTOR, "1")
    if not wanted.isdecimal() or int(wanted) < 2:
        return
    number = min(int(wanted), len(os.sched_getaffinity(0)))  # of themselves they begin with no more
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(number)
    mapped = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
    for path in mapped:
        if "openblas" in Path(path).name:
            library = ctypes.CDLL(path)
            for set_threads in filter(None, (getattr(library, name, None) for name in OPENBLAS_NAMES)):
                set_threads(number)


def _is_adopted_by(launcher_pid: int) -> bool:
    """Whether the launcher is our parent, once the process between us has ended."""
    between = os.getppid()
    if between != launcher_pid:
        with contextlib.suppress(ProcessLookupError):  # it has ended in this moment
            pidfd = os.pidfd_open(between)
            select.select([pidfd], [], [], ADOPT_S)
            os.close(pidfd)
    if os.getppid() == launcher_pid:
        return True
    print(f"process {launcher_pid}, the launcher, did not become our parent within {ADOPT_S:g} s", flush=True)
    return False
