"""The run supervisor on node 0: gathers nodes, has actors started, carries out what `core/supervision` decides.

Knows names, nodes, attempts and deadlines. Must not know processes (agents do), sockets, or what actors are for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from ...core.actor import PeerEvent
from ...core.child_states import OVER, SupervisionError
from ...core.errors import CallError, ConfigError, LaunchError, MyxaError
from ...core.exit_status import describe_status
from ...core.supervision import Supervisor
from ...core.supervision_orders import Done, Drain, End, FailRun, GiveUp, Instruction, Kill, Restart, Retired
from ..actor_spec import ActorSpec
from ..contracts import (
    SUPERVISOR,
    AgentContract,
    ChildEnd,
    EnlistReply,
    JoinReply,
    NameReply,
    NodeFacts,
    StartOrder,
    SupervisorContract,
    agent_name,
)
from ..first_failure import CAUSE, Failures, FirstFailure
from ..run_dir import RunDir
from .bulletin import Bulletin
from .crew import Crew
from .gang_meetings import GangMeetings
from .hand_back import hand_back
from .late_place import Present
from .muster import Muster
from .patience import Patience
from .reach import Reach
from .reserved_names import ReservedNames
from .roster import ActorRecord, roster_of
from .run_place import RunPlace, StopWish
from .run_tree import role_name, run_tree, seat
from .visitors import Visitors


class RunSupervisor(SupervisorContract):
    """See the module's head. The launcher of node 0 hosts it and calls `gather`, `start_all`, `stop_all` directly."""

    def __init__(self, place: RunPlace, *, lot: Callable[[], float], patience: Patience) -> None:
        self.failed: asyncio.Future[FailRun] = asyncio.get_running_loop().create_future()
        """Set when an actor may not be started again, or a node is lost."""
        self.stop_wished: asyncio.Future[StopWish] = asyncio.get_running_loop().create_future()
        self._failures = Failures()
        self._place = place
        self._patience = patience
        self._crew = Crew(place.actors)
        self._rules = Supervisor(run_tree(place.actors, patience.end_s), lot=lot)
        self._muster = Muster(place.num_nodes, place.version, place.config, logging.getLogger(f"myxa.{SUPERVISOR}"))
        self._visitors = Visitors(place.run, place.num_nodes, place.max_nodes, self._muster)
        self._others = {agent_name(node): node for node in range(1, place.num_nodes)}
        self._gone = asyncio.Event()
        self._meetings = GangMeetings(place.actors, lambda node: self.agent(node).meeting_place())
        self._reserved = ReservedNames(sum(actor.role == "rollout" for actor in place.actors))
        self._has_started = False
        self._heard_at: dict[int, float] = {}

    async def on_start(self) -> None:
        """Hear of every actor and every node."""
        self.ctx.watch("")
        self._bulletin = Bulletin(self.ctx)
        self._reach = Reach(self.ctx, self._crew, self._lose_node)
        self.ctx.spawn(self._watch_silence(), name="watch silence")

    async def on_peer(self, event: PeerEvent) -> None:
        if event.name in self._crew:
            self._on_actor(event)
        elif event.kind in ("down", "restarted") and event.name in self._others:
            self._lose_node(self._others[event.name], event.reason)
        elif event.kind == "down":
            self._reserved.left(event.name)

    def _on_actor(self, event: PeerEvent) -> None:
        if event.kind in ("suspect", "hung", "recovered"):
            self.ctx.log.warning("%s: %s (%s)", event.name, event.kind, event.reason or "it answers again")
            self._bulletin.post(event)
            self._carry_out(self._rules.on_health(event.name, event.kind, event.reason, self._now()))
        elif event.kind != "down" and self._rules.state(event.name) == "starting":
            self.ctx.log.info("%s is up (epoch %d)", event.name, event.epoch)
            self._crew[event.name].epoch = event.epoch
            self._rules.on_up(event.name)

    # -- what the launcher asks for ----------------------------------------------------------------------------

    async def gather(self) -> None:
        """Until all nodes joined. LaunchError naming the missing ones, and why those that came were refused; at once
        if a node says that it cannot take part."""
        await self._muster.gather(self._patience.gather_s)

    async def start_all(self) -> None:
        """Prepare every node, then start every actor in order."""
        for node in range(self._place.num_nodes):
            await self.agent(node).prepare(self._place.plan)
        for actor in self._place.actors:
            if self._rules.may_launch(actor.name, 0):  # not if the run, or a mate of its gang, failed already
                self._rules.on_launch(actor.name)
                await self._start(actor.name, 0)
        self._has_started = True

    async def stop_all(self, reason: str) -> None:
        """End all actors, last started role first, and wait until they are gone."""
        self._carry_out(self._rules.stop(reason, self._now()))
        roles = len({actor.role for actor in self._crew.specs})
        try:
            await asyncio.wait_for(self._gone.wait(), (self._patience.end_s + 10.0) * roles)
        except TimeoutError:
            raise LaunchError(f"these did not end: {', '.join(self._rules.alive)}") from None

    async def kill_all(self, reason: str) -> None:
        """End all actors at once."""
        self._rules.stop(reason, self._now())
        await self._reach.end_at_once(self._rules.alive)

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

    def knows(self, name: str) -> bool:
        """Whether the run has an actor of that name."""
        return name in self._crew

    # -- what an operator asks for -----------------------------------------------------------------------------

    def roster(self) -> tuple[ActorRecord, ...]:
        """All actors of the run, in start order."""
        return roster_of(self._crew, self._rules, self._muster.host, self._now())

    def present(self) -> Present:
        """Who is there and what is free, for whoever decides how many there are to be."""
        specs = {spec.name: spec for spec in self._crew.specs}
        return Present.of(self.roster(), specs, self.nodes, self.foreign_names, self._visitors.late)

    def dismiss(self, node: int, reason: str) -> None:
        """Have all actors of a node hand their work back and end for good, then tell its launcher to leave. Raises
        ConfigError where one of them cannot."""
        if node == 0 or node not in self._muster.nodes:
            raise ConfigError(f"node {node} cannot leave", remedy="node 0 conducts the run; see `myxa ps` for others")
        if self._visitors.go(node, reason):
            self.ctx.log.info("node %d leaves: %s", node, reason)
            for name in reversed(self._on_node(node)):
                self.retire(name, reason)
            if not any(spec.role == "rollout" and spec.node != node for spec in self._crew.specs):
                self.ctx.log.error("no rollout actor is left: `myxa scale rollout=N` starts some")
            self._release()

    @property
    def crew(self) -> Crew:
        """Where each actor belongs."""
        return self._crew

    @property
    def nodes(self) -> tuple[int, ...]:
        """Nodes that joined and are not lost."""
        return self._muster.nodes

    @property
    def foreign_names(self) -> frozenset[str]:
        """Names of rollout actors that other programs host, or are about to."""
        there = {*self.ctx.peers("rollout/"), *self._reserved.held(self._now())}
        return frozenset(there - set(self._crew.names))

    def agent(self, node: int) -> AgentContract:
        """A reference to that node's agent."""
        return self.ctx.ref(AgentContract, agent_name(node))

    def hire(self, actor: ActorSpec) -> None:
        """Start one more actor of a role. Raises ConfigError if the run is not ready for it, or ends."""
        if not self._has_started:
            raise ConfigError(f"{actor.name} cannot join: the run is being started", remedy="try again when it runs")
        try:
            self._rules.grow(role_name(actor.role), seat(actor, self._patience.end_s))
        except SupervisionError as error:
            raise ConfigError(f"{actor.name} cannot join: {error}") from error
        self._crew.add(actor)
        self._rules.on_launch(actor.name)
        self.ctx.spawn(self._start(actor.name, self._rules.attempt(actor.name)), name=f"hire {actor.name}")

    def retire(self, name: str, reason: str) -> None:
        """Have an actor hand its work back and end for good. Raises ConfigError for one that cannot."""
        try:
            self._carry_out(self._rules.retire(name, reason, self._now()))
        except SupervisionError as error:
            raise ConfigError(f"{name} cannot leave: {error}") from error

    def renew(self, name: str, reason: str) -> None:
        """Have an actor, or its whole gang, end and start again. Raises ConfigError for one that leaves."""
        try:
            self._carry_out(self._rules.renew(name, reason, self._now()))
        except SupervisionError as error:
            raise ConfigError(f"{name} cannot be restarted: {error}", remedy="`myxa scale` starts new ones") from error

    # -- what others tell --------------------------------------------------------------------------------------

    async def join(self, facts: NodeFacts) -> JoinReply:
        if facts.late is not None and not self._visitors.is_expected(facts.node):
            return JoinReply(accepted=False, reason=f"nobody gave the number {facts.node} to it")
        reply = self._muster.join(facts)
        if reply.accepted and facts.late is not None:
            self._others[agent_name(facts.node)] = facts.node
            self.ctx.spawn(self._welcome(facts.node), name=f"welcome node {facts.node}")
        return reply

    async def enlist(self, facts: NodeFacts) -> EnlistReply:
        has_room = self._has_started and not self.stop_wished.done() and self._rules.verdict is None
        reply = self._visitors.enlist(facts, self.present, has_room)
        if reply.reason and not reply.is_early:
            self.ctx.log.error("%s may not come to the run: %s", facts.host, reply.reason)
        return reply

    async def leave_node(self, node: int, reason: str) -> None:
        self.dismiss(node, reason)

    async def decline(self, node: int, host: str, reason: str) -> None:
        self._muster.decline(node, host, reason)

    async def reserve_name(self, wanted: str) -> NameReply:
        own = [actor.name for actor in self._crew.specs if actor.role == "rollout"]
        return self._reserved.ask(wanted, own, self.ctx.peers("rollout/"), self._now())

    async def child_ended(self, end: ChildEnd) -> None:
        if end.name not in self._crew or end.attempt != self._rules.attempt(end.name):
            return  # told twice, or of an attempt before a lost node's
        if end.name not in self._rules.alive:
            return
        self._failures.note_end(end, describe_status(end.status), self._now())
        level = logging.INFO if self._rules.state(end.name) == "ending" else logging.WARNING
        self.ctx.log.log(level, "%s ended: %s", end.name, describe_status(end.status))
        self._carry_out(self._rules.on_exit(end.name, end.status, self._now()))

    async def ping(self, node: int) -> None:
        if node in self._muster.nodes:
            self._heard_at[node] = self._now()

    async def stop_run(self, reason: str, signal_number: int) -> None:
        self.wish_stop(reason, signal_number)

    def wish_stop(self, reason: str, signal_number: int) -> None:
        """The run shall end in good order; only the first wish counts."""
        if not self.stop_wished.done():
            self.stop_wished.set_result(StopWish(reason, signal_number))

    def _lose_node(self, node: int, why: str) -> None:
        names = self._crew.on_node(node)
        if self._muster.lose(node):
            self._heard_at.pop(node, None)
            self._visitors.forget(node)
            reason = f"the launcher of node {node} is gone ({why or 'no word from it'})"
            self.ctx.log.error("%s", reason)
            self._carry_out(self._rules.on_lost(agent_name(node), names, reason, self._now()))

    # -- nodes that come and go ----------------------------------------------------------------------------------

    async def _welcome(self, node: int) -> None:
        """A late node has joined: it gets its actors."""
        try:
            await self.agent(node).prepare(self._place.plan)
            for actor in self._visitors.staff(node, self.present()):
                self.hire(actor)
        except MyxaError as error:
            self.ctx.log.warning("node %d is sent away: %s", node, error)
            await self._let_go(node, LaunchError.exit_code, str(error))

    def _on_node(self, node: int) -> list[str]:
        """Its actors that have a process or will get one."""
        return [name for name in self._crew.on_node(node) if self._rules.state(name) not in OVER]

    def _release(self) -> None:
        for node, reason in self._visitors.released(lambda node: bool(self._on_node(node))):
            self.ctx.spawn(self._let_go(node, 0, reason), name=f"let node {node} go")

    async def _let_go(self, node: int, exit_code: int, reason: str) -> None:
        """From here on its end is no loss."""
        if self._muster.lose(node):
            self._heard_at.pop(node, None)
            self._visitors.forget(node)
            try:
                await self.agent(node).leave(exit_code, reason)
            except CallError as error:
                self.ctx.log.info("node %d was not told to leave: %s", node, error)
            self.ctx.log.info("node %d has left the run: %s", node, reason)

    # -- carrying out ------------------------------------------------------------------------------------------

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Restart():
                    self.ctx.spawn(self._restart(instruction), name=f"restart {instruction.children[0]}")
                case Drain():
                    for name in instruction.children:
                        drained = self._drain(self._crew[name].spec, instruction.reason)
                        self.ctx.spawn(drained, name=f"drain {name}")
                case End():
                    self.ctx.spawn(self._reach.end(instruction), name=f"end {len(instruction.children)} actors")
                case Kill():
                    self.ctx.log.error("%s: killed", instruction.reason)
                    self.ctx.spawn(self._reach.kill_hung(instruction.children), name=f"kill {instruction.children[0]}")
                case FailRun():
                    self.blame(instruction.culprit, instruction.reason)
                    if not self.failed.done():
                        self.failed.set_result(instruction)
                case GiveUp() | Retired() | Done():
                    self._take_leave(instruction)

    def _take_leave(self, news: GiveUp | Retired | Done) -> None:
        if isinstance(news, Retired):
            for name in news.children:
                self.ctx.log.info("%s has left the run", name)
                self._crew.remove(name)
            self._release()
        elif isinstance(news, GiveUp):
            told = "%s; the run goes on without it: %d are left, %d must be"
            self.ctx.log.error(told, news.reason, news.num_left, news.quorum)
        else:
            self._gone.set()

    async def _restart(self, restart: Restart) -> None:
        which = ", ".join(str(n) for n in sorted(set(restart.attempts)))
        level = logging.WARNING if restart.branch else logging.INFO
        told = "%s: attempt %s in %.1f s (%s)"
        self.ctx.log.log(level, told, ", ".join(restart.children), which, restart.delay_s, restart.reason)
        await asyncio.sleep(restart.delay_s)
        for name, attempt in zip(restart.children, restart.attempts, strict=True):
            # A stop, or a newer restart of the same children, makes this one void.
            if self._rules.may_launch(name, attempt):
                self._rules.on_launch(name)
                await self._start(name, attempt)

    async def _drain(self, actor: ActorSpec, reason: str) -> None:
        await hand_back(self.ctx, actor, reason)
        self._carry_out(self._rules.on_drained(actor.name, self._now()))

    async def _start(self, name: str, attempt: int) -> None:
        member = self._crew[name]
        actor, member.pid = member.spec, 0
        try:
            meeting = await self._meetings.of(actor, attempt)
            reply = await self.agent(actor.node).start_actor(StartOrder(actor=actor, attempt=attempt, meeting=meeting))
        except CallError as error:
            self._lose_node(actor.node, str(error))
            return
        member.pid, member.started_s, member.started_wall_s = reply.pid, self._now(), self.ctx.clock.wall()
        if reply.problem:
            log_path = str(RunDir(Path(self._place.plan.run_dir)).log_path(name, attempt))
            tail = (CAUSE + reply.problem,)
            end = ChildEnd(name=name, attempt=attempt, status=2, node=actor.node, log_path=log_path, tail=tail)
            await self.child_ended(end)
        elif name in self._crew and self._rules.state(name) == "ending":  # it was to end before it was there
            await self._reach.end_on(actor.node, (name,), self._patience.end_s)

    async def _watch_silence(self) -> None:
        """A process that never registers counts as ended: it is killed, and the rules judge its end as any other. A
        node that is silent for too long is lost."""
        while True:
            await asyncio.sleep(1.0)
            now = self._now()
            for name in self.starting:
                member = self._crew[name]
                if member.pid and now - member.started_s > self._patience.start_s:
                    self.ctx.log.error("%s did not register within %g s and is killed", name, self._patience.start_s)
                    await self._reach.end_on(member.spec.node, (name,), 0.0)
            for node, at in list(self._heard_at.items()):
                if now - at > self._patience.lost_s:
                    self._lose_node(node, f"no word from it for {self._patience.lost_s:g} s")

    def _now(self) -> float:
        return self.ctx.clock.monotonic()
