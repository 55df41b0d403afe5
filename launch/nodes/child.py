"""One attempt of one actor as a process: started in its own session, watched by pidfd, ended with all it started.

asyncio's own subprocesses give the status out only after the process id is free again, so the rest of a process group
could not be killed safely. Stacks are taken by SIGQUIT, on which faulthandler writes them into the log (worker.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ...core.errors import ConfigError, LaunchError
from ..contracts import StackReply

OnExit = Callable[["Child", int], None]

NO_SUCH_PROGRAM = frozenset({errno.ENOENT, errno.EACCES, errno.ENOTDIR, errno.ENOEXEC})
"""Errors of a program that would not start the next time either. Other errors (no process, memory or descriptor left)
may pass."""
HAS_NO_PIDFD = (errno.ENOSYS, errno.EPERM)
"""Of a kernel before Linux 5.3 (RHEL 8), and of a container's policy."""
LOOK_S = 0.05
"""How often a process without a pidfd is looked at."""
REAP_S = 5.0
WRITE_S = 1.0
"""How long a process may take to write its stacks."""
MAX_TEXT = 512 * 1024


ORDERLY_END = signal.SIGRTMIN
"""From a launcher to a worker. None of those that schedulers send to every process of a job at once: the launcher ends
the run in order, and its actors are needed for that."""


class Child:
    """A running process of which we are the parent. `on_exit(child, status)` is called once, on the loop, when it was
    reaped. Raises OSError."""

    def __init__(self, name: str, attempt: int, log_path: Path, pid: int, on_exit: OnExit) -> None:
        self.name = name
        self.pid = pid
        """Process id, also of its session and process group."""
        self.attempt = attempt
        self.log_path = log_path
        self.status: int | None = None
        """Return code as `subprocess` gives it (negative: signal), None while it runs."""
        self._on_exit = on_exit
        self._is_asked = False
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError as error:
            if error.errno not in HAS_NO_PIDFD:
                raise
            self._pidfd = -1
            self._loop.call_soon(self._look)
            return
        try:
            self._loop.add_reader(self._pidfd, self._reap)
        except BaseException:
            os.close(self._pidfd)
            raise

    def ask_to_end(self) -> None:
        """ORDERLY_END, once: a second one could hit a process that has begun to end and dropped its handler."""
        if self.status is None and not self._is_asked:
            self._is_asked = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, ORDERLY_END)

    def ask_for_stacks(self) -> None:
        """SIGQUIT: a worker writes all stacks into its log. Not before its handler is there: it would end it."""
        if self.status is None and self._catches(signal.SIGQUIT):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGQUIT)

    def _catches(self, number: int) -> bool:
        try:
            text = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii", errors="replace")
        except OSError:
            return False
        caught = next((line.split()[1] for line in text.splitlines() if line.startswith("SigCgt:")), "0")
        return bool(int(caught, 16) >> (number - 1) & 1)

    def kill(self) -> None:
        """End the process and everything in its group at once."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def wait(self, timeout_s: float) -> bool:
        try:
            await asyncio.wait_for(self._ended.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def _look(self) -> None:
        with contextlib.suppress(ChildProcessError):  # another waiter in this process took its status
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                self._loop.call_later(LOOK_S, self._look)
                return
        self._reap()

    def _reap(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
        # The zombie still holds the process id, so the group cannot be another's: end the rest of it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        try:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:  # another waiter in this process took its status: count it as a failure
            self.status = -signal.SIGKILL
        if self._pidfd >= 0:
            os.close(self._pidfd)
        self._ended.set()
        self._on_exit(self, self.status)


def start_child(
    name: str,
    attempt: int,
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    log_path: Path,
    on_exit: OnExit,
    pass_fds: Sequence[int] = (),
) -> Child:
    """Start a process with standard output and error in `log_path` (made new) and no input; of our descriptors it gets
    `pass_fds`.

    Raises ConfigError for a program that cannot be started, LaunchError if the machine has no room for a process now,
    OSError for a log that cannot be written. If it raises, there is no process.
    """
    with log_path.open("wb") as log:
        try:
            process = subprocess.Popen(
                list(command), env=dict(env), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True, pass_fds=tuple(pass_fds),
            )  # fmt: skip
        except OSError as error:
            problem = f"{name} cannot be started: {command[0]}: {error.strerror}"
            if error.errno in NO_SUCH_PROGRAM:
                raise ConfigError(problem, remedy="check the role's `python` in the run file") from error
            raise LaunchError(problem, remedy="check what is used up there: memory, processes, descriptors") from error
    try:
        child = Child(name, attempt, log_path, process.pid, on_exit)
    except OSError as error:
        with contextlib.suppress(ProcessLookupError):  # its end would not be noticed, so it must not run
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it has just been started, so this is quick
            process.wait(REAP_S)
        raise LaunchError(
            f"{name} cannot be watched: {error.strerror}", remedy="check what is used up there: descriptors, memory"
        ) from error
    process.returncode = 0  # the child is reaped by its id
    return child


# -- stacks from outside


async def written_stacks(child: Child) -> StackReply:
    """Stacks by SIGQUIT. Raises LaunchError for a process that wrote none."""
    before = child.log_path.stat().st_size
    child.ask_for_stacks()
    await child.wait(WRITE_S)
    with child.log_path.open("rb") as file:
        file.seek(before)
        text = file.read(MAX_TEXT).decode("utf-8", errors="replace")
    # Other threads may have logged before faulthandler wrote.
    begin = min((index for index in (text.find("Thread 0x"), text.find("Current thread 0x")) if index >= 0), default=-1)
    if begin < 0:
        raise LaunchError(
            f"{child.name} (process {child.pid}) wrote no stacks within {WRITE_S:g} s",
            remedy=f"it has just been started, is stopped, or hangs in the kernel: see /proc/{child.pid}/stack",
        )
    return StackReply(name=child.name, pid=child.pid, text=text[begin:], how="signal")
