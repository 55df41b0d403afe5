"""The coordinator's word to the leader: begin, go on after a restart, end. Told until the leader has it.

Knows contracts. An order that was given before the gang was started anew is void: the next one is for the new gang,
which gets it when it reports in.
"""

from __future__ import annotations

import asyncio

from ...core.actor import ActorContext
from ...core.clock import Clock
from ...core.errors import CallError, MyxaError, NotReady
from ...core.patience import until_answered
from ..contracts.roles import TrainerContract
from .owner_return import OwnerReturn
from .run_state import RunState

LEADER = "trainer/0"
TELL_AGAIN_S = 1.0
"""Before a leader that did not hear, or sets up, is told again that it is to end."""


class LeaderRein:
    """See the module's head."""

    def __init__(self, ctx: ActorContext, state: RunState, owners: OwnerReturn, clock: Clock) -> None:
        self._ctx = ctx
        self._state = state
        self._owners = owners
        self._clock = clock
        self._leader = ctx.ref(TrainerContract, LEADER)
        self._letting_go: asyncio.Task[None] | None = None
        self._telling: asyncio.Task[None] | None = None

    def let_go(self) -> None:
        """Have it begin, or go on, from the run's version, once it uses the knobs that were decided."""
        if self._letting_go is not None:
            self._letting_go.cancel()
        self._letting_go = self._ctx.spawn(self._let_go(), name="run-leader")

    async def _let_go(self) -> None:
        await self._owners.told(LEADER)
        if (telling := self.tell_stop()) is not None:
            await asyncio.shield(telling)  # before it makes a step too many; whoever takes its place is told too
        try:
            await until_answered(self._run_leader, who=LEADER, clock=self._clock, log=self._ctx.log)
        except CallError as error:
            if LEADER in self._ctx.peers(LEADER):
                raise
            self._ctx.log.warning("%s is gone: %s; the next one is let go when it reports in", LEADER, error)

    async def _run_leader(self) -> None:
        try:
            await self._leader.run_leader(self._state.version)
        except NotReady as error:
            self._ctx.log.warning("the gang is another one by now: %s; it is let go when it reports in", error)

    def tell_stop(self) -> asyncio.Task[None] | None:
        """If it was to end, it is told until it has heard, also one that is only coming up. None: it was not."""
        if self._state.stop_reason and (self._telling is None or self._telling.done()):
            self._telling = self._ctx.spawn(self._tell_stop(self._state.stop_reason), name="stop-leader")
        return self._telling

    async def _tell_stop(self, reason: str) -> None:
        while self._state.leader_reason is None and not self._state.is_over:
            try:
                return await self._leader.stop_leader(reason)
            except MyxaError as error:
                self._ctx.log.warning("%s was not told to end: %s; it is told again", LEADER, error)
            await asyncio.sleep(TELL_AGAIN_S)
        return None
