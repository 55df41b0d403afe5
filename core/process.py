"""Processes of this host: its boot id, parents and start times, and what the kernel does when a parent ends. Linux.

A child can end when its parent does, even by SIGKILL; a process can adopt descendants whose own parents ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import socket
import sys
from collections.abc import Generator, Mapping
from pathlib import Path

from .errors import LaunchError

SCHEDULERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What schedulers send: an orderly end after it is no failure. They may send it to every process of a job."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")


@functools.lru_cache(maxsize=1)
def boot_id() -> str:
    """Equal for all processes of one running system that share a PID namespace: containers number processes themselves.
    The host name where the kernel has no boot id."""
    try:
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
        return f"{boot}-{_PID_NAMESPACE.stat().st_ino}"
    except OSError:
        return socket.gethostname()


def parent_mark() -> str:
    """Names the process that started this one, as no other process is or was named: equal for all its children."""
    parent = os.getppid()
    return f"{boot_id()}.{parent}.{start_time(parent)}"


def start_time(pid: int) -> int:
    """Clock ticks since boot at which the process began; 0 if it is gone or cannot be seen."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])  # counted behind the name, which may hold anything


class ProcessorTime:
    """What the kernel says of the threads of this process since this was made. Linux; elsewhere it says nothing."""

    def __init__(self) -> None:
        self._threads = _threads()
        self._ran_ns = self._waited_ns = 0

    def seconds(self) -> dict[str, float]:
        """Sums over all threads: "cpu/ran" on a processor, "cpu/waited" ready to run while others had the processors.
        Of a thread that ended what it did after the last call is not counted."""
        before, self._threads = self._threads, _threads()
        for name, (ran, waited) in self._threads.items():
            ran_before, waited_before = before.get(name, (0, 0))
            is_same = ran >= ran_before and waited >= waited_before  # else a new thread has the number
            self._ran_ns += ran - ran_before if is_same else ran
            self._waited_ns += waited - waited_before if is_same else waited
        return {"cpu/ran": self._ran_ns / 1e9, "cpu/waited": self._waited_ns / 1e9} if self._threads else {}


def _threads() -> dict[str, tuple[int, int]]:
    """Nanoseconds that each ran, and waited for a processor."""
    times: dict[str, tuple[int, int]] = {}
    with contextlib.suppress(OSError):
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError, ValueError):  # it ended; a kernel that does not count
                ran, waited, _ = (thread / "schedstat").read_text(encoding="ascii").split()
                times[thread.name] = int(ran), int(waited)
    return times


_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_NAME_BYTES = 15
_IS_LINUX = sys.platform.startswith("linux")


def die_with_parent(parent_pid: int, sig: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process `sig` when the thread that started it ends; call it first. `parent_pid`: as the
    parent passed it; if that is gone already, this process ends here. Raises LaunchError where the kernel refuses."""
    if not _IS_LINUX:
        raise LaunchError(f"myxa's processes run on Linux, this is {sys.platform}", remedy="use a Linux machine")
    if not _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(sig)):
        reason = os.strerror(ctypes.get_errno())
        raise LaunchError(f"prctl(PR_SET_PDEATHSIG) failed: {reason}", remedy="allow prctl in the container's policy")
    if os.getppid() != parent_pid:
        raise SystemExit(128 + sig)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, as some programs leave it, children's statuses are lost


@contextlib.contextmanager
def adopting_orphans() -> Generator[None]:
    """Meanwhile this process, not init, becomes the parent of each descendant whose own parent ends; it has to reap
    them. Nothing happens where the kernel knows no such thing: see `adopts_orphans`."""
    before = adopts_orphans()
    _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(before))


def adopts_orphans() -> bool:
    """Whether this process becomes the parent of its descendants' orphans."""
    answer = ctypes.c_int(0)
    return _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(answer)) and bool(answer.value)


def name_process(name: str) -> None:
    """What `top` and `ps -e` show of this process; cut off where the kernel cuts."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(os.fsencode(name)[:_NAME_BYTES]))


def _prctl(option: int, value: object) -> bool:
    """Whether the kernel did it; else `ctypes.get_errno` says why not."""
    return _IS_LINUX and ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) == 0


def past_proxies(env: Mapping[str, str], *hosts: str) -> dict[str, str]:
    """Variables by which clients in that environment ask these hosts of the run's own without a proxy."""
    direct = env.get("no_proxy") or env.get("NO_PROXY", "")
    return {} if direct == "*" else dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(filter(None, (direct, *hosts))))
