"""What the leader asks of the memory manager, in which order, and what it books; weights that left and come anew."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from tests.harness.waits import waits

from myxa.actors.contracts import MemoryContract, RolloutContract
from myxa.actors.telemetry import Reporter
from myxa.actors.tenancy import time_share
from myxa.actors.tenancy.tenant import CountedRoom
from myxa.actors.tenancy.time_share import ROLLOUT_TAGS, TRAINER_TAGS, TimeShare, TimeShareOptions
from myxa.core.activity import ActivityMeter, TelemetryBuffer
from myxa.core.actor import Actor, PeerEvent
from myxa.core.clock import SystemClock
from myxa.core.device_memory import LeaseReply, LeaseRequest, TenantReport, TenantState
from myxa.core.errors import LeaseRefused
from myxa.transport.node import Node

ROLLOUTS = ("rollout/0", "rollout/1")
OPTIONS = TimeShareOptions("memory/0", (), ROLLOUTS, switch_s=5.0, start_s=5.0)


class ToyManager(MemoryContract):
    """Grants everything, or nothing; notes what was asked."""

    def __init__(self) -> None:
        self.asked: list[LeaseRequest] = []
        self.reply = LeaseReply(granted=True, epoch=1, copied_bytes=10)
        self.replies: list[LeaseReply] = []
        """Given before it, one each."""

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        self.asked.append(request)
        return self.replies.pop(0) if self.replies else self.reply


class ToyRollout(RolloutContract):
    """Cold until it is told to load."""

    def __init__(self) -> None:
        self.num_loads = 0
        self.epoch = 1
        self.state: TenantState = "quiet"

    async def memory_report(self) -> TenantReport | None:
        return TenantReport(self.ctx.name, self.epoch, "rollout", ("host:0",), (1,), self.state, ())

    async def load_engine(self) -> None:
        self.num_loads += 1
        self.state = "quiet"

    leave: Callable[[], Awaitable[None]]
    """Set by the stage: its process ends."""


class Leads(Actor):
    async def on_start(self) -> None:
        clock = SystemClock()
        meter, telemetry = ActivityMeter("leader", clock), TelemetryBuffer("leader", clock)
        self.share = TimeShare(Reporter(self.ctx, meter, telemetry), OPTIONS)


@asynccontextmanager
async def stage(folder: Path) -> AsyncGenerator[tuple[TimeShare, ToyManager, list[ToyRollout]]]:
    node = await Node.attach(run_dir=folder, node_rank=0, name="stage")
    manager, rollouts, leads = ToyManager(), [ToyRollout() for _ in ROLLOUTS], Leads()
    try:
        await node.start(manager, name="memory/0")
        for name, rollout in zip(ROLLOUTS, rollouts, strict=True):
            await node.start(rollout, name=name)
            rollout.leave = partial(node.stop, name, grace_s=0)
        await node.start(leads, name="trainer/0")
        yield leads.share, manager, rollouts
    finally:
        await node.close(grace_s=0.1)


async def test_a_step_in_turns(tmp_path: Path) -> None:
    async with stage(tmp_path) as (share, manager, rollouts):
        await share.offer()
        assert [rollout.num_loads for rollout in rollouts] == [1, 1]
        assert manager.asked[0].tags == ROLLOUT_TAGS, "an engine that loads needs all of its room at once"
        await share.give()
        share.metrics()
        await share.take()
        share.trained()
        await share.offer()
        await share.give()
        asked = [(r.gang, r.tags, r.is_active, r.quiet) for r in manager.asked[2:]]
        assert asked == [
            ("trainer", TRAINER_TAGS, True, ("rollout",)),
            ("rollout", ("weights",), False, ("trainer",)),
            ("rollout", ROLLOUT_TAGS, True, ("trainer",)),
        ]
        assert len({r.request_id for r in manager.asked}) == len(manager.asked)
        assert [rollout.num_loads for rollout in rollouts] == [1, 1], "nobody loads twice"
        told = share.metrics()
        assert told["memory/copied_bytes"] == 30.0
        assert told["memory/exposed_s"] >= told["memory/switch_s"] > 0
        assert share.metrics()["memory/switch_s"] == 0.0


async def test_an_engine_that_died_is_asked_for_again_and_loaded(tmp_path: Path) -> None:
    """It may stand with room and without an engine: the state of a tenant does not say that it has loaded."""
    async with stage(tmp_path) as (share, manager, rollouts):
        await share.offer()
        await share.give()
        rollouts[1].epoch, rollouts[1].state = 2, "quiet"  # restarted, and granted room on the way
        lost = LeaseReply(granted=False, epoch=3, reason="rollout/1 was lost while the switch was in its restore step")
        manager.replies = [lost]
        await share.offer()
        assert [rollout.num_loads for rollout in rollouts] == [1, 2]
        manager.replies = [lost]
        await share.give()
        assert manager.asked[-1].is_active
        await share.offer()
        assert [rollout.num_loads for rollout in rollouts] == [1, 2], "it has loaded now"


async def test_a_slow_engine_costs_a_refused_lease_and_no_gang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_share, "TIMEOUTS", waits(memory={"again_s": 0.0}))
    slow = LeaseReply(granted=False, epoch=3, reason="rollout/1 did not answer quiesce in time")
    async with stage(tmp_path) as (share, manager, _):
        await share.offer()
        await share.give()
        manager.asked.clear()
        manager.replies = [slow, slow]
        await share.take()
        assert [(r.gang, r.is_active, r.quiet) for r in manager.asked] == [("trainer", True, ("rollout",))] * 3
        assert len({r.request_id for r in manager.asked}) == 3
        manager.reply = slow
        with pytest.raises(LeaseRefused, match="did not answer quiesce"):
            await share.take()


async def test_the_trainer_takes_its_turn_while_an_engine_is_away(tmp_path: Path) -> None:
    async with stage(tmp_path) as (share, manager, rollouts):
        await share.offer()
        await share.give()
        manager.replies = [
            LeaseReply(granted=False, epoch=3, reason="rollout/1 was lost while the switch was under way")
        ]
        await rollouts[1].leave()
        await share.take()
        assert manager.asked[-1].gang == "trainer"


async def test_a_refusal_names_who_holds_what(tmp_path: Path) -> None:
    async with stage(tmp_path) as (share, manager, _):
        manager.reply = LeaseReply(granted=False, epoch=2, reason="3.1 GiB short, held by rollout/0 kv_cache 7.0 GiB")
        with pytest.raises(LeaseRefused, match=r"trainer cannot have .*: 3\.1 GiB short, held by rollout/0 .*myxa mem"):
            await share.take()


async def test_engines_that_come_anew_are_noticed_until_they_are_loaded(tmp_path: Path) -> None:
    async with stage(tmp_path) as (share, _, _):
        share.on_peer(PeerEvent("up", "rollout/7", 1))
        assert not share.has_newcomers, "not one of these devices"
        share.on_peer(PeerEvent("restarted", "rollout/1", 2))
        assert share.has_newcomers
        await share.offer()
        assert not share.has_newcomers


def test_room_is_counted_and_moves_nothing() -> None:
    vacated: list[str] = []
    room = CountedRoom({"workspace": (100, "discard")}, is_held=True, vacate=lambda: vacated.append("once"))
    room.release(("params",))
    assert (vacated, room.held_bytes) == ([], 100)
    room.release(("params", "workspace"))
    room.release(("workspace",))
    assert (vacated, room.held_bytes) == (["once"], 0)
    assert room.report()[0].backing == "discarded"
    room.restore(("params",))
    assert room.report()[0].backing == "discarded"
    room.restore(("workspace",))
    assert room.report()[0].backing == "mapped_dirty"
