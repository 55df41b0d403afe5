"""All actors of a run: their nodes, processes and start times, and the status that an operator sees. No decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ...core.config import RoleName
from ...core.supervision import ChildState
from ..actor_spec import ActorSpec


@dataclass(slots=True)
class RunActor:
    """One actor; the facts concern its newest attempt."""

    spec: ActorSpec
    pid: int = 0
    epoch: int = 0
    started_s: float = 0.0
    started_wall_s: float = 0.0

    @property
    def process(self) -> str:
        """Process and node in words, for a person who looks for it."""
        return f"{self.spec.name} (process {self.pid or 'unknown'} on node {self.spec.node})"


class RunActors(dict[str, RunActor]):
    """All actors of the run by their names, in start order."""

    @property
    def specs(self) -> tuple[ActorSpec, ...]:
        return tuple(member.spec for member in self.values())

    def on_node(self, node: int) -> list[str]:
        return [name for name, member in self.items() if member.spec.node == node]

    def by_node(self, names: Sequence[str]) -> list[tuple[int, tuple[str, ...]]]:
        """Those of these names that are still in the run, by node."""
        place = {name: self[name].spec.node for name in names if name in self}
        nodes = sorted(set(place.values()))
        return [(node, tuple(name for name in place if place[name] == node)) for node in nodes]


class ActorStatus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Status of one actor of the run."""

    name: str
    role: RoleName
    node: int
    host: str
    """Host of its node; empty: the node is lost."""
    state: ChildState
    attempt: int
    """0 is the first."""
    pid: int = 0
    """Process id on its node; 0: it has no process."""
    epoch: int = 0
    """Epoch of the incarnation that registered last; 0: none did."""
    started_wall_s: float = 0.0
    """Start of the attempt in seconds since 1970; 0: it was not started."""
    restarts_left: int = 0
    """Restarts that its budget allows now."""
    devices: tuple[int, ...] = ()
    is_leaving: bool = False
    """Whether it leaves for good, at an operator's request."""

    @property
    def is_over(self) -> bool:
        return self.state in ("failed", "stopped")
