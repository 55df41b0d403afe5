"""Processes that actors started and that outlived their parents: the launcher adopts them, so it has to reap them.

Knows process ids and sessions. Must not know actors or runs. `os.waitpid(-1)` was considered: it would take the status
of children that others of this process wait for, `subprocess` among them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

LOOK_EVERY_S = 2.0


class Orphans:
    """Reaps who has ended and that nobody waits for. An actor has a session of its own, so has all that it starts; what
    `subprocess` starts here has ours, unless told otherwise, and then somebody waits for it: therefore one is reaped
    only if it was dead at the last look already. `is_known(pid)`: who is watched by its descriptor."""

    def __init__(self, is_known: Callable[[int], bool]) -> None:
        self._is_known = is_known
        self._dead: frozenset[int] = frozenset()

    def look(self, *, is_last: bool = False) -> None:
        """`is_last`: nobody waits for anybody any more."""
        dead = frozenset(pid for pid in _children() if not self._is_known(pid) and _is_foreign_dead(pid))
        for pid in dead if is_last else dead & self._dead:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        self._dead = dead


def _children() -> list[int]:
    """Of the main thread: the kernel gives orphans to it. None where it does not tell."""
    try:
        text = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
    except OSError:
        return []
    return [int(word) for word in text.split()]


def _is_foreign_dead(pid: int) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] == "Z" and int(fields[3]) != os.getsid(0)
