"""Which weights every rollout actor serves, and what they are worth in the trainer's present lineage. Pure.

A trainer that goes back to version r undoes the versions above r and makes the same numbers again, of other weights.
So each version comes with its lineage: the epoch of the trainer's leader that published it.

    draw(v, lineage)       says what was served when the draw was sent; it may be older than the newest `adopted`
    adopted(v, lineage)    an engine took v
    rewound(r, lineage)    that leader begins at r: of what earlier ones made, whatever is above r counts as r
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

ALWAYS_NEWEST = (1 << 31) - 1
"""What an actor without an engine announces: its samples carry no version, so no age ever holds them back."""


@dataclass(frozen=True, slots=True, order=True)
class ServedWeights:
    """What an engine serves; the greater is the later."""

    lineage: int
    version: int


@dataclass(frozen=True, slots=True)
class Rewind:
    """The leader with the epoch `lineage` began at `version`."""

    lineage: int
    version: int


@dataclass(frozen=True, slots=True)
class JudgedVersion:
    """What a draw is judged by."""

    version: int
    is_undone: bool = False
    """The number that it stamps is of another lineage: whatever stamp is above `version` counts as `version`."""


class EngineVersions:
    """See the module's head. One per buffer."""

    def __init__(self, rewinds: Iterable[Rewind] = ()) -> None:
        """`rewinds`: those that an earlier process of the buffer knew."""
        self._engines: dict[str, tuple[int, ServedWeights]] = {}
        """Rollout actor -> its newest incarnation, and the latest weights that it reported."""
        self.rewinds = tuple(rewinds)

    def reported(self, rollout: str, epoch: int, weights: ServedWeights) -> bool:
        """An engine serves these weights, or did when it said so; whether that is news."""
        newest_epoch, latest = self._engines.get(rollout, (-1, None))
        is_old = epoch < newest_epoch or (epoch == newest_epoch and latest is not None and weights <= latest)
        if is_old or weights.version == ALWAYS_NEWEST:
            return False
        self._engines[rollout] = (epoch, weights)
        return True

    def rewound(self, version: int, lineage: int) -> None:
        """The leader with that epoch begins at `version`. What an earlier rewind to the same version or a later one
        says is said by this one too; one of a greater epoch is of an earlier launch, whose engines are gone."""
        earlier = [rewind for rewind in self.rewinds if rewind.lineage < lineage and rewind.version < version]
        self.rewinds = (*earlier, Rewind(lineage, version))

    def serving(self, rollout: str, epoch: int, reported: ServedWeights, newest: int) -> JudgedVersion:
        """The version by which a draw that reported these weights is judged. `newest`: of the run."""
        if reported.version == ALWAYS_NEWEST:
            return JudgedVersion(newest)
        newest_epoch, latest = self._engines.get(rollout, (-1, reported))
        weights = max(reported, latest) if newest_epoch == epoch else reported
        undone_to = [rewind.version for rewind in self.rewinds if rewind.lineage > weights.lineage]
        version = min(undone_to, default=weights.version)
        if version < weights.version:
            return JudgedVersion(version, is_undone=True)
        return JudgedVersion(newest, is_undone=True) if weights.version > newest else JudgedVersion(weights.version)
