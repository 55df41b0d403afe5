"""Node 0's part: from the nodes' meeting to the last process's end. Decides when a run is over and how.

Knows the run supervisor, the run watch and a place to show states. Must not know sockets, processes or the terminal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from ...core.clock import Clock
from ...core.messages import RunStatus
from ..first_failure import FirstFailure
from ..run_watch import RunWatch
from ..supervisor.run_supervisor import Patience, RunSupervisor, StopWish
from ..views.live_state import LiveState
from .race import race

LOOK_EVERY_S = 0.5
ASK_TO_STOP_S = 10.0
"""How long one request to end in good order may take; it is repeated."""
VERDICT_S = 1.5
"""How long a run that the coordinator calls failed waits for the failing process's own exit status."""
CONSEQUENCES_S = 0.5
"""How long the report of a failure waits for others to fail of it. Report within 3 s: with the two above it is."""
CLOSE_MONITOR_S = 30.0


@dataclass(frozen=True, slots=True)
class Ending:
    """How the run ended."""

    exit_code: int
    reason: str
    status: RunStatus | None = None
    first_failure: FirstFailure | None = None


class Lead:
    """Conducts one run."""

    def __init__(
        self,
        supervisor: RunSupervisor,
        watch: RunWatch,
        *,
        clock: Clock,
        patience: Patience,
        show: Callable[[LiveState], None],
        tell: Callable[[FirstFailure], None],
    ) -> None:
        self._supervisor = supervisor
        self._watch = watch
        self._clock = clock
        self._patience = patience
        self._show = show
        self._tell = tell

    async def run(self) -> Ending:
        """Gather, start, watch, end. Raises LaunchError if the nodes do not meet."""
        start = await race(self._start(), self._supervisor.stop_wished)
        if start.cancelled():
            ending = self._stopped_early()
        else:
            start.result()
            ending = await self._until_over()
        await self._report()
        await self._watch.close_monitor(CLOSE_MONITOR_S)
        await self._supervisor.stop_all(ending.reason)
        failure = self._supervisor.first_failure if ending.exit_code else None
        return Ending(ending.exit_code, ending.reason, self._watch.last.status, failure)

    async def _start(self) -> None:
        await self._supervisor.gather()
        await self._supervisor.start_all()

    async def _report(self) -> None:
        """Tell of a failure now: to end everything in good order takes longer than a person should wait for a word."""
        if not self._supervisor.has_failed:
            return
        await asyncio.sleep(CONSEQUENCES_S)
        status = self._watch.last.status
        if status is not None and status.phase == "failed" and status.error:
            self._supervisor.add_consequence(f"the coordinator gave the run up: {status.error}")
        if (failure := self._supervisor.first_failure) is not None:
            self._tell(failure)

    def _stopped_early(self) -> Ending:
        wish = self._supervisor.stop_wished.result()
        return Ending(wish.exit_code(is_orderly=True), wish.reason)

    async def _until_over(self) -> Ending:
        deadline: float | None = None
        is_heard = False
        while True:
            state = await self._look()
            if (ending := self._judge(state)) is not None:
                return await self._settle(ending)
            wish = self._wish()
            if wish is not None and deadline is None:
                deadline = self._clock.monotonic() + self._patience.finish_s
            if wish is not None and not is_heard:  # a coordinator that is being restarted hears it the next time
                is_heard = await self._watch.ask_to_stop(wish.reason, min(ASK_TO_STOP_S, self._patience.finish_s))
            if wish is not None and deadline is not None and self._clock.monotonic() > deadline:
                waited = f"the run did not end in good order within {self._patience.finish_s:g} s"
                why = waited if is_heard else "the coordinator did not answer"
                return Ending(wish.exit_code(is_orderly=False), f"{wish.reason}; {why}")
            await asyncio.wait({self._supervisor.failed}, timeout=LOOK_EVERY_S)

    async def _look(self) -> LiveState:
        """How things stand; a failure is not kept waiting for the answers of others."""
        look = await race(self._watch.look(self._note()), self._supervisor.failed)
        if look.cancelled():
            return self._watch.last
        state = look.result()
        if state.status is not None:
            self._supervisor.hear(state.status)
        self._show(state)
        return state

    def _wish(self) -> StopWish | None:
        return self._supervisor.stop_wished.result() if self._supervisor.stop_wished.done() else None

    def _judge(self, state: LiveState) -> Ending | None:
        """Whether the run is over. An actor's death weighs more than what the coordinator says of it."""
        if self._supervisor.failed.done():
            verdict = self._supervisor.failed.result()
            return Ending(verdict.exit_code, verdict.reason)
        if state.status is None or state.status.phase not in ("finished", "failed"):
            return None
        if state.status.phase == "failed":
            return Ending(1, state.status.error or state.status.reason or "the coordinator gave the run up")
        wish = self._wish()
        return Ending(wish.exit_code(is_orderly=True) if wish else 0, state.status.reason)

    async def _settle(self, ending: Ending) -> Ending:
        """A failed run's cause is the process that failed, if it ends by itself now; else the one the error names."""
        if ending.exit_code != 1 or self._supervisor.failed.done():
            return ending
        await asyncio.wait({self._supervisor.failed}, timeout=VERDICT_S)
        if self._supervisor.failed.done():
            verdict = self._supervisor.failed.result()
            return Ending(verdict.exit_code, ending.reason)
        name = ending.reason.partition(":")[0]
        self._supervisor.blame(name if self._supervisor.knows(name) else "coordinator", ending.reason)
        return ending

    def _note(self) -> str:
        waiting = self._supervisor.starting
        return f"waiting for {', '.join(waiting)}" if waiting else ""
