"""Run one command for at most so many seconds, and leave nothing of it behind.

    python limited.py SECONDS COMMAND [ARGUMENT ...]

Exit status: the command's own, 124 after a time-out. Orphans of the command come to this process (Linux's child
subreaper), so that servers and their workers end with it, in whatever session they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time

import psutil

PR_SET_CHILD_SUBREAPER = 36
TERM_S = 5.0
"""Between asking and killing."""
TIMED_OUT = 124


def end_descendants() -> int:
    """End everything below this process; how many there were."""
    num_seen = 0
    for sign, patience_s in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, TERM_S)):
        give_up_at = time.monotonic() + patience_s
        told: set[int] = set()
        while time.monotonic() < give_up_at:
            left = [p for p in psutil.Process().children(recursive=True) if is_alive(p)]
            if not left:
                reap()
                return num_seen
            for process in left:
                if process.pid not in told:
                    told.add(process.pid)
                    num_seen += sign == signal.SIGTERM
                    with contextlib.suppress(psutil.Error):
                        process.send_signal(sign)
            time.sleep(0.1)
            reap()
    return num_seen


def is_alive(process: psutil.Process) -> bool:
    """A zombie has ended, whether or not somebody is there to reap it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def reap() -> None:
    """Collect orphans that ended; the command itself is Popen's."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def run(limit_s: float, command: list[str]) -> int:
    """See the module's head."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    process = subprocess.Popen(command, start_new_session=True)
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        print(f"limited: {' '.join(command)} ran past {limit_s:g} s and is ended", file=sys.stderr, flush=True)
        status = TIMED_OUT
    finally:
        num_left = end_descendants()
    if num_left and status != TIMED_OUT:
        print(f"limited: {num_left} processes were left and are ended", file=sys.stderr, flush=True)
    return status if status >= 0 else 128 - status


def stop(number: int, _frame: object) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    sys.exit(run(float(sys.argv[1]), sys.argv[2:]))
