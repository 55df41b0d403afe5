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
    """Looks at one status after the other. A version that was reached before is none: after a rewind the same steps are
    made again, up to the one that the trainer fails of."""

    def __init__(self) -> None:
        self._highest = -1
        self._knows_version = False
        """Whether `_highest` is what the trainer had come to, and not only what was heard of it."""

    def coordinator_came(self) -> None:
        """The first one, or another: what was made while none was there shows as one rise, whoever made it."""
        self._knows_version = False

    def seen(self, status: RunStatus, actors: Iterable[ActorSpec]) -> list[str]:
        """Names of the actors that this status shows at work: a rollout actor serves weights, the trainer has made a
        version above all before, the coordinator has got the run to begin."""
        has_stepped = self._has_stepped(status)
        serving = {engine.rollout for engine in status.engines if engine.version >= 0}
        works = {"coordinator": status.phase != "starting", "trainer": has_stepped}
        return [actor.name for actor in actors if works.get(actor.role, actor.name in serving)]

    def _has_stepped(self, status: RunStatus) -> bool:
        if status.phase == "starting" or status.version <= self._highest:
            return False
        knew, self._knows_version, self._highest = self._knows_version, True, status.version
        return knew
