"""The coordinator's word to the leader: begin, go on after a restart, end. Told until the leader has it.

Knows contracts. An order that was given before the gang was started anew is void: the next one is for the new gang.
"""

from __future__ import annotations

import asyncio

from ...core.actor import ActorContext
from ...core.clock import Clock
from ...core.errors import CallError
from ...core.patience import until_answered
from ..contracts.roles import TrainerContract
from .owner_return import OwnerReturn
from .run_state import RunState

LEADER = "trainer/0"


class LeaderRein:
    """See the module's head."""

    def __init__(self, ctx: ActorContext, state: RunState, owners: OwnerReturn, clock: Clock) -> None:
        self._ctx = ctx
        self._state = state
        self._owners = owners
        self._clock = clock
        self._leader = ctx.ref(TrainerContract, LEADER)
        self._letting_go: asyncio.Task[None] | None = None

    def let_go(self) -> None:
        """Have it begin, or go on, from the run's version, once it uses the knobs that were decided."""
        if self._letting_go is not None:
            self._letting_go.cancel()
        self._letting_go = self._ctx.spawn(self._let_go(), name="run-leader")

    async def _let_go(self) -> None:
        await self._owners.told(LEADER)
        await self.tell_stop()
        await until_answered(
            lambda: self._leader.run_leader(self._state.version), who=LEADER, clock=self._clock, log=self._ctx.log
        )

    async def tell_stop(self) -> None:
        """If it was to end. One that is away is told when it reports in."""
        if not self._state.stop_reason:
            return
        try:
            await self._leader.stop_leader(self._state.stop_reason)
        except CallError as error:
            self._ctx.log.warning("%s was not told to end: %s; told again when it reports in", LEADER, error)
