"""Owners of knobs that come back, or that a coordinator which came back finds there: told until they use what is in
force. Part of the coordinator. Knows the conductor; must not know what an owner's failure means for the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ...core.actor import ActorContext
from ...core.errors import CallError
from .knob_conductor import KnobConductor

OTHER_OWNERS = ("buffer", "monitor", "trainer/")
"""Owners of knobs beside the rollout actors, which report in."""
TELL_TRIES = 4
"""How often one of them may refuse what is in force."""
TELL_AGAIN_S = 1.0


class OwnerReturn:
    """See the module's head."""

    def __init__(
        self,
        ctx: ActorContext,
        conductor: KnobConductor,
        tell: Callable[[str, str], None],
        on_broken: Callable[[str, str], Awaitable[None]],
    ) -> None:
        """`tell`: an event, its kind and text. `on_broken`: an owner will not use them: name, why."""
        self._ctx = ctx
        self._conductor = conductor
        self._tell = tell
        self._on_broken = on_broken

    async def told(self, owner: str) -> None:
        """Who asks at its start is told twice, which changes nothing; who does not is told here. One that cannot be
        reached is told until it can, or is gone; one that answers and will not use them has failed, since others count
        on it, but for the monitor."""
        num_refused, why = 0, ""
        while num_refused < TELL_TRIES:
            await self._conductor.until_decided()
            try:
                return await self._conductor.joined(owner)
            except CallError as err:
                why = str(err)
                self._tell("knob-not-used", why)
            await asyncio.sleep(TELL_AGAIN_S)
            if owner not in self._ctx.peers(owner):
                return None  # whoever takes its place is told anew
            num_refused += owner not in (await self._conductor.roster(owner)).silent
        return await self._on_broken(owner, why) if owner != "monitor" else None

    def others(self) -> list[str]:
        """Who is there now, of those that do not report in by themselves."""
        return [name for prefix in OTHER_OWNERS for name in self._ctx.peers(prefix)]
