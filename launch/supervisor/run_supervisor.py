"""The run supervisor on node 0: gathers nodes, has actors started, carries out what `core/supervision` decides.

An actor (or gang) that has spent its restarts ends the run, unless its role can do without it. The agents of the nodes
start and end processes; membership.py decides which nodes take part.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from msgspec.structs import replace

from ...actors.contracts import CoordinatorContract, MonitorContract, RolloutContract
from ...actors.telemetry import report_forever
from ...core.activity import TelemetryBuffer
from ...core.actor import PeerEvent
from ...core.errors import (
    ConfigError,
    DeadlineExceeded,
    LaunchError,
    MyxaError,
    NoSuchActor,
    NotSent,
    PeerDied,
    raised_as,
)
from ...core.process import SCHEDULERS
from ...core.refs import with_deadline
from ...core.supervision import (
    ALIVE,
    OVER,
    Drain,
    End,
    FailRun,
    GiveUp,
    Instruction,
    Kill,
    Restart,
    Retired,
    RoleSpec,
    SupervisionError,
    Supervisor,
    describe_status,
)
from ...core.timeouts import LauncherTimeouts
from ...transport.address import LOOPBACK
from ..actor_spec import ActorSpec
from ..contracts import (
    AgentContract,
    ChildEnd,
    EnlistReply,
    NodeFacts,
    SupervisorContract,
    agent_name,
)
from ..first_failure import CAUSE, Failures
from ..run_dir import RunDir
from ..views.run_view import ActorFacts
from .membership import Membership
from .placement import Present, RunActor, RunActors, staff_node

START_ALONE_S = 0.5
"""A start has the node for itself for so long, so that quick starts keep their order; then the next one begins."""
LEAVE_S = 10.0
"""How long a node may take to acknowledge that it has to leave."""
NODE_IS_GONE = (NotSent, PeerDied, DeadlineExceeded, NoSuchActor)
"""Outcomes of a call to a node's agent that concern the node. Other errors come from an agent that is there."""
ANSWER_S = 30.0
"""Time for an agent's answer, in addition to a process's own grace."""
LEAVING_S = 5.0
DRAIN_S = 40.0
"""A running group is aborted and returned at once; its reward may take time."""


@dataclass(frozen=True, slots=True)
class StopRequest:
    """A person or a scheduler wants the run to end."""

    reason: str
    signal: int

    def exit_code(self, *, is_orderly: bool) -> int:
        """130 after Ctrl-C, as shells have it; a scheduler's signal is no failure if the run ended orderly."""
        return 0 if self.signal in SCHEDULERS and is_orderly else 128 + self.signal


