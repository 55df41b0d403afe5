"""How many new groups each rollout actor may take while others wait for some too.

Slots come back a whole step at a time, and to whichever engine adopts the step's weights first; where it has room for
all of them, the others would get none, step after step. So what those who wait are owed stays for them: as many as
bring everybody to the same number of groups in hand. Whoever is quicker still does more, for his are finished sooner.

An engine that does not follow holds nobody up for long: what is kept for it is free again after `OWED_S`, until it
follows or is given something. Pure: no ledger, no actor, time is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

OWED_S = 15.0
"""How long new groups are kept for an actor that waits while its engine is behind the newest weights."""


@dataclass(slots=True)
class _Waiting:
    """An actor whose draw is held."""

    room: int
    """Groups that it could take; 0: it takes none now, and is only remembered."""
    owed_since_s: float | None = None
    """When something was first kept for it that it did not take."""

    def is_over(self, now_s: float) -> bool:
        """Whether it had its time."""
        return self.owed_since_s is not None and now_s >= self.owed_since_s + OWED_S


class Shares:
    """See the module's head. One per buffer."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Waiting] = {}

    def waits(self, rollout: str, room: int) -> None:
        """Its draw is held until there is something for it. What it is owed since goes on from an earlier draw."""
        known = self._waiting.get(rollout)
        self._waiting[rollout] = _Waiting(room, known.owed_since_s if known else None)

    def leaves(self, rollout: str) -> None:
        """Its draw is held no longer; it may ask again."""
        if rollout in self._waiting:
            self._waiting[rollout].room = 0

    def follows(self, rollout: str) -> None:
        """Its engine serves another version: it may take what it is owed."""
        if rollout in self._waiting:
            self._waiting[rollout].owed_since_s = None

    def served(self, rollout: str) -> None:
        """It was given something, or is gone."""
        self._waiting.pop(rollout, None)

    def limit(self, rollout: str, room: int, num_free: int, held: Callable[[], Mapping[str, int]], now_s: float) -> int:
        """New groups that `rollout`, which has `room` for so many, may take of `num_free`; `held` tells the groups in
        hand, by actor."""
        others = self._others(rollout, now_s)
        if not others or num_free < 1:
            return num_free
        in_hand = held()
        wanted = [(in_hand.get(name, 0), each.room) for name, each in others.items()]
        level = _level([*wanted, (in_hand.get(rollout, 0), room)], num_free)
        num_kept = 0
        for name, each in others.items():
            owed = _fill(in_hand.get(name, 0), each.room, level)
            if owed and each.owed_since_s is None:
                each.owed_since_s = now_s
            num_kept += owed
        return num_free - num_kept

    def next_change_s(self, rollout: str, now_s: float) -> float | None:
        """When something that is kept for others becomes free for `rollout`; None: nothing is kept."""
        since = [each.owed_since_s for each in self._others(rollout, now_s).values()]
        return min((at_s + OWED_S for at_s in since if at_s is not None), default=None)

    def _others(self, rollout: str, now_s: float) -> dict[str, _Waiting]:
        """For whom something is kept, if they have less than `rollout`."""
        return {
            name: each
            for name, each in self._waiting.items()
            if each.room and name != rollout and not each.is_over(now_s)
        }


def _fill(in_hand: int, room: int, level: int) -> int:
    """Groups that bring an actor to the level, as far as it has room."""
    return min(room, max(0, level - in_hand))


def _level(wanted: Sequence[tuple[int, int]], num_free: int) -> int:
    """The highest level to which `num_free` groups bring everybody; what they leave over is whose who comes first."""
    low, high = 0, max(in_hand for in_hand, _ in wanted) + num_free + 1
    while high - low > 1:
        middle = (low + high) // 2
        if sum(_fill(in_hand, room, middle) for in_hand, room in wanted) <= num_free:
            low = middle
        else:
            high = middle
    return low
