"""What an actor that asks for work may get, and in one word why it gets none.

It writes nothing and dispatches nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...algos.staleness import Admission
from ...core.messages import DrawBlock, DrawRequest
from ..ledger.ledger import Ledger
from ..ledger.states import Row, State
from .cursor import PromptCursor
from .knobs import LiveSettings
from .quarantine import PoisonTracker

RESERVED_S = 15.0
"""How long new groups are kept for an actor that waits while its engine is behind the newest weights."""


class DispatchQueue:
    """What an actor that asks for work may get. One per buffer."""

    def __init__(
        self,
        ledger: Ledger,
        admission: Admission,
        settings: LiveSettings,
        cursor: PromptCursor,
        poison: PoisonTracker,
        shares: FairShare,
        reattach_until_s: float,
    ) -> None:
        """`reattach_until_s`: until then a group waits for the actor that may still run it."""
        self._ledger = ledger
        self._admission = admission
        self._settings = settings
        self._cursor = cursor
        self._poison = poison
        self._reattach_until_s = reattach_until_s
        self._shares = shares

    @property
    def may_draw(self) -> bool:
        return not self._settings.is_stopping and self._cursor.has_next

    @property
    def wants_new(self) -> bool:
        return not self._settings.is_stopping and not self._has_enough

    @property
    def is_open(self) -> bool:
        return self._settings.serves(self._ledger.next_step)

    def turn(self, request: DrawRequest, version: int, now_s: float) -> tuple[list[Row], int]:
        """Groups handed back that this actor may get, and how many groups in all."""
        rollout, rows = request.rollout, self._handed_back(request, now_s)
        if not self._poison:  # every look of every draw that waits comes by here
            return rows, request.max_groups
        waiting = {row.group_id: row for row in self._dispatchable(rows, version)}
        holding = {row.group_id for row in self._ledger.rows(State.DISPATCHED) if row.rollout == rollout}
        holding.update(request.holding or ())
        actor = (rollout, request.epoch)
        allowed, max_groups = self._poison.turn(actor, holding, list(waiting), request.max_groups, now_s)
        return [waiting[group_id] for group_id in allowed], max_groups

    def num_new(self, request: DrawRequest, now_s: float) -> int:
        """Groups that this actor may begin beside the reserved shares of others. Admission bounds the sum of all."""
        num_free = max(0, self._admission.slots_total - self._admission.slots_used)
        return self._shares.limit(request.rollout, request.room or request.max_groups, num_free, self._held, now_s)

    def why_none(self, request: DrawRequest, version: int, now_s: float) -> DrawBlock:
        if not self.is_open or self._has_enough:
            return "paused"
        allowed, max_groups = self.turn(request, version, now_s)
        handed_back = self._handed_back(request, now_s)
        if not max_groups:
            return "suspect"
        if not self.may_draw or self._cursor.is_waiting:
            if not handed_back:
                return "data-exhausted"
            if not allowed and self._dispatchable(handed_back, version):  # for others: its engine is in doubt
                return "suspect"
        newest = self._admission.newest_version
        return "weights" if version < newest and self._admission.may_dispatch(newest) else "staleness"

    @property
    def _has_enough(self) -> bool:
        if (until := self._settings.until_step) is None:
            return False
        return self._admission.num_open >= (until - self._ledger.next_step) * self._admission.batch_size

    def _held(self) -> Counter[str]:
        return Counter(row.rollout for row in self._ledger.rows(State.DISPATCHED))

    def _dispatchable(self, rows: list[Row], version: int) -> list[Row]:
        return [row for row in rows if self._admission.may_dispatch(version, row.group_id)]

    def _handed_back(self, request: DrawRequest, now_s: float) -> list[Row]:
        """Groups that are not kept for another actor, which may run them still."""
        rows, is_late = self._ledger.rows(State.REQUEUED), now_s >= self._reattach_until_s
        return [row for row in rows if is_late or row.rollout in ("", request.rollout)]


class FairShare:
    """How many new groups each rollout actor may take while others wait for some too. Pure: time is passed in.

    Slots come back a whole step at a time, and to the engine that adopts the step's weights first; where it has room
    for all of them, the others would get none, step after step. So each waiting actor has a reserved share: as many
    groups as bring all actors to the same number of groups that they run. A quicker actor still does more, for its
    groups are finished sooner.

    The share of an engine that does not follow the weights is free again after `RESERVED_S`, until it follows or gets
    a group."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Waiting] = {}

    def waits(self, rollout: str, room: int) -> None:
        """Its draw is held until there is something for it. Its reserved share counts from an earlier draw on."""
        known = self._waiting.get(rollout)
        self._waiting[rollout] = _Waiting(room, known.reserved_since_s if known else None)

    def leaves(self, rollout: str) -> None:
        if rollout in self._waiting:
            self._waiting[rollout].room = 0

    def follows(self, rollout: str) -> None:
        """Its engine serves another version: it may take its reserved share."""
        if rollout in self._waiting:
            self._waiting[rollout].reserved_since_s = None

    def served(self, rollout: str) -> None:
        """It was given something, or is gone."""
        self._waiting.pop(rollout, None)

    def limit(self, rollout: str, room: int, num_free: int, held: Callable[[], Mapping[str, int]], now_s: float) -> int:
        """New groups that `rollout`, which has `room` for so many, may take of `num_free`. `held`: the groups that each
        actor runs."""
        others = self._others(rollout, now_s)
        if not others or num_free < 1:
            return num_free
        running = held()
        wanted = [(running.get(name, 0), each.room) for name, each in others.items()]
        level = _level([*wanted, (running.get(rollout, 0), room)], num_free)
        num_kept = 0
        for name, each in others.items():
            num_reserved = _fill(running.get(name, 0), each.room, level)
            if num_reserved and each.reserved_since_s is None:
                each.reserved_since_s = now_s
            num_kept += num_reserved
        return num_free - num_kept

    def next_change_s(self, rollout: str, now_s: float) -> float | None:
        """When something that is kept for others becomes free for `rollout`; None: nothing is kept."""
        since = [each.reserved_since_s for each in self._others(rollout, now_s).values()]
        return min((at_s + RESERVED_S for at_s in since if at_s is not None), default=None)

    def _others(self, rollout: str, now_s: float) -> dict[str, _Waiting]:
        """For whom something is kept, if they have less than `rollout`."""
        return {
            name: each
            for name, each in self._waiting.items()
            if each.room and name != rollout and not each.is_over(now_s)
        }


@dataclass(slots=True)
class _Waiting:
    """An actor whose draw is held."""

    room: int
    """Groups that it could take; 0: it takes none now, and is only remembered."""
    reserved_since_s: float | None = None
    """When something was first kept for it that it did not take."""

    def is_over(self, now_s: float) -> bool:
        return self.reserved_since_s is not None and now_s >= self.reserved_since_s + RESERVED_S


def _fill(running: int, room: int, level: int) -> int:
    return min(room, max(0, level - running))


def _level(wanted: Sequence[tuple[int, int]], num_free: int) -> int:
    """The highest level to which `num_free` groups bring everybody; what they leave over is whose who comes first."""
    low, high = 0, max(running for running, _ in wanted) + num_free + 1
    while high - low > 1:
        middle = (low + high) // 2
        if sum(_fill(running, room, middle) for running, room in wanted) <= num_free:
            low = middle
        else:
            high = middle
    return low