class RunSupervisor(SupervisorContract):
    """The launcher of node 0 hosts it and calls `gather`, `start_all` and `stop_all` directly."""

    def __init__(
        self, membership: Membership, exit_seen: Callable[[ChildEnd], Awaitable[None]], *,
        jitter: Callable[[], float], timeouts: LauncherTimeouts,
    ) -> None:  # fmt: skip
        """`exit_seen` is called for every end of a process, before this acts on it."""
        self.failed: asyncio.Future[FailRun] = asyncio.get_running_loop().create_future()
        """Set when an actor may not be started again, or a node is lost."""
        self.stop_requested: asyncio.Future[StopRequest] = asyncio.get_running_loop().create_future()
        self.failures = Failures()
        """The first failure with the end of its log and its consequences; complete once the process has ended."""
        self.membership = membership
        self._exit_seen = exit_seen
        self._timeouts = timeouts
        self._first_actors = membership.welcome.actors
        self.actors = RunActors((actor.name, RunActor(actor)) for actor in self._first_actors)
        self._rules = Supervisor(roles_of(self._first_actors), jitter=jitter, grace_s=timeouts.end_s)
        self._others = {agent_name(node): node for node in range(1, membership.num_nodes)}
        self._ended = asyncio.Event()
        self._stopping: asyncio.Task[None] | None = None
        self._has_started = False
        self._heard_at: dict[int, float] = {}
        """Newest sign of life of each other node."""
        ranks = [(spec.rank.gang, spec.node) for spec in self._first_actors if spec.rank is not None]
        self._gang_hosts = dict(reversed(ranks))
        self._gang_nodes = {gang: {node for other, node in ranks if other == gang} for gang, _ in ranks}

    async def on_start(self) -> None:
        self.ctx.watch("")
        self._telemetry = TelemetryBuffer("launcher", self.ctx.clock)
        reporting = report_forever(self._telemetry, self.ctx.ref(MonitorContract, "monitor").telemetry)
        self.ctx.spawn(reporting, name="telemetry")
        self.ctx.spawn(self._watch_silence(), name="watch silence")

    async def on_peer(self, event: PeerEvent) -> None:
        if event.name in self.actors:
            self._on_actor(event)
        elif event.kind in ("down", "restarted") and event.name in self._others:
            self._lose_node(self._others[event.name], event.reason)

    def _on_actor(self, event: PeerEvent) -> None:
        if event.kind in ("suspect", "hung", "recovered"):
            self.ctx.log.warning("%s: %s (%s)", event.name, event.kind, event.reason or "it answers again")
            # The monitor, for events.jsonl, the live view and the report; one that is away gets it when it is back.
            text = f"{event.name} (epoch {event.epoch}): {event.reason}"
            self._telemetry.event(f"actor-{event.kind}", text, source=event.name, epoch=event.epoch)
            self._carry_out(self._rules.on_health(event.name, event.kind, event.reason, self._now()))
        elif event.kind == "down":
            # Checked here and not in the task: the state may change before the task begins.
            if self._rules.state(event.name) in ("up", "hung", "draining"):
                ending = self._end_after_grace(event, self._rules.attempt(event.name))
                self.ctx.spawn(ending, name=f"end of {event.name}")
        elif self._rules.state(event.name) == "starting":
            self.ctx.log.info("%s is up (epoch %d)", event.name, event.epoch)
            self.actors[event.name].epoch = event.epoch
            self._rules.on_up(event.name)

    async def _end_after_grace(self, event: PeerEvent, attempt: int) -> None:
        """Its incarnation is over: a process that does not exit is ended, since it is in the way of the next one."""
        await asyncio.sleep(self._timeouts.leave_s if event.is_own_word else self._timeouts.over_s)
        if event.name not in self.actors or self._rules.attempt(event.name) != attempt:
            return
        member = self.actors[event.name]
        if member.pid and member.epoch == event.epoch:
            self._carry_out(self._rules.on_health(event.name, "given up", event.reason, self._now()))

    # -- for the launcher ---------------------------------------------------------------------------------------

    async def start_all(self) -> None:
        """Start every actor in order; a slow one delays no other. Continues if cancelled."""
        starts: set[asyncio.Task[None]] = set()
        for actor in self._first_actors:
            if self._rules.on_launch(actor.name, 0):  # false if the run or its gang failed already
                starts.add(start := self.ctx.spawn(self._start(actor.name, 0), name=f"start {actor.name}"))
                await asyncio.wait({start}, timeout=START_ALONE_S)
        if starts:
            await asyncio.wait(starts)
        self._has_started = True

    async def stop_all(self) -> None:
        """End all actors, last started role first, and wait until they are gone."""
        roles = len(self._rules.roles)
        try:
            await asyncio.wait_for(asyncio.shield(self._stop()), (self._timeouts.end_s + 10.0) * roles)
        except TimeoutError:
            alive = ", ".join(self.actors[name].process for name in self._rules.alive)
            raise LaunchError(f"these did not end: {alive}", remedy="check on those nodes where they hang") from None

    def _stop(self) -> asyncio.Task[None]:
        self._rules.stop()
        if self._stopping is None:
            self._stopping = self.ctx.spawn(self._end_roles(), name="end all actors")
        return self._stopping

    async def _end_roles(self) -> None:
        for role in reversed(self._rules.roles):
            names = self._rules.end_role(role)
            self.ctx.spawn(self._end_all(names, self._timeouts.end_s), name=f"end {len(names)} actors")
            while not set(names).isdisjoint(self._rules.alive):
                self._ended.clear()
                await self._ended.wait()

    async def kill_all(self) -> None:
        self._rules.stop()
        await self._end_all(self._rules.alive)

    @property
    def starting(self) -> tuple[str, ...]:
        """Actors that have a process and did not register yet."""
        return tuple(name for name in self._rules.alive if self._rules.state(name) == "starting")

    # -- for the operator ---------------------------------------------------------------------------------------

    def statuses(self) -> tuple[ActorFacts, ...]:
        return tuple(self._status(name, actor) for name, actor in self.actors.items())

    def _status(self, name: str, actor: RunActor) -> ActorFacts:
        spec, state = actor.spec, self._rules.state(name)
        return ActorFacts(
            name=name, role=spec.role, node=spec.node, host=self.membership.facts(spec.node).host, state=state,
            attempt=self._rules.attempt(name), pid=actor.pid if state in ALIVE else 0, epoch=actor.epoch,
            started_wall_s=actor.started_wall_s, restarts_left=self._rules.restarts_left(name, self._now()),
            devices=spec.devices, is_leaving=self._rules.is_retiring(name),
        )  # fmt: skip

    def present(self) -> Present:
        """The input of scaling decisions."""
        specs = [spec for spec in self.actors.specs if self._rules.state(spec.name) not in OVER]
        leaving = tuple(spec for spec in self.actors.specs if self._rules.is_retiring(spec.name))
        staying = tuple(spec for spec in specs if spec not in leaving)
        foreign_names = {*self.ctx.peers("rollout/")} - self.actors.keys()
        return Present(staying, self.nodes, leaving, foreign_names, self.membership.late)

    async def leave_node(self, node: int, reason: str) -> None:
        """A node's actors hand their work back and end, then it leaves. Raises ConfigError if one cannot: none does."""
        if node == 0 or node not in self.nodes:
            raise ConfigError(f"node {node} cannot leave", remedy="node 0 conducts the run; see `myxa ps` for others")
        with raised_as(ConfigError, f"node {node} cannot leave", SupervisionError, remedy="`myxa down` ends the run"):
            for name in self._on_node(node):
                self._rules.check_retire(name)
        if self.membership.leave(node, reason):
            self.ctx.log.info("node %d leaves: %s", node, reason)
            for name in reversed(self._on_node(node)):
                self._carry_out(self._rules.retire(name, reason, self._now()))
            if not any(spec.role == "rollout" and spec.node != node for spec in self.actors.specs):
                self.ctx.log.error("no rollout actor is left: `myxa scale rollout=N` starts some")
            self._release_nodes()

    @property
    def nodes(self) -> tuple[int, ...]:
        return self.membership.nodes

    def agent(self, node: int) -> AgentContract:
        return self.ctx.ref(AgentContract, agent_name(node))

    def hire(self, actor: ActorSpec) -> None:
        """Start one more actor of a role. Raises ConfigError if the run is not ready for it, or ends."""
        if not self._has_started:
            raise ConfigError(f"{actor.name} cannot join: the run is being started", remedy="try again when it runs")
        with raised_as(ConfigError, f"{actor.name} cannot join", SupervisionError):
            self._rules.grow(actor.role, actor.name)
        self.actors[actor.name] = RunActor(actor)
        attempt = self._rules.attempt(actor.name)
        self._rules.on_launch(actor.name, attempt)
        self.ctx.spawn(self._start(actor.name, attempt), name=f"hire {actor.name}")

    async def kill(self, meant: Sequence[ActorFacts], killer: str) -> None:
        """Kill these and all that they started. `killer`: who asked for it, and why, for the report."""
        names = [record.name for record in meant]
        for name in names:
            self._note_kill(name, killer)
        await self._end_all(names)

    def _note_kill(self, name: str, killer: str) -> None:
        """For the report, before it is sent."""
        if name in self.actors:
            self.failures.killed(name, self._rules.attempt(name), killer)

    def retire(self, name: str, reason: str) -> None:
        """Have an actor hand its work back and end for good. Raises ConfigError for one that cannot."""
        with raised_as(ConfigError, f"{name} cannot leave", SupervisionError):
            self._carry_out(self._rules.retire(name, reason, self._now()))

    def renew(self, name: str, reason: str) -> None:
        """Have an actor, or its whole gang, end and start again. Raises ConfigError for one that leaves."""
        remedy = "`myxa scale` starts new ones"
        with raised_as(ConfigError, f"{name} cannot be restarted", SupervisionError, remedy=remedy):
            self._carry_out(self._rules.renew(name, reason, self._now()))

    # -- for nodes and other programs ---------------------------------------------------------------------------

    async def join(self, facts: NodeFacts) -> str:
        is_new = facts.node not in self.membership.nodes
        reason = self.membership.join(facts)
        if reason or not is_new or facts.doing:
            return reason
        if facts.node:
            self._heard_at[facts.node] = self._now()
        if facts.is_late:
            self._others[agent_name(facts.node)] = facts.node
            self.ctx.spawn(self._welcome(facts.node), name=f"welcome node {facts.node}")
        return ""

    async def enlist(self, facts: NodeFacts) -> EnlistReply:
        is_open = self._has_started and not self.stop_requested.done() and not self._rules.is_over
        reply = self.membership.enlist(facts, is_open)
        if reply.reason and not reply.is_early:
            self.ctx.log.error("%s may not join the run: %s", facts.host, reply.reason)
        return reply

    async def child_ended(self, end: ChildEnd) -> None:
        if end.pid:
            await self._exit_seen(end)
        if end.name not in self.actors or end.attempt != self._rules.attempt(end.name):
            return  # reported twice, or an attempt before a lost node's
        if end.name not in self._rules.alive:
            return
        self.failures.note_end(end, describe_status(end.status), self._now())
        level = logging.INFO if self._rules.state(end.name) == "ending" else logging.WARNING
        self.ctx.log.log(level, "%s ended: %s", end.name, describe_status(end.status))
        self._carry_out(self._rules.on_exit(end.name, end.status, self._now()))
        self._ended.set()

    async def ping(self, node: int) -> bool:
        if node not in self.membership.nodes:
            return False
        self._heard_at[node] = self._now()
        return True

    async def stop_run(self, reason: str, signal_number: int) -> None:
        self.request_stop(reason, signal_number)

    def request_stop(self, reason: str, signal_number: int) -> None:
        """Request an orderly end of the run; only the first request counts."""
        if not self.stop_requested.done():
            self.stop_requested.set_result(StopRequest(reason, signal_number))

    async def _welcome(self, node: int) -> None:
        """Start the actors of a late node that has joined."""
        try:
            if self.membership.is_staying(node):
                for actor in staff_node(self.membership.run, node, self.present()):
                    self.hire(actor)
        except MyxaError as error:
            self.ctx.log.warning("node %d has to leave: %s", node, error)
            await self.release_node(node, LaunchError.exit_code, str(error))

    # -- nodes that leave or are lost ---------------------------------------------------------------------------

    def _release_nodes(self) -> None:
        """Leaving nodes whose last actor has ended may leave."""
        for node, reason in self.membership.released(lambda node: bool(self._on_node(node))):
            self.ctx.spawn(self.release_node(node, 0, reason), name=f"release node {node}")

    async def release_node(self, node: int, exit_code: int, reason: str) -> None:
        """From here on the node's end is no loss."""
        if self._forget_node(node):
            self._lose_actors_on(node, f"node {node} left: {reason}")
            await self.order_leave(node, exit_code, reason)
            self.ctx.log.info("node %d has left the run: %s", node, reason)

    def _lose_node(self, node: int, why: str) -> None:
        """The node is gone or considered lost, and its actors with it. It is ordered to leave: it may be alive, and its
        processes must not continue without the run. No effect if this is known, or nothing was on the node yet."""
        was_here = self._forget_node(node)
        if not was_here and not any(name in self._rules.alive for name in self.actors.on_node(node)):
            return
        why = why or "no sign of life"
        reason = f"the launcher of node {node} is gone ({why})"
        self.ctx.log.error("%s", reason)
        if was_here and node:
            order = self.order_leave(node, LaunchError.exit_code, f"node 0 considers this node lost: {why}")
            self.ctx.spawn(order, name=f"order node {node} to leave")
        self._lose_actors_on(node, reason)

    def _lose_actors_on(self, node: int, reason: str) -> None:
        if names := self._on_node(node):
            self._carry_out(self._rules.on_lost(agent_name(node), names, reason, self._now()))
            self._ended.set()

    def _on_node(self, node: int) -> list[str]:
        """Its actors that have a process or will get one."""
        return [name for name in self.actors.on_node(node) if self._rules.state(name) not in OVER]

    def _forget_node(self, node: int) -> bool:
        self._heard_at.pop(node, None)
        return self.membership.lose(node)

    async def order_leave(self, node: int, exit_code: int, reason: str) -> None:
        agent = with_deadline(self.agent(node), LEAVE_S)
        try:
            await agent.leave(exit_code, reason)
        except MyxaError as error:
            self.ctx.log.info("node %d did not get the order to leave: %s", node, error)

    # -- processes: starting ------------------------------------------------------------------------------------

    async def _restart(self, order: Restart) -> None:
        attempts = ", ".join(str(n) for n in sorted(set(order.attempts)))
        level = logging.WARNING if order.budget else logging.INFO
        text = "%s: attempt %s in %.1f s (%s)"
        self.ctx.log.log(level, text, ", ".join(order.children), attempts, order.delay_s, order.reason)
        await asyncio.sleep(order.delay_s)
        for name, attempt in zip(order.children, order.attempts, strict=True):
            # A stop, or a newer restart of the same children, makes this one void.
            if self._rules.on_launch(name, attempt):
                await self._start(name, attempt)

    async def _start(self, name: str, attempt: int) -> None:
        """Start that attempt; returns when its process is there, or the rules know why it is not."""
        if name not in self.actors:
            return  # it left before
        actor = self.actors[name]
        actor.pid, actor.gone_by_s = 0, math.inf
        spec, failed, meeting = actor.spec, None, None
        asked = spec.node if spec.rank is None else self._gang_hosts[spec.rank.gang]
        try:
            if spec.rank is not None:  # ranks on one node use loopback: torch's store does not ask for a key
                is_near = len(self._gang_nodes[spec.rank.gang]) == 1
                address = LOOPBACK if is_near else self.membership.facts(asked).address
                meeting = await self.agent(asked).hold_meeting(spec.rank.gang, attempt, address)
            asked = spec.node
            actor.pid = await self.agent(asked).start_actor(replace(spec, attempt=attempt), meeting)
        except MyxaError as error:
            if isinstance(error, NODE_IS_GONE):
                self._lose_node(asked, str(error))
            failed = self._failed_start(spec, attempt, error)
        actor.started_s, actor.started_wall_s = self.ctx.clock.monotonic(), self.ctx.clock.wall()
        if failed is not None:
            await self.child_ended(failed)
        elif name in self.actors and (self._rules.is_over or self._rules.state(name) == "ending"):
            # It was ended while it started.
            await self._end_on(spec.node, (name,), self._timeouts.end_s)

    def _failed_start(self, actor: ActorSpec, attempt: int, error: MyxaError) -> ChildEnd:
        is_answer = isinstance(error, ConfigError | LaunchError)
        status = error.exit_code if is_answer else LaunchError.exit_code  # a failed call says nothing of the run file
        log_path = RunDir(Path(self.membership.welcome.run_dir)).log_path(actor.name, attempt)
        return ChildEnd(
            name=actor.name, attempt=attempt, status=status, node=actor.node, log_path=str(log_path),
            tail=(f"{CAUSE}{'' if is_answer else f'{actor.name} was not started: '}{error}",),
        )  # fmt: skip

    # -- processes: ending ---------------------------------------------------------------------------------------

    async def _hand_back(self, actor: ActorSpec, reason: str) -> None:
        """The coordinator learns that an actor leaves, and it hands its work back. A failure is logged and delays
        nothing: work that was not handed back begins again elsewhere, from its prompts."""
        if actor.role != "rollout":
            return
        log = self.ctx.log
        try:
            coordinator = with_deadline(self.ctx.ref(CoordinatorContract, "coordinator"), LEAVING_S)
            await coordinator.rollout_leaving(actor.name, reason)
        except MyxaError as error:
            log.info("the coordinator did not learn that %s leaves: %s", actor.name, error)
        try:
            num_groups = await with_deadline(self.ctx.ref(RolloutContract, actor.name), DRAIN_S).drain()
        except MyxaError as error:
            log.warning("%s hands nothing back, its groups begin again from their prompts: %s", actor.name, error)
        else:
            log.info("%s handed back %d groups (%s)", actor.name, num_groups, reason)

    async def _end_all(self, names: Sequence[str], grace_s: float = 0.0, *, is_hung: bool = False) -> None:
        """At the same time. `is_hung`: they do not react; their stacks go to their logs first."""
        by_node: dict[int, list[str]] = {}
        for name in names:
            if name in self.actors:  # it may have left
                by_node.setdefault(self.actors[name].spec.node, []).append(name)
        await asyncio.gather(
            *(self._end_on(node, tuple(its), grace_s, is_hung=is_hung) for node, its in by_node.items())
        )

    async def _end_on(self, node: int, names: tuple[str, ...], grace_s: float, *, is_hung: bool = False) -> None:
        agent = with_deadline(self.agent(node), grace_s + ANSWER_S)
        try:
            await agent.end_actors(names, grace_s, is_hung)
        except MyxaError as error:
            if isinstance(error, NODE_IS_GONE):
                self._lose_node(node, str(error))
            else:  # processes that do not end are found by their time limit
                self.ctx.log.warning("node %d did not end %s: %s", node, ", ".join(names), error)

    # -- carrying out -------------------------------------------------------------------------------------------

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Restart():
                    self.ctx.spawn(self._restart(instruction), name=f"restart {instruction.children[0]}")
                case Drain():
                    for name in instruction.children:
                        drained = self._drain(self.actors[name].spec, instruction.reason)
                        self.ctx.spawn(drained, name=f"drain {name}")
                case End():
                    ending = self._end_all(instruction.children, instruction.grace_s)
                    self.ctx.spawn(ending, name=f"end {len(instruction.children)} actors")
                case Kill():
                    self.ctx.log.error("%s: killed", instruction.reason)
                    self._kill(instruction.child, instruction.reason, is_hung=True)
                case FailRun():
                    self._fail(instruction)
                case GiveUp():
                    text = "%s; the run continues without it: %d are left, %d must be"
                    self.ctx.log.error(text, instruction.reason, instruction.num_left, instruction.quorum)
                case Retired():
                    self.ctx.log.info("%s has left the run", instruction.child)
                    self.actors.pop(instruction.child, None)
                    self._release_nodes()

    def _fail(self, verdict: FailRun) -> None:
        self.failures.blame(verdict.culprit, verdict.reason, self._now())
        if not self.failed.done():
            self.failed.set_result(verdict)
        self._stop()

    async def _drain(self, actor: ActorSpec, reason: str) -> None:
        await self._hand_back(actor, reason)
        self._carry_out(self._rules.on_drained(actor.name))

    async def _watch_silence(self) -> None:
        """Kill processes that do not register in time. A process that does not vanish is lost, and so is a silent node.
        Nothing here waits, because others may be silent at the same time."""
        while True:
            await asyncio.sleep(1.0)
            now = self._now()
            for name in self._rules.alive:
                if name in self.actors and self.actors[name].pid:  # it may have left with another
                    self._check_process(name, self.actors[name], now)
            for node in [node for node, heard_s in self._heard_at.items() if now - heard_s > self._timeouts.lost_s]:
                self._lose_node(node, f"no sign of life for {self._timeouts.lost_s:g} s")

    def _check_process(self, name: str, member: RunActor, now: float) -> None:
        limits, state = self._timeouts, self._rules.state(name)
        if state not in ("starting", "ending"):
            member.gone_by_s = math.inf
        elif now > member.gone_by_s:
            self._lose_actor(name)
        elif member.gone_by_s < math.inf:
            return
        elif state == "ending":
            member.gone_by_s = now + limits.end_s + limits.gone_s
        elif now - member.started_s > limits.start_s:
            member.gone_by_s = now + limits.gone_s
            self.ctx.log.error("%s did not register within %g s and is killed", name, limits.start_s)
            self._kill(name, f"it did not register within {limits.start_s:g} s")

    def _kill(self, name: str, why: str, *, is_hung: bool = False) -> None:
        self._note_kill(name, f"the launcher, since {why}")
        self.ctx.spawn(self._end_all((name,), is_hung=is_hung), name=f"kill {name}")

    def _lose_actor(self, name: str) -> None:
        """Its process holds what another attempt would need, so there is no other attempt."""
        member = self.actors[name]
        reason = (
            f"{member.process} is still there {self._timeouts.gone_s:g} s after it had to end: it survives "
            "SIGKILL, so it hangs in the kernel"
        )
        self.ctx.log.error("%s", reason)
        self._kill(name, reason)  # in case that order was lost
        self._carry_out(self._rules.on_lost(name, (name,), reason, self._now()))
        self._ended.set()

    def _now(self) -> float:
        return self.ctx.clock.monotonic()


# -- roles to supervise (no IO) -------------------------------------------------------------------------------------


def roles_of(actors: Sequence[ActorSpec]) -> list[RoleSpec]:
    """What the rules must know. `actors` are in start order, the actors of a role together."""
    roles: list[RoleSpec] = []
    for role, mates in groupby(actors, key=lambda actor: actor.name.rpartition("/")[0] or actor.name):
        first, *others = mates
        roles.append(
            RoleSpec(
                role,
                tuple(actor.name for actor in (first, *others)),
                is_gang=first.rank is not None,
                max_restarts=first.max_restarts,
                quorum=first.quorum,
                when_hung=first.when_hung,
            )
        )
    return roles
