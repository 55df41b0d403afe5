"""The begin and the end of a run, as the coordinator orders them, while its disk, its leader or its callers fail
it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.harness.manifests import join
from tests.harness.manual_clock import ManualClock
from tests.harness.waiting import until
from tests.harness.waits import waits
from tests.knobs.coordinator_room import make_coordinator

from myxa.actors.contracts import CoordinatorContract, TrainerContract
from myxa.actors.coordinator.coordinator import Coordinator, LeaderControl, PhaseMoves
from myxa.actors.coordinator.run_state import RunContext, RunState
from myxa.actors.monitor.monitor import Monitor
from myxa.actors.telemetry import Reporter
from myxa.core.errors import LaunchError, LedgerError, NoSuchActor, NotReady, NotSent
from myxa.core.messages import WeightManifest
from myxa.transport.node import Node


def manifest(version: int, location: str = "") -> WeightManifest:
    return WeightManifest(
        version=version, channel="shm", location=location, num_bytes=0, tensors=(), digest="", host=""
    )


class Leader(TrainerContract):
    """Notes what it is told; while `sets_up` it refuses as one that is not up yet does."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.stops: list[str] = []
        self.num_refused = 0
        self.sets_up = False

    async def run_leader(self, start_version: int) -> None:
        if self.sets_up:
            self.num_refused += 1
            raise NotReady("trainer/0 is still setting up")
        self.starts.append(start_version)

    async def stop_leader(self, reason: str) -> None:
        if self.sets_up:
            self.num_refused += 1
            raise NotReady("trainer/0 is still setting up")
        self.stops.append(reason)


@asynccontextmanager
async def place(
    folder: Path, *, has_engines: bool = False, **more: Any
) -> AsyncIterator[tuple[Node, Coordinator, Leader, Any]]:
    """A coordinator, a leader that says only what the test has it say, and the coordinator's reference."""
    node = await Node.attach(name="launcher/0")
    coordinator, leader = make_coordinator(folder, has_engines=has_engines, **more), Leader()
    try:
        await node.start(Monitor(folder, ()), "monitor")
        await node.start(leader, "trainer/0")
        await node.start(coordinator, "coordinator")
        yield node, coordinator, leader, node.ref(CoordinatorContract, "coordinator")
    finally:
        await node.close(grace_s=0.5)


async def test_a_run_whose_begin_cannot_be_kept_is_not_begun(tmp_path: Path) -> None:
    (tmp_path / ".coordinator.journal.part").mkdir()
    async with place(tmp_path) as (node, coordinator, leader, ref):
        await ref.trainer_ready(0, None, {})
        async with asyncio.timeout(20):
            failed = await node.failed
        assert isinstance(failed, LedgerError) or "check disk and rights" in str(failed)
        assert not leader.starts, "the next incarnation would begin the run once more"
        assert coordinator._state.phase == "starting"


async def test_a_leader_that_leads_already_is_not_started_again(tmp_path: Path) -> None:
    async with place(tmp_path, has_engines=True) as (_, coordinator, leader, ref):
        await ref.trainer_ready(7, None, {}, None, True)
        await until(lambda: coordinator._state.phase == "running", "the phase")
        assert (await ref.status()).version == 7
        journal = coordinator._journal
        assert journal.load()[0] and (journal.state.phase, journal.state.has_restored) == ("running", False)
        await asyncio.sleep(0.1)
        assert not leader.starts


async def test_a_gang_that_is_only_coming_up_is_let_go_when_it_reports_in(tmp_path: Path) -> None:
    async with place(tmp_path) as (node, coordinator, leader, ref):
        leader.sets_up = True  # the gang that had reported in died before the run began
        await ref.trainer_ready(4, None, {})
        await until(lambda: leader.num_refused == 1, "the order that came too early")
        leader.sets_up = False
        await ref.trainer_ready(4, None, {})
        await until(lambda: leader.starts == [4], "the begin")
        assert coordinator._state.phase == "running" and not node.failed.done()


