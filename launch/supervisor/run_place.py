"""What a run is told at its start, and how somebody may wish its end. Plain records."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from ...core.config import RunConfig
from ..actor_spec import ActorSpec
from ..contracts import RunPlan


@dataclass(frozen=True, slots=True)
class RunPlace:
    """What all nodes must agree on, and what they are told."""

    actors: tuple[ActorSpec, ...]
    num_nodes: int
    version: str
    config: str
    plan: RunPlan
    run: RunConfig | None = None
    """The configuration itself, by which late nodes are staffed; None: nobody may come late."""
    max_nodes: int = 0
    """So many nodes at the same time; 0: as many as come."""


@dataclass(frozen=True, slots=True)
class StopWish:
    """A person or a scheduler wants the run to end."""

    reason: str
    signal: int

    def exit_code(self, *, is_orderly: bool) -> int:
        """130 after Ctrl-C, as shells have it; a scheduler's SIGTERM is no failure if the run ended in good order."""
        return 0 if self.signal == signal.SIGTERM and is_orderly else 128 + self.signal
