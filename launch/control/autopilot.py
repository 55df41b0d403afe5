"""The autopilot: approves suggestions by itself, with the damping of `pilot.py`. Off unless the run file wants it.

It runs in the launcher of node 0, asks what `myxa why` asks, and changes knobs as an operator does: through the
coordinator, all or none, in the audit log. Pinned knobs and forbidden proposals are left alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Container

from ...actors.contracts.roles import CoordinatorContract
from ...core.actor import with_deadline
from ...core.errors import MyxaError
from ...core.knobs import ChangeRequest, Operator
from ..views.advice import Advice, all_advice
from .evidence import gather_evidence
from .pilot import Pilot
from .suggestion_book import SuggestionBook
from .verb import Room

LOOK_S = 2.0
LONGEST_WINDOW_S = 60.0
CHANGE_S = 60.0
WHO = Operator(user="autopilot", via="auto")

_log = logging.getLogger("myxa.autopilot")


@contextlib.asynccontextmanager
async def autopilot(room: Room) -> AsyncGenerator[None]:
    """While this lasts, the autopilot flies, if `control.autopilot` is set."""
    if not room.config.control.autopilot:
        yield
        return
    # Kept and ended here: the launcher has no actor context of its own to spawn it in.
    flight = asyncio.get_running_loop().create_task(Autopilot(room).fly())
    try:
        yield
    finally:
        flight.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await flight


class Autopilot:
    """One per run."""

    def __init__(self, room: Room, pilot: Pilot | None = None) -> None:
        self._room = room
        self._pilot = pilot or Pilot()
        self._seen = -1
        self._moved_s = room.node.clock.monotonic()

    async def fly(self) -> None:
        """Until cancelled. What goes wrong is logged: a run never fails for its autopilot."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except (MyxaError, OSError) as error:
                _log.info("the autopilot could not look: %s", error)

    async def look(self) -> None:
        """One look, and one move if it is due. Only new versions count as looks, so that a look is new evidence."""
        since_s = self._room.node.clock.monotonic() - self._moved_s
        evidence = await gather_evidence(self._room, min(LONGEST_WINDOW_S, since_s))
        if not evidence.is_running or evidence.version <= self._seen:
            return
        self._seen = evidence.version
        verdict = evidence.verdict()
        book = SuggestionBook(self._room.run_dir.path)

        def propose(but_for: Container[str]) -> Advice | None:
            found = all_advice(verdict, evidence.facts, but_for=but_for)
            return next((advice for advice in found if advice.knob and book.allows(advice)), None)

        advice = self._pilot.look(evidence.version, verdict, propose)
        if advice is None:
            return
        refused = await self._change(advice)
        self._moved_s = self._room.node.clock.monotonic()
        if refused:
            self._pilot.refused(advice, refused)
        else:
            self._pilot.moved(evidence.version, advice, verdict)

    async def _change(self, advice: Advice) -> str:
        """Why the owners refuse it, or nothing."""
        coordinator = with_deadline(self._room.node.ref(CoordinatorContract, "coordinator"), CHANGE_S)
        request = ChangeRequest(
            values={advice.knob: advice.new}, expect={advice.knob: advice.old}, who=WHO, reason=advice.why
        )
        reply = await coordinator.change_knobs(request)
        _log.info("%s: %s -> %s %s", advice.knob, advice.old, advice.new, reply.refused or "")
        return reply.refused
