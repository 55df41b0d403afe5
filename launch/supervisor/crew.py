"""What is known of each actor of a run beside the rules: where it belongs, its process, since when. No decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..actor_spec import ActorSpec


@dataclass(slots=True)
class Member:
    """One actor; the facts are those of its newest attempt."""

    spec: ActorSpec
    pid: int = 0
    epoch: int = 0
    started_s: float = 0.0
    started_wall_s: float = 0.0

    @property
    def process(self) -> str:
        """In words, for who has to look for it."""
        return f"{self.spec.name} (process {self.pid or 'unknown'} on node {self.spec.node})"


class Crew:
    """All actors of the run, in start order."""

    def __init__(self, actors: Sequence[ActorSpec]) -> None:
        self._members = {actor.name: Member(actor) for actor in actors}

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def __getitem__(self, name: str) -> Member:
        return self._members[name]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._members)

    @property
    def specs(self) -> tuple[ActorSpec, ...]:
        return tuple(member.spec for member in self._members.values())

    def add(self, actor: ActorSpec) -> None:
        """One more, or one of a name that was there before."""
        self._members[actor.name] = Member(actor)

    def remove(self, name: str) -> None:
        """It left for good."""
        self._members.pop(name, None)

    def on_node(self, node: int) -> list[str]:
        """Names of the actors of one node."""
        return [name for name, member in self._members.items() if member.spec.node == node]

    def by_node(self, names: Sequence[str]) -> list[tuple[int, tuple[str, ...]]]:
        """Those of these that are still here, sorted by their nodes."""
        place = {name: self._members[name].spec.node for name in names if name in self._members}
        nodes = sorted(set(place.values()))
        return [(node, tuple(name for name in place if place[name] == node)) for node in nodes]
