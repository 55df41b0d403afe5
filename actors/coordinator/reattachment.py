"""How a coordinator that was started anew comes back to a run that went on: tells what is decided, waits to be told.

Part of the coordinator. Owners of knobs and the buffer are told; trainer and engines tell where they stand by
themselves, as soon as they see the new incarnation. Those that died at the same time are not waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from ...core.actor import ActorContext
from .conduct import Conduct
from .owner_return import OwnerReturn
from .run_state import RunState

REJOIN_S = 5.0
"""How long those that an earlier incarnation knew may take."""


class Reattachment:
    """See the module's head."""

    def __init__(
        self,
        ctx: ActorContext,
        state: RunState,
        owners: OwnerReturn,
        conduct: Conduct,
        tell: Callable[[str, str], None],
    ) -> None:
        """`tell`: an event, its kind and text."""
        self._ctx = ctx
        self._state = state
        self._owners = owners
        self._conduct = conduct
        self._tell = tell
        self._wanted = set(state.engines)
        self._is_trainer_wanted = state.version >= 0
        self._news = asyncio.Event()

    def heard(self, name: str) -> None:
        """The trainer, or a rollout actor, has reported in."""
        if name == "trainer/0":
            self._is_trainer_wanted = False
        self._wanted.discard(name)
        self._news.set()

    async def run(self, joined: Collection[str]) -> None:
        """Returns when the run can go on as before. `joined`: rollout actors that reported in, as it grows."""
        began_s = self._ctx.clock.monotonic()
        for name in self._owners.others():
            self._ctx.spawn(self._owners.told(name), name=f"knobs-for-{name}")
        self._ctx.spawn(self._conduct.tell_again(), name="pause-again")
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
        engines = sorted(self._wanted.intersection(self._ctx.peers("rollout/")))
        return ["trainer/0", *engines] if self._is_trainer_wanted else engines
