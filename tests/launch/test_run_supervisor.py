"""The run supervisor among nodes whose agents start nothing, in virtual time: what it makes of starts that fail, of
processes that do not go, of nodes that pass for lost and of launchers that ask twice."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.simulation.simulator import Sim, run

from myxa import __version__
from myxa.actors.contracts import MonitorContract
from myxa.core.actor import FAILED, Actor, PeerEvent
from myxa.core.config import RunConfig
from myxa.core.errors import ConfigError, LaunchError, MyxaError
from myxa.core.messages import Telemetry
from myxa.core.timeouts import LauncherTimeouts
from myxa.launch.actor_spec import ActorSpec, GangRendezvous, RankSpec
from myxa.launch.contracts import (
    SUPERVISOR,
    AgentContract,
    ChildEnd,
    EnlistReply,
    NodeFacts,
    SupervisorContract,
    agent_name,
)
from myxa.launch.supervisor.membership import Membership
from myxa.launch.supervisor.run_supervisor import RunSupervisor
from myxa.transport.node import Node

TIMEOUTS = LauncherTimeouts(start_s=60.0, end_s=5.0, lost_s=20.0, gone_s=30.0)
SIGKILL = -9


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    """Failures are what this is about."""
    log = logging.getLogger("myxa")
    before = log.level
    log.setLevel(logging.CRITICAL + 1)
    yield
    log.setLevel(before)


class Hands(AgentContract):
    """A node's agent: its processes are actors of its own node, and do what they are told to."""

    def __init__(self, number: int, node: Node) -> None:
        self.number = number
        self.node = node
        self.started: list[tuple[str, int]] = []
        self.pids: dict[str, int] = {}
        self.attempts: dict[str, int] = {}
        self.meetings: dict[tuple[str, int], GangRendezvous] = {}
        self.held: set[tuple[str, int]] = set()
        self.left: tuple[int, str] | None = None
        self.ended: list[str] = []
        self.killed: list[str] = []
        # How it misbehaves.
        self.raises: Exception | None = None
        """At every start."""
        self.answers = True
        """Whether its processes register."""
        self.undead: set[str] = set()
        self.end_s = 0.0
        """How long it takes to end one."""

    async def hold_meeting(self, gang: str, attempt: int, address: str) -> GangRendezvous:
        self.held.add((gang, attempt))
        return GangRendezvous(address=address, port=1000 * self.number + 100 + attempt)

    async def start_actor(self, actor: ActorSpec, meeting: GangRendezvous | None = None) -> int:
        name = actor.name
        if meeting is not None:
            self.meetings[name, actor.attempt] = meeting
        self.started.append((name, actor.attempt))
        if self.raises is not None:
            raise self.raises
        self.pids[name], self.attempts[name] = 100 + len(self.started), actor.attempt
        if self.answers:
            await self.node.start(Actor(), name)
        return self.pids[name]

    async def end_actors(self, names: tuple[str, ...], grace_s: float, is_hung: bool = False) -> None:
        if is_hung:
            self.killed += names
        else:
            self.ended += names
        await asyncio.sleep(self.end_s)
        for name in names:
            if name in self.pids and name not in self.undead:
                await self.die(name, 0 if grace_s else SIGKILL)

    async def die(self, name: str, status: int = SIGKILL) -> None:
        pid, attempt = self.pids.pop(name), self.attempts[name]
        if name in self.node.peers(name):
            await self.node.stop(name)
        end = ChildEnd(name=name, attempt=attempt, status=status, node=self.number, log_path="", pid=pid)
        await self.ctx.ref(SupervisorContract, SUPERVISOR).child_ended(end)

    async def leave(self, exit_code: int, reason: str) -> None:
        self.left = exit_code, reason


def rollout(index: int, node: int = 0, **more: Any) -> ActorSpec:
    return ActorSpec(name=f"rollout/{index}", role="rollout", kind="embedded", index=index, node=node, **more)


def trainers(*nodes: int, **more: Any) -> tuple[ActorSpec, ...]:
    def rank(number: int) -> RankSpec:
        return RankSpec(
            gang="trainer", rank=number, world_size=len(nodes), local_rank=0, local_world_size=1, group_rank=number
        )

    return tuple(
        ActorSpec(name=f"trainer/{n}", role="trainer", kind="torch", index=n, node=node, rank=rank(n), **more)
        for n, node in enumerate(nodes)
    )


