"""Who takes part: the nodes that have joined, those that were refused, and why. Waits for all of them at the start."""

from __future__ import annotations

import asyncio
import logging

from ...core.errors import LaunchError
from ..config_differences import differences
from ..contracts import JoinReply, NodeFacts


class Muster:
    """The nodes of one run."""

    def __init__(self, num_nodes: int, version: str, config: str, log: logging.Logger) -> None:
        self._num_nodes = num_nodes
        self._version = version
        self._config = config
        self._log = log
        self._nodes: dict[int, NodeFacts] = {}
        self._refused: dict[int, str] = {}
        self._declined = ""
        self._changed = asyncio.Event()

    @property
    def nodes(self) -> tuple[int, ...]:
        """Nodes that joined and are not lost."""
        return tuple(sorted(self._nodes))

    @property
    def config(self) -> str:
        """The run's resolved configuration."""
        return self._config

    def is_same_machine(self, facts: NodeFacts) -> bool:
        """Whether a node is on the machine of all that are here: what is shared memory to them is to it too."""
        return bool(facts.machine) and all(each.machine == facts.machine for each in self._nodes.values())

    def host(self, node: int) -> str:
        """Host name of a node; empty: it is not here."""
        return self._nodes[node].host if node in self._nodes else ""

    def join(self, facts: NodeFacts) -> JoinReply:
        """A node is here. The launcher that is here already may say so again."""
        held = self._nodes.get(facts.node)
        if held is not None and held.nonce and held.nonce == facts.nonce:
            return JoinReply(accepted=True)
        reason = self._objection(facts)
        if reason:
            self._refused[facts.node] = reason
            self._log.error("node %d (%s) is refused: %s", facts.node, facts.host, reason)
            return JoinReply(accepted=False, reason=reason)
        self._log.info("node %d joined from %s", facts.node, facts.host)
        self._refused.pop(facts.node, None)
        self._nodes[facts.node] = facts
        self._changed.set()
        return JoinReply(accepted=True)

    def decline(self, node: int, host: str, reason: str) -> None:
        """A node says that it cannot take part."""
        self._log.error("node %d (%s) cannot take part: %s", node, host, reason)
        self._declined = self._declined or f"node {node} ({host}) cannot take part: {reason}"
        self._changed.set()

    def lose(self, node: int) -> bool:
        """A node is gone; whether it was here."""
        return self._nodes.pop(node, None) is not None

    async def gather(self, timeout_s: float) -> None:
        """Until all nodes joined. LaunchError naming the missing ones, and why those that came were refused; at once
        if a node says that it cannot take part."""
        wanted = set(range(self._num_nodes))
        try:
            async with asyncio.timeout(timeout_s):
                while not wanted <= self._nodes.keys() and not self._declined:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            missing = sorted(wanted - self._nodes.keys())
            told = "".join(f"; node {node} was refused: {why}" for node, why in sorted(self._refused.items()))
            raise LaunchError(
                f"{len(missing)} of {len(wanted)} nodes did not join within {timeout_s:g} s: "
                f"{', '.join(map(str, missing))}{told}",
                remedy="start `myxa launch` on every node with the same run file and the --rdzv of node 0",
            ) from None
        if self._declined:
            raise LaunchError(self._declined, remedy="mend it there and start all nodes again")

    def objection_to_late(self, facts: NodeFacts) -> str:
        """Why a node may not come later; empty: it may, as far as its version and configuration go."""
        if facts.version != self._version:
            return f"it runs myxa {facts.version}, node 0 runs {self._version}"
        if facts.config and facts.config != self._config:
            return f"its configuration differs from node 0's: {differences(facts.config, self._config)}"
        return ""

    def _objection(self, facts: NodeFacts) -> str:
        if facts.late is not None:
            return self.objection_to_late(facts) or self._taken(facts)
        if facts.version != self._version:
            return f"it runs myxa {facts.version}, node 0 runs {self._version}"
        if facts.num_nodes != self._num_nodes:
            return f"it expects {facts.num_nodes} nodes, node 0 expects {self._num_nodes} (--nnodes)"
        if not 0 <= facts.node < self._num_nodes:
            return f"there is no node {facts.node} among {self._num_nodes} (--node-rank)"
        if facts.config != self._config:
            return f"its configuration differs from node 0's: {differences(facts.config, self._config)}"
        return self._taken(facts)

    def _taken(self, facts: NodeFacts) -> str:
        held = self._nodes.get(facts.node)
        return f"node {facts.node} joined already, from {held.host} (--node-rank)" if held is not None else ""
