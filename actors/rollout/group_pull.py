"""A rollout actor's groups: drawn from the buffer while there is room, run, and returned to the buffer.

The room may change while groups run: with less room what runs ends as usual, and work on its way is returned at once.

Tokens outlive the engine: a group whose stream broke is returned with its tokens; all groups are returned before this
actor drops its engine; and long groups are copied to the buffer from time to time, in case the actor is killed.
`GroupHandover` returns groups, also while the buffer restarts, and counts failures against the budget of errors.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from ...core.activity import TelemetryBuffer
from ...core.actor import ActorContext
from ...core.clock import Clock
from ...core.errors import CallError, DiskRefused, EngineError, MyxaError, UserCodeError
from ...core.messages import Assignment, DrawBlock, DrawRequest, GroupDropped, GroupReturned
from ...core.retry import until_answered
from ...core.samples import Group, Prompt, Sample
from ..contracts import BufferContract
from ..rewards.guard import GroupBudget
from ..weights.engine_versions import ServedWeights
from .gauges import GroupCounts, RolloutTime
from .group_runner import GroupRunner, Partial, drop_reason
from .judging import PooledScorer

POLL_S = 5.0
"""Long poll for work: the buffer holds a draw that long at most."""
RETRY_S = 0.2
"""Pause after a call that failed because its callee is being restarted."""
LOSS_S = 1.0
"""Nothing is drawn for so long after a stream broke: an engine that is lost ends this actor within that time."""
HAND_BACK_S = 2.0
"""For handing all groups back before this actor fails."""
SAVING_SHARE = 0.05
"""Largest share of its time that goes into saving tokens: the more there are, the less often they are saved."""
DRAW_AT_ONCE = 8
"""Groups taken by one draw: small bites share the slots among engines that ask at the same time."""


class GroupPull:
    """The groups of one rollout actor. Made on its loop."""

    def __init__(
        self,
        ctx: ActorContext,
        buffer: BufferContract,
        handover: GroupHandover,
        time: RolloutTime,
        *,
        max_groups: int,
        save_s: float = 0.0,
    ) -> None:
        """`max_groups`: in flight at most. `save_s`: how often tokens so far are sent to the buffer; 0: never."""
        self._ctx = ctx
        self._buffer = buffer
        self._handover = handover
        self._time = time
        self.max_groups = max_groups
        self._save_s = save_s
        self._runner: GroupRunner | None = None
        self._in_flight: dict[int, asyncio.Task[None]] = {}
        self._assignments: dict[int, Assignment] = {}
        self._num_saved: dict[int, int] = {}
        """Tokens of a group that the buffer has."""
        self._broke_s = -LOSS_S
        self._room = asyncio.Event()
        self._blocked_by: DrawBlock = ""
        self.is_draining = False
        """Nothing new is taken; there is no way back."""
        self.num_samples = 0
        """Of the group that was taken last."""
        self._note_load()

    @property
    def num_groups(self) -> int:
        return len(self._in_flight)

    def resize(self, max_groups: int) -> None:
        """Room for so many groups from now on; what runs already runs to its end."""
        self.max_groups = max_groups
        self._note_load()
        self._room.set()

    async def run(self, runner: GroupRunner, serves: Callable[[], ServedWeights]) -> None:
        """Until it has to drain. Never gives up on a buffer that is being restarted. `serves`: what is served now."""
        self._time.begin()
        self._runner = runner
        if self._save_s:
            self._ctx.spawn(self._save_forever(runner), name="save-partials")
        while not self.is_draining:
            while (left_s := self._broke_s + LOSS_S - self._ctx.clock.monotonic()) > 0:
                await asyncio.sleep(left_s)
            await self._judge()
            free = self.max_groups - len(self._in_flight)
            if free <= 0:
                self._room.clear()
                await self._room.wait()
                continue
            weights = serves()
            request = DrawRequest(
                rollout=self._ctx.name,
                epoch=self._ctx.epoch,
                version=weights.version,
                lineage=weights.lineage,
                max_groups=min(free, DRAW_AT_ONCE),
                room=free,
                wait_s=POLL_S,
                holding=tuple(self._in_flight),
                blocked_by=self._blocked_by,
            )
            try:
                reply = await self._buffer.draw(request)
            except (CallError, DiskRefused) as err:
                self._ctx.log.warning("draw: %s", err)
                await asyncio.sleep(RETRY_S)
                continue
            self._blocked_by = reply.blocked_by
            self._time.blocked(reply.blocked_by)
            for assignment in reply.assignments:
                await self._take(assignment, runner)
            if reply.blocked_by == "finished":
                await asyncio.sleep(RETRY_S)

    async def _judge(self) -> None:
        """An engine that failed too many groups is given up as one that is lost: with their tokens. Raises why."""
        try:
            self._handover.judge_breaks()
        except EngineError as err:
            num_groups = await self.hand_back(err)
            self._ctx.log.warning("the engine is given up, %d groups go elsewhere: %s", num_groups, err)
            raise

    async def _take(self, assignment: Assignment, runner: GroupRunner) -> None:
        group_id = assignment.prompt.group_id
        if group_id in self._in_flight:
            self._ctx.log.warning("group %d was assigned twice; the second is ignored", group_id)
            return
        if self.is_draining or len(self._in_flight) >= self.max_groups:  # the room went while the draw was under way
            await self._handover.give_back(assignment, Partial(assignment.partial))
            return
        self.num_samples = assignment.num_samples
        self._assignments[group_id] = assignment
        self._num_saved[group_id] = _num_tokens(assignment.partial)
        self._in_flight[group_id] = self._ctx.spawn(self._run_group(assignment, runner), name=f"group-{group_id}")
        self._note_load()

    async def _run_group(self, assignment: Assignment, runner: GroupRunner) -> None:
        """One group from assignment to the buffer's answer. Only a broken error budget or engine ends the actor."""
        try:
            group = await runner.run(assignment)
            await self._handover.deliver(group, assignment.attempt)
        except Partial as partial:
            # Another actor continues, with the tokens so far. The buffer, which knows the other attempts, judges
            # whether this group breaks engine after engine.
            if partial.cause is not None:
                self._broke_s = self._ctx.clock.monotonic()
                self._handover.note_break(assignment, partial)
            await self._handover.give_back(assignment, partial)
        except MyxaError as err:
            if isinstance(err, CallError):
                raise
            await self._handover.drop(assignment, err)
        finally:
            for known in (self._in_flight, self._assignments, self._num_saved):
                known.pop(assignment.prompt.group_id, None)
            self._note_load()
            self._room.set()

    async def hand_back(self, cause: EngineError | None = None) -> int:
        """Return all groups with their tokens, since this actor is about to fail; returns how many. `cause`: the engine
        failed, perhaps because of one of them. Takes `HAND_BACK_S` at most: a group that does not get through continues
        from the tokens saved before."""
        self.is_draining = True
        num_groups = 0
        try:
            async with asyncio.timeout(HAND_BACK_S):
                for group_id, assignment in list(self._assignments.items()):
                    task = self._in_flight.get(group_id)
                    if task is None or self._runner is None or not self._runner.has(group_id):
                        continue  # it is on its way to the buffer already
                    samples = self._runner.so_far(group_id)
                    task.cancel()
                    await self._handover.give_back(assignment, Partial(samples, cause))
                    num_groups += 1
                if self._in_flight:
                    await asyncio.wait(self._in_flight.values())
        except TimeoutError:
            self._ctx.log.warning("the buffer did not take all groups back in %g s", HAND_BACK_S)
        return num_groups

    async def _save_forever(self, runner: GroupRunner) -> None:
        """Send the buffer the tokens since the last message; each answer is awaited before the next message."""
        pause_s = self._save_s
        while True:
            await asyncio.sleep(pause_s)
            started_s = self._ctx.clock.monotonic()
            for group_id, assignment in list(self._assignments.items()):
                samples = runner.so_far(group_id)
                num_tokens = _num_tokens(samples)
                if num_tokens <= self._num_saved.get(group_id, num_tokens):
                    continue
                try:
                    await self._handover.save(assignment, samples)
                except (CallError, DiskRefused) as err:
                    self._ctx.log.info("tokens of group %d were not saved: %s", group_id, err)
                    break
                if group_id in self._num_saved:
                    self._num_saved[group_id] = num_tokens
            took_s = self._ctx.clock.monotonic() - started_s
            pause_s = max(self._save_s, took_s / SAVING_SHARE)

    def end(self) -> list[asyncio.Task[None]]:
        self.is_draining = True
        self._time.draining()
        self._room.set()
        return list(self._in_flight.values())

    def _note_load(self) -> None:
        self._time.groups(len(self._in_flight), self.max_groups)


