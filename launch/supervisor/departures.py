"""Nodes that leave a run: in order, with their actors' work handed back, or lost. Decides nothing about actors.

Whatever was on a node, or was being started there, goes with it. A node that passes for lost is told so: it may live,
and its processes must not go on without the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...core.actor import ActorContext
from ...core.errors import ConfigError, LaunchError, MyxaError
from ...core.refs import with_deadline
from ...core.supervision import OVER, Instruction, Supervisor
from ...core.supervision_tree import SupervisionError
from ..contracts import AgentContract, agent_name
from .crew import Crew
from .muster import Muster
from .silence import Silence
from .visitors import Visitors

LEAVE_S = 10.0
"""How long a node may take to hear that it is to leave."""


class Departures:
    """Of one run. `carry_out`: what the rules answer."""

    def __init__(
        self,
        ctx: ActorContext,
        crew: Crew,
        rules: Supervisor,
        *,
        muster: Muster,
        visitors: Visitors,
        silence: Silence,
        carry_out: Callable[[Sequence[Instruction]], None],
    ) -> None:
        self._ctx = ctx
        self._crew = crew
        self._rules = rules
        self._muster = muster
        self._visitors = visitors
        self._silence = silence
        self._carry_out = carry_out

    def dismiss(self, node: int, reason: str) -> None:
        """Have all its actors hand their work back and end for good, then tell its launcher to leave. Raises
        ConfigError where one of them cannot; then none of them does."""
        if node == 0 or node not in self._muster.nodes:
            raise ConfigError(f"node {node} cannot leave", remedy="node 0 conducts the run; see `myxa ps` for others")
        try:
            for name in self._on_node(node):
                self._rules.check_retire(name)
        except SupervisionError as error:
            raise ConfigError(f"node {node} cannot leave: {error}", remedy="`myxa down` ends the run") from error
        if self._visitors.go(node, reason):
            self._ctx.log.info("node %d leaves: %s", node, reason)
            for name in reversed(self._on_node(node)):
                self._carry_out(self._rules.retire(name, reason, self._now()))
            if not any(spec.role == "rollout" and spec.node != node for spec in self._crew.specs):
                self._ctx.log.error("no rollout actor is left: `myxa scale rollout=N` starts some")
            self.release()

    def release(self) -> None:
        """Nodes on their way out whose last actor has gone are free to leave."""
        for node, reason in self._visitors.released(lambda node: bool(self._on_node(node))):
            self._ctx.spawn(self.let_go(node, 0, reason), name=f"let node {node} go")

    async def let_go(self, node: int, exit_code: int, reason: str) -> None:
        """From here on its end is no loss."""
        if self._forget(node):
            self._mourn(node, f"node {node} left: {reason}")
            await self._send_away(node, exit_code, reason)
            self._ctx.log.info("node %d has left the run: %s", node, reason)

    def lose(self, node: int, why: str) -> None:
        """It is gone, or passes for it. Of no interest where it is known, or before anything was on it."""
        was_here = self._forget(node)
        if not was_here and not any(name in self._rules.alive for name in self._crew.on_node(node)):
            return
        why = why or "no word from it"
        reason = f"the launcher of node {node} is gone ({why})"
        self._ctx.log.error("%s", reason)
        if was_here and node:
            told = f"node 0 takes this node for lost: {why}"
            self._ctx.spawn(self._send_away(node, LaunchError.exit_code, told), name=f"send node {node} away")
        self._mourn(node, reason)

    def _mourn(self, node: int, reason: str) -> None:
        if names := self._on_node(node):
            self._carry_out(self._rules.on_lost(agent_name(node), names, reason, self._now()))

    def _on_node(self, node: int) -> list[str]:
        """Its actors that have a process or will get one."""
        return [name for name in self._crew.on_node(node) if self._rules.state(name) not in OVER]

    def _forget(self, node: int) -> bool:
        """Whether it was here."""
        self._silence.forget(node)
        self._visitors.forget(node)
        return self._muster.lose(node)

    async def _send_away(self, node: int, exit_code: int, reason: str) -> None:
        agent = with_deadline(self._ctx.ref(AgentContract, agent_name(node)), LEAVE_S)
        try:
            await agent.leave(exit_code, reason)
        except MyxaError as error:
            self._ctx.log.info("node %d was not told to leave: %s", node, error)

    def _now(self) -> float:
        return self._ctx.clock.monotonic()
