"""Finished, interrupted and failed groups on their way back to the buffer, which may be restarting meanwhile.

Knows the buffer's contract and the budget of errors; must not know engines or how a group is made.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ...core.activity import TelemetryBuffer
from ...core.chaos import reached
from ...core.clock import Clock
from ...core.errors import EngineError, MyxaError, UserCodeError
from ...core.messages import Assignment, GroupDropped, GroupReturned
from ...core.patience import until_answered
from ...core.samples import Group, Prompt, Sample
from ..contracts.roles import BufferContract
from ..rewards.error_budget import GroupBudget
from .gauges import GroupCounts
from .group_runner import Partial, drop_reason
from .judging import PooledScorer

R = TypeVar("R")


class GroupHandover:
    """One rollout actor's way to the buffer."""

    def __init__(
        self,
        name: str,
        buffer: BufferContract,
        *,
        scorer: PooledScorer,
        max_error_rate: float,
        max_outage_s: float,
        telemetry: TelemetryBuffer,
        clock: Clock,
        log: logging.Logger,
    ) -> None:
        """`max_error_rate`: share of groups that may be lost to the workflow or the engine. `max_outage_s`: for so long
        all of them may be lost to their environments."""
        self._name = name
        self._buffer = buffer
        self._scorer = scorer
        self._budget = GroupBudget(max_error_rate, max_outage_s)
        self._telemetry = telemetry
        self._clock = clock
        self._log = log
        self.counts = GroupCounts()
        self._broke: EngineError | None = None
        """What a group was failed with since that was judged last."""
        scorer.listen(self._tell)

    def _tell(self, kind: str, text: str) -> None:
        self._log.warning("%s: %s", kind, text)
        self._telemetry.event(kind, text)

    def allow(self, max_error_rate: float) -> None:
        """Another share of lost groups, and of failed reward calls, from now on."""
        self._budget.max_rate = max_error_rate
        self._scorer.allow(max_error_rate)

    async def deliver(self, group: Group, attempt: int) -> None:
        """A finished group."""
        self._budget.note(None)
        reached("rollout.put")
        result = await self._ask(lambda: self._buffer.put_group(group, attempt, self._name))
        if result.outcome not in ("ready", "filtered"):
            self._log.info("group %d: %s %s", group.group_id, result.outcome, result.reason)
        self.counts.num_groups += 1

    async def give_back(self, assignment: Assignment, partial: Partial) -> None:
        """A group to be continued elsewhere."""
        returned = GroupReturned(
            group_id=assignment.prompt.group_id,
            attempt=assignment.attempt,
            rollout=self._name,
            partial=partial.samples,
            has_died=partial.cause is not None,
        )
        await self._ask(lambda: self._buffer.return_group(returned))

    async def save(self, assignment: Assignment, samples: tuple[Sample, ...]) -> None:
        """Tell what there is of a group that goes on here. Raises CallError when the buffer does not
        hear, DiskRefused when it cannot keep them."""
        await self._buffer.return_group(
            GroupReturned(
                group_id=assignment.prompt.group_id,
                attempt=assignment.attempt,
                rollout=self._name,
                partial=samples,
                goes_on=True,
            )
        )

    def note_break(self, assignment: Assignment, partial: Partial) -> None:
        """The engine failed a group, which goes on elsewhere."""
        self._broke = partial.cause
        self.counts.num_breaks += 1
        num_tokens = sum(int(sample.response_ids.size) for sample in partial.samples)
        text = f"group {assignment.prompt.group_id} goes on elsewhere with {num_tokens} tokens: {partial.cause}"
        self._log.error("group-broken: %s", text)
        self._telemetry.event("group-broken", text)

    def judge_breaks(self) -> None:
        """The engine lives on after it failed some groups at a time, which counts as one. Raises what the budget raises
        when that comes too often: then it is the engine."""
        broke, self._broke = self._broke, None
        if broke is not None:
            self._budget.note(broke)

    async def drop(self, assignment: Assignment, err: MyxaError) -> None:
        """A group that failed. Raises UserCodeError or what the budget raises when too many did."""
        self.counts.num_errors += 1
        prompt: Prompt = assignment.prompt
        self._log.error("group %d (row %d) dropped: %s", prompt.group_id, prompt.row, err)
        self._telemetry.event("group-dropped", f"group {prompt.group_id}: {err}")
        dropped = GroupDropped(
            group_id=prompt.group_id,
            attempt=assignment.attempt,
            rollout=self._name,
            reason=drop_reason(err),
            detail=str(err)[:2000],
        )
        await self._ask(lambda: self._buffer.drop_group(dropped))
        if text := self._scorer.too_many_errors:
            raise UserCodeError(text.removesuffix(f" -- {err.remedy}"), remedy=err.remedy)
        self._budget.note(err, self._clock.monotonic())

    async def _ask(self, send: Callable[[], Awaitable[R]]) -> R:
        """Keyed or idempotent calls, repeated while the buffer is restarting: the group in hand must not be lost."""
        return await until_answered(send, who="buffer", clock=self._clock, log=self._log)
