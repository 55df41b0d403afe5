"""What operators do to a run beside knobs: pause, resume, step, write a checkpoint, evaluate; all recorded.

The buffer pauses and resumes, and keeps that: while it is paused, nothing is drawn or claimed, a claimed step is
trained to its end, and the trainer waits before the next. What the audit log does not take is not done. What it took
is: the buffer gets it until it obeys. A deed that has begun completes, even if its caller is gone. The buffer is asked
what it holds back after a restart of either side.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import msgspec

from ...core.errors import CallError, LedgerError, MyxaError
from ...core.knobs import AuditRecord, Operator
from ...core.messages import EvalResult, PauseState
from ...core.retry import until_answered
from ...core.timeouts import TIMEOUTS
from ..contracts import BufferContract, TrainerContract
from .run_state import RunContext

T = TypeVar("T")


class NotToldYet(CallError):
    """A deed is decided and recorded, and not carried out yet."""


def _deed(verb: str, who: Operator, reason: str, **arguments: object) -> AuditRecord:
    """Something that is asked for, as the audit log has it but for the outcome."""
    return AuditRecord(number=0, wall_s=0.0, verb=verb, who=who, arguments=arguments, result="", reason=reason)


def _ended(deed: AuditRecord, result: str, detail: str = "") -> AuditRecord:
    return msgspec.structs.replace(deed, result=result, detail=detail)


class RunControl:
    """See the module's head."""

    def __init__(self, run: RunContext, evaluate: Callable[[str], Awaitable[EvalResult]]) -> None:
        """`evaluate`: on the held-out prompts now, of that set or all."""
        self._ctx, self._meter = run.ctx, run.meter
        self._version, self._tell, self._record = run.version, run.tell, run.record
        self._evaluate = evaluate
        self._buffer = run.ctx.ref(BufferContract, "buffer")
        self._leader = run.ctx.ref(TrainerContract, "trainer/0")
        self._turn = asyncio.Lock()
        self._now = PauseState()
        self._is_told = True
        """Whether the buffer does what was decided."""

    async def look(self) -> None:
        """Hear from the buffer what it holds back: after a restart of either side."""
        if not self._is_told:
            return  # it is being told
        try:
            async with self._turn:
                stats = await self._until_answered(self._buffer.stats)
                self._now = stats.pause
        except MyxaError as error:
            self._tell("pause-unknown", f"{error}; asked again when the buffer is back")
        else:
            if self.paused:
                self._meter.switch("paused", "paused")

    @property
    def paused(self) -> str:
        """Why the run is paused; empty while it trains, also while it trains up to a version at which it will pause."""
        return "" if self._now.serves(self._version()) else self._now.reason

    def version_made(self, version: int) -> None:
        if self._now.is_paused and version == self._now.until_step:
            self._rests(version)

    async def pause(self, who: Operator, reason: str) -> int:
        """Returns the version that the trainer will rest at."""

        async def work() -> int:
            rests_at = await self._change(deed, PauseState(is_paused=True, reason=reason or _by(who)))
            self._rests(rests_at)
            return rests_at

        deed = _deed("pause", who, reason)
        return await self._carried_out(deed, work)

    async def resume(self, who: Operator, reason: str) -> None:
        """Nothing happens to a run that is not paused."""

        async def work() -> None:
            await self._change(deed, PauseState())
            self._meter.switch("wait-data", "orders")
            self._tell("run-resumed", reason or _by(who))

        deed = _deed("resume", who, reason)
        await self._carried_out(deed, work)

    async def step(self, who: Operator, reason: str, num_steps: int) -> int:
        """So many more steps from the version that the run is at; returns the version at which it will pause."""

        async def work() -> int:
            wanted = PauseState(is_paused=True, until_step=self._version() + num_steps, reason=reason or _by(who))
            pauses_at = await self._change(deed, wanted)
            self._meter.switch("wait-data", "orders")
            self._tell("run-stepping", f"to version {pauses_at}: {wanted.reason}")
            return pauses_at

        deed = _deed("step", who, reason, num_steps=num_steps)
        return await self._carried_out(deed, work)

    def _rests(self, version: int) -> None:
        self._meter.switch("paused", "paused")
        self._tell("run-paused", f"at version {version}: {self._now.reason}")

    async def checkpoint(self, who: Operator, reason: str, *, export: bool) -> str:
        deed = _deed("ckpt", who, reason, export=export)
        return await self._carried_out(deed, lambda: self._leader.checkpoint_at_boundary(export), is_recorded=False)

    async def evaluate(self, who: Operator, reason: str, name: str) -> EvalResult:
        """On held-out prompts, beside training; `name`: of one set, else all."""
        deed = _deed("eval", who, reason, **({"set": name} if name else {}))
        return await self._carried_out(deed, lambda: self._evaluate(name), is_recorded=False)

    async def _change(self, deed: AuditRecord, wanted: PauseState) -> int:
        """Recorded, then done; returns where the trainer rests. Raises NotToldYet when the buffer has not answered."""
        async with self._turn:
            await self._record(_ended(deed, "done"))
            self._now, self._is_told = wanted, False
            try:
                return await self._told(wanted)
            except MyxaError as error:
                self._ctx.spawn(self._insist(wanted), name="pause-told-again")
                raise NotToldYet(
                    f"{deed.verb} is decided and recorded, but the buffer has not obeyed yet: {error.message}",
                    remedy="it gets the order again until it does; `myxa ps` shows what it waits for",
                ) from error

    async def _told(self, wanted: PauseState) -> int:
        rests_at = await self._until_answered(
            lambda: self._buffer.set_paused(wanted.is_paused, wanted.until_step, wanted.reason)
        )
        self._is_told = True
        return rests_at

    async def _insist(self, wanted: PauseState) -> None:
        while True:
            await asyncio.sleep(TIMEOUTS.coordinator.tell_again_s)
            async with self._turn:
                if self._now is not wanted:
                    return  # something else was decided since
                with suppress(MyxaError):
                    await self._told(wanted)
                    self._tell("pause-told", f"the buffer obeys: {wanted.reason or 'resumed'}")
                    return

    async def _until_answered(self, ask: Callable[[], Awaitable[T]]) -> T:
        clock, log = self._ctx.clock, self._ctx.log
        return await until_answered(
            ask, who="buffer", clock=clock, log=log, give_up_s=TIMEOUTS.coordinator.pause_s, waits_for_disk=False
        )

    async def _carried_out(self, deed: AuditRecord, work: Callable[[], Awaitable[T]], *, is_recorded: bool = True) -> T:
        """Completes even if the caller is gone. `is_recorded`: `work` writes the record before it acts."""
        task = self._ctx.spawn(self._attempt(deed, work, is_recorded=is_recorded), name=f"control-{deed.verb}")
        outcome = await asyncio.shield(task)
        if isinstance(outcome, MyxaError):
            raise outcome
        return outcome

    async def _attempt(
        self, deed: AuditRecord, work: Callable[[], Awaitable[T]], *, is_recorded: bool
    ) -> T | MyxaError:
        """Its result, or its error: a failed deed does not end the actor."""
        try:
            done = await work()
        except NotToldYet as error:
            return error
        except MyxaError as error:
            try:
                await self._record(_ended(deed, "failed", str(error)))
            except MyxaError as another:
                self._tell("audit-incomplete", f"that {deed.verb} failed was not recorded: {another}")
            return error
        if not is_recorded:
            try:
                await self._record(_ended(deed, "done", str(done)))
            except MyxaError as error:
                return LedgerError(f"{deed.verb} was done ({done}), but could not be recorded: {error}")
        return done


def _by(who: Operator) -> str:
    return f"by {who.user or who.via or 'an operator'}"
