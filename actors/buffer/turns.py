"""Whose turn it is: what an actor that asks for work may get, and in one word why it gets none.

Writes nothing, dispatches nothing. Knows ledger, admission and suspects by what they tell; must not know prompts'
content, messages' ways or what becomes of a group that is given away.
"""

from __future__ import annotations

from collections import Counter

from ...algos.staleness import Admission
from ...core.messages import DrawBlock, DrawRequest
from ..ledger.ledger import Ledger
from ..ledger.states import Row, State
from .cursor import PromptCursor
from .settings import LiveSettings
from .shares import Shares
from .suspects import Suspects


class Turns:
    """See the module's head. One per buffer."""

    def __init__(
        self,
        ledger: Ledger,
        admission: Admission,
        settings: LiveSettings,
        cursor: PromptCursor,
        suspects: Suspects,
        shares: Shares,
        reattach_until_s: float,
    ) -> None:
        """`reattach_until_s`: so long a group waits for the actor that may still have it in hand."""
        self._ledger = ledger
        self._admission = admission
        self._settings = settings
        self._cursor = cursor
        self._suspects = suspects
        self._reattach_until_s = reattach_until_s
        self._shares = shares

    @property
    def may_draw(self) -> bool:
        """Is there, or may there come, a prompt that nobody has got?"""
        return not self._settings.is_stopping and self._cursor.has_next

    @property
    def wants_new(self) -> bool:
        """Whether any of those is to be drawn now."""
        return not self._settings.is_stopping and not self._has_enough

    @property
    def is_open(self) -> bool:
        """Whether work is given away at all."""
        return self._settings.serves(self._ledger.next_step)

    def turn(self, request: DrawRequest, version: int, now_s: float) -> tuple[list[Row], int]:
        """Groups handed back that this actor may get, and how many groups in all."""
        rollout, rows = request.rollout, self._handed_back(request, now_s)
        if not self._suspects:  # every look of every draw that waits comes by here
            return rows, request.max_groups
        waiting = {row.group_id: row for row in self._dispatchable(rows, version)}
        holding = {row.group_id for row in self._ledger.rows(State.DISPATCHED) if row.rollout == rollout}
        holding.update(request.holding or ())
        actor = (rollout, request.epoch)
        allowed, max_groups = self._suspects.turn(actor, holding, list(waiting), request.max_groups, now_s)
        return [waiting[group_id] for group_id in allowed], max_groups

    def num_new(self, request: DrawRequest, now_s: float) -> int:
        """Groups that this actor may begin, as far as others are owed some; how many in all is for admission to say."""
        num_free = max(0, self._admission.slots_total - self._admission.slots_used)
        return self._shares.limit(request.rollout, request.room or request.max_groups, num_free, self._held, now_s)

    def why_none(self, request: DrawRequest, version: int, now_s: float) -> DrawBlock:
        """Why an engine that serves `version` got nothing just now."""
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
        """Paused, but for some steps: is all that they need drawn?"""
        if (until := self._settings.until_step) is None:
            return False
        return self._admission.num_open >= (until - self._ledger.next_step) * self._admission.batch_size

    def _held(self) -> Counter[str]:
        """Groups in hand, by rollout actor."""
        return Counter(row.rollout for row in self._ledger.rows(State.DISPATCHED))

    def _dispatchable(self, rows: list[Row], version: int) -> list[Row]:
        return [row for row in rows if self._admission.may_dispatch(version, row.group_id)]

    def _handed_back(self, request: DrawRequest, now_s: float) -> list[Row]:
        """Groups that are not kept for another actor, which may have them in hand still."""
        rows, is_late = self._ledger.rows(State.REQUEUED), now_s >= self._reattach_until_s
        return [row for row in rows if is_late or row.rollout in ("", request.rollout)]
