"""What the run supervisor has the nodes' agents do to processes that run: end them, kill them. Decides nothing.

A node whose agent is not there, or does not answer, is reported as lost, never waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ...core.actor import ActorContext
from ...core.errors import DeadlineExceeded, MyxaError, NoSuchActor, NotSent, PeerDied
from ...core.refs import with_deadline
from ...core.supervision import End
from ..contracts import AgentContract, agent_name
from .crew import Crew

NODE_IS_GONE = (NotSent, PeerDied, DeadlineExceeded, NoSuchActor)
"""Outcomes of a call to a node's agent that mean the node. Any other error is of the agent's work: it is there."""
MARGIN_S = 30.0
"""Beside a process's own grace, for the answer."""


class Reach:
    """From node 0 to the processes of every node. `lose(node, why)`: its agent did not answer."""

    def __init__(self, ctx: ActorContext, crew: Crew, lose: Callable[[int, str], None]) -> None:
        self._ctx = ctx
        self._crew = crew
        self._lose = lose

    async def end(self, order: End) -> None:
        """All of them at the same time, each with its grace."""
        graces = dict(zip(order.children, order.graces_s, strict=True))
        waits = [
            self.end_on(node, tuple(name for name in mine if graces[name] == grace_s), grace_s)
            for node, mine in self._crew.by_node(order.children)
            for grace_s in sorted({graces[name] for name in mine})
        ]
        await asyncio.gather(*waits)

    async def end_at_once(self, names: Sequence[str]) -> None:
        """Without any grace."""
        await asyncio.gather(*(self.end_on(node, mine, 0.0) for node, mine in self._crew.by_node(names)))

    async def end_on(self, node: int, names: tuple[str, ...], grace_s: float) -> None:
        """Those of one node; returns when they are gone."""
        agent = with_deadline(self._agent(node), grace_s + MARGIN_S)
        try:
            await agent.end_actors(names, grace_s)
        except MyxaError as error:
            self._failed(node, names, error)

    async def kill_hung(self, names: Sequence[str]) -> None:
        """They do not react: with their stacks in their logs."""
        for node, mine in self._crew.by_node(names):
            try:
                await self._agent(node).kill_hung(mine)
            except MyxaError as error:
                self._failed(node, mine, error)

    def _failed(self, node: int, names: Sequence[str], error: MyxaError) -> None:
        if isinstance(error, NODE_IS_GONE):
            self._lose(node, str(error))
        else:  # who does not end is found out by the time that it takes
            self._ctx.log.error("node %d did not end %s: %s", node, ", ".join(names), error)

    def _agent(self, node: int) -> AgentContract:
        return self._ctx.ref(AgentContract, agent_name(node))
