"""A fork server: a process with a preload set imported, forked into actors: `python -m myxa.launch.nodes.fork_server`.

The launcher (fork_server_pool.py) and its servers exchange one message a packet:

    launcher -> server           ForkRequest with two descriptors: the new process's end of a socket pair, and its log
    new process -> launcher      ForkReply on that pair: its pid, or why there is no process
    launcher -> new process      GO: continue. Anything else, or the end of the pair: exit at once
    server -> launcher, at start ForkReply: the imports are done, or why not

So a process that the launcher no longer wants never starts to work, however late it comes.

A server has one loop and handles one request at a time. It starts no thread and touches no GPU, because a child must be
like a fresh process. It forks twice, and the kernel makes the launcher, which adopts orphans (core/process.py), the
parent of the second child: the launcher watches, reaps and ends it like its own process, with or without the
server. `multiprocessing.forkserver` was considered: its children belong to the server, so the launcher has neither
their exit status nor a death signal for them, and what they run is pickled.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import secrets
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from ...core.process import die_with_parent, name_process
from ..worker_spec import WORKER_MODULE
from .preloads import LIGHT, PRELOAD_SETS, SET_PER_ACTOR

MAX_BYTES = 1 << 20
"""Largest packet; the kernel's limit on buffers may be lower."""
GO = b"go"
ADOPT_S = 10.0
"""How long the process between us and the launcher may take to exit, so that the launcher becomes our parent."""
GO_S = 60.0
"""How long the launcher may take to answer GO. It closes its end if the process is not wanted."""
OPENBLAS_NAMES = tuple(
    f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_", "_64")
)
GPU_FILES = "/dev/nvidia"
_ARG_START = 45
"""Field of /proc/self/stat, counted from the state: start of the arguments; their end and both ends of the variables
follow."""


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A process to be made."""

    name: str
    launcher_pid: int
    preload_set: str = ""
    """Set: the process becomes a fork server with this preload set (preloads.py); empty: an actor."""
    env: tuple[tuple[bytes, bytes], ...] = ()
    """The process's whole environment."""


class ForkReply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The process, or why there is none."""

    pid: int = 0
    problem: str = ""


pack = msgspec.msgpack.encode
unpack_request = msgspec.msgpack.Decoder(ForkRequest).decode
unpack_reply = msgspec.msgpack.Decoder(ForkReply).decode


def main(arguments: list[str]) -> int:
    """`<process id of the launcher> <descriptor of the socket>`."""
    launcher_pid, descriptor = map(int, arguments)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, as some programs leave it, children's statuses are lost
    die_with_parent(launcher_pid)
    serve(socket.socket(fileno=descriptor), LIGHT)
    return 0


def serve(launcher: socket.socket, preload_set: str) -> None:
    """Import, report, then fork on request until the launcher closes the socket."""
    launcher.set_inheritable(False)
    name_process(f"myxa: {preload_set}")
    gc.disable()
    problem = _preload(preload_set) or unfit()
    launcher.send(pack(ForkReply(pid=os.getpid(), problem=problem)))
    if problem:
        return
    gc.collect()
    gc.freeze()  # a collection would write into every shared page
    while True:
        data, descriptors, _, _ = socket.recv_fds(launcher, MAX_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return
        request = unpack_request(data)
        own_end, log = socket.socket(fileno=descriptors[0]), descriptors[1]
        problem = unfit() or _fork(request, launcher, own_end, log)
        if problem:
            _tell(own_end, ForkReply(problem=problem))
        own_end.close()
        os.close(log)


def unfit() -> str:
    """Why this process must not be forked; empty: it may. A child has only the forking thread, and locks that other
    threads held stay locked. CUDA does not survive a fork and has chosen its devices already."""
    threads: list[str] = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has just ended
            threads.append(path.read_text().strip())
    if not threads:
        return "/proc does not list its threads"
    if len(threads) != 1:
        return f"an import started {len(threads) - 1} threads ({', '.join(sorted(threads))})"
    for path in Path("/proc/self/fd").iterdir():
        try:
            target = str(path.readlink())
        except OSError:  # the one that lists them
            continue
        if target.startswith(GPU_FILES):
            return f"an import opened {target}"
    return ""


def _preload(preload_set: str) -> str:
    try:
        for module in PRELOAD_SETS[preload_set].modules:
            importlib.import_module(module)
        from ...transport.codec import (
            compile_loaded,
        )  # imports numpy, as every preload set does and this module does not

        compile_loaded()
    except Exception as error:  # noqa: BLE001 - the actor's own start will report it properly
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return ""


def _fork(request: ForkRequest, launcher: socket.socket, own_end: socket.socket, log: int) -> str:
    """Why there is no process; empty: there is one, or the closing socket shows that it died."""
    try:
        between = os.fork()
    except OSError as error:
        return f"no process can be made: {error.strerror}"
    if between:
        os.waitpid(between, 0)
        return ""
    status = 1
    try:
        if os.fork() == 0:
            launcher.close()
            status = _live(request, own_end, log)
        else:
            status = 0
    except OSError as error:
        _tell(own_end, ForkReply(problem=f"no process can be made: {error.strerror}"))
    except BaseException:  # noqa: BLE001 - the child must not return into the server's loop
        traceback.print_exc()
    finally:
        os._exit(status)


def _live(request: ForkRequest, own_end: socket.socket, log: int) -> int:
    """Run the new process; returns its exit status."""
    if not detach(request, own_end, log):
        return 0
    if request.preload_set:
        serve(own_end, request.preload_set)
        return 0
    own_end.close()
    return be_actor(request)


def _tell(own_end: socket.socket, reply: ForkReply) -> None:
    try:
        own_end.send(pack(reply))
    except OSError:
        return  # the launcher has closed its end


# -- the forked process


def detach(request: ForkRequest, own_end: socket.socket, log: int) -> bool:
    """Leave the server's session, wait until the launcher is our parent, ask it for GO; whether it answered GO."""
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
    except OSError:  # timeout, or the launcher is gone
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
    for name in ("__main__", "__mp_main__"):  # children of `multiprocessing` import these
        if name in sys.modules:
            sys.modules[name] = worker
    importlib.invalidate_caches()  # users' files may be newer than the server
    reseed()
    use_threads(os.environ)
    gc.enable()
    try:
        return worker.main()
    except SystemExit as error:  # no interpreter above us handles it
        if error.code is None or isinstance(error.code, int):
            return worker.leave((error.code or 0) & 0xFF)
        print(error.code, file=sys.stderr)
        return worker.leave(1)


