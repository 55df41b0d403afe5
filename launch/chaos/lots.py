"""Which actor fails next, and how, drawn by a seed. Pure: who is there is passed in."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ...core.config.chaos import FaultName
from ...core.errors import ConfigError
from ..supervisor.roster import ActorRecord


@dataclass(frozen=True, slots=True)
class Lot:
    """What was drawn."""

    fault: FaultName
    actor: str


class Lots:
    """One series of draws. The same seed and the same actors give the same series."""

    def __init__(self, seed: int, faults: Sequence[FaultName], targets: Sequence[str]) -> None:
        """`targets`: shell patterns. Raises ConfigError if there is nothing to draw from."""
        if not faults or not targets:
            raise ConfigError("random faults need faults and targets", remedy='such as "kill" and "rollout/*"')
        self._random = random.Random(seed)
        self._faults = tuple(faults)
        self._targets = tuple(targets)

    def draw(self, roster: Sequence[ActorRecord]) -> Lot | None:
        """The next one; None if nobody who is meant is up. Draws the same count of numbers either way."""
        up = [r.name for r in roster if r.state == "up" and r.pid and not r.is_leaving and self._is_meant(r.name)]
        chance, fault = self._random.random(), self._random.choice(self._faults)
        return Lot(fault, sorted(up)[int(chance * len(up))]) if up else None

    def _is_meant(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._targets)
