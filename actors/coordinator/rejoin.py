"""How actors and coordinator resume their work after one of them restarted.

Owners of knobs hear what is decided, the buffer whether the run is paused. Trainer and engines report in by themselves
as soon as they see the new incarnation. The leader gets its orders.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from ...core.errors import CallError, MyxaError, NotReady
from ...core.retry import until_answered
from ..contracts import TrainerContract
from .journal import RunContext
from .knob_conductor import KnobConductor
from .run_control import RunControl

REJOIN_S = 5.0
"""How long trainer and engines of the run may take to report in."""
LEADER = "trainer/0"
OTHER_OWNERS = ("buffer", "monitor", "trainer/")
"""Owners of knobs beside the rollout actors, which report in."""
TELL_AGAIN_S = 1.0


class Rejoin:
    """Of a coordinator that starts again in a run that works. Actors that died at the same time are not waited for."""

    def __init__(self, run: RunContext, conductor: KnobConductor, control: RunControl) -> None:
        self._ctx, self._state, self._tell = run.ctx, run.state, run.tell
        self._conductor = conductor
        self._control = control
        self._heard: set[str] = set()
        self._is_trainer_wanted = run.state.version >= 0
        self._news = asyncio.Event()

    def heard(self, name: str) -> None:
        if name == "trainer/0":
            self._is_trainer_wanted = False
        self._heard.add(name)
        self._news.set()

    async def run(self, joined: Collection[str]) -> None:
        """Returns when the run can continue. `joined`: rollout actors that reported in, as it grows."""
        began_s = self._ctx.clock.monotonic()
        for name in (name for prefix in OTHER_OWNERS for name in self._ctx.peers(prefix)):
            self._ctx.spawn(self._conductor.joined(name), name=f"knobs-for-{name}")
        self._ctx.spawn(self._control.tell_again(), name="pause-again")
        try:
            async with asyncio.timeout(REJOIN_S):
                while self._missing() and not self._state.is_over:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            self._tell("coordinator-alone", f"not heard within {REJOIN_S:g} s: {', '.join(self._missing())}")
        took_s = self._ctx.clock.monotonic() - began_s
        names = ", ".join(joined) or "no rollout actor"
        self._tell("coordinator-attached", f"version {self._state.version}, {names}; waited {took_s:.2f} s")

    def _missing(self) -> list[str]:
        engines = sorted({*self._ctx.peers("rollout/")} - self._heard)
        return ["trainer/0", *engines] if self._is_trainer_wanted else engines


class LeaderControl:
    """Sends start, continue and stop to the trainer's leader; retries until acknowledged. An order to an earlier gang
    is void: the new gang gets the next one when it reports in."""

    def __init__(self, run: RunContext) -> None:
        self._ctx, self._state, self._clock = run.ctx, run.state, run.clock
        self._leader = run.ctx.ref(TrainerContract, LEADER)
        self._starting: asyncio.Task[None] | None = None
        self._telling: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
        self._starting = self._ctx.spawn(self._start(), name="run-leader")

    async def _start(self) -> None:
        if (telling := self.tell_stop()) is not None:
            await asyncio.shield(telling)  # before it makes a step too many; its successor gets the order too
        try:
            await until_answered(self._run_leader, who=LEADER, clock=self._clock, log=self._ctx.log)
        except CallError as error:
            if LEADER in self._ctx.peers(LEADER):
                raise
            self._ctx.log.warning("%s is gone: %s; the next one is started when it reports in", LEADER, error)

    async def _run_leader(self) -> None:
        try:
            await self._leader.run_leader(self._state.version)
        except NotReady as error:
            self._ctx.log.warning("the gang was replaced: %s; the new one is started when it reports in", error)

    def tell_stop(self) -> asyncio.Task[None] | None:
        """If the run is to end, send that to the leader until it acknowledges. None: the run is not to end."""
        if self._state.stop_reason and (self._telling is None or self._telling.done()):
            self._telling = self._ctx.spawn(self._tell_stop(self._state.stop_reason), name="stop-leader")
        return self._telling

    async def _tell_stop(self, reason: str) -> None:
        while self._state.leader_reason is None and not self._state.is_over:
            try:
                return await self._leader.stop_leader(reason)
            except MyxaError as error:
                self._ctx.log.warning("the order to end did not reach %s: %s; it is repeated", LEADER, error)
            await asyncio.sleep(TELL_AGAIN_S)
        return None
