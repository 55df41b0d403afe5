"""How long a launcher waits for whom. Apart from its users: the command line shows the defaults, and starts fast."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Patience:
    """How long this run waits for whom."""

    gather_s: float = 300.0
    """For all nodes to join."""
    start_s: float = 600.0
    """For a started process to register; a slow file system under torch is the usual cause of long starts."""
    finish_s: float = 60.0
    """For the coordinator to end the run in good order once it was asked to."""
    end_s: float = 10.0
    """For a process to end after SIGTERM."""
    lost_s: float = 20.0
    """For a sign of life of another node's launcher."""
    over_s: float = 5.0
    """For a process to end by itself that the registry has given up, before it is killed."""
    leave_s: float = 30.0
    """The same for one that said itself that it ends: it may have much memory to give back, and its status says why."""
    gone_s: float = 60.0
    """For a process to vanish after SIGKILL; the kernel takes its time for one that holds much pinned memory."""
