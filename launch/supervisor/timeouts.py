"""Time limits of a launcher. A light file: the command line shows the defaults and starts fast."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunTimeouts:
    """How long the launchers of a run wait."""

    gather_s: float = 300.0
    """For all nodes to join."""
    start_s: float = 600.0
    """For a started process to register; a slow file system under torch is the usual cause of long starts."""
    finish_s: float = 60.0
    """For the coordinator to end the run in an orderly way after a request."""
    end_s: float = 10.0
    """For a process to end after ORDERLY_END."""
    lost_s: float = 20.0
    """For a sign of life of another node's launcher."""
    over_s: float = 5.0
    """For a process to end by itself after the registry has ended it, before it is killed."""
    leave_s: float = 30.0
    """The same for a process that announced its end: it may have much memory to free, and its exit status says why."""
    gone_s: float = 60.0
    """For a process to vanish after SIGKILL; the kernel needs time to free much pinned memory."""