def _num_tokens(samples: Sequence[Sample]) -> int:
    return sum(int(sample.response_ids.size) for sample in samples)


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
        self._budget.note(None)
        result = await self._ask(lambda: self._buffer.put_group(group, attempt, self._name))
        if result.outcome not in ("ready", "filtered"):
            self._log.info("group %d: %s %s", group.group_id, result.outcome, result.reason)
        self.counts.num_groups += 1

    async def give_back(self, assignment: Assignment, partial: Partial) -> None:
        returned = GroupReturned(
            group_id=assignment.prompt.group_id,
            attempt=assignment.attempt,
            rollout=self._name,
            partial=partial.samples,
            has_died=partial.cause is not None,
        )
        await self._ask(lambda: self._buffer.return_group(returned))

    async def save(self, assignment: Assignment, samples: tuple[Sample, ...]) -> None:
        """Save the tokens of a group that continues here. Raises CallError when the buffer is not reached, DiskRefused
        when it cannot keep them."""
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
        """The engine failed a group, which continues elsewhere."""
        self._broke = partial.cause
        self.counts.num_breaks += 1
        num_tokens = sum(int(sample.response_ids.size) for sample in partial.samples)
        text = f"group {assignment.prompt.group_id} continues elsewhere with {num_tokens} tokens: {partial.cause}"
        self._log.error("group-broken: %s", text)
        self._telemetry.event("group-broken", text)

    def judge_breaks(self) -> None:
        """An engine survives the failure of some groups; those that fail at the same time count once. Raises what the
        budget raises when there are too many: then the engine is at fault."""
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
        """Keyed or idempotent calls, repeated while the buffer is restarting, so that the group is not lost."""
        return await until_answered(send, who="buffer", clock=self._clock, log=self._log)
