"""Communicators that the owner destroys and makes again: the last resort, for groups that no proxy stands before.

Every group object is a new one afterwards, so only an owner that keeps no group anywhere else can do this (Megatron:
`destroy_model_parallel`, `destroy_process_group`, `init_process_group`, `initialize_model_parallel`).
"""

from __future__ import annotations

from collections.abc import Callable

from .deadline import within
from .epochs import EpochGate, GateState
from .peers import Peers
from .residency import CommStats, ResidencyKind

ABORT_S = 10.0


class RebuildComms:
    """CommResidency by two callbacks. Methods block."""

    def __init__(
        self, destroy: Callable[[int], None], make: Callable[[int], int], peers: Peers, *, num_groups: int = 0
    ) -> None:
        """`destroy(epoch)` ends all groups; `make(epoch)` makes them (under a prefix of the epoch in the store: old
        keys must not be met) and returns how many. `num_groups`: how many there are now."""
        self._destroy = destroy
        self._make = make
        self._peers = peers
        self._gate = EpochGate()
        self._num_groups = num_groups

    @property
    def kind(self) -> ResidencyKind:
        return "rebuild"

    def stats(self) -> CommStats:
        num_live = self._num_groups if self._gate.state == "live" else 0
        return CommStats(kind="rebuild", epoch=self._gate.newest, num_groups=self._num_groups, num_live=num_live)

    def release(self, epoch: int, timeout_s: float) -> CommStats:
        """Destroy, once all members have come."""
        if self._gate.asked("release", epoch) == "done":
            self._gate.became("released", epoch)
            return self.stats()
        self._step("destroy", "released", epoch, timeout_s, lambda: self._destroy(epoch))
        return self.stats()

    def restore(self, epoch: int, timeout_s: float) -> CommStats:
        """Make, once all members have come."""
        if self._gate.asked("restore", epoch) == "done" or self._gate.state == "live":
            self._gate.became("live", epoch)
            return self.stats()

        def make() -> None:
            self._num_groups = self._make(epoch)

        self._step("make", "live", epoch, timeout_s, make)
        return self.stats()

    def abort(self) -> None:
        """Destroy without asking anybody."""
        newest = self._gate.newest
        self._gate.became("broken", newest)
        within(ABORT_S, lambda: "destroying all groups", lambda: self._destroy(newest))

    def _step(self, word: str, state: GateState, epoch: int, timeout_s: float, work: Callable[[], None]) -> None:
        deadline = self._peers.clock.monotonic() + timeout_s
        self._peers.meet(f"{word} under epoch {epoch}", deadline)
        try:
            left_s = deadline - self._peers.clock.monotonic()
            within(left_s, lambda: f"the owner's callback to {word} all groups under epoch {epoch}", work)
        except BaseException:
            self._gate.became("broken", epoch)
            self._peers.tell(f"broken under epoch {epoch}")
            raise
        self._gate.became(state, epoch)
        self._peers.tell(f"{state} under epoch {epoch}")
