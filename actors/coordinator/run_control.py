"""What operators do to a run beside knobs: pause, resume, step, write a checkpoint.

A pause is a value of the buffer's knob `pause_at`: nothing is drawn or claimed, a claimed step is trained to its end.
What the audit log does not take is not done.
"""

from __future__ import annotations

from dataclasses import replace

from ...core.errors import CallError, LedgerError, TrainError
from ...core.ids import LEADER
from ...core.knobs import ChangeRequest, KnobMove, KnobSheet, KnobState, Operator, PauseVerb
from ..contracts import BufferContract, TrainerContract
from ..knobs.owner import PAUSE_AT
from .knob_conductor import KnobConductor, Order
from .knob_decisions import ChangeDraft, OwnerStates, draft_change
from .run_state import RunContext

_BUFFER = OwnerStates([KnobSheet(owner="buffer", knobs=(KnobState(tunable=PAUSE_AT, value=-1, first=-1),))], {})
"""A pause can be decided while the buffer is away."""


class RunControl:
    """See the module's head."""

    def __init__(self, run: RunContext, conductor: KnobConductor) -> None:
        self._meter, self._version, self._tell, self._ask = run.meter, run.version, run.tell, run.ask
        self._conductor, self._file = conductor, run.options.file
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

    async def checkpoint(self, *, export: bool) -> str:
        """The folder. Raises TrainError where the run file rules checkpoints out."""
        if not export and self._file is not None and (why := self._file.refusal({"trainer.checkpoint_every": 1})):
            raise TrainError(f"no checkpoint can be written: {why}", remedy="export the model instead")
        return await self._leader.checkpoint_at_boundary(export)
