"""Nodes that come to a run that goes on, and nodes that leave it before it ends: who may, and when one is free to go.

Decides without IO; the run supervisor tells what happens and carries out.

Must not know processes or sockets. A number is never given twice: what is late of a node that went cannot be taken for
news of another.
"""

from __future__ import annotations

from collections.abc import Callable

from ...core.config import RunConfig
from ...core.errors import ConfigError
from ..actor_spec import ActorSpec
from ..contracts import EnlistReply, LateWish, NodeFacts
from .late_place import Present, check_distance, staff_node
from .muster import Muster


class Visitors:
    """Of one run. `config` None: a run whose actors nobody can add to; then nobody may come."""

    def __init__(self, config: RunConfig | None, num_nodes: int, max_nodes: int, muster: Muster) -> None:
        self._config = config
        self._max_nodes = max_nodes
        self._muster = muster
        self._next = num_nodes
        self._wishes: dict[int, LateWish] = {}
        """Late node -> what it offered; from its number on."""
        self._given: dict[str, EnlistReply] = {}
        """Launcher's nonce -> its number: who asks again is told the same."""
        self._going: dict[int, str] = {}
        """Node -> why it leaves."""

    @property
    def late(self) -> dict[int, str]:
        """Late nodes that take part now, and the GPUs that they named."""
        return {node: wish.devices for node, wish in self._wishes.items() if node in self._muster.nodes}

    def enlist(self, facts: NodeFacts, present: Callable[[], Present], has_started: bool) -> EnlistReply:
        """The answer to a node that wants to come. `present` is asked only when it is needed."""
        if self._config is None or facts.late is None:
            return EnlistReply(reason="this run takes nobody in")
        if facts.nonce in self._given:
            return self._given[facts.nonce]
        if not has_started:
            return EnlistReply(reason="the run is being started", is_early=True)
        reason = self._muster.objection_to_late(facts)
        if not reason and self._max_nodes and len(self._muster.nodes) >= self._max_nodes:
            reason = f"the run has {len(self._muster.nodes)} nodes, as many as it may have (--nnodes)"
        if reason:
            return EnlistReply(reason=reason)
        node = self._next
        there = present()
        there = Present(there.actors, (*there.nodes, node), there.taken, there.leaving,
                        {**there.late, node: facts.late.devices})  # fmt: skip
        try:
            check_distance(self._config, self._muster.is_same_machine(facts))
            actors = staff_node(self._config, node, facts.late.num_rollouts, there)
        except ConfigError as error:
            return EnlistReply(reason=str(error))
        self._next += 1
        self._wishes[node] = facts.late
        reply = EnlistReply(node=node, config=self._muster.config, actors=actors)
        if facts.nonce:
            self._given[facts.nonce] = reply
        return reply

    def is_expected(self, node: int) -> bool:
        """Whether that number was given to a late node."""
        return node in self._wishes

    def staff(self, node: int, present: Present) -> tuple[ActorSpec, ...]:
        """What is to be started on a late node that joined; nothing, if it goes or has gone. Raises ConfigError if that
        cannot be (any more)."""
        if self._config is None or node in self._going or node not in self._wishes:
            return ()
        return staff_node(self._config, node, self._wishes[node].num_rollouts, present)

    # -- leaving

    def go(self, node: int, reason: str) -> bool:
        """That node shall leave; False: it does already."""
        if node in self._going:
            return False
        self._going[node] = reason
        return True

    def is_going(self, node: int) -> bool:
        """Whether it is on its way out."""
        return node in self._going

    def released(self, has_actors: Callable[[int], bool]) -> list[tuple[int, str]]:
        """Nodes on their way out that have nobody any more, and why they go; each is told once."""
        free = [(node, why) for node, why in self._going.items() if not has_actors(node)]
        for node, _ in free:
            self.forget(node)
        return free

    def forget(self, node: int) -> None:
        """It is gone."""
        self._going.pop(node, None)
        self._wishes.pop(node, None)
        self._given = {nonce: reply for nonce, reply in self._given.items() if reply.node != node}
