"""How a run comes from one phase to the next: into the journal first, then told. Part of the coordinator.

Knows the run's state and the journal; must not know what its owner does in a phase.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ...core.actor import ActorContext
from ...core.errors import LedgerError, MyxaError
from ...core.messages import RunPhase
from .journal import CoordinatorJournal
from .run_state import NextPhase, RunState

KEEP_S = 10.0
"""How long the journal's disk is waited for where the run goes on without it."""


async def keep_in_time(journal: CoordinatorJournal) -> None:
    """As `journal.keep`; LedgerError also for a disk that hangs. The write goes on."""
    try:
        async with asyncio.timeout(KEEP_S):
            await journal.keep()
    except TimeoutError:
        why = f"{journal.path}: not written within {KEEP_S:g} s"
        raise LedgerError(why, remedy="check the disk of the run directory") from None


class PhaseMoves:
    """See the module's head."""

    def __init__(
        self,
        ctx: ActorContext,
        state: RunState,
        journal: CoordinatorJournal,
        tell: Callable[[str, str], None],
        on_change: Callable[[], None],
    ) -> None:
        """`tell`: an event, its kind and text. `on_change`: the run is in another phase now."""
        self._ctx = ctx
        self._state = state
        self._next = NextPhase(state)
        self._journal = journal
        self._tell = tell
        self._on_change = on_change

    def kept(self) -> RunState:
        """For the journal."""
        return self._next.kept()

    async def to(self, phase: RunPhase) -> bool:
        """Nobody is told, and nothing of that phase is done, before it is kept; False when something else came between.
        It is made to its end, whatever becomes of who asked.

        A start that cannot be kept is none: the next incarnation would begin the run again. It waits for a disk that
        refuses, and raises LedgerError for any other reason. In
        all other phases the run goes on without, and without a disk that hangs: what ended has ended, and who said so
        says it again.
        """
        if not self._next.propose(phase):
            return False
        return await asyncio.shield(self._ctx.spawn(self._move(phase), name=f"to-{phase}"))

    async def _move(self, phase: RunPhase) -> bool:
        before = self._state.phase
        try:
            await (self._journal.until_kept() if phase == "running" else keep_in_time(self._journal))
        except MyxaError as error:
            if phase == "running":
                self._next.withdraw(phase)
                raise
            self._tell("journal-not-written", str(error))
        if not self._next.arrive(phase):
            return False
        self._tell("phase", f"{before} -> {phase}")
        if phase == "finished":
            self._tell("run-ended", self._state.reason)
        elif phase == "failed":
            self._tell("run-failed", self._state.error)
        self._on_change()
        return True
