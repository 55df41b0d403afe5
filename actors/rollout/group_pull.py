"""Where a rollout actor's groups come from and go to: draws them while there is room, has each run, hands it back.

Who waits for whom: the pull loop waits for room here, then for work in the buffer (long poll); each group's task waits
for engine and rewards, then for the buffer's answer. The room may be changed while it goes on: less of it lets what
runs end, and work that was on its way is handed back at once.

Tokens outlive the engine: a group whose stream broke is handed back with those it has, all of them are before this
actor gives its engine up, and what lasts longer is told to the buffer from time to time, for an actor that is killed.

Knows the buffer's contract and the group runner; must not know engines or weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ...core.actor import ActorContext
from ...core.errors import CallError, DiskRefused, EngineError, MyxaError
from ...core.messages import Assignment, DrawBlock, DrawRequest
from ...core.samples import Sample
from ..contracts.roles import BufferContract
from ..engine_versions import Weights
from .group_handover import GroupHandover
from .group_runner import GroupRunner, Partial
from .time_booking import RolloutTime

POLL_S = 5.0
"""Long poll for work: the buffer holds a draw that long at most."""
RETRY_S = 0.2
"""Pause after a call that failed because its callee is being restarted."""
LOSS_S = 1.0
"""Nothing is drawn for so long after a stream broke: an engine that is lost, or about to be fenced, ends this actor
within that time."""
HAND_BACK_S = 2.0
"""For handing all groups back before this actor fails."""
SAVING_SHARE = 0.05
"""Of its time at most the telling of tokens goes on: the more there is to tell, the more seldom."""
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
        """`max_groups`: in flight at most. `save_s`: how often tokens so far are told to the buffer; 0: never."""
        self._ctx = ctx
        self._buffer = buffer
        self._handover = handover
        self._time = time
        self._max_groups = max_groups
        self._save_s = save_s
        self._runner: GroupRunner | None = None
        self._in_flight: dict[int, asyncio.Task[None]] = {}
        self._assignments: dict[int, Assignment] = {}
        """Of the groups in flight."""
        self._num_saved: dict[int, int] = {}
        """Tokens of a group that the buffer has."""
        self._broke_s = -LOSS_S
        self._room = asyncio.Event()
        self._blocked_by: DrawBlock = ""
        self.is_draining = False
        """Nothing new is taken; there is no way back."""
        self.num_samples = 0
        """Of the group that was taken last."""
        self._told()

    @property
    def max_groups(self) -> int:
        """Groups in flight at most."""
        return self._max_groups

    @property
    def num_groups(self) -> int:
        """Groups in flight."""
        return len(self._in_flight)

    def resize(self, max_groups: int) -> None:
        """Room for so many groups from now on; what runs already runs to its end."""
        self._max_groups = max_groups
        self._told()
        self._room.set()

    async def run(self, runner: GroupRunner, serves: Callable[[], Weights]) -> None:
        """Until told to drain. Never gives up on a buffer that is being restarted. `serves`: what is served now."""
        self._time.begin()
        self._runner = runner
        if self._save_s:
            self._ctx.spawn(self._save_forever(runner), name="save-partials")
        while not self.is_draining:
            await self._calm()
            await self._judge()
            free = self._max_groups - len(self._in_flight)
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
        if self.is_draining or len(self._in_flight) >= self._max_groups:  # the room went while the draw was under way
            await self._handover.give_back(assignment, Partial(assignment.partial))
            return
        self.num_samples = assignment.num_samples
        self._assignments[group_id] = assignment
        self._num_saved[group_id] = _num_tokens(assignment.partial)
        self._in_flight[group_id] = self._ctx.spawn(self._run_group(assignment, runner), name=f"group-{group_id}")
        self._told()

    async def _run_group(self, assignment: Assignment, runner: GroupRunner) -> None:
        """One group from assignment to the buffer's answer. Only a broken error budget or engine ends the actor."""
        try:
            group = await runner.run(assignment)
            await self._handover.deliver(group, assignment.attempt)
        except Partial as partial:
            await self._leave_off(assignment, partial)
        except MyxaError as err:
            if isinstance(err, CallError):
                raise
            await self._handover.drop(assignment, err)
        finally:
            for known in (self._in_flight, self._assignments, self._num_saved):
                known.pop(assignment.prompt.group_id, None)
            self._told()
            self._room.set()

    async def _leave_off(self, assignment: Assignment, partial: Partial) -> None:
        """Somebody else goes on, with the tokens there are. Whether this group breaks engine after engine is judged by
        the buffer, which knows the other attempts."""
        if partial.cause is not None:
            self._broke_s = self._ctx.clock.monotonic()
            self._handover.note_break(assignment, partial)
        await self._handover.give_back(assignment, partial)

    async def _calm(self) -> None:
        while (left_s := self._broke_s + LOSS_S - self._ctx.clock.monotonic()) > 0:
            await asyncio.sleep(left_s)

    # -- tokens outlive the engine

    async def hand_back(self, cause: EngineError | None = None) -> int:
        """All groups go back with the tokens they have, for this actor is about to fail; returns how many. `cause`: the
        engine did, and one of them may be why. Takes `HAND_BACK_S` at most: what the buffer was not told goes on from
        what it was told before."""
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
        """Tell the buffer of tokens that came since it was told last; one answer is awaited before the next is sent."""
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
        """Take nothing new; returns the tasks of the groups that are in flight."""
        self.is_draining = True
        self._time.draining()
        self._room.set()
        return list(self._in_flight.values())

    def _told(self) -> None:
        self._time.groups(len(self._in_flight), self._max_groups)


def _num_tokens(samples: Sequence[Sample]) -> int:
    return sum(int(sample.response_ids.size) for sample in samples)