async def test_a_stop_reaches_a_leader_that_was_setting_up(tmp_path: Path) -> None:
    async with place(tmp_path) as (_, coordinator, leader, ref):
        await ref.trainer_ready(0, None, {})
        await until(lambda: leader.starts == [0], "the begin")
        leader.sets_up = True
        await ref.stop("run.max_wall_s = 1 s is over")
        await until(lambda: leader.num_refused > 1, "told again")
        leader.sets_up = False
        await until(lambda: leader.stops == ["run.max_wall_s = 1 s is over"], "the stop")
        assert coordinator._state.phase == "running", "until the leader has ended"


async def test_a_version_that_the_trainer_makes_again_counts_as_not_evaluated(tmp_path: Path) -> None:
    async with place(tmp_path) as (_, coordinator, leader, ref):
        await ref.trainer_ready(7, None, {})
        await until(lambda: leader.starts == [7], "the begin")
        coordinator._state.eval_version = 7
        await ref.trainer_ready(7, None, {}, None, True)
        assert coordinator._state.eval_version == 7
        await ref.trainer_ready(6, None, {})
        assert coordinator._state.eval_version == -1


async def test_a_gang_started_anew_before_the_run_begins_is_the_one_that_engines_get_weights_of(tmp_path: Path) -> None:
    async with place(tmp_path, has_engines=True) as (_, coordinator, _, ref):
        await ref.trainer_ready(5, manifest(5), {})
        await ref.trainer_ready(3, manifest(3), {})  # the checkpoint of 5 turned out to be damaged
        assert coordinator._adoption.newest == 3
        await ref.trainer_ready(3, manifest(3, location="again"), {})
        join(coordinator._adoption, "rollout/0", 1)
        instruction = coordinator._adoption.next()
        assert instruction is not None and instruction.manifest.location == "again"


@pytest.mark.parametrize(
    ("has_trainer", "said"),
    [
        (False, "trainer/0: it was not ready within 1 s -- see its log"),
        (True, "rollout: no rollout actor had an engine that serves within 1 s -- see its log"),
    ],
)
async def test_a_run_that_does_not_come_to_work_in_time_fails_and_names_who_was_waited_for(
    tmp_path: Path, has_trainer: bool, said: str
) -> None:
    """The coordinator answers on: another attempt of it would wait as long for the same."""
    async with place(tmp_path, has_engines=True, start_timeout_s=1.0) as (node, coordinator, _, ref):
        if has_trainer:
            await ref.trainer_ready(0, None, {})
        await until(lambda: coordinator._state.phase == "failed", "the run to be given up")
        assert (await ref.status()).error.startswith(said)
        await asyncio.sleep(0.05)
        assert not node.failed.done()


# -- the rein alone ------------------------------------------------------------------------------------------------


