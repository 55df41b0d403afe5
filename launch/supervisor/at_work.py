"""Which actors are seen at work: what the run's status shows of them, beyond that they answer. Pure.

An actor answers as soon as its process has joined, while its model still loads; what fails of loading fails minutes
later.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...core.messages import RunStatus
from ..actor_spec import ActorSpec

SEEN_IN_STATUS = frozenset({"coordinator", "trainer", "rollout"})
"""Roles whose work the status shows; the others are at work when they answer."""


class AtWork:
    """Looks at one status after the other."""

    def __init__(self) -> None:
        self._version: int | None = None

    def seen(self, status: RunStatus, actors: Iterable[ActorSpec]) -> list[str]:
        """Names of the actors that this status shows at work: a rollout actor serves weights, the trainer has made
        another version since the last status, the coordinator has got the run to begin."""
        has_stepped = self._version is not None and status.version > self._version
        self._version = status.version
        serving = {engine.rollout for engine in status.engines if engine.version >= 0}
        works = {"coordinator": status.phase != "starting", "trainer": has_stepped}
        return [actor.name for actor in actors if works.get(actor.role, actor.name in serving)]