@dataclass
class Stage:
    sim: Sim
    supervisor: RunSupervisor
    hands: list[Hands] = field(default_factory=list[Hands])

    def states(self) -> dict[str, str]:
        return {record.name: record.state for record in self.supervisor.statuses()}

    def facts(self, node: int, nonce: str = "") -> NodeFacts:
        host = f"host-{node}"
        return NodeFacts(node=node, version=__version__, host=host, address=f"10.0.0.{node}", nonce=nonce)

    async def on_0(self, work: Callable[[], Awaitable[Any]]) -> Any:
        async def do() -> Any:
            return await work()

        return await self.sim.spawn("launcher/0", do())

    async def begin(self) -> None:
        async def start() -> None:
            for node in range(len(self.hands)):
                assert await self.supervisor.join(self.facts(node, f"nonce-{node}")) == ""
            await self.supervisor.start_all()

        await self.on_0(start)

    async def ping(self, *nodes: int, seconds: float) -> None:
        """These give signs of life for so long; the others do not."""
        for _ in range(round(seconds)):
            for node in nodes:
                await self.on_0(lambda node=node: self.supervisor.ping(node))
            await asyncio.sleep(1.0)


RUN = RunConfig.model_validate({"model": {"path": "m"}, "data": {"train": "d.jsonl"}})


def staged(
    body: Callable[[Stage], Awaitable[Any]], *actors: ActorSpec, num_nodes: int = 1, at_once: bool = True,
    timeouts: LauncherTimeouts = TIMEOUTS,
) -> Any:  # fmt: skip
    """Run `body` on a run of these actors; `at_once`: with all of them started."""

    async def scenario(seed: int) -> Any:
        async with Sim(seed) as sim:
            membership = Membership(num_nodes, EnlistReply(run_dir="/nowhere", actors=actors), RUN)
            seen: list[ChildEnd] = []

            async def exit_seen(end: ChildEnd) -> None:
                seen.append(end)

            stage = Stage(sim, RunSupervisor(membership, exit_seen, jitter=lambda: 0.0, timeouts=timeouts))
            home = sim.nodes["launcher/0"].node
            await stage.on_0(lambda: home.start(stage.supervisor, SUPERVISOR))
            for number in range(num_nodes):
                node = home if number == 0 else (await sim.node(f"launcher/{number}")).node
                stage.hands.append(Hands(number, node))
                start = node.start(stage.hands[number], agent_name(number))
                await sim.spawn(f"launcher/{number}", start)
            if at_once:
                await stage.begin()
                await asyncio.sleep(0.5)
            await body(stage)
            assert not sim.failures, "the supervisor lives"
            assert all(end.pid for end in seen), "only of processes"
            await stage.on_0(lambda: stage.supervisor.kill_all())
            await sim.quiet()

    return run(scenario, 1)


def on_stage(*actors: ActorSpec, **options: Any) -> Callable[[Callable[[Stage], Awaitable[Any]]], Callable[[], None]]:
    def made(body: Callable[[Stage], Awaitable[Any]]) -> Callable[[], None]:
        def test() -> None:
            staged(body, *actors, **options)

        return test

    return made


# -- starts that fail --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError(28, "no space"), LaunchError("no fork")])
def test_a_start_that_fails_on_a_node_that_is_there_is_tried_again_and_costs_no_node(error: Exception):
    async def body(stage: Stage) -> None:
        away = stage.hands[1]
        away.raises = error
        await stage.sim.spawn("launcher/1", away.die("rollout/1"))
        await stage.ping(1, seconds=3)
        assert (stage.supervisor.nodes, away.left) == ((0, 1), None)
        assert len(away.started) > 2, "it was tried again"
        away.raises = None
        await stage.ping(1, seconds=5)
        assert stage.states() == {"rollout/0": "up", "rollout/1": "up"}

    staged(body, rollout(0), rollout(1, 1, max_restarts=20), num_nodes=2)


@pytest.mark.parametrize(("kind", "exit_code", "attempts"), [(ConfigError, 2, [0]), (LaunchError, 4, [0, 1, 2, 3])])
def test_a_missing_program_fails_the_run_at_once_and_a_full_machine_when_the_restarts_are_spent(
    kind: type[MyxaError], exit_code: int, attempts: list[int]
):
    async def body(stage: Stage) -> None:
        stage.hands[0].raises = kind("rollout/0 cannot be started: no memory")
        await stage.begin()
        await asyncio.sleep(30)
        assert stage.supervisor.failed.result().exit_code == exit_code
        assert [attempt for _, attempt in stage.hands[0].started] == attempts
        failure = stage.supervisor.failures.first
        assert failure is not None and "no memory" in failure.report()

    staged(body, rollout(0), at_once=False)