class Surroundings:
    log = logging.getLogger("rein")

    def __init__(self, leader: Any) -> None:
        self.leader = leader
        self.there: tuple[str, ...] = ("trainer/0",)
        self.tasks: list[asyncio.Task[Any]] = []

    def ref(self, contract: type, name: str) -> Any:
        return self.leader

    def spawn(self, work: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        self.tasks.append(asyncio.get_running_loop().create_task(work))
        return self.tasks[-1]

    def peers(self, prefix: str) -> tuple[str, ...]:
        return self.there


class Away:
    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock

    async def run_leader(self, start_version: int) -> None:
        self._clock.advance(121.0)
        raise NoSuchActor("no actor is called trainer/0")


def rein(leader_of: Callable[[ManualClock], Any]) -> tuple[LeaderControl, Surroundings]:
    clock = ManualClock(start_s=10.0)
    around: Any = Surroundings(leader_of(clock))
    around.clock = clock
    context: Any = SimpleNamespace(
        ctx=around, state=RunState(phase="running"), ask=Reporter(around, around, around).ask
    )
    return LeaderControl(context), around


async def test_a_gang_that_is_gone_is_not_the_coordinator_s_failure_and_one_that_never_answers_is() -> None:
    held, around = rein(Away)
    around.there = ()
    held.start()
    await asyncio.gather(*around.tasks)
    held, around = rein(Away)
    held.start()
    with pytest.raises(Exception, match="did not answer for"):
        await asyncio.gather(*around.tasks)


class Deaf:
    """Hears the third word only."""

    def __init__(self, clock: ManualClock) -> None:
        self.num_words = 0
        self.has_begun = False

    async def stop_leader(self, reason: str) -> None:
        self.num_words += 1
        if self.num_words < 3:
            raise NotSent("no way there")

    async def run_leader(self, start_version: int) -> None:
        assert self.num_words == 3, "the stop comes first"
        self.has_begun = True


async def test_a_leader_that_is_to_end_learns_it_before_it_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("myxa.actors.coordinator.coordinator.TIMEOUTS", waits(coordinator={"tell_again_s": 0.001}))
    held, around = rein(Deaf)
    held._state.stop_reason = "enough"
    held.start()
    held.tell_stop()
    await asyncio.gather(*around.tasks)
    assert around.leader.has_begun and around.leader.num_words == 3


# -- phases --------------------------------------------------------------------------------------------------------


def moves_of(state: RunState, journal: Any) -> tuple[PhaseMoves, list[str]]:
    told: list[str] = []
    ctx: Any = Surroundings(None)
    telemetry: Any = SimpleNamespace(event=lambda kind, text: told.append(kind))
    nothing: Any = None
    journal.state, journal.coming = state, None
    return PhaseMoves(RunContext(ctx, nothing, telemetry, nothing, journal), lambda: None), told


async def test_of_two_moves_at_once_the_one_that_may_follow_wins() -> None:
    state, disk = RunState(), asyncio.Event()
    moves, _ = moves_of(state, SimpleNamespace(keep=disk.wait, path=Path("journal")))

    async def begun(phase: Any) -> asyncio.Task[bool]:
        move = asyncio.create_task(moves.to(phase))
        await asyncio.sleep(0.01)
        return move

    running = await begun("running")
    assert moves._run.journal.coming == "running" and state.phase == "starting", "kept before it is so"
    draining = await begun("draining")  # somebody stops the run at that moment
    disk.set()
    assert not await running
    assert await draining and state.phase == "draining"
    disk.clear()
    failed = await begun("failed")
    assert not await moves.to("finished"), "what failed does not end well"
    disk.set()
    assert await failed
    with pytest.raises(LaunchError, match="cannot go from failed"):
        await moves.to("running")


def hanging(end: asyncio.Event, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A journal whose disk hangs until `end`, for which nobody waits long."""
    monkeypatch.setattr("myxa.actors.coordinator.run_state.TIMEOUTS", waits(coordinator={"keep_s": 0.01}))
    return SimpleNamespace(keep=end.wait, path=Path("coordinator.journal"))


@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize("phase", ["draining", "failed"])
async def test_an_end_that_cannot_be_kept_is_one_all_the_same(
    phase: Any, is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would end the processes of a run that cannot say that it is over."""

    async def keep() -> None:
        raise LedgerError("the disk is full")

    state = RunState(phase="running")
    journal = hanging(asyncio.Event(), monkeypatch) if is_slow else SimpleNamespace(keep=keep)
    moves, told = moves_of(state, journal)
    async with asyncio.timeout(20):
        assert await moves.to(phase)
    assert state.phase == phase and told[:2] == ["journal-not-written", "phase"]


async def test_a_begin_waits_for_a_disk_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    hang, state = asyncio.Event(), RunState()
    moving = asyncio.create_task(moves_of(state, hanging(hang, monkeypatch))[0].to("running"))
    await asyncio.sleep(0.1)
    assert state.phase == "starting" and not moving.done()
    hang.set()
    assert await moving and state.phase == "running"
