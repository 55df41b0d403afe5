"""The groups that were finished last, kept for people who want to look at samples. Bounded by count and by tokens.

Knows groups and where the ledger says they are. Must not know who looks.
"""

from __future__ import annotations

from collections import deque

from ...core.messages import PutResult, RecentGroup
from ...core.samples import Group
from ..ledger.ledger import Ledger

MAX_GROUPS = 64
MAX_TOKENS = 1 << 20
"""Of all groups that are kept: about 20 MB."""
ANSWER_TOKENS = 1 << 18
"""Of all groups in one answer."""


class RecentGroups:
    """Newest first. What was left out is among them: it is what people want to see."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._found: deque[RecentGroup] = deque()
        self._num_tokens = 0

    def add(self, group: Group, attempt: int, rollout: str, result: PutResult, wall_s: float) -> None:
        """A finished group arrived, and this became of it."""
        if result.outcome not in ("ready", "filtered"):
            return
        found = RecentGroup(
            group=group,
            outcome="kept" if result.outcome == "ready" else "left out",
            reason=result.reason,
            rollout=rollout,
            attempt=attempt,
            wall_s=wall_s,
            state="",
            step=-1,
        )
        self._found.appendleft(found)
        self._num_tokens += _num_tokens(group)
        while len(self._found) > MAX_GROUPS or (self._num_tokens > MAX_TOKENS and len(self._found) > 1):
            self._num_tokens -= _num_tokens(self._found.pop().group)

    def newest(self, num_groups: int) -> tuple[RecentGroup, ...]:
        """At most so many, with where they are now."""
        told: list[RecentGroup] = []
        left = ANSWER_TOKENS
        for found in self._found:
            left -= _num_tokens(found.group)
            if len(told) >= num_groups or (left < 0 and told):
                break
            told.append(self._now(found))
        return tuple(told)

    def _now(self, found: RecentGroup) -> RecentGroup:
        row = self._ledger.find(found.group.group_id)
        if row is None:
            return found
        return RecentGroup(
            group=found.group,
            outcome=found.outcome,
            reason=found.reason or row.reason,
            rollout=found.rollout,
            attempt=found.attempt,
            wall_s=found.wall_s,
            state=str(row.state),
            step=row.step,
        )


def _num_tokens(group: Group) -> int:
    return sum(sample.num_tokens for sample in group.samples)