def reseed() -> None:
    """Seed this process's random numbers again. Python's `random` reseeds itself after a fork."""
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
    if (processes := sys.modules.get("multiprocessing.process")) is not None:
        processes.current_process().authkey = secrets.token_bytes(32)


def use_threads(env: Mapping[str, str]) -> None:
    """Set the actor's number of threads: the server loaded its libraries with one. `threadpoolctl` was considered: a
    dependency for one call."""
    wanted = env.get(SET_PER_ACTOR, "1")
    if not wanted.isdecimal() or int(wanted) < 2:
        return
    number = min(int(wanted), len(os.sched_getaffinity(0)))  # the libraries' own default has this bound
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
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            pidfd = os.pidfd_open(between)
            select.select([pidfd], [], [], ADOPT_S)
            os.close(pidfd)
    if os.getppid() == launcher_pid:
        return True
    print(f"process {launcher_pid}, the launcher, did not become our parent within {ADOPT_S:g} s", flush=True)
    return False


def look_like(command: Sequence[str], env: Iterable[tuple[bytes, bytes]]) -> None:
    """Set the command line and variables that /proc shows (`ps`, `myxa doctor`).

    The kernel shows the bytes behind the first stack frame of the program; this overwrites them and leaves out what
    does not fit. No library may use the first environment any more. Does nothing if the kernel does not give the
    addresses. `setproctitle` was considered: it drops the variables, by which actors are found."""
    text = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
    places = [int(field) for field in text.rpartition(")")[2].split()[_ARG_START : _ARG_START + 4]]
    if len(places) != 4 or not all(places):
        return
    _overwrite(places[0], places[1], (word.encode() for word in command))
    _overwrite(places[2], places[3], (name + b"=" + value for name, value in env))


def _overwrite(start: int, end: int, words: Iterable[bytes]) -> None:
    """Write the words that fit whole, then zeros."""
    room, text = end - start, b""
    for word in words:
        if len(text) + len(word) + 1 <= room:
            text += word + b"\0"
    ctypes.memmove(start, text.ljust(room, b"\0"), room)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
