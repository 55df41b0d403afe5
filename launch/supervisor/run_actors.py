"""All actors of a run: their nodes, processes and start times, and the status that an operator sees. No decisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from ...core.config import RoleName
from ...core.supervision import ALIVE, ChildState, Supervisor
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


class RunActors:
    """All actors of the run, in start order."""

    def __init__(self, actors: Sequence[ActorSpec]) -> None:
        self._members = {actor.name: RunActor(actor) for actor in actors}

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def __getitem__(self, name: str) -> RunActor:
        return self._members[name]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._members)

    @property
    def specs(self) -> tuple[ActorSpec, ...]:
        return tuple(member.spec for member in self._members.values())

    def add(self, actor: ActorSpec) -> None:
        """Add an actor, perhaps under a name that was used before."""
        self._members[actor.name] = RunActor(actor)

    def remove(self, name: str) -> None:
        self._members.pop(name, None)

    def on_node(self, node: int) -> list[str]:
        return [name for name, member in self._members.items() if member.spec.node == node]

    def by_node(self, names: Sequence[str]) -> list[tuple[int, tuple[str, ...]]]:
        """Those of these names that are still in the run, by node."""
        place = {name: self._members[name].spec.node for name in names if name in self._members}
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


def actor_statuses(
    actors: RunActors, rules: Supervisor, host: Callable[[int], str], now: float
) -> tuple[ActorStatus, ...]:
    return tuple(_record(name, actors, rules, host, now) for name in actors.names)


def _record(name: str, actors: RunActors, rules: Supervisor, host: Callable[[int], str], now: float) -> ActorStatus:
    member, state = actors[name], rules.state(name)
    return ActorStatus(
        name=name,
        role=member.spec.role,
        node=member.spec.node,
        host=host(member.spec.node),
        state=state,
        attempt=rules.attempt(name),
        pid=member.pid if state in ALIVE else 0,
        epoch=member.epoch,
        started_wall_s=member.started_wall_s,
        restarts_left=rules.restarts_left(name, now),
        devices=member.spec.devices,
        is_leaving=rules.is_retiring(name),
    )
