"""A process that has imported what `myxa` imports, and is forked into one command after the other: a program for the
tests.

    python command_server.py DESCRIPTOR ROOM [MODULE ...]

A suite starts `myxa` hundreds of times, and most of what a short run computes is imports: the launcher's, and those of
the fork server that its actors are forked from (torch). A request on the socket DESCRIPTOR is the words, folder and
variables of one command as JSON, with its standard streams and a pipe. Each gets a process of its own, whose parent
writes its process id and then its exit status into the pipe: what runs is `python -m myxa.launch` from its first line,
on its own streams, signals and session; or a program of the tests that needs the same imports. What starts a run has a
child that stands by to be its first fork server (standing_by.py). ROOM is overwritten by what a command looks like;
MODULEs are imported too.
Ends when the socket is closed.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import standing_by

from myxa.launch.cli import make_parser
from myxa.launch.nodes.fork_server import LIGHT, TORCH, look_like, unfit
from myxa.transport.codec import compile_loaded

MODULES = (
    *("myxa.core.config", "myxa.launch.cli", "myxa.launch.commands.run_life", "myxa.launch.control.client"),
    *("myxa.launch.launcher", "myxa.launch.run_lineage.origin", "uvloop"),
    *("myxa.launch.checks.all_checks", "myxa.launch.checks.plan", "myxa.launch.control.handlers"),
    *("myxa.launch.run_lineage.next_run", "myxa.launch.web.dashboard", "myxa.actors.engines.sglang.launch"),
    *LIGHT,
    *TORCH,
)
STARTERS = ("up", "launch", "resume", "fork", "demo")
"""Commands that start runs."""
MAX_BYTES = 1 << 20
REAP_S = 1.0
BACKENDS = Path(__file__).resolve().parents[1] / "backends"


@dataclass(frozen=True)
class Request:
    """One command."""

    words: list[str]
    folder: str
    env: dict[str, str]
    has_session: bool
    """Whether it leads a session of its own."""
    has_stand_by: bool
    """Whether a run of it gets its first fork server from us."""
    program: str = ""
    """A program of the tests to run in place of `myxa`."""


def told(report: int, number: int) -> None:
    try:
        os.write(report, f"{number}\n".encode())
    except BrokenPipeError:
        return  # nobody wants to know any more


def fork(request: Request, tests: socket.socket, streams: list[int], report: int) -> bool:
    """Returns, in the command's own process, True."""
    if os.fork():
        return False
    tests.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child:
        for stream in streams:
            os.close(stream)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the command's to hear
        told(report, child)
        told(report, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        os._exit(0)
    os.close(report)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    if request.has_session:
        os.setsid()
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.env)
    tempfile.tempdir = None
    if "HF_ENDPOINT" in request.env:  # what reads its variables when it is imported is imported anew
        for name in [name for name in sys.modules if name.split(".")[0] == "huggingface_hub"]:
            del sys.modules[name]
    paths = request.env.get("PYTHONPATH", "").split(os.pathsep)
    own = [str(Path(request.program).parent), sys.path[0]] if request.program else [request.folder]
    sys.path[:1] = [*own, *(path for path in paths if path and path not in sys.path)]
    sys.argv = [request.program or "myxa", *request.words]
    look_like(sys.argv, ((name.encode(), value.encode()) for name, value in request.env.items()))
    if request.has_stand_by and not request.program and request.words[0] in STARTERS:
        standing_by.begin()
    return True


def reap(*_: object) -> None:
    """Those that waited for commands: by hand, so that their time counts as ours."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def become_a_command(tests: socket.socket) -> Request | None:
    """Serve until the socket is closed; in each process that is to be a command, which one."""
    signal.signal(signal.SIGCHLD, reap)
    while True:
        while not select.select([tests], [], [], REAP_S)[0]:
            reap()  # of a death between the look at signals and the wait nothing else would tell
        data, descriptors, _, _ = socket.recv_fds(tests, MAX_BYTES, 4, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return None
        fields: dict[str, Any] = json.loads(data)
        *streams, report = descriptors
        request = Request(**fields)
        if fork(request, tests, streams, report):
            return request
        for descriptor in descriptors:
            os.close(descriptor)


def main() -> None:
    tests = socket.socket(fileno=int(sys.argv[1]))
    tests.set_inheritable(False)
    gc.disable()
    for module in MODULES:
        importlib.import_module(module)
    if not Path("/dev/nvidiactl").exists():  # to look for devices is nothing that a fork survives
        sys.path.append(str(BACKENDS))
        importlib.import_module("megatron_on_cpu").install()  # for runs with its trainer; nothing has imported it yet
        sys.path.remove(str(BACKENDS))
    with warnings.catch_warnings(action="ignore"):
        for module in sys.argv[3:]:
            importlib.import_module(module)
    compile_loaded()
    make_parser()  # what it compiles at first is kept
    problem = unfit()
    if problem:
        sys.exit(f"no command can be forked: {problem}")
    gc.collect()
    gc.freeze()
    gc.enable()
    request = become_a_command(tests)
    if request is None:
        return
    end(play(request))


def play(request: Request) -> int:
    """The command itself; its exit status."""
    try:
        if request.program:
            runpy.run_path(request.program, run_name="__main__")
        else:
            runpy.run_module("myxa.launch", run_name="__main__", alter_sys=True)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def end(status: int) -> None:
    """As Python ends, but for the taking apart of all modules: it writes to every page of torch's, which the server
    lends us, and takes most of a second."""
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
