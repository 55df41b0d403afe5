"""Membership of a run: nodes that joined, were refused, come late or leave.

Pure but for `gather`, which waits: time is passed in, and the run supervisor acts. A node number is never given twice,
so delayed messages of a node that left cannot be taken for another node's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from ... import __version__
from ...core.config import RunConfig
from ...core.errors import LaunchError
from ..contracts import SUPERVISOR, EnlistReply, NodeFacts
from .placement import distance_problem, make_spec

SAY_EVERY_S = 10.0
_log = logging.getLogger(f"myxa.{SUPERVISOR}")


class Membership:
    """The nodes of one run: those that take part, come late, leave."""

    def __init__(self, num_nodes: int, welcome: EnlistReply, run: RunConfig, max_nodes: int = 0) -> None:
        """`welcome`: what every node is to know before it joins, but for its number. `run`: from which late nodes get
        their actors. `max_nodes`: at the same time; 0: no limit."""
        self.num_nodes = num_nodes
        self._max_nodes = max_nodes
        self.welcome = welcome
        self.run = run
        self._nodes: dict[int, NodeFacts] = {}
        self._refused: dict[int, str] = {}
        self._declined = ""
        self._doing: dict[int, str] = {}
        """Node that has not joined -> what it does, as it said last."""
        self._changed = asyncio.Event()
        self._next = num_nodes
        self._late: set[int] = set()
        """Late nodes, from the moment they have a number."""
        self._replies: dict[str, EnlistReply] = {}
        """Launcher's nonce -> its number: a repeated request gets the same answer."""
        self._leaving: dict[int, str] = {}
        """Node -> why it leaves."""

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(sorted(self._nodes))

    def facts(self, node: int) -> NodeFacts:
        """Of a member; without host and address if it is none any more."""
        return self._nodes.get(node) or NodeFacts(node=node, version="", host="")

    def join(self, facts: NodeFacts) -> str:
        """A node wants to join, or cannot: why it takes no part, or empty. The same launcher may repeat its request."""
        if cause := facts.problem or self._gpu_problem(facts):
            problem = f"node {facts.node} ({facts.host}) cannot take part: {cause}"
            _log.error("%s", problem)
            if not facts.is_late:
                self._declined = self._declined or problem
                self._changed.set()
            return cause
        if self._is_member(facts):
            return ""
        if reason := self._objection(facts):
            return self._refuse(facts, reason)
        if facts.doing:
            self._doing[facts.node] = f"{facts.host}: {facts.doing}"
            self._changed.set()
            return ""
        _log.info("node %d joined from %s", facts.node, facts.host)
        self._refused.pop(facts.node, None)
        self._doing.pop(facts.node, None)
        self._nodes[facts.node] = facts
        self._changed.set()
        return ""

    def _gpu_problem(self, facts: NodeFacts) -> str:
        for member in self._nodes.values():
            if member.node != facts.node and (shared := set(facts.gpus) & set(member.gpus)):
                return (
                    f"its actors and those of node {member.node} use the same GPUs ({', '.join(sorted(shared))}): "
                    "start one launcher on each machine (srun --ntasks-per-node=1), or name other GPUs in roles"
                )
        return ""

    def _is_member(self, facts: NodeFacts) -> bool:
        member = self._nodes.get(facts.node)
        return member is not None and bool(member.nonce) and member.nonce == facts.nonce

    def _refuse(self, facts: NodeFacts, reason: str) -> str:
        self._refused[facts.node] = reason
        _log.error("node %d (%s) is refused: %s", facts.node, facts.host, reason)
        return reason

    def lose(self, node: int) -> bool:
        """The node has left or is lost; whether it was a member."""
        self._leaving.pop(node, None)
        self._doing.pop(node, None)
        self._late.discard(node)
        self._replies = {nonce: reply for nonce, reply in self._replies.items() if reply.node != node}
        return self._nodes.pop(node, None) is not None

    async def gather(self, timeout_s: float, say: Callable[[str], object] = lambda _: None) -> None:
        """Wait until all nodes joined, for each of them as long as it says something new within `timeout_s`. Raises
        LaunchError with the missing ones, or what a node reports of itself."""
        now = asyncio.get_running_loop().time
        heard_s, told_texts, said_s = dict.fromkeys(range(self.num_nodes), now()), dict[int, str](), -SAY_EVERY_S
        while (missing := heard_s.keys() - self._nodes.keys()) and not self._declined:
            self._changed.clear()
            try:
                async with asyncio.timeout(min(heard_s[node] for node in missing) + timeout_s - now()):
                    await self._changed.wait()
            except TimeoutError:
                raise self._missing(sorted(missing), timeout_s) from None
            news = {node: text for node, text in self._doing.items() if told_texts.get(node) != text}
            told_texts |= news
            heard_s |= dict.fromkeys((*news, *self._nodes), now())
            if news and now() >= said_s + SAY_EVERY_S:
                said_s = now()
                say("; ".join(f"node {node} ({text})" for node, text in sorted(news.items())))
        if self._declined:
            raise LaunchError(self._declined, remedy="correct it there and start all nodes again")

    def _missing(self, nodes: Sequence[int], timeout_s: float) -> LaunchError:
        shown = [f"{node} ({self._doing[node]})" if node in self._doing else str(node) for node in nodes]
        refusals = "".join(f"; node {node} was refused: {why}" for node, why in sorted(self._refused.items()))
        return LaunchError(
            f"{len(nodes)} of {self.num_nodes} nodes did not join within {timeout_s:g} s of their last word: "
            f"{', '.join(shown)}{refusals}",
            remedy="start `myxa launch` on every node with the --rdzv of node 0",
        )

    def _objection(self, facts: NodeFacts) -> str:
        """Why a node may not join; empty: it may."""
        if facts.version != __version__:
            return f"it runs myxa {facts.version}, node 0 runs {__version__}"
        if facts.is_late and facts.node >= 0 and facts.node not in self._late:
            return f"it was not given the number {facts.node}"
        if not facts.is_late and not 0 <= facts.node < self.num_nodes:
            return f"there is no node {facts.node} among {self.num_nodes} (--node-rank)"
        member = self._nodes.get(facts.node)
        return f"node {facts.node} joined already, from {member.host} (--node-rank)" if member is not None else ""

    # -- nodes that come late or leave

    @property
    def late(self) -> frozenset[int]:
        """Late nodes that are members now."""
        return frozenset(self._late & self._nodes.keys())

    def enlist(self, facts: NodeFacts, has_started: bool) -> EnlistReply:
        """The answer to a node that wants to join."""
        if not facts.is_late:
            if not self._is_member(facts) and (reason := self._objection(facts)):
                return EnlistReply(reason=self._refuse(facts, reason))
            return replace(self.welcome, node=facts.node)
        if facts.nonce in self._replies:
            return self._replies[facts.nonce]
        if not has_started:
            waits = "; ".join(f"node {node} ({text})" for node, text in sorted(self._doing.items()))
            return EnlistReply(reason=f"the run is being started{': ' if waits else ''}{waits}", is_early=True)
        reason = self._objection(facts)
        if not reason and self._max_nodes and len(self._nodes) >= self._max_nodes:
            reason = f"the run has {len(self._nodes)} nodes, as many as it may have (--nnodes)"
        shares_memory = bool(facts.machine) and all(node.machine == facts.machine for node in self._nodes.values())
        if reason := reason or distance_problem(self.run, shares_memory):
            return EnlistReply(reason=reason)
        node, role = self._next, self.run.roles.rollout
        self._next += 1
        self._late.add(node)
        actor = make_spec("rollout", role, 0, node, role.device_ids)
        reply = self._replies[facts.nonce] = replace(self.welcome, node=node, actors=(actor,))
        return reply

    def is_staying(self, node: int) -> bool:
        return node in self._nodes and node not in self._leaving

    def leave(self, node: int, reason: str) -> bool:
        """The node shall leave; False: it does already."""
        if node in self._leaving:
            return False
        self._leaving[node] = reason
        return True

    def released(self, has_actors: Callable[[int], bool]) -> list[tuple[int, str]]:
        """Leaving nodes that have no actor any more, with the reasons; each is returned once."""
        free_nodes = [(node, why) for node, why in self._leaving.items() if not has_actors(node)]
        for node, _ in free_nodes:
            del self._leaving[node]
        return free_nodes
