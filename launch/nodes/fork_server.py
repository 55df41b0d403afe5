"""A process that has imported what actors need and is forked into them: `python -m myxa.launch.nodes.fork_server`.

Knows a socket to its launcher and names of modules. Must not know roles or runs, start a thread, or touch a GPU: what
is forked must be as if it had just begun. One loop, one request at a time; it ends when its launcher closes the socket.

Python's `multiprocessing.forkserver` was considered: its children are the server's, so that the launcher has neither
their exit status nor the signal of its own death to them; what they run comes pickled. Here the server forks twice, and
the kernel makes the launcher, which adopts orphans (core/process.py), the parent of the second: watched by pidfd,
reaped, and ended with the launcher, as a process that it started itself. The server is needed to start only.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
import traceback
from pathlib import Path

from ...core.process import die_with_parent, name_process
from .fork_wire import MAX_BYTES, ForkReply, ForkRequest, pack, unpack_request
from .forked import be_actor, be_born
from .preloads import KITS, LIGHT

GPU_FILES = "/dev/nvidia"


def main(arguments: list[str]) -> int:
    """`<process id of the launcher> <descriptor of the socket>`."""
    launcher_pid, descriptor = map(int, arguments)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, as some programs leave it, it takes children's statuses
    die_with_parent(launcher_pid)
    serve(socket.socket(fileno=descriptor), LIGHT)
    return 0


def serve(launcher: socket.socket, kit: str) -> None:
    """Import, say so, fork on request until the launcher closes the socket."""
    launcher.set_inheritable(False)
    name_process(f"myxa: {kit}")
    gc.disable()
    problem = _preload(kit) or unfit()
    launcher.send(pack(ForkReply(pid=os.getpid(), problem=problem)))
    if problem:
        return
    gc.collect()
    gc.freeze()  # the collector would write into every page that is shared
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
    """Why this process must not be forked; empty: it may. Only the thread that forks lives on in the child, with the
    locks of the others held for ever; CUDA does not survive a fork and has chosen its devices."""
    threads: list[str] = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has ended in this moment
            threads.append(path.read_text().strip())
    if not threads:
        return "/proc does not tell of its threads"
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


def _preload(kit: str) -> str:
    try:
        for module in KITS[kit].modules:
            importlib.import_module(module)
        from ...transport.codec import compile_loaded  # brings numpy, as every kit does and this module does not

        compile_loaded()
    except Exception as error:  # noqa: BLE001 - whatever it is, the actor's own start will tell it properly
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return ""


def _fork(request: ForkRequest, launcher: socket.socket, own_end: socket.socket, log: int) -> str:
    """Why there is no process; empty: there is one, or one between died and the closing socket says so."""
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
    except BaseException:  # noqa: BLE001 - nothing may return into the server's loop
        traceback.print_exc()
    finally:
        os._exit(status)


def _live(request: ForkRequest, own_end: socket.socket, log: int) -> int:
    """The new process's life; returns its exit status."""
    if not be_born(request, own_end, log):
        return 0
    if request.kit:
        serve(own_end, request.kit)
        return 0
    own_end.close()
    return be_actor(request)


def _tell(own_end: socket.socket, reply: ForkReply) -> None:
    try:
        own_end.send(pack(reply))
    except OSError:
        return  # the launcher does not want it any more


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
