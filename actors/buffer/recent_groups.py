"""Groups for people to read: the ones finished last, and a log of some groups of each step.

The groups finished last are bounded by count and by tokens; a few of every step come back from training with the
trainer's log-probs of their tokens. The log goes by telemetry to the monitor, which writes files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

import msgspec
import numpy as np

from ...core.activity import TelemetryBuffer
from ...core.clock import Clock
from ...core.errors import LedgerError
from ...core.messages import PutResult, RecentGroup
from ...core.samples import F32, Group, Sample, ScoredSample
from ..ledger.ledger import Ledger
from ..telemetry import group_text

MAX_GROUPS = 64
MAX_TOKENS = 1 << 20
"""Of all groups that are kept: about 20 MB."""
MAX_SCORED = 16
ANSWER_TOKENS = 1 << 18
"""Of all groups in one answer."""


class RecentGroups:
    """Newest first. What was left out is among them: it is what people want to see."""

    def __init__(self) -> None:
        self._finished: deque[RecentGroup] = deque()
        self._num_tokens = 0
        self._scored: list[RecentGroup] = []

    def add(self, group: Group, attempt: int, rollout: str, result: PutResult, wall_s: float) -> None:
        if result.outcome not in ("ready", "filtered"):
            return
        found = RecentGroup(
            group=group,
            outcome="kept" if result.outcome == "ready" else "left out",
            reason=result.reason,
            rollout=rollout,
            attempt=attempt,
            wall_s=wall_s,
        )
        self._finished.appendleft(found)
        self._num_tokens += _num_tokens(group)
        while len(self._finished) > MAX_GROUPS or (self._num_tokens > MAX_TOKENS and len(self._finished) > 1):
            self._num_tokens -= _num_tokens(self._finished.pop().group)

    def scored(self, scores: Iterable[ScoredSample], ledger: Ledger) -> None:
        """The trainer's log-probs of some samples of a step, which it bounds in number and tokens."""
        by_group: dict[int, dict[tuple[int, int], F32]] = {}
        for score in scores:
            by_group.setdefault(score.group_id, {})[score.index, score.branch] = score.logprobs
        for group_id, logprobs in by_group.items():
            found = next((f for f in self._finished if f.group.group_id == group_id), None)
            found = found or _from_ledger(ledger, group_id)
            if found is not None:
                fitted = tuple(
                    _fitting(sample, logprobs.get((sample.index, sample.branch))) for sample in found.group.samples
                )
                others = [f for f in self._scored if f.group.group_id != group_id]
                newest = msgspec.structs.replace(found, train_logprobs=fitted)
                self._scored = [newest, *others][:MAX_SCORED]

    def newest(self, num_groups: int, ledger: Ledger | None) -> tuple[RecentGroup, ...]:
        """At most so many, with where they are now, if that can be read: those that were finished last, then up to as
        many that the trainer has scored, so that a batch that is larger than the shelf does not hide them."""
        scored = self._scored[: num_groups // 2]
        known = {found.group.group_id for found in scored}
        fresh = (found for found in self._finished if found.group.group_id not in known)
        newest: list[RecentGroup] = []
        left = ANSWER_TOKENS
        for found in (*islice(fresh, num_groups - len(scored)), *scored):
            left -= _num_tokens(found.group)
            if left < 0 and newest:
                break
            row = None if ledger is None else ledger.find(found.group.group_id)
            if row is not None:
                found = msgspec.structs.replace(
                    found, reason=found.reason or row.reason, state=str(row.state), step=row.step
                )
            newest.append(found)
        return tuple(newest)


def _from_ledger(ledger: Ledger, group_id: int) -> RecentGroup | None:
    """One that was finished long before it was trained, or before the buffer was started again."""
    try:
        row = ledger.find(group_id)
        group = ledger.group(group_id)
    except LedgerError:  # given away since, or damaged: nothing that training depends on is looked at here
        return None
    return RecentGroup(group=group, outcome="kept", attempt=0 if row is None else row.attempt)


def _fitting(sample: Sample, logprobs: F32 | None) -> F32:
    """Empty where the trainer sent none, or sent those of another answer."""
    if logprobs is None or len(logprobs) != len(sample.response_ids):
        return np.zeros(0, dtype=np.float32)
    return logprobs


def _num_tokens(group: Group) -> int:
    return sum(sample.num_tokens for sample in group.samples)


class SampleLog:
    """Some groups of each step: some that were trained on, some that the filter left out."""

    def __init__(self, telemetry: TelemetryBuffer, clock: Clock, per_step: int) -> None:
        """`per_step`: groups of each step, at most half of them left out by the filter; 0: none."""
        self._telemetry = telemetry
        self._clock = clock
        self._per_step = per_step
        self._step = -1
        self._num_left_out = 0

    def left_out(self, group: Group, step: int, reason: str, rollout: str) -> None:
        """A finished group is not trained on; at once, since a run that keeps none makes no step."""
        if step != self._step:
            self._step, self._num_left_out = step, 0
        if self._num_left_out < self._per_step // 2:
            self._num_left_out += 1
            self._tell(group, step, "filtered", rollout, reason)

    def num_wanted(self, step: int) -> int:
        return self._per_step - (self._num_left_out if step == self._step else 0)

    def trained(self, groups: Iterable[Group], step: int) -> None:
        for group in groups:
            self._tell(group, step, "kept", "")

    def _tell(self, group: Group, step: int, outcome: str, rollout: str, reason: str = "") -> None:
        wall_s = self._clock.wall()
        source = rollout or self._telemetry.source
        self._telemetry.sample(
            group_text(group, step=step + 1, outcome=outcome, wall_s=wall_s, source=source, reason=reason)
        )
