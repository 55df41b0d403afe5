"""The run supervisor on node 0: gathers nodes, has actors started, carries out what `core/supervision` decides.

Knows names, nodes, attempts and deadlines. Must not know processes (agents do), sockets, or what actors are for.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence

from ...core.actor import PeerEvent
from ...core.errors import ConfigError, LaunchError, MyxaError
from ...core.messages import RunStatus
from ...core.supervision import (
    AllEnded,
    Drain,
    End,
    FailRun,
    GiveUp,
    Instruction,
    Kill,
    Restart,
    Retired,
    Supervisor,
    describe_status,
)
from ...core.supervision_tree import SupervisionError
from ..actor_spec import ActorSpec
from ..contracts import (
    SUPERVISOR,
    AgentContract,
    ChildEnd,
    EnlistReply,
    JoinReply,
    NameReply,
    NodeFacts,
    SupervisorContract,
    agent_name,
)
from ..first_failure import Failures, FirstFailure
from .at_work import SEEN_IN_STATUS, AtWork
from .bulletin import Bulletin
from .crew import Crew
from .departures import Departures
from .hand_back import hand_back
from .late_place import Present
from .muster import Muster
from .patience import Patience
from .reach import Reach
from .reserved_names import ReservedNames
from .roster import ActorRecord, roster_of
from .run_place import RunPlace, StopWish
from .run_tree import role_name, run_tree, seat
from .silence import Silence
from .starts import Starts
from .visitors import Visitors

START_ALONE_S = 0.5
"""So long a start has the node for itself, so that those which are quick come in order; then the next begins."""


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
        self._at_work = AtWork()
        self._reserved = ReservedNames(sum(actor.role == "rollout" for actor in place.actors))
        self._has_started = False
        self._silence = Silence(self._crew, self._rules, patience)

    async def on_start(self) -> None:
        """Hear of every actor and every node."""
        self.ctx.watch("")
        self._bulletin = Bulletin(self.ctx)
        self._departures = Departures(
            self.ctx, self._crew, self._rules, muster=self._muster, visitors=self._visitors, silence=self._silence,
            carry_out=self._carry_out,
        )  # fmt: skip
        self._reach = Reach(self.ctx, self._crew, self._departures.lose)
        self._starts = Starts(
            self.ctx, self._crew, self._rules, self._reach, plan=self._place.plan, end_s=self._patience.end_s,
            lose=self._departures.lose, ended=self.child_ended,
        )  # fmt: skip
        self.ctx.spawn(self._watch_silence(), name="watch silence")

    async def on_peer(self, event: PeerEvent) -> None:
        if event.name in self._crew:
            self._on_actor(event)
        elif event.kind in ("down", "restarted") and event.name in self._others:
            self._departures.lose(self._others[event.name], event.reason)
        elif event.kind == "down":
            self._reserved.left(event.name)

    def _on_actor(self, event: PeerEvent) -> None:
        if event.kind in ("suspect", "hung", "recovered"):
            self.ctx.log.warning("%s: %s (%s)", event.name, event.kind, event.reason or "it answers again")
            self._bulletin.post(event)
            self._carry_out(self._rules.on_health(event.name, event.kind, event.reason, self._now()))
        elif event.kind == "down":
            if self._rules.state(event.name) in ("up", "hung", "draining"):  # now: it may leave before the task begins
                seen_to = self._see_it_end(event, self._rules.attempt(event.name))
                self.ctx.spawn(seen_to, name=f"end of {event.name}")
        elif self._rules.state(event.name) == "starting":
            self.ctx.log.info("%s is up (epoch %d)", event.name, event.epoch)
            self._crew[event.name].epoch = event.epoch
            self._rules.on_up(event.name)
            if self._crew[event.name].spec.role == "coordinator":
                self._at_work.coordinator_came()
            if self._crew[event.name].spec.role not in SEEN_IN_STATUS:
                self._rules.on_work(event.name, self._now())

    async def _see_it_end(self, event: PeerEvent, attempt: int) -> None:
        """Its incarnation is over for everybody. A process that does not end of it, perhaps because nobody can tell it,
        is in the next one's way."""
        await asyncio.sleep(self._patience.leave_s if event.is_own_word else self._patience.over_s)
        if event.name not in self._crew or self._rules.attempt(event.name) != attempt:
            return
        member = self._crew[event.name]
        if member.pid and member.epoch == event.epoch:
            self._carry_out(self._rules.on_health(event.name, "given up", event.reason, self._now()))

    # -- what the launcher asks for ----------------------------------------------------------------------------

    async def gather(self) -> None:
        """Until all nodes joined. LaunchError naming the missing ones, and why those that came were refused; at once
        if a node says that it cannot take part."""
        await self._muster.gather(self._patience.gather_s)

    async def start_all(self) -> None:
        """Prepare every node, then start every actor in order; one that takes long holds up no other. A start goes on
        and is told of if this is cancelled: whoever ends the run has to know what there is to end."""
        for node in range(self._place.num_nodes):
            await self.agent(node).prepare(self._place.plan)
        starts: set[asyncio.Task[None]] = set()
        for actor in self._place.actors:
            if self._rules.may_launch(actor.name, 0):  # not if the run, or a mate of its gang, failed already
                self._rules.on_launch(actor.name)
                starts.add(start := self.ctx.spawn(self._starts.start(actor.name, 0), name=f"start {actor.name}"))
                await asyncio.wait({start}, timeout=START_ALONE_S)
        if starts:
            await asyncio.wait(starts)
        self._has_started = True

    async def stop_all(self, reason: str) -> None:
        """End all actors, last started role first, and wait until they are gone."""
        self._carry_out(self._rules.stop(reason, self._now()))
        roles = len({actor.role for actor in self._crew.specs})
        try:
            await asyncio.wait_for(self._gone.wait(), (self._patience.end_s + 10.0) * roles)
        except TimeoutError:
            left = ", ".join(self._crew[name].process for name in self._rules.alive)
            raise LaunchError(
                f"these did not end: {left}", remedy="look for what they hang in, on those nodes"
            ) from None

    async def kill_all(self, reason: str) -> None:
        """End all actors at once."""
        self._rules.stop(reason, self._now())
        await self._reach.end_at_once(self._rules.alive)

    def hear(self, status: RunStatus) -> None:
        """What the run's coordinator says: it shows who is at work."""
        for name in self._at_work.seen(status, self._crew.specs):
            self._rules.on_work(name, self._now())

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
        ConfigError where one of them cannot; then none of them does."""
        self._departures.dismiss(node, reason)

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
        self.ctx.spawn(self._starts.start(actor.name, self._rules.attempt(actor.name)), name=f"hire {actor.name}")

    def signalled(self, name: str, number: signal.Signals, who: str) -> None:
        """An actor's process gets a signal from this run; `who` asked for it, and why. To be told before it is sent."""
        if name in self._crew:
            self._failures.signalled(name, self._rules.attempt(name), number, who)

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
        is_new = facts.node not in self._muster.nodes
        reply = self._muster.join(facts)
        if not reply.accepted or not is_new:
            return reply
        if facts.node:
            self._silence.heard(facts.node, self._now())
        if facts.late is not None:
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

    async def ping(self, node: int) -> bool:
        if node not in self._muster.nodes:
            return False
        self._silence.heard(node, self._now())
        return True

    async def stop_run(self, reason: str, signal_number: int) -> None:
        self.wish_stop(reason, signal_number)

    def wish_stop(self, reason: str, signal_number: int) -> None:
        """The run shall end in good order; only the first wish counts."""
        if not self.stop_wished.done():
            self.stop_wished.set_result(StopWish(reason, signal_number))

    async def _welcome(self, node: int) -> None:
        """A late node has joined: it gets its actors."""
        try:
            await self.agent(node).prepare(self._place.plan)
            for actor in self._visitors.staff(node, self.present()):
                self.hire(actor)
        except MyxaError as error:
            self.ctx.log.warning("node %d is sent away: %s", node, error)
            await self._departures.let_go(node, LaunchError.exit_code, str(error))

    # -- carrying out ------------------------------------------------------------------------------------------

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Restart():
                    self.ctx.spawn(self._starts.again(instruction), name=f"restart {instruction.children[0]}")
                case Drain():
                    for name in instruction.children:
                        drained = self._drain(self._crew[name].spec, instruction.reason)
                        self.ctx.spawn(drained, name=f"drain {name}")
                case End():
                    self.ctx.spawn(self._reach.end(instruction), name=f"end {len(instruction.children)} actors")
                case Kill():
                    self._kill_hung(instruction)
                case FailRun():
                    self.blame(instruction.culprit, instruction.reason)
                    if not self.failed.done():
                        self.failed.set_result(instruction)
                case GiveUp() | Retired() | AllEnded():
                    self._take_leave(instruction)

    def _kill_hung(self, kill: Kill) -> None:
        self.ctx.log.error("%s: killed", kill.reason)
        for name in kill.children:
            self.signalled(name, signal.SIGKILL, f"the launcher, since {kill.reason}")
        self.ctx.spawn(self._reach.kill_hung(kill.children), name=f"kill {kill.children[0]}")

    def _take_leave(self, news: GiveUp | Retired | AllEnded) -> None:
        if isinstance(news, Retired):
            for name in news.children:
                self.ctx.log.info("%s has left the run", name)
                self._crew.remove(name)
            self._departures.release()
        elif isinstance(news, GiveUp):
            told = "%s; the run goes on without it: %d are left, %d must be"
            self.ctx.log.error(told, news.reason, news.num_left, news.quorum)
        else:
            self._gone.set()

    async def _drain(self, actor: ActorSpec, reason: str) -> None:
        await hand_back(self.ctx, actor, reason)
        self._carry_out(self._rules.on_drained(actor.name, self._now()))

    async def _watch_silence(self) -> None:
        """A process that never registers is killed, and the rules judge its end as any other. One that does not go when
        it has to is lost, and so is a node that is silent. Nothing here waits: others may be silent meanwhile."""
        while True:
            await asyncio.sleep(1.0)
            now = self._now()
            for name in self._silence.unregistered(now):
                self.ctx.log.error("%s did not register within %g s and is killed", name, self._patience.start_s)
                why = f"the launcher, since it did not register within {self._patience.start_s:g} s"
                self.signalled(name, signal.SIGKILL, why)
                self._kill(name)
            for name in self._silence.undead(now):
                if name in self._crew:  # it may have left with the one before
                    self._bury(name)
            for node in self._silence.lost_nodes(now):
                self._departures.lose(node, f"no word from it for {self._patience.lost_s:g} s")

    def _kill(self, name: str) -> None:
        node = self._crew[name].spec.node
        self.ctx.spawn(self._reach.end_on(node, (name,), 0.0), name=f"kill {name}")

    def _bury(self, name: str) -> None:
        """Its process holds what another attempt would need, so there is none."""
        member = self._crew[name]
        reason = (
            f"{member.process} is still there {self._patience.gone_s:g} s after it had to be gone: it survives "
            "SIGKILL, so it hangs in the kernel"
        )
        self.ctx.log.error("%s", reason)
        self._kill(name)  # if that order was lost
        self._carry_out(self._rules.on_lost(name, (name,), reason, self._now()))

    def _now(self) -> float:
        return self.ctx.clock.monotonic()
