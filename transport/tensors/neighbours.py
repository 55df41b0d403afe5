"""The other processes of this host whose memory we read, or that read ours.

    reach   UNKNOWN --ask--> ASKING --found--> OPEN         by which ways that process can read our memory
            ASKING --nothing--> SHUT    OPEN --failed--> SHUT    SHUT --retry--> UNKNOWN

Each has a pidfd from before the first look at its memory: so a number that the kernel gives to another process is
noticed, and its exit is heard of at once.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from enum import Enum

from ...core.errors import SlabError
from ...core.ids import PeerKey
from .kernel import has_exited, watch_process
from .slab import SlabMapping

SHUT_S = 30.0
"""How long nothing is tried with a process that could not read our memory."""
MAPPING_IDLE_S = 10.0


class ReachState(Enum):
    """What we know of a process's ability to read our memory."""

    UNKNOWN = "unknown"
    ASKING = "being asked"
    OPEN = "open"
    SHUT = "shut"


REACH_TABLE: dict[tuple[ReachState, str], ReachState] = {
    (ReachState.UNKNOWN, "ask"): ReachState.ASKING,
    (ReachState.ASKING, "found"): ReachState.OPEN,
    (ReachState.ASKING, "nothing"): ReachState.SHUT,
    (ReachState.OPEN, "found"): ReachState.OPEN,
    (ReachState.OPEN, "failed"): ReachState.SHUT,
    (ReachState.SHUT, "failed"): ReachState.SHUT,
    (ReachState.SHUT, "retry"): ReachState.UNKNOWN,
}


class Reach:
    """How one other process can read our memory. Sans-IO."""

    def __init__(self) -> None:
        self.state = ReachState.UNKNOWN
        self.can_pull = False
        self.can_map = False
        self._shut_until = 0.0

    def on(self, event: str) -> None:
        """KeyError for an event that the table does not know in this state: a bug."""
        self.state = REACH_TABLE[self.state, event]

    def found(self, *, can_pull: bool, can_map: bool, now: float) -> None:
        """It was tried."""
        self.can_pull, self.can_map = can_pull, can_map
        self._settle("found" if can_pull or can_map else "nothing", now)

    def lost(self, *, pull: bool, now: float) -> None:
        """It could not read what it was promised, by pulling or else from a slab."""
        if pull:
            self.can_pull = False
        else:
            self.can_map = False
        if not (self.can_pull or self.can_map) and self.state in (ReachState.OPEN, ReachState.SHUT):
            self._settle("failed", now)

    def is_due(self, now: float) -> bool:
        """Whether it should be asked (again)."""
        if self.state is ReachState.SHUT and now >= self._shut_until:
            self.on("retry")
        return self.state is ReachState.UNKNOWN

    def _settle(self, event: str, now: float) -> None:
        self.on(event)
        if self.state is ReachState.SHUT:
            self._shut_until = now + SHUT_S


class Neighbour:
    """One other incarnation on this host."""

    def __init__(self, key: PeerKey) -> None:
        self.key = key
        self.reach = Reach()
        self.asking: asyncio.Task[None] | None = None
        self.pid = 0
        """0: not known yet."""
        self.is_readable = False
        """We may pull from its memory: tried."""
        self._watch = -1
        self._mappings: dict[int, tuple[float, SlabMapping]] = {}

    def meet(self, pid: int, when_gone: Callable[[PeerKey], None]) -> None:
        """It says that it is this process. Raises OSError if there is none, ValueError if it said another before."""
        if self.pid:
            if pid != self.pid:
                raise ValueError(f"{self.key} was process {self.pid} and now says {pid}")
            return
        self._watch = watch_process(pid)
        self.pid = pid
        asyncio.get_running_loop().add_reader(self._watch, when_gone, self.key)

    @property
    def is_alive(self) -> bool:
        """What was just read under its number was read from it and no other."""
        return self._watch >= 0 and not has_exited(self._watch)

    def check_path(self, path: str) -> str:
        """A slab's path, if it is one of this process. Raises SlabError."""
        if not self.pid or not path.startswith(f"/proc/{self.pid}/fd/"):
            raise SlabError(f"{self.key} points at {path}, which is not of process {self.pid}")
        return path

    def mapping(self, slab_id: int, now: float) -> SlabMapping | None:
        """A slab that is mapped already."""
        found = self._mappings.get(slab_id)
        if found is not None:
            self._mappings[slab_id] = now, found[1]
        return found[1] if found is not None else None

    def keep(self, slab_id: int, mapping: SlabMapping, now: float) -> None:
        self._mappings[slab_id] = now, mapping

    def trim(self, now: float) -> None:
        """Unmap slabs that were not used for a while; their owner may want the memory back."""
        self._mappings = {n: (t, m) for n, (t, m) in self._mappings.items() if now - t < MAPPING_IDLE_S}

    def leave(self) -> None:
        """Forget all of it. What is in use stays mapped until its last array is gone."""
        self._mappings.clear()
        if self.asking is not None:
            self.asking.cancel()
        if self._watch >= 0:
            asyncio.get_running_loop().remove_reader(self._watch)
            os.close(self._watch)
            self._watch = -1
        self.is_readable = False
