"""Runs between a rollout actor and the server it started, so that nothing of the server outlives the actor.

    python -m myxa.actors.engines.sglang.server_guardian <pid of the actor>

reads one JSON line (`Task`) from standard input, starts the command in its own session, and writes to standard
output `{"pid": ...}`, later `{"ended": <status>}`. "stop" on standard input ends the server gracefully; the end of
standard input, which is what a kill -9 of the actor looks like, kills the server's whole process group at once.

PR_SET_PDEATHSIG alone was considered: it reaches the server's first process only, while an inference server is a
family of them. The guardian is small, and if it is killed itself, the server's first process goes with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, TypedDict

from ....core.errors import LaunchError
from ....core.process import die_with_parent

LOG_MODE = 0o600
"""Servers write their arguments into their log, keys included."""


class Task(TypedDict):
    """What the guardian is to run."""

    command: Sequence[str]
    env: Mapping[str, str]
    log_path: str
    grace_s: float
    """Between "stop" and the kill."""


def main() -> int:
    die_with_parent(int(sys.argv[1]), signal.SIGTERM)
    task: Task = json.loads(sys.stdin.buffer.readline())
    try:
        server = _start(task)
    except OSError as error:
        _tell(failed=f"{task['command'][0]}: {error.strerror}")
        return LaunchError.exit_code

    def on_parents_end(sig: int, frame: FrameType | None) -> None:
        _kill(server)

    signal.signal(signal.SIGTERM, on_parents_end)
    _tell(pid=server.pid)
    _watch(server, task["grace_s"])
    _kill(server)  # it is a zombie, so the group is still its own: end what it left behind
    status = server.wait()
    _tell(ended=status)
    return 0


def _start(task: Task) -> subprocess.Popen[bytes]:
    parent = os.getpid()
    log = os.open(task["log_path"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, LOG_MODE)
    try:
        return subprocess.Popen(
            list(task["command"]),
            env=dict(task["env"]),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent),  # safe: this process has one thread
        )
    finally:
        os.close(log)


def _watch(server: subprocess.Popen[bytes], grace_s: float) -> None:
    pidfd = os.pidfd_open(server.pid)
    kill_at: float | None = None
    inputs: list[int] = [pidfd, sys.stdin.fileno()]
    while True:
        left = None if kill_at is None else max(kill_at - time.monotonic(), 0.0)
        ready = select.select(inputs, [], [], left)[0]
        if pidfd in ready or (not ready and kill_at is not None):
            return
        if not os.read(sys.stdin.fileno(), 4096):
            return
        if kill_at is None:
            kill_at = time.monotonic() + grace_s
            _quietly(lambda: os.kill(server.pid, signal.SIGTERM))


def _kill(server: subprocess.Popen[bytes]) -> None:
    _quietly(lambda: os.killpg(server.pid, signal.SIGKILL))


def _quietly(act: Callable[[], None]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        act()


def _tell(**what: Any) -> None:
    with contextlib.suppress(OSError):  # the actor is gone
        os.write(sys.stdout.fileno(), json.dumps(what).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
