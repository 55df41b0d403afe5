"""The adopter over a real node: some engines at a time, those that stand still are named, those that refuse are asked
again, and nobody waits for anybody who is none of their business."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from myxa.actors.contracts.roles import RolloutContract, TrainerContract
from myxa.actors.coordinator import adopter as module
from myxa.actors.coordinator.adopter import Adopter, AdoptionLimits
from myxa.actors.coordinator.adoption import Adoption
from myxa.core.activity import ActivityMeter, TelemetryBuffer
from myxa.core.actor import Actor
from myxa.core.clock import SystemClock
from myxa.core.errors import TrainError
from myxa.core.messages import WeightAck, WeightManifest
from myxa.core.weight_channel import WeightProgress
from myxa.transport.node import Node

WAIT_S = 20.0


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LOOK_S": 0.05, "RETRY_S": 0.02, "RETRY_LIMIT_S": 0.05, "MAX_REFUSALS": 3}.items():
        monkeypatch.setattr(module, name, value)


class ToyRollout(RolloutContract):
    """Adopts when its gate is open, unless it is told what to say instead."""

    def __init__(self, floor: Floor) -> None:
        self._floor = floor
        self.gate = asyncio.Event()
        self.gate.set()
        self.refusals: list[WeightAck] = []
        self.at_commit = False
        self.progress: WeightProgress | None = None
        self.num_asked = 0
        self.fenced: list[str] = []

    async def prepare_weights(self, manifest: WeightManifest) -> WeightAck:
        self._floor.busy.add(self.ctx.name)
        self._floor.most_busy = max(self._floor.most_busy, len(self._floor.busy))
        try:
            if not self.at_commit:
                return await self._answer(manifest.version)
            return self.ack(manifest.version)
        finally:
            self._floor.busy.discard(self.ctx.name)

    async def commit_weights(self, version: int) -> WeightAck:
        return await self._answer(version) if self.at_commit else self.ack(version)

    async def _answer(self, version: int) -> WeightAck:
        await asyncio.sleep(0.02)
        await self.gate.wait()
        return self.refusals.pop(0) if self.refusals else self.ack(version)

    def ack(self, version: int, reason: str = "", *, is_whole: bool = False) -> WeightAck:
        return WeightAck(rollout=self.ctx.name, version=version, accepted=not reason, reason=reason, is_whole=is_whole)

    async def weight_progress(self) -> WeightProgress:
        self.num_asked += 1
        return self.progress or WeightProgress(at=f"tensor {self.num_asked}", num_done=self.num_asked, is_counted=True)

    async def fence(self, reason: str) -> None:
        self.fenced.append(reason)


class ToyTrainer(TrainerContract):
    """Lets go of versions, once it hears."""

    def __init__(self) -> None:
        self.released: list[int] = []
        self.num_deaf = 0

    async def release_weights(self, version: int) -> None:
        if self.num_deaf:
            self.num_deaf -= 1
            raise TrainError("it does not hear")
        self.released.append(version)


@dataclass
class Floor:
    """All of them."""

    node: Node
    adoption: Adoption
    adopter: Adopter
    telemetry: TelemetryBuffer
    trainer: ToyTrainer
    rollouts: list[ToyRollout] = field(default_factory=list)
    busy: set[str] = field(default_factory=set)
    most_busy: int = 0

    async def add(self) -> ToyRollout:
        rollout = ToyRollout(self)
        name = f"rollout/{len(self.rollouts)}"
        self.rollouts.append(rollout)
        await self.node.start(rollout, name=name)
        self.adoption.joined(name, 1)
        return rollout

    def publish(self, version: int) -> None:
        self.adoption.published(
            WeightManifest(
                version=version, channel="shm", location="", generation=0, num_bytes=0, tensors=(), digest="", host=""
            )
        )

    def told(self) -> str:
        return "; ".join(f"{event.kind}: {event.text}" for event in self.telemetry.drain().events)


@asynccontextmanager
async def floor_of(
    num_engines: int, *, at_once: int = 1, stall_s: float = 0.0, prepare_s: float = 5.0
) -> AsyncIterator[Floor]:
    node = await Node.attach(name="adopter-floor")
    try:
        host, trainer, clock = Actor(), ToyTrainer(), SystemClock()
        await node.start(host, name="coordinator")
        await node.start(trainer, name="trainer/0")
        adoption, telemetry = Adoption(at_once=at_once), TelemetryBuffer("floor", clock)
        adopter = Adopter(
            host.ctx,
            adoption,
            limits=AdoptionLimits(prepare_s=prepare_s, commit_s=5.0, stall_s=stall_s),
            on_adopted=lambda name, version: None,
            meter=ActivityMeter("floor", clock),
            telemetry=telemetry,
            clock=clock,
        )
        floor = Floor(node, adoption, adopter, telemetry, trainer)
        for _ in range(num_engines):
            await floor.add()
        yield floor
    finally:
        await node.close(grace_s=0.5)


async def until(condition: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError as err:
        raise AssertionError(what) from err


@pytest.mark.asyncio
@pytest.mark.parametrize("at_once", [1, 2, 4])
async def test_so_many_adopt_at_once_and_no_more(at_once: int) -> None:
    async with floor_of(5, at_once=at_once) as floor:
        for version in (0, 1):
            floor.publish(version)
            await floor.adopter.adopt_pending()
            assert set(floor.adoption.serving.values()) == {version}
        assert floor.most_busy == at_once
        await until(lambda: floor.trainer.released == [0], "version 0 is let go")


@pytest.mark.asyncio
async def test_an_engine_that_stands_still_is_named_with_its_place_and_the_others_go_on() -> None:
    async with floor_of(3, stall_s=0.3) as floor:
        stands = floor.rollouts[0]
        stands.gate.clear()
        stands.progress = WeightProgress(at="receive bucket 2 of 5 from trainer/3", num_done=2, is_counted=True)
        floor.publish(0)
        await floor.adopter.adopt_pending()
        assert floor.adoption.serving == {"rollout/1": 0, "rollout/2": 0}
        await until(lambda: bool(stands.fenced), "it is told")
        (reason,) = stands.fenced
        assert re.search(r"prepare of version 0: no progress for 0.3 s: receive bucket 2 of 5 from trainer/3", reason)
        assert f"engine-fenced: rollout/0: {reason}" in floor.told()


@pytest.mark.asyncio
async def test_with_room_for_two_nobody_waits_for_the_one_that_stands_still() -> None:
    async with floor_of(4, at_once=2) as floor:
        floor.rollouts[0].gate.clear()
        floor.publish(0)
        adopting = asyncio.ensure_future(floor.adopter.adopt_pending())
        await until(lambda: len(floor.adoption.serving) == 3, "the other three serve")
        floor.publish(1)
        await until(lambda: list(floor.adoption.serving.values()) == [1, 1, 1], "and the next version too")
        await floor.add()
        await until(lambda: len(floor.adoption.serving) == 4, "and one that came meanwhile")
        assert not adopting.done() and not floor.rollouts[0].fenced
        floor.rollouts[0].gate.set()
        await adopting
        assert set(floor.adoption.serving.values()) == {1}


@pytest.mark.asyncio
async def test_one_that_moves_or_cannot_be_counted_has_until_the_deadline() -> None:
    async with floor_of(2, at_once=2, stall_s=0.2, prepare_s=1.0) as floor:
        slow, silent = floor.rollouts
        slow.gate.clear()
        silent.gate.clear()
        silent.progress = WeightProgress(at="the server reads /folder")
        floor.publish(0)
        adopting = asyncio.ensure_future(floor.adopter.adopt_pending())
        await asyncio.sleep(0.6)
        assert not slow.fenced and not silent.fenced
        slow.gate.set()
        await adopting
        assert floor.adoption.serving == {"rollout/0": 0}
        await until(lambda: bool(silent.fenced), "it is told")
        assert "rollout/1" in floor.told()


@pytest.mark.asyncio
@pytest.mark.parametrize("at_commit", [False, True])
async def test_one_that_refuses_and_is_whole_serves_on_and_is_asked_again(*, at_commit: bool) -> None:
    async with floor_of(2) as floor:
        floor.publish(0)
        await floor.adopter.adopt_pending()
        refuses = floor.rollouts[0]
        refuses.at_commit = at_commit
        refuses.refusals = [refuses.ack(1, "the slab of trainer/0 is gone", is_whole=True) for _ in range(2)]
        floor.publish(1)
        adopting = asyncio.ensure_future(floor.adopter.adopt_pending())
        await until(lambda: floor.adoption.serving["rollout/1"] == 1, "the other goes on meanwhile")
        await adopting
        assert floor.adoption.serving == {"rollout/0": 1, "rollout/1": 1} and not refuses.fenced
        assert "weights-refused: rollout/0: " in floor.told()


@pytest.mark.asyncio
async def test_one_that_refuses_for_ever_or_is_torn_is_fenced() -> None:
    async with floor_of(3) as floor:
        stubborn, torn = floor.rollouts[:2]
        stubborn.refusals = [stubborn.ack(0, "no room", is_whole=True) for _ in range(9)]
        torn.refusals = [torn.ack(0, "bucket 3 did not arrive")]
        floor.publish(0)
        await floor.adopter.adopt_pending()
        assert floor.adoption.serving == {"rollout/2": 0}
        await until(lambda: bool(stubborn.fenced and torn.fenced), "both are told")
        assert "no room (4 refusals in a row)" in stubborn.fenced[0]
        assert "prepare of version 0 refused: bucket 3 did not arrive" in torn.fenced[0]


@pytest.mark.asyncio
async def test_a_version_that_nobody_can_take_costs_no_engine() -> None:
    async with floor_of(2) as floor:
        floor.publish(0)
        await floor.adopter.adopt_pending()
        for engine in floor.rollouts:
            engine.refusals = [engine.ack(1, "its digest is another", is_whole=True) for _ in range(4)]
        floor.publish(1)
        await floor.adopter.adopt_pending()
        assert floor.adoption.serving == {"rollout/0": 0, "rollout/1": 0}
        assert not any(engine.fenced for engine in floor.rollouts)
        assert floor.told().count("its digest is another") == 8
        floor.publish(2)
        await floor.adopter.adopt_pending()
        assert floor.adoption.serving == {"rollout/0": 2, "rollout/1": 2}


@pytest.mark.asyncio
async def test_refusals_while_the_trainer_is_away_are_not_held_against_the_engine() -> None:
    async with floor_of(1) as floor:
        engine = floor.rollouts[0]
        await floor.node.stop("trainer/0")
        engine.refusals = [engine.ack(0, "the slab is gone", is_whole=True) for _ in range(8)]
        floor.publish(0)
        await floor.adopter.adopt_pending()
        assert floor.adoption.serving == {"rollout/0": 0} and not engine.fenced


@pytest.mark.asyncio
async def test_a_release_that_was_not_heard_is_told_again_unless_the_trainer_went_back() -> None:
    async with floor_of(1) as floor:
        floor.trainer.num_deaf = 1
        for version in (0, 1, 2):
            floor.publish(version)
            await floor.adopter.adopt_pending()
            await asyncio.sleep(0.05)
        await until(lambda: floor.trainer.released == [0, 1], "both were told in the end")
        floor.trainer.num_deaf = 1
        floor.publish(3)
        await floor.adopter.adopt_pending()
        await until(lambda: floor.trainer.num_deaf == 0, "told, and not heard")
        floor.adoption.rewound()
        for version in (2, 3):
            floor.publish(version)
            await floor.adopter.adopt_pending()
        await asyncio.sleep(0.1)
        assert floor.trainer.released == [0, 1, 2] and floor.adoption.serving == {"rollout/0": 3}
