"""What the leader of the switching benchmark and its stand-ins say to each other, besides the manager's protocol.

No torch: the leader's process has none.
"""

from __future__ import annotations

from typing import Literal

from myxa.actors.contracts.memory import TenantContract
from myxa.core.device_memory import Tag, TagPolicy
from myxa.core.handlers import call
from myxa.core.messages import Record

WorkKind = Literal[
    "setup", "mode", "step", "baseline", "generate", "load", "digest", "rates", "residue", "pause", "resume"
]
POLICIES: dict[Tag, TagPolicy] = {
    "params": "rematerialise", "grads": "discard", "optimizer": "backup", "workspace": "discard",
    "weights": "discard", "kv_cache": "discard",
}  # fmt: skip
MANAGER = "memory/0"


class WorkOrder(Record, frozen=True, kw_only=True):
    """What the leader has a stand-in do besides memory commands."""

    kind: WorkKind
    amount: float = 0.0
    """step, baseline: micro-batches; generate: seconds; load: version."""
    overlap: bool = False
    """mode: begin steps before the optimizer is there, and copy it out as soon as it is written."""


class WorkDone(Record, frozen=True, kw_only=True):
    """Figures of it; times are of the host's monotonic clock."""

    values: dict[str, float] = {}
    digest: tuple[int, ...] = ()


class StandInContract(TenantContract):
    """A tenant that also works on orders."""

    @call(deadline=300, reentrant=True)
    async def work(self, order: WorkOrder) -> WorkDone:
        raise NotImplementedError
