"""How the run supervisor has one actor's process started on its node, and what it makes of a start that fails.

A start that the node says no to is an end of the actor, which the rules judge as any other. Only a node that is not
there is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from ...core.actor import ActorContext
from ...core.errors import LaunchError, MyxaError
from ...core.supervision import Restart, Supervisor
from ..actor_spec import ActorSpec
from ..contracts import AgentContract, ChildEnd, RunPlan, StartOrder, StartReply, agent_name
from ..first_failure import CAUSE
from ..run_dir import RunDir
from .crew import Crew
from .gang_meetings import GangMeetings
from .reach import NODE_IS_GONE, Reach


class Starts:
    """Of one run. `lose(node, why)`: a node is not there. `ended(end)`: what came of a start that failed."""

    def __init__(
        self,
        ctx: ActorContext,
        crew: Crew,
        rules: Supervisor,
        reach: Reach,
        *,
        plan: RunPlan,
        end_s: float,
        lose: Callable[[int, str], None],
        ended: Callable[[ChildEnd], Awaitable[None]],
    ) -> None:
        self._ctx = ctx
        self._crew = crew
        self._rules = rules
        self._reach = reach
        self._plan = plan
        self._end_s = end_s
        self._lose = lose
        self._ended = ended
        self._meetings = GangMeetings(crew.specs, lambda node: self._agent(node).meeting_place())

    async def again(self, restart: Restart) -> None:
        """After its pause, in order."""
        which = ", ".join(str(n) for n in sorted(set(restart.attempts)))
        level = logging.WARNING if restart.branch else logging.INFO
        told = "%s: attempt %s in %.1f s (%s)"
        self._ctx.log.log(level, told, ", ".join(restart.children), which, restart.delay_s, restart.reason)
        await asyncio.sleep(restart.delay_s)
        for name, attempt in zip(restart.children, restart.attempts, strict=True):
            # A stop, or a newer restart of the same children, makes this one void.
            if self._rules.may_launch(name, attempt):
                self._rules.on_launch(name)
                await self.start(name, attempt)

    async def start(self, name: str, attempt: int) -> None:
        """As that attempt; returns when its process is there, or the rules have heard why it is not."""
        if name not in self._crew:
            return  # it left before its turn came
        member = self._crew[name]
        member.pid = 0
        reply = await self._ask(member.spec, attempt)
        member.pid, member.started_s, member.started_wall_s = reply.pid, self._now(), self._ctx.clock.wall()
        if reply.problem:
            await self._ended(self._failed(member.spec, attempt, reply))
        elif name in self._crew and self._rules.state(name) == "ending":  # it was to end before it was there
            await self._reach.end_on(member.spec.node, (name,), self._end_s)

    async def _ask(self, actor: ActorSpec, attempt: int) -> StartReply:
        try:
            meeting = await self._meetings.of(actor, attempt)
        except MyxaError as error:
            if isinstance(error, NODE_IS_GONE):
                self._lose(self._meetings.host(actor), str(error))
            return _refusal(f"{actor.name} has no place to meet its gang: {error}")
        order = StartOrder(actor=actor, attempt=attempt, meeting=meeting)
        try:
            return await self._agent(actor.node).start_actor(order)
        except MyxaError as error:
            if isinstance(error, NODE_IS_GONE):
                self._lose(actor.node, str(error))
            return _refusal(f"{actor.name} was not started: {error}")

    def _failed(self, actor: ActorSpec, attempt: int, reply: StartReply) -> ChildEnd:
        log_path = RunDir(Path(self._plan.run_dir)).log_path(actor.name, attempt)
        return ChildEnd(
            name=actor.name,
            attempt=attempt,
            status=reply.status,
            node=actor.node,
            log_path=str(log_path),
            tail=(CAUSE + reply.problem,),
        )

    def _agent(self, node: int) -> AgentContract:
        return self._ctx.ref(AgentContract, agent_name(node))

    def _now(self) -> float:
        return self._ctx.clock.monotonic()


def _refusal(problem: str) -> StartReply:
    return StartReply(problem=problem, status=LaunchError.exit_code)
