"""The run supervisor on node 0: gathers nodes, has actors started, carries out what `core/supervision` decides.

Knows names, nodes, attempts and deadlines. Must not know processes (agents do), sockets, or what actors are for.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..core.actor import PeerEvent, with_deadline
from ..core.errors import CallError, LaunchError
from ..core.supervision import (
    Done,
    End,
    FailRun,
    GiveUp,
    Instruction,
    Kill,
    Restart,
    Supervisor,
    describe_status,
)
from .actor_spec import ActorSpec
from .bulletin import Bulletin
from .config_differences import differences
from .contracts import (
    AgentContract,
    ChildEnd,
    JoinReply,
    NodeFacts,
    RunPlan,
    StartOrder,
    SupervisorContract,
    agent_name,
)
from .first_failure import CAUSE, Failures, FirstFailure
from .gang_meetings import GangMeetings
from .run_dir import RunDir
from .run_tree import run_tree


@dataclass(frozen=True, slots=True)
class Patience:
    """How long this run waits for whom."""

    gather_s: float = 300.0
    """For all nodes to join."""
    start_s: float = 600.0
    """For a started process to register; a slow file system under torch is the usual cause of long starts."""
    finish_s: float = 60.0
    """For the coordinator to end the run in good order once it was asked to."""
    end_s: float = 10.0
    """For a process to end after SIGTERM."""
    lost_s: float = 20.0
    """For a sign of life of another node's launcher."""


@dataclass(frozen=True, slots=True)
class RunPlace:
    """What all nodes must agree on, and what they are told."""

    actors: tuple[ActorSpec, ...]
    num_nodes: int
    version: str
    config: str
    plan: RunPlan


@dataclass(frozen=True, slots=True)
class StopWish:
    """A person or a scheduler wants the run to end."""

    reason: str
    signal: int

    def exit_code(self, *, is_orderly: bool) -> int:
        """130 after Ctrl-C, as shells have it; a scheduler's SIGTERM is no failure if the run ended in good order."""
        return 0 if self.signal == signal.SIGTERM and is_orderly else 128 + self.signal


