"""Node 0's part: from the gathering of nodes to the end of the last process. It decides when a run is over and how."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from ...core.timeouts import LauncherTimeouts
from ..first_failure import RunEnd
from ..run_watch import RunWatch
from ..screen import Screen
from ..supervisor.run_supervisor import RunSupervisor, StopRequest
from ..views.run_view import RunView

LOOK_EVERY_S = 0.5
ASK_TO_STOP_S = 10.0
"""How long one request for an orderly end may take; it is repeated."""
VERDICT_S = 1.5
"""After the coordinator reports a failure: how long to wait for the failing process's own exit status."""
CONSEQUENCES_S = 0.5
"""How long the report of a failure waits for consequences. With the two above, the report comes within 3 s."""

T = TypeVar("T")


async def race(work: Coroutine[Any, Any, T], *others: asyncio.Future[Any]) -> asyncio.Task[T]:
    """The work's task, done; cancelled if one of the others was done first."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        await asyncio.wait({task, *others}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    return task


@dataclass(eq=False)
class Lead:
    """Conducts one run."""

    supervisor: RunSupervisor
    watch: RunWatch
    screen: Screen
    timeouts: LauncherTimeouts

    def __post_init__(self) -> None:
        self._failures = self.supervisor.failures

    def _now(self) -> float:
        return self.supervisor.ctx.clock.monotonic()

    async def run(self) -> RunEnd:
        """Gather, start, watch, end. Raises LaunchError if the nodes do not meet."""
        start = await race(self._start(), self.supervisor.stop_requested)
        if start.cancelled():
            wish = self.supervisor.stop_requested.result()
            ending = RunEnd(wish.exit_code(is_orderly=True), wish.reason)
        else:
            start.result()
            ending = await self._until_over()
        await self._report()
        await self.supervisor.stop_all()
        failure = self._failures.first if ending.exit_code else None
        return RunEnd(ending.exit_code, ending.reason, self.watch.last.status, failure)

    async def _start(self) -> None:
        await self.supervisor.membership.gather(self.timeouts.gather_s, self.screen.say)
        await self.supervisor.start_all()

    async def _report(self) -> None:
        """Report a failure now: an orderly end takes longer than a person should wait for the reason."""
        if self._failures.first is None:
            return
        await asyncio.sleep(CONSEQUENCES_S)
        status = self.watch.last.status
        if status is not None and status.phase == "failed" and status.error:
            self._failures.add(f"the coordinator ended the run: {status.error}", self._now())
        self.screen.tell(self._failures.first)

    async def _until_over(self) -> RunEnd:
        deadline: float | None = None
        is_heard = False
        while True:
            state = await self._look()
            if (ending := self._judge(state)) is not None:
                return await self._settle(ending)
            wish = self._wish()
            if wish is not None and deadline is None:
                deadline = self._now() + self.timeouts.finish_s
            if wish is not None and not is_heard:  # a coordinator that is being restarted gets the next request
                is_heard = await self.watch.ask_to_stop(wish.reason, min(ASK_TO_STOP_S, self.timeouts.finish_s))
            if wish is not None and deadline is not None and self._now() > deadline:
                waited = f"the run had no orderly end within {self.timeouts.finish_s:g} s"
                why = waited if is_heard else "the coordinator did not answer"
                return RunEnd(wish.exit_code(is_orderly=False), f"{wish.reason}; {why}")
            await asyncio.wait({self.supervisor.failed}, timeout=LOOK_EVERY_S)

    async def _look(self) -> RunView:
        """State of the run; a failure does not wait for answers of others."""
        waiting = ", ".join(self.supervisor.starting)
        look = await race(self.watch.look(f"waiting for {waiting}" if waiting else ""), self.supervisor.failed)
        if look.cancelled():
            return self.watch.last
        state = look.result()
        self.screen.show(state)
        return state

    def _wish(self) -> StopRequest | None:
        return self.supervisor.stop_requested.result() if self.supervisor.stop_requested.done() else None

    def _judge(self, state: RunView) -> RunEnd | None:
        """Whether the run is over. An actor's death counts more than the coordinator's status."""
        if self.supervisor.failed.done():
            verdict = self.supervisor.failed.result()
            return RunEnd(verdict.exit_code, verdict.reason)
        if state.status is None or state.status.phase not in ("finished", "failed"):
            return None
        if state.status.phase == "failed":
            return RunEnd(1, state.status.error or state.status.reason or "the coordinator ended the run")
        wish = self._wish()
        return RunEnd(wish.exit_code(is_orderly=True) if wish else 0, state.status.reason)

    async def _settle(self, ending: RunEnd) -> RunEnd:
        """The cause of a failed run: a process that fails by itself now, else the actor that the error names."""
        if ending.exit_code != 1 or self.supervisor.failed.done():
            return ending
        await asyncio.wait({self.supervisor.failed}, timeout=VERDICT_S)
        if self.supervisor.failed.done():
            verdict = self.supervisor.failed.result()
            return RunEnd(verdict.exit_code, ending.reason)
        name = ending.reason.partition(":")[0]
        name = name if name in self.supervisor.actors else "coordinator"
        self._failures.blame(name, ending.reason, self._now())
        return ending
