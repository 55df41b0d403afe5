"""The named parts of rewards as metrics of a step. Knows groups; must not know how parts come about.

Names come from users' code and may be made of data, so only so many become metrics: the first ones that are seen.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...core.samples import Group

MAX_PARTS = 32
"""Names that become metrics in the life of one leader."""
MAX_NAME = 64
"""Characters of a name that becomes one."""
LEFT_OUT = "reward/parts_left_out"


class PartMetrics:
    """One per leader: remembers which names have metrics."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def of(self, groups: Sequence[Group]) -> dict[str, float]:
        """`reward/part/NAME/mean` and `/std` over those samples of the batch that have the part, and how many names
        were left out; nothing where no sample has parts."""
        found: dict[str, list[float]] = {}
        for name, value in (item for g in groups for parts in g.reward_parts for item in parts.items()):
            found.setdefault(name, []).append(value)
        for name in sorted(found):
            if len(self._names) < MAX_PARTS and len(name) <= MAX_NAME:
                self._names.add(name)
        metrics = {LEFT_OUT: float(len(found.keys() - self._names))} if found else {}
        for name in sorted(found.keys() & self._names):
            values = np.asarray(found[name], dtype=np.float64)
            metrics[f"reward/part/{name}/mean"] = float(values.mean())
            metrics[f"reward/part/{name}/std"] = float(values.std())
        return metrics
