"""The other members of a gang, as the residencies meet them; a gang of one meets nobody."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ...core.clock import Clock, SystemClock
from .roll_call import RollCall, Store


@dataclass(frozen=True, slots=True)
class Peers:
    """Whom to agree with, and over what. Use `Peers.over` or `Peers.alone`."""

    ranks: tuple[int, ...]
    roll_call: RollCall | None
    clock: Clock

    @staticmethod
    def over(store: Store, rank: int, ranks: Collection[int], clock: Clock | None = None) -> Peers:
        """`store`: one that all members share, best with a prefix of its own."""
        chosen = clock or SystemClock()
        return Peers(tuple(sorted(ranks)), RollCall(store, rank, chosen), chosen)

    @staticmethod
    def alone(clock: Clock | None = None) -> Peers:
        return Peers((0,), None, clock or SystemClock())

    def meet(self, point: str, deadline: float, word: str = "") -> dict[int, str]:
        """See `RollCall.meet`."""
        return {0: word} if self.roll_call is None else self.roll_call.meet(point, self.ranks, deadline, word)

    def tell(self, where: str) -> None:
        """See `RollCall.tell`."""
        if self.roll_call is not None:
            self.roll_call.tell(where)
