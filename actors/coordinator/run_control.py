"""What operators do to a run beside knobs: pause, resume, step, write a checkpoint, evaluate; all recorded.

A pause is a value of the buffer's knob `pause_at`: nothing is drawn or claimed, a claimed step is trained to its end.
What the audit log does not take is not done. A deed that has begun completes, even if its caller is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

import msgspec

from ...core.errors import CallError, LedgerError, MyxaError, TrainError
from ...core.ids import LEADER
from ...core.knobs import AuditRecord, ChangeRequest, KnobMove, KnobSheet, KnobState, Operator, PauseVerb
from ...core.messages import EvalResult
from ..contracts import BufferContract, TrainerContract
from ..knobs.owner import PAUSE_AT
from .knob_conductor import KnobConductor, Order
from .knob_decisions import ChangeDraft, OwnerStates, draft_change
from .run_state import RunContext

T = TypeVar("T")

_BUFFER = OwnerStates([KnobSheet(owner="buffer", knobs=(KnobState(tunable=PAUSE_AT, value=-1, first=-1),))], {})
"""A pause can be decided while the buffer is away."""


def _deed(verb: str, who: Operator, reason: str, **arguments: object) -> AuditRecord:
    """Something that is asked for, as the audit log has it but for the outcome."""
    return AuditRecord(number=0, wall_s=0.0, verb=verb, who=who, arguments=arguments, result="", reason=reason)


class RunControl:
    """See the module's head."""

    def __init__(
        self, run: RunContext, conductor: KnobConductor, evaluate: Callable[[str], Awaitable[EvalResult]]
    ) -> None:
        """`evaluate`: on the held-out prompts now, of that set or all."""
        self._ctx, self._meter = run.ctx, run.meter
        self._version, self._tell, self._record, self._ask = run.version, run.tell, run.record, run.ask
        self._conductor, self._evaluate, self._file = conductor, evaluate, run.options.file
        self._buffer = run.ctx.ref(BufferContract, "buffer")
        self._leader = run.ctx.ref(TrainerContract, LEADER)
        self._seen: tuple[int, str] | None = None
        """`pause_at` and `paused` at the last look; None: before the first."""

    @property
    def paused(self) -> str:
        """Why the run is paused; empty while it trains, also while it trains up to a version at which it will pause."""
        return self._conductor.decisions.why(PAUSE_AT.name) if 0 <= self._pause_at() <= self._version() else ""

    def _pause_at(self) -> int:
        return int(self._conductor.decisions.latest(PAUSE_AT.name, -1))

    def look(self) -> None:
        """Book and report that the run was paused or continues; what the first look finds is no news."""
        before, self._seen = self._seen, (self._pause_at(), self.paused)
        if before == self._seen:
            return
        (pause_at, paused), reason = self._seen, self._conductor.decisions.why(PAUSE_AT.name)
        if paused:
            self._meter.switch("paused", "paused")
        elif before is not None:
            self._meter.switch("wait-data", "orders")
        if before is None:
            return
        if paused:
            self._tell("run-paused", f"at version {self._version()}: {paused}")
        elif pause_at < 0:
            self._tell("run-resumed", reason or "the pause is over")
        else:
            self._tell("run-stepping", f"to version {pause_at}: {reason}")

    async def set_pause(self, verb: PauseVerb, who: Operator, reason: str, num_steps: int = 0) -> int:
        """Where the trainer rests. Raises LedgerError if not decided, CallError while the buffer has not obeyed."""
        pause_at = {"pause": 0, "resume": -1, "step": self._version() + num_steps}[verb]
        arguments = {"num_steps": num_steps} if verb == "step" else {}
        request = ChangeRequest(values={PAUSE_AT.name: pause_at}, who=who, reason=reason)

        def drafter(roster: OwnerStates) -> ChangeDraft:
            draft = draft_change(request, roster, self._conductor.decisions)
            same = KnobMove(name=PAUSE_AT.name, owner="buffer", old=pause_at, new=pause_at, boundary="now")
            return replace(draft, moves=draft.moves or (same,))

        reply = await self._conductor.make(Order(verb, request, drafter, arguments, roster=_BUFFER))
        if reply.refused:
            raise LedgerError(f"{verb}: {reply.refused}", remedy="nothing was changed; ask again")
        if reply.warnings:
            raise CallError(
                f"{verb} is decided and recorded, but the buffer has not obeyed yet: {'; '.join(reply.warnings)}",
                remedy="it gets the order again until it does; `myxa ps` shows what it waits for",
            )
        stats = await self._ask("buffer", self._buffer.stats)
        return max(stats.next_step, pause_at)

    async def checkpoint(self, who: Operator, reason: str, *, export: bool) -> str:
        async def write() -> str:
            if not export and self._file is not None and (why := self._file.refusal({"trainer.checkpoint_every": 1})):
                raise TrainError(f"no checkpoint can be written: {why}", remedy="export the model instead")
            return await self._leader.checkpoint_at_boundary(export)

        return await self._carry_out(_deed("ckpt", who, reason, export=export), write)

    async def evaluate(self, who: Operator, reason: str, name: str) -> EvalResult:
        """On held-out prompts, beside training; `name`: of one set, else all."""
        deed = _deed("eval", who, reason, **({"set": name} if name else {}))
        return await self._carry_out(deed, lambda: self._evaluate(name))

    async def _carry_out(self, deed: AuditRecord, work: Callable[[], Awaitable[T]]) -> T:
        """Completes even if the caller is gone."""
        task = self._ctx.spawn(self._attempt(deed, work), name=f"control-{deed.verb}")
        outcome = await asyncio.shield(task)
        if isinstance(outcome, MyxaError):
            raise outcome
        return outcome

    async def _attempt(self, deed: AuditRecord, work: Callable[[], Awaitable[T]]) -> T | MyxaError:
        """Its result, or its error: a failed deed does not end the actor."""
        try:
            result = await work()
        except MyxaError as failure:
            try:
                await self._record(msgspec.structs.replace(deed, result="failed", detail=str(failure)))
            except MyxaError as error:
                self._tell("audit-incomplete", f"that {deed.verb} failed was not recorded: {error}")
            return failure
        try:
            await self._record(msgspec.structs.replace(deed, result="done", detail=str(result)))
        except MyxaError as error:
            return LedgerError(f"{deed.verb} was done ({result}), but could not be recorded: {error}")
        return result
