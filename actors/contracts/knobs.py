"""What owners of live knobs, and the coordinator that changes them, answer to. Declarations only."""

from __future__ import annotations

from ...core.actor import Actor
from ...core.handlers import call
from ...core.knobs import (
    AuditRecord,
    ChangeReply,
    ChangeRequest,
    KnobChange,
    KnobCommit,
    KnobSheet,
    KnobTable,
    KnobVote,
    Operator,
)
from ...core.messages import EvalResult


class KnobsContract(Actor):
    """An actor with live knobs: buffer, rollout actors, trainer ranks (rank 0 speaks for all), the coordinator."""

    @call(deadline=10, reentrant=True, safe=True)
    async def knobs(self) -> KnobSheet:
        """Declarations and values in force."""
        raise NotImplementedError

    @call(deadline=10, reentrant=True)
    async def prepare_knobs(self, change: KnobChange) -> KnobVote:
        """Judge a change and hold it. A newer epoch replaces one that was prepared and not decided."""
        raise NotImplementedError

    @call(deadline=10, reentrant=True)
    async def commit_knobs(self, commit: KnobCommit) -> None:
        """It is decided. Answered once the values are sure to be used at the boundary, not once they are in force."""
        raise NotImplementedError

    @call(deadline=10, reentrant=True)
    async def abort_knobs(self, epoch: int) -> None:
        """Forget what was prepared under that epoch. Idempotent."""
        raise NotImplementedError


class ConductContract(Actor):
    """The coordinator as the operator sees it."""

    @call(deadline=60, reentrant=True)
    async def change_knobs(self, request: ChangeRequest) -> ChangeReply:
        """Change knobs, all or none; one change at a time."""
        raise NotImplementedError

    @call(deadline=30, reentrant=True, safe=True)
    async def knob_table(self) -> KnobTable:
        """All knobs of all owners."""
        raise NotImplementedError

    @call(deadline=60, reentrant=True)
    async def undo(self, who: Operator, reason: str, epoch: int = 0) -> ChangeReply:
        """Take the newest change back, or that of `epoch`: its knobs get the values they had before it. Refused, naming
        the later change, when a knob was changed again since."""
        raise NotImplementedError

    @call(deadline=30, reentrant=True, safe=True)
    async def history(self, limit: int) -> tuple[AuditRecord, ...]:
        """The newest records of the audit log, oldest first."""
        raise NotImplementedError

    @call(deadline=30, reentrant=True)
    async def pause_run(self, who: Operator, reason: str) -> int:
        """No new work and no new step; the step in hand ends. Returns the version the trainer will rest at."""
        raise NotImplementedError

    @call(deadline=30, reentrant=True)
    async def resume_run(self, who: Operator, reason: str) -> None:
        """Go on after a pause, or after steps that were counted."""
        raise NotImplementedError

    @call(deadline=30, reentrant=True)
    async def step_run(self, who: Operator, reason: str, num_steps: int) -> int:
        """Go on for so many training steps, then pause; returns the version at which it will pause."""
        raise NotImplementedError

    @call(deadline=1800, reentrant=True)
    async def checkpoint_now(self, who: Operator, reason: str, export: bool) -> str:
        """A checkpoint at the next step boundary, or with `export` a HuggingFace folder; returns the folder."""
        raise NotImplementedError

    @call(deadline=600, reentrant=True)
    async def evaluate_now(self, who: Operator, reason: str, name: str) -> EvalResult:
        """Held-out reward now, beside training; `name`: of one evaluation set, else all of them."""
        raise NotImplementedError