class RunSupervisor(SupervisorContract):
    """See the module's head. The launcher of node 0 hosts it and calls `gather`, `start_all`, `stop_all` directly."""

    def __init__(self, place: RunPlace, *, lot: Callable[[], float], patience: Patience) -> None:
        self.failed: asyncio.Future[FailRun] = asyncio.get_running_loop().create_future()
        """Set when an actor may not be started again, or a node is lost."""
        self.stop_wished: asyncio.Future[StopWish] = asyncio.get_running_loop().create_future()
        self._failures = Failures()
        self._place = place
        self._patience = patience
        self._actors = {actor.name: actor for actor in place.actors}
        self._rules = Supervisor(run_tree(place.actors, patience.end_s), lot=lot)
        self._nodes: dict[int, NodeFacts] = {}
        self._others = {agent_name(node): node for node in range(1, place.num_nodes)}
        self._refused: dict[int, str] = {}
        self._declined = ""
        self._changed = asyncio.Event()
        self._gone = asyncio.Event()
        self._meetings = GangMeetings(place.actors, lambda node: self._agent(node).meeting_place())
        self._started_at: dict[str, float] = {}
        self._heard_at: dict[int, float] = {}

    async def on_start(self) -> None:
        """Hear of every actor and every node."""
        self.ctx.watch("")
        self._bulletin = Bulletin(self.ctx)
        self.ctx.spawn(self._watch_silence(), name="watch silence")

    async def on_peer(self, event: PeerEvent) -> None:
        if event.name in self._actors:
            self._on_actor(event)
        elif event.kind in ("down", "restarted") and event.name in self._others:
            self._lose_node(self._others[event.name], event.reason)

    def _on_actor(self, event: PeerEvent) -> None:
        if event.kind in ("suspect", "hung", "recovered"):
            self.ctx.log.warning("%s: %s (%s)", event.name, event.kind, event.reason or "it answers again")
            self._bulletin.post(event)
            self._carry_out(self._rules.on_health(event.name, event.kind, event.reason, self._now()))
        elif event.kind != "down" and self._rules.state(event.name) == "starting":
            self.ctx.log.info("%s is up (epoch %d)", event.name, event.epoch)
            self._rules.on_up(event.name)

    # -- what the launcher asks for ----------------------------------------------------------------------------

    async def gather(self) -> None:
        """Until all nodes joined. LaunchError naming the missing ones, and why those that came were refused; at once
        if a node says that it cannot take part."""
        wanted = set(range(self._place.num_nodes))
        try:
            async with asyncio.timeout(self._patience.gather_s):
                while not wanted <= self._nodes.keys() and not self._declined:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            missing = sorted(wanted - self._nodes.keys())
            told = "".join(f"; node {node} was refused: {why}" for node, why in sorted(self._refused.items()))
            raise LaunchError(
                f"{len(missing)} of {len(wanted)} nodes did not join within {self._patience.gather_s:g} s: "
                f"{', '.join(map(str, missing))}{told}",
                remedy="start `myxa launch` on every node with the same run file and the --rdzv of node 0",
            ) from None
        if self._declined:
            raise LaunchError(self._declined, remedy="mend it there and start all nodes again")

    async def start_all(self) -> None:
        """Prepare every node, then start every actor in order."""
        for node in range(self._place.num_nodes):
            await self._agent(node).prepare(self._place.plan)
        for actor in self._place.actors:
            if self._rules.may_launch(actor.name, 0):  # not if the run, or a mate of its gang, failed already
                self._rules.on_launch(actor.name)
                await self._start(actor.name, 0)

    async def stop_all(self, reason: str) -> None:
        """End all actors, last started role first, and wait until they are gone."""
        self._carry_out(self._rules.stop(reason, self._now()))
        roles = len({actor.role for actor in self._place.actors})
        try:
            await asyncio.wait_for(self._gone.wait(), (self._patience.end_s + 10.0) * roles)
        except TimeoutError:
            raise LaunchError(f"these did not end: {', '.join(self._rules.alive)}") from None

    async def kill_all(self, reason: str) -> None:
        """End all actors at once."""
        self._rules.stop(reason, self._now())
        names = self._rules.alive
        await asyncio.gather(*(self._end_on(node, mine, 0.0) for node, mine in self._by_node(names)))

    def blame(self, name: str, reason: str) -> None:
        """Keep who failed first, for the report."""
        self._failures.blame(name, reason, self._now())

    def add_consequence(self, text: str) -> None:
        """Something that followed from the first failure, for the report."""
        self._failures.add(text, self._now())

    @property
    def has_failed(self) -> bool:
        """Whether somebody is to blame."""
        return self._failures.first is not None

    @property
    def first_failure(self) -> FirstFailure | None:
        """Who failed first, with the end of its log and what followed; complete once its process has ended."""
        return self._failures.first

    @property
    def starting(self) -> tuple[str, ...]:
        """Actors that have a process and did not register yet."""
        return tuple(name for name in self._rules.alive if self._rules.state(name) == "starting")

    @property
    def other_nodes(self) -> tuple[int, ...]:
        """Nodes that joined and are not lost, without node 0."""
        return tuple(sorted(self._nodes.keys() - {0}))

    def knows(self, name: str) -> bool:
        """Whether the run has an actor of that name."""
        return name in self._actors

    # -- what others tell --------------------------------------------------------------------------------------

    async def join(self, facts: NodeFacts) -> JoinReply:
        reason = self._objection(facts)
        if reason:
            self._refused[facts.node] = reason
            self.ctx.log.error("node %d (%s) is refused: %s", facts.node, facts.host, reason)
            return JoinReply(accepted=False, reason=reason)
        self.ctx.log.info("node %d joined from %s", facts.node, facts.host)
        self._refused.pop(facts.node, None)
        self._nodes[facts.node] = facts
        self._changed.set()
        return JoinReply(accepted=True)

    async def decline(self, node: int, host: str, reason: str) -> None:
        self.ctx.log.error("node %d (%s) cannot take part: %s", node, host, reason)
        self._declined = self._declined or f"node {node} ({host}) cannot take part: {reason}"
        self._changed.set()

    def _objection(self, facts: NodeFacts) -> str:
        place = self._place
        if facts.version != place.version:
            return f"it runs myxa {facts.version}, node 0 runs {place.version}"
        if facts.num_nodes != place.num_nodes:
            return f"it expects {facts.num_nodes} nodes, node 0 expects {place.num_nodes} (--nnodes)"
        if not 0 <= facts.node < place.num_nodes:
            return f"there is no node {facts.node} among {place.num_nodes} (--node-rank)"
        if facts.config != place.config:
            return f"its configuration differs from node 0's: {differences(facts.config, place.config)}"
        if facts.node in self._nodes:
            return f"node {facts.node} joined already, from {self._nodes[facts.node].host} (--node-rank)"
        return ""

    async def child_ended(self, end: ChildEnd) -> None:
        if end.name not in self._actors or end.attempt != self._rules.attempt(end.name):
            return  # told twice, or of an attempt before a lost node's
        if end.name not in self._rules.alive:
            return
        self._failures.note_end(end, describe_status(end.status), self._now())
        level = logging.INFO if self._rules.state(end.name) == "ending" else logging.WARNING
        self.ctx.log.log(level, "%s ended: %s", end.name, describe_status(end.status))
        self._carry_out(self._rules.on_exit(end.name, end.status, self._now()))

    async def ping(self, node: int) -> None:
        self._heard_at[node] = self._now()

    async def stop_run(self, reason: str, signal_number: int) -> None:
        self.wish_stop(reason, signal_number)

    def wish_stop(self, reason: str, signal_number: int) -> None:
        """The run shall end in good order; only the first wish counts."""
        if not self.stop_wished.done():
            self.stop_wished.set_result(StopWish(reason, signal_number))

    def _lose_node(self, node: int, why: str) -> None:
        names = [actor.name for actor in self._place.actors if actor.node == node]
        if self._nodes.pop(node, None) is not None:
            self._heard_at.pop(node, None)
            reason = f"the launcher of node {node} is gone ({why or 'no word from it'})"
            self.ctx.log.error("%s", reason)
            self._carry_out(self._rules.on_lost(agent_name(node), names, reason, self._now()))

    # -- carrying out ------------------------------------------------------------------------------------------

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Restart():
                    self.ctx.log.warning(
                        "%s: attempt %s in %.1f s (%s)",
                        ", ".join(instruction.children),
                        ", ".join(str(n) for n in sorted(set(instruction.attempts))),
                        instruction.delay_s,
                        instruction.reason,
                    )
                    self.ctx.spawn(self._restart(instruction), name=f"restart {instruction.children[0]}")
                case End():
                    self.ctx.spawn(self._end(instruction), name=f"end {len(instruction.children)} actors")
                case Kill():
                    self.ctx.log.error("%s: killed", instruction.reason)
                    self.ctx.spawn(self._kill_hung(instruction.children), name=f"kill {instruction.children[0]}")
                case GiveUp():
                    self.ctx.log.error(
                        "%s; the run goes on without it: %d are left, %d must be",
                        instruction.reason,
                        instruction.num_left,
                        instruction.quorum,
                    )
                case FailRun():
                    self.blame(instruction.culprit, instruction.reason)
                    if not self.failed.done():
                        self.failed.set_result(instruction)
                case Done():
                    self._gone.set()

    async def _restart(self, restart: Restart) -> None:
        await asyncio.sleep(restart.delay_s)
        for name, attempt in zip(restart.children, restart.attempts, strict=True):
            # A stop, or a newer restart of the same children, makes this one void.
            if self._rules.may_launch(name, attempt):
                self._rules.on_launch(name)
                await self._start(name, attempt)

    async def _start(self, name: str, attempt: int) -> None:
        actor = self._actors[name]
        try:
            meeting = await self._meetings.of(actor, attempt)
            problem = await self._agent(actor.node).start_actor(
                StartOrder(actor=actor, attempt=attempt, meeting=meeting)
            )
        except CallError as error:
            self._lose_node(actor.node, str(error))
            return
        self._started_at[name] = self._now()
        if problem:
            log_path = str(RunDir(Path(self._place.plan.run_dir)).log_path(name, attempt))
            tail = (CAUSE + problem,)
            end = ChildEnd(name=name, attempt=attempt, status=2, node=actor.node, log_path=log_path, tail=tail)
            await self.child_ended(end)

    async def _end(self, end: End) -> None:
        """All of them at the same time, each with its grace."""
        graces = dict(zip(end.children, end.graces_s, strict=True))
        waits = [
            self._end_on(node, tuple(name for name in mine if graces[name] == grace_s), grace_s)
            for node, mine in self._by_node(end.children)
            for grace_s in sorted({graces[name] for name in mine})
        ]
        await asyncio.gather(*waits)

    async def _kill_hung(self, names: tuple[str, ...]) -> None:
        for node, mine in self._by_node(names):
            try:
                await self._agent(node).kill_hung(mine)
            except CallError as error:
                self._lose_node(node, str(error))

    async def _end_on(self, node: int, names: tuple[str, ...], grace_s: float) -> None:
        agent = with_deadline(self._agent(node), grace_s + 30.0)
        try:
            await agent.end_actors(names, grace_s)
        except CallError as error:
            self._lose_node(node, str(error))

    async def _watch_silence(self) -> None:
        """A process that never registers counts as ended: it is killed, and the rules judge its end as any other. A
        node that is silent for too long is lost."""
        while True:
            await asyncio.sleep(1.0)
            now = self._now()
            for name, at in list(self._started_at.items()):
                if self._rules.state(name) == "starting" and now - at > self._patience.start_s:
                    self.ctx.log.error("%s did not register within %g s and is killed", name, self._patience.start_s)
                    await self._end_on(self._actors[name].node, (name,), 0.0)
            for node, at in list(self._heard_at.items()):
                if now - at > self._patience.lost_s:
                    self._lose_node(node, f"no word from it for {self._patience.lost_s:g} s")

    def _by_node(self, names: Sequence[str]) -> list[tuple[int, tuple[str, ...]]]:
        nodes = sorted({self._actors[name].node for name in names})
        return [(node, tuple(name for name in names if self._actors[name].node == node)) for node in nodes]

    def _agent(self, node: int) -> AgentContract:
        return self.ctx.ref(AgentContract, agent_name(node))

    def _now(self) -> float:
        return self.ctx.clock.monotonic()