@on_stage(rollout(0), *trainers(1, 2, max_restarts=20), num_nodes=3)
async def test_the_ranks_of_an_attempt_meet_at_one_port_of_the_node_of_rank_0(stage: Stage) -> None:
    first, second = stage.hands[1].meetings, stage.hands[2].meetings
    assert first["trainer/0", 0] == second["trainer/1", 0]
    assert (first["trainer/0", 0].address, first["trainer/0", 0].port) == ("10.0.0.1", 1100), "chosen there"
    assert not stage.hands[0].held and not stage.hands[2].held
    await stage.sim.spawn("launcher/2", stage.hands[2].die("trainer/1"))
    await stage.ping(1, 2, seconds=6)
    assert first["trainer/0", 1] == second["trainer/1", 1] != first["trainer/0", 0]


@on_stage(rollout(0), *trainers(0, 0))
async def test_ranks_on_one_node_meet_on_loopback(stage: Stage) -> None:
    assert stage.hands[0].meetings["trainer/1", 0].address == "127.0.0.1"


class Listener(MonitorContract):
    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []

    async def telemetry(self, bundle: Telemetry) -> None:
        self.heard += [(event.kind, event.source) for event in bundle.events]


@on_stage(rollout(0))
async def test_a_monitor_that_was_away_hears_who_hung_meanwhile(stage: Stage) -> None:
    for kind in ("suspect", "hung", "recovered"):
        event = PeerEvent(kind, "rollout/0", 1, "it does not answer")
        await stage.on_0(lambda event=event: stage.supervisor.on_peer(event))
        await asyncio.sleep(3)
    monitor = Listener()
    await stage.on_0(lambda: stage.hands[0].node.start(monitor, "monitor"))
    await asyncio.sleep(15)
    assert monitor.heard == [(f"actor-{kind}", "rollout/0") for kind in ("suspect", "hung", "recovered")]


# -- processes that do not come, or do not go --------------------------------------------------------------------------


@on_stage(rollout(0), *trainers(1, 2), num_nodes=3)
async def test_a_process_that_survives_sigkill_fails_the_run_and_is_named_with_its_node(stage: Stage) -> None:
    away = stage.hands[1]
    away.undead.add("trainer/0")
    await stage.sim.spawn("launcher/2", stage.hands[2].die("trainer/1"))
    await stage.ping(1, 2, seconds=30)
    assert not stage.supervisor.failed.done()
    assert stage.states()["trainer/0"] == "ending"
    await stage.ping(1, 2, seconds=10)
    verdict = stage.supervisor.failed.result()
    pid = away.pids["trainer/0"]
    assert verdict.culprit == "trainer/0"
    assert f"trainer/0 (process {pid} on node 1) is still there 30 s after it had to end" in verdict.reason
    await stage.on_0(lambda: stage.supervisor.stop_all())  # and does not wait for it


@on_stage(rollout(0))
async def test_an_end_that_takes_too_long_names_process_and_node(stage: Stage) -> None:
    stage.hands[0].undead.add("rollout/0")
    pid = stage.hands[0].pids["rollout/0"]
    with pytest.raises(LaunchError, match=rf"these did not end: rollout/0 \(process {pid} on node 0\)"):
        await stage.on_0(lambda: stage.supervisor.stop_all())


@on_stage(rollout(0, quorum=1), rollout(1, quorum=1))
async def test_the_run_goes_on_without_an_undead_one_where_others_are_enough(stage: Stage) -> None:
    stage.hands[0].undead.add("rollout/1")
    await stage.on_0(lambda: asyncio.sleep(0, stage.supervisor.renew("rollout/1", "somebody wished it")))
    await asyncio.sleep(120)
    assert not stage.supervisor.failed.done()
    assert stage.states() == {"rollout/0": "up", "rollout/1": "stopped"}


@on_stage(rollout(0), at_once=False)
async def test_who_does_not_register_is_killed_once_and_one_that_then_does_not_go_is_lost(stage: Stage) -> None:
    hands = stage.hands[0]
    hands.answers = False
    hands.undead.add("rollout/0")
    await stage.begin()
    await asyncio.sleep(TIMEOUTS.start_s + 10)
    assert hands.ended == ["rollout/0"]
    assert not stage.supervisor.failed.done()
    await asyncio.sleep(TIMEOUTS.gone_s)
    assert stage.supervisor.failed.result().culprit == "rollout/0"


