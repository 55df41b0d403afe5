"""A rollout actor's groups: drawn from the buffer while there is room, run, and returned to the buffer.

The room may change while groups run: with less room what runs ends as usual, and work on its way is returned at once.

Tokens outlive the engine: a group whose stream broke is returned with its tokens; all groups are returned before this
actor drops its engine; and long groups are copied to the buffer from time to time, in case the actor is killed. Groups
are handed over also while the buffer restarts; failures count against the budget of errors.

How the time of the actor is booked:

most samples wait for their environment    wait-env, function and file
generating                                 compute, "generate"; "generate at limit" while the actor is full
only rewards                               wait-data, "reward"
only handing over                          wait-data, "hand over"
no groups                                  the buffer's last answer: draw (wait-data), staleness (wait-capacity),
                                           weights, paused (also for the ledger's disk), or a suspect group that
                                           must run alone (wait-data)
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ...core.activity import ActivityMeter, TelemetryBuffer
from ...core.actor import ActorContext
from ...core.errors import CallError, DiskRefused, EngineError, MessageTooLarge, MyxaError, UserCodeError
from ...core.messages import (
    ActivityKind,
    Assignment,
    DrawBlock,
    DrawRequest,
    GroupDropped,
    GroupFinished,
    GroupReturned,
    PutResult,
)
from ...core.retry import until_answered
from ...core.samples import Group, Sample
from ..contracts import BufferContract
from ..rewards.guard import GroupBudget, Guarded
from ..weights.engine_versions import ServedWeights
from .group_runner import GroupLoad, GroupRunner, Partial, RolloutOptions, drop_reason

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
PUT_AT_ONCE = 16
"""Finished groups in one message."""
DRAW_AT_ONCE = 8
"""Groups taken by one draw: small bites share the slots among engines that ask at the same time."""


COUNTED = ("num_groups", "num_errors", "num_breaks", "num_lies")
"""Groups that were handed over, that failed, that went elsewhere because the engine failed them; streams in which the
engine said what cannot be."""

_BLOCKED: dict[DrawBlock, tuple[ActivityKind, str]] = {
    "": ("wait-data", "draw"),
    "data-exhausted": ("wait-data", "draw"),
    "suspect": ("wait-data", "suspect"),
    "staleness": ("wait-capacity", "draw"),
    "finished": ("wait-capacity", "draw"),
    "weights": ("wait-weights", "adopt"),
    "paused": ("paused", "paused"),
    "disk": ("paused", "disk"),
}

R = TypeVar("R")


@dataclass(slots=True)
class _Held:
    """A group that runs here."""

    assignment: Assignment
    task: asyncio.Task[None]
    num_saved: int
    """Tokens of it that the buffer has."""


class GroupPull:
    """The groups of one rollout actor. Made on its loop."""

    def __init__(
        self,
        ctx: ActorContext,
        buffer: BufferContract,
        options: RolloutOptions,
        judges: Guarded,
        meter: ActivityMeter,
        telemetry: TelemetryBuffer,
        *,
        has_turn: bool,
        saves: bool,
    ) -> None:
        """`options`: as they are at any moment. `has_turn`: the engine has its device now. `saves`: tokens so far are
        sent to the buffer."""
        self._ctx = ctx
        self._buffer = buffer
        self._options = options
        self._judges = judges
        self._budget = GroupBudget(options.max_error_rate, options.max_outage_s)
        """Of groups lost to the workflow or the engine."""
        self._meter = meter
        self._telemetry = telemetry
        self._has_turn = has_turn
        self._saves = saves and options.save_partials_s > 0
        self._load = GroupLoad()
        self._is_at_work = False
        self._runner: GroupRunner | None = None
        self._held: dict[int, _Held] = {}
        self.counts = Counter[str](dict.fromkeys(COUNTED, 0))
        self._broke: EngineError | None = None
        """What a group was failed with since that was judged last."""
        self._broke_s = -LOSS_S
        self._finished: asyncio.Queue[tuple[GroupFinished, asyncio.Future[PutResult]]] = asyncio.Queue()
        self._room = asyncio.Event()
        self._blocked_by: DrawBlock = ""
        self.is_draining = False
        """Nothing new is taken; there is no way back."""
        self.num_samples = 0
        """Of the group that was taken last."""
        judges.listen(self._tell)

    def _tell(self, kind: str, text: str) -> None:
        self._ctx.log.warning("%s: %s", kind, text)
        self._telemetry.event(kind, text)

    @property
    def num_groups(self) -> int:
        return len(self._held)

    def retuned(self) -> None:
        """The options changed: another share of lost groups and failed reward calls, and of groups in flight; what runs
        already runs to its end."""
        self._budget.lost.max_rate = self._options.max_error_rate
        self._judges.allow(self._options.max_error_rate)
        self._book()
        self._room.set()

    def note_load(self, load: GroupLoad) -> None:
        """What the groups are doing."""
        self._load = load
        self._book()

    def note_turn(self, has_turn: bool) -> None:
        """The device was given to, or taken from, the engine."""
        self._has_turn = has_turn
        self._book()

    def _book(self) -> None:
        if self._is_at_work or self._load.generating or self._load.rewarding or self._load.waiting:
            self._meter.switch(*self._state())

    def _state(self) -> tuple[ActivityKind, str]:
        load = self._load
        if not self._has_turn:
            return "wait-memory", "the trainer's turn"
        if load.waiting > load.generating:
            return "wait-env", load.place
        if load.generating:
            return "compute", "generate at limit" if len(self._held) >= self._options.concurrency else "generate"
        if load.rewarding:
            return "wait-data", "reward"
        if self._held:
            return "wait-data", "hand over"
        return ("paused", "drained") if self.is_draining else _BLOCKED[self._blocked_by]

    async def run(self, runner: GroupRunner, serves: Callable[[], ServedWeights]) -> None:
        """Until it has to drain. Never gives up on a buffer that is being restarted. `serves`: what is served now."""
        self._is_at_work = True
        self._book()
        self._runner = runner
        self._ctx.spawn(self._deliver_forever(), name="deliver")
        if self._saves:
            self._ctx.spawn(self._save_forever(runner), name="save-partials")
        while not self.is_draining:
            while (left_s := self._broke_s + LOSS_S - self._ctx.clock.monotonic()) > 0:
                await asyncio.sleep(left_s)
            await self._judge()
            free = self._options.concurrency - len(self._held)
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
                holding=tuple(self._held),
                blocked_by=self._blocked_by,
            )
            try:
                reply = await self._buffer.draw(request)
            except (CallError, DiskRefused) as err:
                self._ctx.log.warning("draw: %s", err)
                await asyncio.sleep(RETRY_S)
                continue
            self._blocked_by = reply.blocked_by
            self._book()
            for assignment in reply.assignments:
                await self._take(assignment, runner)
            if reply.blocked_by == "finished":
                await asyncio.sleep(RETRY_S)

    async def _judge(self) -> None:
        """An engine survives the failure of some groups; those that fail at the same time count once. One that failed
        too many is at fault, and is given up as one that is lost: with their tokens. Raises why."""
        broke, self._broke = self._broke, None
        if broke is None:
            return
        try:
            self._budget.note(broke)
        except EngineError as err:
            num_groups = await self.hand_back(err)
            self._ctx.log.warning("the engine is given up, %d groups go elsewhere: %s", num_groups, err)
            raise

    async def _take(self, assignment: Assignment, runner: GroupRunner) -> None:
        group_id = assignment.prompt.group_id
        if group_id in self._held:
            self._ctx.log.warning("group %d was assigned twice; the second is ignored", group_id)
            return
        if self.is_draining or len(self._held) >= self._options.concurrency:  # it went during the draw
            await self._give_back(assignment, Partial(assignment.partial))
            return
        self.num_samples = assignment.num_samples
        task = self._ctx.spawn(self._run_group(assignment, runner), name=f"group-{group_id}")
        self._held[group_id] = _Held(assignment, task, _num_tokens(assignment.partial))
        self._book()

    async def _run_group(self, assignment: Assignment, runner: GroupRunner) -> None:
        """One group from assignment to the buffer's answer. Only a broken error budget or engine ends the actor."""
        try:
            group = await runner.run(assignment)
            await self._deliver(group, assignment.attempt)
        except Partial as partial:
            # Another actor continues, with the tokens so far. The buffer, which knows the other attempts, judges
            # whether this group breaks engine after engine.
            if partial.cause is not None:
                self._note_break(assignment, partial, partial.cause)
            await self._give_back(assignment, partial)
        except MyxaError as err:
            if isinstance(err, CallError):
                raise
            await self._drop(assignment, err)
        finally:
            self._held.pop(assignment.prompt.group_id, None)
            self._book()
            self._room.set()

    async def hand_back(self, cause: EngineError | None = None) -> int:
        """Return all groups with their tokens, since this actor is about to fail; returns how many. `cause`: the engine
        failed, perhaps because of one of them. Takes `HAND_BACK_S` at most: a group that does not get through continues
        from the tokens saved before."""
        self.is_draining = True
        num_groups = 0
        try:
            async with asyncio.timeout(HAND_BACK_S):
                for group_id, held in list(self._held.items()):
                    if group_id not in self._held or self._runner is None or not self._runner.has(group_id):
                        continue  # it is on its way to the buffer already
                    samples = self._runner.so_far(group_id)
                    held.task.cancel()
                    await self._give_back(held.assignment, Partial(samples, cause))
                    num_groups += 1
                if self._held:
                    await asyncio.wait([held.task for held in self._held.values()])
        except TimeoutError:
            self._ctx.log.warning("the buffer did not take all groups back in %g s", HAND_BACK_S)
        return num_groups

    async def _save_forever(self, runner: GroupRunner) -> None:
        """Send the buffer the tokens since the last message; each answer is awaited before the next message."""
        pause_s = self._options.save_partials_s
        while True:
            await asyncio.sleep(pause_s)
            started_s = self._ctx.clock.monotonic()
            for group_id, held in list(self._held.items()):
                samples = runner.so_far(group_id)
                num_tokens = _num_tokens(samples)
                if num_tokens <= held.num_saved:
                    continue
                try:
                    await self._buffer.return_group(self._returned(held.assignment, samples, goes_on=True))
                except (CallError, DiskRefused) as err:
                    self._ctx.log.info("tokens of group %d were not saved: %s", group_id, err)
                    break
                held.num_saved = num_tokens
            took_s = self._ctx.clock.monotonic() - started_s
            pause_s = max(self._options.save_partials_s, took_s / SAVING_SHARE)

    def end(self) -> list[asyncio.Task[None]]:
        self.is_draining = True
        self._book()
        self._room.set()
        return [held.task for held in self._held.values()]

    async def _deliver(self, group: Group, attempt: int) -> None:
        self._budget.note(None)
        answer = asyncio.get_running_loop().create_future()
        self._finished.put_nowait((GroupFinished(group=group, attempt=attempt), answer))
        result = await answer
        if result.outcome not in ("ready", "filtered"):
            self._ctx.log.info("group %d: %s %s", group.group_id, result.outcome, result.reason)
        self.counts["num_groups"] += 1

    async def _deliver_forever(self) -> None:
        """One message at a time: what is finished while one is under way goes with the next."""
        while True:
            batch = [await self._finished.get()]
            while len(batch) < PUT_AT_ONCE and not self._finished.empty():
                batch.append(self._finished.get_nowait())
            await self._put(batch)

    async def _put(self, batch: Sequence[tuple[GroupFinished, asyncio.Future[PutResult]]]) -> None:
        finished, middle = tuple(one for one, _ in batch), len(batch) // 2
        waiting = (answer for _, answer in batch)
        try:
            results = await self._ask(lambda: self._buffer.put_groups(finished, self._ctx.name))
        except MyxaError as error:
            if isinstance(error, MessageTooLarge) and middle:
                await self._put(batch[:middle])
                await self._put(batch[middle:])
                return
            for answer in waiting:
                if not answer.done():
                    answer.set_exception(error)
        else:
            for answer, result in zip(waiting, results, strict=True):
                if not answer.done():  # the group's task was cancelled
                    answer.set_result(result)

    async def _give_back(self, assignment: Assignment, partial: Partial) -> None:
        returned = self._returned(assignment, partial.samples, has_died=partial.cause is not None)
        await self._ask(lambda: self._buffer.return_group(returned))

    def _returned(
        self, of: Assignment, samples: tuple[Sample, ...], *, goes_on: bool = False, has_died: bool = False
    ) -> GroupReturned:
        group_id, name = of.prompt.group_id, self._ctx.name
        return GroupReturned(
            group_id=group_id, attempt=of.attempt, rollout=name, partial=samples, goes_on=goes_on, has_died=has_died
        )

    def _note_break(self, assignment: Assignment, partial: Partial, cause: EngineError) -> None:
        """The engine failed a group, which continues elsewhere."""
        self._broke, self._broke_s = cause, self._ctx.clock.monotonic()
        self.counts["num_breaks"] += 1
        num_tokens = _num_tokens(partial.samples)
        text = f"group {assignment.prompt.group_id} continues elsewhere with {num_tokens} tokens: {cause}"
        self._ctx.log.error("group-broken: %s", text)
        self._telemetry.event("group-broken", text)

    async def _drop(self, assignment: Assignment, err: MyxaError) -> None:
        """A group that failed. Raises UserCodeError or what the budget raises when too many did."""
        self.counts["num_errors"] += 1
        prompt = assignment.prompt
        self._ctx.log.error("group %d (row %d) dropped: %s", prompt.group_id, prompt.row, err)
        self._telemetry.event("group-dropped", f"group {prompt.group_id}: {err}")
        dropped = GroupDropped(
            group_id=prompt.group_id,
            attempt=assignment.attempt,
            rollout=self._ctx.name,
            reason=drop_reason(err),
            detail=str(err)[:2000],
        )
        await self._ask(lambda: self._buffer.drop_group(dropped))
        if text := self._judges.too_many_errors:
            raise UserCodeError(text.removesuffix(f" -- {err.remedy}"), remedy=err.remedy)
        self._budget.note(err, self._ctx.clock.monotonic())

    async def _ask(self, send: Callable[[], Awaitable[R]]) -> R:
        """Keyed or idempotent calls, repeated while the buffer is restarting, so that the group is not lost."""
        return await until_answered(send, who="buffer", clock=self._ctx.clock, log=self._ctx.log)


def _num_tokens(samples: Sequence[Sample]) -> int:
    return sum(int(sample.response_ids.size) for sample in samples)
