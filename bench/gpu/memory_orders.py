"""What the leader of the switching benchmark and its stand-ins say to each other, besides the manager's protocol.

No torch: the leader's process has none.
"""

from __future__ import annotations

from typing import Literal

from myxa.actors.contracts import TenantContract
from myxa.core.device_memory import OPTIMIZER_PARTS, Tag, TagPolicy
from myxa.core.handlers import call
from myxa.core.messages import Record

WorkKind = Literal[
    "setup", "mode", "step", "baseline", "generate", "load", "digest", "rates", "residue", "pause", "resume"
]
TRAINER_TAGS: tuple[Tag, ...] = ("params", "grads", "masters", *OPTIMIZER_PARTS, "workspace")
ENGINE_TAGS: tuple[Tag, ...] = ("weights", "kv_cache")
COPIED = frozenset[Tag](("masters", *OPTIMIZER_PARTS))
POLICIES: dict[Tag, TagPolicy] = {
    "params": "rematerialise", "grads": "discard", "workspace": "discard", "weights": "discard", "kv_cache": "discard",
    **dict.fromkeys(COPIED, "backup"),
}  # fmt: skip
MANAGER = "memory/0"


class WorkOrder(Record, frozen=True, kw_only=True):
    """What the leader has a stand-in do besides memory commands."""

    kind: WorkKind
    amount: float = 0.0
    """step, baseline: micro-batches; generate: seconds; load: version."""
    overlap: bool = False
    """mode: begin steps before the moments are there, and copy out what leaves as soon as it is written."""


class WorkDone(Record, frozen=True, kw_only=True):
    """Figures of it; times are of the host's monotonic clock."""

    values: dict[str, float] = {}
    digest: tuple[int, ...] = ()


class StandInContract(TenantContract):
    """A tenant that also works on orders."""

    @call(deadline=300, reentrant=True)
    async def work(self, order: WorkOrder) -> WorkDone:
        raise NotImplementedError