@on_stage(rollout(0, max_restarts=0))
async def test_e07_the_report_names_the_operator_who_killed_an_actor(stage: Stage) -> None:
    supervisor = stage.supervisor
    await stage.on_0(lambda: supervisor.kill(supervisor.statuses(), "`myxa kill` by alice (a drill)"))
    assert supervisor.failed.result().exit_code == 4
    assert supervisor.failures.first is not None
    assert "`myxa kill` by alice (a drill)" in supervisor.failures.first.report()
    assert "kernel" not in supervisor.failures.first.report()


# -- nodes -------------------------------------------------------------------------------------------------------------


@on_stage(rollout(0, quorum=1), rollout(1, 1, quorum=1), num_nodes=2)
async def test_a_node_that_was_silent_and_lives_is_told_to_leave_and_its_pings_are_told_that_nobody_counts_on_it(
    stage: Stage,
) -> None:
    assert await stage.on_0(lambda: stage.supervisor.ping(1)) is True
    await asyncio.sleep(TIMEOUTS.lost_s + 3)
    assert stage.supervisor.nodes == (0,)
    left = stage.hands[1].left
    assert left is not None
    assert left[0] == LaunchError.exit_code
    assert "lost" in left[1]
    assert await stage.on_0(lambda: stage.supervisor.ping(1)) is False
    assert stage.states() == {"rollout/0": "up", "rollout/1": "stopped"}


@on_stage(rollout(0, quorum=1), rollout(1, 1, quorum=1), rollout(2, 2, quorum=1), num_nodes=3)
async def test_a_node_that_joined_and_never_gave_a_sign_of_life_is_lost_too(stage: Stage) -> None:
    await stage.ping(1, seconds=TIMEOUTS.lost_s + 3)
    assert stage.supervisor.nodes == (0, 1)


@on_stage(rollout(0, quorum=1), rollout(1, 1, quorum=1), num_nodes=2)
async def test_what_is_started_on_a_node_that_has_left_does_not_stay_starting_for_ever(stage: Stage) -> None:
    await stage.on_0(lambda: stage.supervisor.release_node(1, 0, "it may go"))
    assert stage.hands[1].left == (0, "it may go")
    assert stage.states()["rollout/1"] == "stopped"
    assert [actor.name for actor in stage.supervisor.present().actors] == ["rollout/0"]
    await stage.sim.crash("launcher/1")
    await stage.on_0(lambda: asyncio.sleep(0, stage.supervisor.hire(rollout(2, 1))))
    await asyncio.sleep(40)
    assert stage.states()["rollout/2"] == "stopped"
    assert stage.states()["rollout/0"] == "up"
    assert not stage.supervisor.failed.done()


@on_stage(rollout(0), rollout(1, 1), *trainers(0, 1), num_nodes=2)
async def test_a_node_goes_as_a_whole_or_not_at_all(stage: Stage) -> None:
    with pytest.raises(ConfigError, match="node 1 cannot leave: trainer/1 is a rank of gang trainer"):
        await stage.on_0(lambda: stage.supervisor.leave_node(1, "a signal"))
    await stage.ping(1, seconds=3)
    assert set(stage.states().values()) == {"up"}, "nobody was asked to end"
    assert not any(record.is_leaving for record in stage.supervisor.statuses())


# -- who is over for everybody -----------------------------------------------------------------------------------------


@on_stage(rollout(0, quorum=1), rollout(1, quorum=1))
async def test_one_that_says_that_it_ends_has_longer_to_do_so_than_one_that_was_lost(stage: Stage) -> None:
    hands, supervisor = stage.hands[0], stage.supervisor
    for name, reason in (("rollout/0", f"{FAILED}: its data is wrong"), ("rollout/1", "the connection is lost")):
        event = PeerEvent("down", name, supervisor.actors[name].epoch, reason)
        await stage.on_0(lambda event=event: supervisor.on_peer(event))
    await asyncio.sleep(TIMEOUTS.over_s + 2)
    assert hands.killed == ["rollout/1"]
    assert stage.states()["rollout/0"] == "up"
    await asyncio.sleep(TIMEOUTS.leave_s)
    assert hands.killed == ["rollout/1", "rollout/0"]
