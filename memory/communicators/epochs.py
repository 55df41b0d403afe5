"""What an order to release or restore means for one process: do it, it is done already, or refuse it. No IO.

live --release(e)--> released --restore(e' > e)--> live
any --failed--> broken --restore(e' > newest)--> live
"""

from __future__ import annotations

from typing import Literal

from ...core.errors import MemoryFault

GateState = Literal["live", "released", "broken"]
Answer = Literal["do", "done"]

_ON_SAME_EPOCH: dict[tuple[str, GateState], Answer | None] = {
    ("release", "live"): "do",
    ("release", "released"): "done",
    ("release", "broken"): "do",
    ("restore", "live"): "done",
    ("restore", "released"): None,
    ("restore", "broken"): None,
}
"""What is answered to an order under the newest epoch seen; None: it needs a newer one."""


class EpochGate:
    """Which epoch the communicators of this process are in, and whether they may be used."""

    def __init__(self) -> None:
        self.newest = 0
        self.state: GateState = "live"

    def asked(self, order: Literal["release", "restore"], epoch: int) -> Answer:
        """What to do about an order; MemoryFault when it comes too late or too early."""
        if epoch < self.newest:
            raise MemoryFault(
                f"{order} of communicators under epoch {epoch}, but epoch {self.newest} was seen",
                remedy="the order is a late one and has no effect",
            )
        if epoch > self.newest:
            return "done" if order == "release" and self.state == "released" else "do"
        answer = _ON_SAME_EPOCH[order, self.state]
        if answer is None:
            raise MemoryFault(
                f"restore of communicators under epoch {epoch}, under which they were released",
                remedy="members could not tell the two lives of a group apart: restore under a newer epoch",
            )
        return answer

    def became(self, state: GateState, epoch: int) -> None:
        """An order was carried out (or failed half way: "broken")."""
        self.state = state
        self.newest = max(self.newest, epoch)
