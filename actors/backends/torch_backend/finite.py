"""Agreement of all ranks on a loss or gradient that is not a finite number, with the names of what caused it.

Knows positions and group ids. Must not know losses. Every function here is collective: each rank says what it saw,
and all raise, or none does; so no rank takes an optimizer step that another refuses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....core.errors import TrainError
from .tensors import integers
from .world import World

MAX_NAMED = 16
"""Group ids named per rank."""

REMEDY = "look at these groups' rewards and log-probs; if they are sound, lower the learning rate"


def first_not_finite(values_K: Tensor) -> int:
    """Index of the first NaN or infinity, -1 if there is none."""
    bad = torch.nonzero(~torch.isfinite(values_K))
    return int(bad[0]) if bad.numel() else -1


def accusation(world: World, what: str, place: str, micro: int, group_ids: Sequence[int]) -> TrainError | None:
    """The error all ranks raise if any of them found micro-batch `micro` (-1: none) bad; None if all are well.

    `what`: "loss" or "gradient"; `place`: step and mini-batch in words.
    """
    named = list(group_ids[:MAX_NAMED]) if micro >= 0 else []
    claim = torch.full((2 + MAX_NAMED,), -1, dtype=torch.int64)
    claim[0] = micro
    claim[1] = len(group_ids)
    claim[2 : 2 + len(named)] = torch.tensor(named, dtype=torch.int64)
    claims = [integers(row) for row in world.gather(claim)]
    clauses = [_clause(rank, row) for rank, row in enumerate(claims) if row[0] >= 0]
    if not clauses:
        return None
    return TrainError(f"{place}: the {what} is not a finite number in {'; '.join(clauses)}", remedy=REMEDY)


def _clause(rank: int, row: list[int]) -> str:
    ids = ", ".join(str(i) for i in row[2:] if i >= 0)
    more = f" and {row[1] - MAX_NAMED} more" if row[1] > MAX_NAMED else ""
    return f"micro-batch {row[0]} of rank {rank} (groups {ids}{more})"
