"""Children that have to be gone before something is done: stage after stage, each told when the one before is gone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from .supervision_tree import BranchSpec


@dataclass(slots=True, eq=False)
class Ending:
    """One of them, under way."""

    then: Literal["restart", "renew", "retire", "give up", "over"]
    stages: list[tuple[str, ...]]
    """Not told yet, the next one first."""
    reason: str
    branch: BranchSpec | None = None
    """Whose restart it is."""
    current: tuple[str, ...] = ()
    scope: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.scope = frozenset(name for stage in self.stages for name in stage)

    @property
    def grace_s(self) -> float:
        """Ranks whose mate has failed have nothing to finish, and may hang in a collective with it."""
        is_broken_gang = self.then == "restart" and self.branch is not None and self.branch.strategy == "gang"
        return 0.5 if is_broken_gang else math.inf

    @property
    def is_gentle(self) -> bool:
        """Whether work is handed back first."""
        return self.then in ("renew", "retire")
