"""Processes of actors on every node, started and ended through the nodes' agents. It carries out and decides nothing.

A start that a node refuses counts as an end of the actor, which the supervision rules judge like any other. A node
whose agent is gone or does not answer is reported as lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from ...actors.contracts import CoordinatorContract, RolloutContract
from ...core.actor import ActorContext
from ...core.errors import DeadlineExceeded, LaunchError, MyxaError, NoSuchActor, NotSent, PeerDied
from ...core.refs import with_deadline
from ...core.supervision import End, Restart, Supervisor
from ..actor_spec import ActorSpec, GangRendezvous
from ..contracts import AgentContract, ChildEnd, RunDescription, StartOrder, StartReply, agent_name
from ..first_failure import CAUSE
from ..run_dir import RunDir
from .run_actors import RunActors

NODE_IS_GONE = (NotSent, PeerDied, DeadlineExceeded, NoSuchActor)
"""Outcomes of a call to a node's agent that concern the node. Other errors come from an agent that is there."""
ANSWER_S = 30.0
"""Time for the answer, in addition to a process's own grace."""
LOOPBACK = "127.0.0.1"
LEAVING_S = 5.0
DRAIN_S = 40.0
"""A running group is aborted and returned at once; its reward may take time."""


class ActorProcesses:
    """`lose(node, why)`: its agent is gone. `ended(end)`: called for a start that failed."""

    def __init__(
        self,
        ctx: ActorContext,
        actors: RunActors,
        rules: Supervisor,
        *,
        plan: RunDescription,
        end_s: float,
        lose: Callable[[int, str], None],
        ended: Callable[[ChildEnd], Awaitable[None]],
    ) -> None:
        self._ctx = ctx
        self._actors = actors
        self._rules = rules
        self._plan = plan
        self._end_s = end_s
        self._lose = lose
        self._ended = ended
        ranks = [(spec.rank.gang, spec.node) for spec in actors.specs if spec.rank is not None]
        self._gang_hosts = dict(reversed(ranks))
        self._gang_nodes = {gang: {node for other, node in ranks if other == gang} for gang, _ in ranks}
        self._rendezvous: dict[str, tuple[int, GangRendezvous]] = {}
        """Gang -> attempt, rendezvous of that attempt's ranks."""
        self._rendezvous_lock = asyncio.Lock()

    # -- starting

    async def restart(self, order: Restart) -> None:
        """After its delay, in order."""
        attempts = ", ".join(str(n) for n in sorted(set(order.attempts)))
        level = logging.WARNING if order.budget else logging.INFO
        text = "%s: attempt %s in %.1f s (%s)"
        self._ctx.log.log(level, text, ", ".join(order.children), attempts, order.delay_s, order.reason)
        await asyncio.sleep(order.delay_s)
        for name, attempt in zip(order.children, order.attempts, strict=True):
            # A stop, or a newer restart of the same children, makes this one void.
            if self._rules.may_launch(name, attempt):
                self._rules.on_launch(name)
                await self.start(name, attempt)

    async def start(self, name: str, attempt: int) -> None:
        """Start that attempt; returns when its process is there, or the rules know why it is not."""
        if name not in self._actors:
            return  # it left before
        actor = self._actors[name]
        actor.pid = 0
        reply = await self._order_start(actor.spec, attempt)
        actor.pid = reply.pid
        actor.started_s, actor.started_wall_s = self._ctx.clock.monotonic(), self._ctx.clock.wall()
        if reply.problem:
            await self._ended(self._failed_start(actor.spec, attempt, reply))
        elif name in self._actors and self._rules.state(name) == "ending":  # it was ended while it started
            await self.end_on(actor.spec.node, (name,), self._end_s)

    async def _order_start(self, actor: ActorSpec, attempt: int) -> StartReply:
        try:
            meeting = await self._rendezvous_of(actor, attempt)
        except MyxaError as error:
            if isinstance(error, NODE_IS_GONE):
                self._lose(self._gang_hosts[actor.rank.gang] if actor.rank is not None else actor.node, str(error))
            return _refusal(f"{actor.name} has no rendezvous for its gang: {error}")
        order = StartOrder(actor=actor, attempt=attempt, meeting=meeting)
        try:
            return await self._agent(actor.node).start_actor(order)
        except MyxaError as error:
            if isinstance(error, NODE_IS_GONE):
                self._lose(actor.node, str(error))
            return _refusal(f"{actor.name} was not started: {error}")

    async def _rendezvous_of(self, actor: ActorSpec, attempt: int) -> GangRendezvous | None:
        """Where the ranks of that attempt meet; None for an actor that is no rank. The node of rank 0 is asked once per
        attempt, so that all ranks get the same answer. Ranks on one node use loopback: torch's store does not ask for a
        key. Raises what the call raises."""
        if actor.rank is None:
            return None
        gang = actor.rank.gang
        async with self._rendezvous_lock:
            held = self._rendezvous.get(gang)
            if held is None or held[0] != attempt:
                place = await self._agent(self._gang_hosts[gang]).meeting_place()
                if len(self._gang_nodes[gang]) == 1:
                    place = msgspec.structs.replace(place, address=LOOPBACK)
                held = self._rendezvous[gang] = attempt, place
            return held[1]

    def _failed_start(self, actor: ActorSpec, attempt: int, reply: StartReply) -> ChildEnd:
        log_path = RunDir(Path(self._plan.run_dir)).log_path(actor.name, attempt)
        return ChildEnd(
            name=actor.name,
            attempt=attempt,
            status=reply.status,
            node=actor.node,
            log_path=str(log_path),
            tail=(CAUSE + reply.problem,),
        )

    # -- ending

    async def drain(self, actor: ActorSpec, reason: str) -> None:
        """Before an operator ends an actor: the coordinator learns that it leaves, and it hands its work back. A
        failure here is logged and delays nothing: work that was not handed back begins again elsewhere, from its
        prompts."""
        if actor.role != "rollout":
            return
        log = self._ctx.log
        try:
            coordinator = with_deadline(self._ctx.ref(CoordinatorContract, "coordinator"), LEAVING_S)
            await coordinator.rollout_leaving(actor.name, reason)
        except MyxaError as error:
            log.info("the coordinator did not learn that %s leaves: %s", actor.name, error)
        try:
            num_groups = await with_deadline(self._ctx.ref(RolloutContract, actor.name), DRAIN_S).drain()
        except MyxaError as error:
            log.warning("%s hands nothing back, its groups begin again from their prompts: %s", actor.name, error)
        else:
            log.info("%s handed back %d groups (%s)", actor.name, num_groups, reason)

    async def end(self, order: End) -> None:
        """End all of them at the same time, each with its grace."""
        graces = dict(zip(order.children, order.graces_s, strict=True))
        waits = [
            self.end_on(node, tuple(name for name in names if graces[name] == grace_s), grace_s)
            for node, names in self._actors.by_node(order.children)
            for grace_s in sorted({graces[name] for name in names})
        ]
        await asyncio.gather(*waits)

    async def end_at_once(self, names: Sequence[str]) -> None:
        """End them without any grace."""
        await asyncio.gather(*(self.end_on(node, there, 0.0) for node, there in self._actors.by_node(names)))

    async def end_on(self, node: int, names: tuple[str, ...], grace_s: float) -> None:
        """End actors of one node; returns when they are gone."""
        agent = with_deadline(self._agent(node), grace_s + ANSWER_S)
        try:
            await agent.end_actors(names, grace_s)
        except MyxaError as error:
            self._not_ended(node, names, error)

    async def kill_hung(self, names: Sequence[str]) -> None:
        """Kill actors that do not react; their stacks go to their logs first."""
        for node, there in self._actors.by_node(names):
            try:
                await self._agent(node).kill_hung(there)
            except MyxaError as error:
                self._not_ended(node, there, error)

    def _not_ended(self, node: int, names: Sequence[str], error: MyxaError) -> None:
        if isinstance(error, NODE_IS_GONE):
            self._lose(node, str(error))
        else:  # processes that do not end are found by their time limit
            self._ctx.log.error("node %d did not end %s: %s", node, ", ".join(names), error)

    def _agent(self, node: int) -> AgentContract:
        return self._ctx.ref(AgentContract, agent_name(node))


def _refusal(problem: str) -> StartReply:
    return StartReply(problem=problem, status=LaunchError.exit_code)
