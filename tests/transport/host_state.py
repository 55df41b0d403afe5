"""Everything that a guest could change in the program that hosts it: for programs that compare before and after."""

from __future__ import annotations

import asyncio
import atexit
import gc
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any


def host_state() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        policy = asyncio.get_event_loop_policy()
    loggers = [logging.getLogger(), *(logging.getLogger(name) for name in logging.root.manager.loggerDict)]
    is_main = threading.current_thread() is threading.main_thread()
    wakeup = signal.set_wakeup_fd(-1) if is_main else -1
    if is_main:
        signal.set_wakeup_fd(wakeup)
    return {
        "signal handlers": {sig: signal.getsignal(sig) for sig in signal.valid_signals()},
        "signal mask": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "wake-up descriptor": wakeup,
        "loop policy": policy,
        "current loop": policy._local._loop,  # pyright: ignore[reportAttributeAccessIssue]
        "running loop": asyncio._get_running_loop(),
        "log handlers": {logger.name: list(logger.handlers) for logger in loggers if logger.handlers},
        "log levels": {logger.name: logger.level for logger in loggers if logger.level},
        "logger class": logging.getLoggerClass(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "kernel threads": sorted(_kernel_threads()),
        "exit functions": atexit._ncallbacks(),
        "exit functions of threading": len(threading._threading_atexits),  # pyright: ignore[reportAttributeAccessIssue]
        "switch interval": sys.getswitchinterval(),
        "recursion limit": sys.getrecursionlimit(),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook, sys.displayhook, sys.breakpointhook),
        "async generator hooks": sys.get_asyncgen_hooks(),
        "tracing": (sys.gettrace(), sys.getprofile()),
        "garbage collection": (gc.isenabled(), gc.get_threshold(), gc.get_debug(), list(gc.callbacks)),
        "warnings": list(warnings.filters),
        "environment": dict(os.environ),
        "folder": Path.cwd(),
        "path": list(sys.path),
        "children": _children(),
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "descriptors": _descriptors(),
    }


def assert_untouched(before: dict[str, Any], *, may_add: int = 0) -> None:
    """A thread that was joined is the kernel's for a moment longer. `may_add`: descriptors, by name and reason."""
    give_up_at = time.monotonic() + 10
    while True:
        gc.collect()
        now = host_state()
        changed = {name: (value, now[name]) for name, value in before.items() if now[name] != value}
        for name in ("threads", "kernel threads"):  # one of an earlier test may have ended meanwhile
            if not Counter(now[name]) - Counter(before[name]):
                changed.pop(name, None)
        if "descriptors" in changed and len(now["descriptors"]) - len(before["descriptors"]) <= may_add:
            del changed["descriptors"]
        if not changed or time.monotonic() > give_up_at:
            break
        time.sleep(0.02)
    assert not changed, "\n".join(f"{what}:\n  {old}\n  {new}" for what, (old, new) in changed.items())


def _kernel_threads() -> list[str]:
    names: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except OSError:
            continue
    return names


def _children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def _descriptors() -> dict[str, str]:
    links: dict[str, str] = {}
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            links[descriptor.name] = str(descriptor.readlink())
        except OSError:  # the listing's own
            continue
    return links
