"""The operator's hand on the run beside knobs: pause, go on, count steps, write a checkpoint, evaluate; all recorded.

Part of the coordinator. Knows contracts. The buffer is what stops and lets go: nothing is drawn or claimed while it is
paused, a step that was claimed is trained to its end, and the trainer rests before the next. What is held back is in
the journal before the buffer hears of it; an incarnation of either that is started anew is told again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from ...core.activity import ActivityMeter, TelemetryBuffer
from ...core.actor import ActorContext
from ...core.errors import ConfigError, MyxaError
from ...core.knobs import AuditRecord, Operator
from ...core.patience import until_answered
from ..contracts.roles import BufferContract, TrainerContract
from .audit_desk import AuditDesk
from .journal import CoordinatorJournal, PauseKept

T = TypeVar("T")

MAX_STEPS = 1_000_000
TELL_S = 20.0
"""For how long a buffer that is away is waited for; less than an operator's call has."""


class Conduct:
    """See the module's head."""

    def __init__(
        self,
        ctx: ActorContext,
        desk: AuditDesk,
        journal: CoordinatorJournal,
        *,
        version: Callable[[], int],
        evaluate: Callable[[], Awaitable[float]],
        meter: ActivityMeter,
        telemetry: TelemetryBuffer,
    ) -> None:
        """`version`: where the run stands. `evaluate`: held-out reward now."""
        self._ctx = ctx
        self._desk = desk
        self._journal = journal
        self._version = version
        self._evaluate = evaluate
        self._meter = meter
        self._telemetry = telemetry
        self._buffer = ctx.ref(BufferContract, "buffer")
        self._leader = ctx.ref(TrainerContract, "trainer/0")
        self._turn = asyncio.Lock()
        self._now = PauseKept()

    def kept(self) -> PauseKept:
        """For the journal."""
        return self._now

    def take_up(self, kept: PauseKept) -> None:
        """Go on from what an earlier incarnation kept; `tell_again` tells the buffer."""
        self._now = kept
        if self.paused:
            self._meter.switch("paused", "paused")

    async def tell_again(self) -> None:
        """The buffer, or this incarnation, was started anew: it holds back what this one says."""
        async with self._turn:
            await self._tell_buffer()

    @property
    def is_paused(self) -> bool:
        """Whether the buffer hands nothing out, or nothing after `until_step`."""
        return self._now.is_paused

    @property
    def until_step(self) -> int | None:
        """See `is_paused`."""
        return self._now.until_step

    @property
    def paused(self) -> str:
        """Why the run stands still; empty while it goes, also while it goes on to a version at which it will pause."""
        is_going = not self.is_paused or (self.until_step is not None and self._version() < self.until_step)
        return "" if is_going else self._now.reason

    def version_made(self, version: int) -> None:
        """The trainer came to a version."""
        if self.is_paused and version == self.until_step:
            self._stands(f"at version {version}: {self._now.reason}")

    async def pause(self, who: Operator, reason: str) -> int:
        """Returns the version that the trainer will rest at."""

        async def work() -> int:
            async with self._turn:
                rests_at = await self._put(PauseKept(is_paused=True, reason=reason or _by(who)))
            self._stands(f"at version {rests_at}: {self._now.reason}")
            return rests_at

        return await self._recorded("pause", who, reason, {}, work)

    async def resume(self, who: Operator, reason: str) -> None:
        """Nothing happens to a run that is not paused."""

        async def work() -> None:
            async with self._turn:
                await self._put(PauseKept())
            self._meter.switch("wait-data", "orders")
            self._tell("run-resumed", reason or _by(who))

        await self._recorded("resume", who, reason, {}, work)

    async def step(self, who: Operator, reason: str, num_steps: int) -> int:
        """So many more steps; returns the version at which the run will pause. Raises ConfigError for no number."""
        if not 0 < num_steps <= MAX_STEPS:
            raise ConfigError(f"{num_steps} steps", remedy=f"a number from 1 to {MAX_STEPS}")

        async def work() -> int:
            wanted = PauseKept(is_paused=True, reason=reason or _by(who))
            async with self._turn:
                until = await self._put(wanted) + num_steps
                await self._put(msgspec.structs.replace(wanted, until_step=until))
            self._meter.switch("wait-data", "orders")
            self._tell("run-stepping", f"to version {until}: {self._now.reason}")
            return until

        return await self._recorded("step", who, reason, {"num_steps": num_steps}, work)

    async def checkpoint(self, who: Operator, reason: str, *, export: bool) -> str:
        """Returns the folder once it is written."""

        async def work() -> str:
            return await self._leader.checkpoint_at_boundary(export)

        return await self._recorded("ckpt", who, reason, {"export": export}, work)

    async def evaluate(self, who: Operator, reason: str) -> float:
        """Held-out reward, beside training."""
        return await self._recorded("eval", who, reason, {}, self._evaluate)

    async def history(self, limit: int) -> tuple[AuditRecord, ...]:
        """The newest records of the audit log."""
        return await self._desk.newest(min(limit, 1000))

    async def _put(self, wanted: PauseKept) -> int:
        """Durable first, then told; returns where the trainer rests. It is as before if either fails."""
        before, self._now = self._now, wanted
        try:
            await self._journal.keep()
            return await self._tell_buffer()
        except MyxaError:
            self._now = before
            await self._journal.keep()
            raise

    async def _tell_buffer(self) -> int:
        now = self._now
        return await until_answered(
            lambda: self._buffer.set_paused(now.is_paused, now.until_step),
            who="buffer",
            clock=self._ctx.clock,
            log=self._ctx.log,
            give_up_s=TELL_S,
        )

    def _stands(self, text: str) -> None:
        self._meter.switch("paused", "paused")
        self._tell("run-paused", text)

    def _tell(self, kind: str, text: str) -> None:
        self._ctx.log.info("%s: %s", kind, text)
        self._telemetry.event(kind, text)

    async def _recorded(
        self, verb: str, who: Operator, reason: str, arguments: dict[str, Any], work: Callable[[], Awaitable[T]]
    ) -> T:
        """Do it and note what came of it."""
        try:
            done = await work()
        except MyxaError as error:
            await self._desk.write(_record(verb, who, reason, arguments, "failed", str(error)))
            raise
        await self._desk.write(_record(verb, who, reason, arguments, "done", "" if done is None else str(done)))
        return done


def _record(verb: str, who: Operator, reason: str, arguments: dict[str, Any], result: str, detail: str) -> AuditRecord:
    return AuditRecord(
        number=0,
        wall_s=0.0,
        verb=verb,
        who=who,
        arguments=arguments,
        result=result,
        detail=detail,
        reason=reason,
    )


def _by(who: Operator) -> str:
    return f"by {who.user or who.via or 'an operator'}"
