"""The adopter over a real node: some engines at a time, those that stand still are named, those that refuse are asked
again, and nobody waits for anybody who is none of their business."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from tests.harness.manifests import join, manifest_of
from tests.harness.manual_clock import ManualClock
from tests.harness.waiting import until
from tests.harness.waits import waits

from myxa.actors.contracts import RolloutContract, TrainerContract
from myxa.actors.telemetry import Reporter
from myxa.actors.weights import rollout_update as module
from myxa.actors.weights.rollout_update import Adopter, Adoption, AdoptionLimits
from myxa.core.activity import ActivityMeter, TelemetryBuffer
from myxa.core.actor import Actor
from myxa.core.errors import Overloaded, TrainError
from myxa.core.messages import WeightAck, WeightManifest
from myxa.core.weight_channel import WeightProgress
from myxa.transport.node import Node

MANY = 1000
"""Calls that fail, more than a test waits for."""
ANSWER_S = 0.02
"""How long an engine takes to answer."""


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"progress_s": 0.05, "first_repeat_s": 0.02, "longest_repeat_s": 0.05, "refuses_s": 0.2}
    monkeypatch.setattr(module, "TIMEOUTS", waits(coordinator=times))


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
        self.num_deaf = 0
        self.locations: list[str] = []

    async def prepare_weights(self, manifest: WeightManifest) -> WeightAck:
        self.locations.append(manifest.location)
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
        await asyncio.sleep(ANSWER_S)
        await self.gate.wait()
        self._floor.clock.advance(ANSWER_S)
        return self.refusals.pop(0) if self.refusals else self.ack(version)

    def ack(self, version: int, reason: str = "", *, is_whole: bool = False) -> WeightAck:
        return WeightAck(rollout=self.ctx.name, version=version, accepted=not reason, reason=reason, is_whole=is_whole)

    async def weight_progress(self) -> WeightProgress:
        self.num_asked += 1
        return self.progress or WeightProgress(at=f"tensor {self.num_asked}", num_done=self.num_asked, is_counted=True)

    async def fence(self, epoch: int, reason: str) -> bool:
        if self.num_deaf:
            self.num_deaf -= 1
            raise Overloaded("it does not hear")
        if epoch == self.ctx.epoch:
            self.fenced.append(reason)
        return epoch == self.ctx.epoch


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
    node: Node
    adoption: Adoption
    adopter: Adopter
    telemetry: TelemetryBuffer
    trainer: ToyTrainer
    clock: ManualClock
    """The adopter's, for refusals and stalls: it moves by answers, and by the test."""
    rollouts: list[ToyRollout] = field(default_factory=list)
    busy: set[str] = field(default_factory=set)
    most_busy: int = 0

    async def add(self) -> ToyRollout:
        rollout = ToyRollout(self)
        name = f"rollout/{len(self.rollouts)}"
        self.rollouts.append(rollout)
        await self.node.start(rollout, name=name)
        join(self.adoption, name, rollout.ctx.epoch)
        return rollout

    def publish(self, version: int, *, location: str = "", lineage: int = 0) -> None:
        self.adoption.published(manifest_of(version, location, "shm", lineage=lineage))

    async def adopt(self, *versions: int) -> None:
        for version in versions:
            self.publish(version)
            await self.adopter.adopt_pending()

    def told(self) -> str:
        return "; ".join(f"{event.kind}: {event.text}" for event in self.telemetry.drain().events)


@asynccontextmanager
async def floor_of(
    num_engines: int, *, at_once: int = 1, stall_s: float = 0.0, prepare_s: float = 5.0
) -> AsyncIterator[Floor]:
    clock = ManualClock()
    node = await Node.attach(name="adopter-floor", clock=clock)
    try:
        host, trainer = Actor(), ToyTrainer()
        await node.start(host, name="coordinator")
        await node.start(trainer, name="trainer/0")
        adoption, telemetry = Adoption(at_once=at_once), TelemetryBuffer("floor", clock)
        adopter = Adopter(
            Reporter(host.ctx, ActivityMeter("floor", clock), telemetry), adoption, limits=AdoptionLimits(prepare_s=prepare_s, commit_s=5.0, stall_s=stall_s),
        )  # fmt: skip
        floor = Floor(node, adoption, adopter, telemetry, trainer, clock)
        for _ in range(num_engines):
            await floor.add()
        yield floor
    finally:
        await node.close(grace_s=0.1)


@pytest.mark.parametrize("at_once", [1, 3])
async def test_so_many_adopt_at_once_and_no_more(at_once: int) -> None:
    async with floor_of(5, at_once=at_once) as floor:
        for version in (0, 1):
            floor.publish(version)
            await floor.adopter.adopt_pending()
            assert set(floor.adoption.serving.values()) == {version}
        assert floor.most_busy == at_once
        await until(lambda: floor.trainer.released == [0], "version 0 is let go")


async def test_an_engine_that_stands_still_is_named_with_its_place_and_the_others_go_on() -> None:
    async with floor_of(3, stall_s=0.3) as floor:
        stands = floor.rollouts[0]
        stands.gate.clear()
        stands.progress = WeightProgress(at="receive bucket 2 of 5 from trainer/3", num_done=2, is_counted=True)
        floor.publish(0)
        adopting = asyncio.ensure_future(floor.adopter.adopt_pending())
        await until(lambda: stands.num_asked >= 2, "it says where it is")
        floor.clock.advance(0.4)
        await adopting
        assert floor.adoption.serving == {"rollout/1": 0, "rollout/2": 0}
        await until(lambda: bool(stands.fenced), "it is told")
        (reason,) = stands.fenced
        assert re.search(r"prepare of version 0: no progress for 0.3 s: receive bucket 2 of 5 from trainer/3", reason)
        assert f"engine-fenced: rollout/0: {reason}" in floor.told()


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


async def test_one_that_moves_or_cannot_be_counted_has_until_the_deadline() -> None:
    async with floor_of(2, at_once=2, stall_s=0.15, prepare_s=2.0) as floor:
        slow, silent = floor.rollouts
        slow.gate.clear()
        silent.gate.clear()
        silent.progress = WeightProgress(at="the server reads /folder")
        floor.publish(0)
        adopting = asyncio.ensure_future(floor.adopter.adopt_pending())
        for _ in range(4):
            floor.clock.advance(0.1)
            asked = slow.num_asked, silent.num_asked
            await until(
                lambda asked=asked: slow.num_asked > asked[0] + 1 and silent.num_asked > asked[1] + 1, "they are asked"
            )
        assert not slow.fenced and not silent.fenced
        slow.gate.set()
        await adopting
        assert floor.adoption.serving == {"rollout/0": 0}
        await until(lambda: bool(silent.fenced), "it is told")
        assert "rollout/1" in floor.told()


@pytest.mark.parametrize("at_commit", [False, True])
async def test_one_that_refuses_and_is_whole_serves_on_and_is_asked_again(*, at_commit: bool) -> None:
    async with floor_of(2) as floor:
        await floor.adopt(0)
        refuses = floor.rollouts[0]
        refuses.at_commit = at_commit
        refuses.refusals = [refuses.ack(1, "the slab of trainer/0 is gone", is_whole=True) for _ in range(2)]
        floor.publish(1)
        adopting = asyncio.ensure_future(floor.adopter.adopt_pending())
        await until(lambda: floor.adoption.serving["rollout/1"] == 1, "the other goes on meanwhile")
        await adopting
        assert floor.adoption.serving == {"rollout/0": 1, "rollout/1": 1} and not refuses.fenced
        assert floor.told().count("weights-refused: rollout/0: ") == 1  # not again for the same reason


async def test_one_that_refuses_for_ever_or_is_torn_is_fenced() -> None:
    async with floor_of(3) as floor:
        stubborn, torn = floor.rollouts[:2]
        stubborn.refusals = [stubborn.ack(0, "no room", is_whole=True) for _ in range(99)]
        torn.refusals = [torn.ack(0, "bucket 3 did not arrive")]
        await floor.adopt(0)
        assert floor.adoption.serving == {"rollout/2": 0}
        await until(lambda: bool(stubborn.fenced and torn.fenced), "both are told")
        assert "no room (it has refused for " in stubborn.fenced[0] and len(stubborn.refusals) < 96
        assert "prepare of version 0 refused: bucket 3 did not arrive" in torn.fenced[0]


async def test_an_engine_that_ends_while_it_adopts_is_told_once_whoever_notices_it_first() -> None:
    async with floor_of(2) as floor:
        ends = floor.rollouts[0]
        ends.gate.clear()
        floor.publish(0)
        adopting = asyncio.ensure_future(floor.adopter.adopt_pending())
        await until(lambda: bool(ends.num_asked or floor.busy), "it adopts")
        await floor.node.stop("rollout/0", grace_s=0.1)
        await adopting
        assert floor.adoption.serving == {"rollout/1": 0}
        floor.adopter.gone("rollout/0", ends.ctx.epoch, "it ended")  # as the coordinator does for each that ends
        floor.adopter.gone("rollout/0", ends.ctx.epoch, "it ended")
        told = [event.kind for event in floor.telemetry.drain().events]
        assert told == ["engine-gone"]


async def test_what_a_trainer_offered_that_has_ended_is_not_held_against_an_engine_that_cannot_take_it() -> None:
    """Also once the next trainer is up, and has offered nothing yet."""
    async with floor_of(1) as floor:
        engine = floor.rollouts[0]
        floor.adoption.trainer_ended(4)
        engine.refusals = [engine.ack(0, "the slab is gone", is_whole=True) for _ in range(MANY)]
        floor.publish(0, lineage=4)
        adopting = asyncio.ensure_future(floor.adopter.adopt_pending())
        await until(lambda: len(engine.refusals) < MANY - 20, "it refuses for longer than refusals are borne")
        assert not engine.fenced
        engine.refusals.clear()
        floor.publish(0, lineage=5)
        await adopting
        assert floor.adoption.serving == {"rollout/0": 0} and not engine.fenced


async def test_a_release_that_was_not_heard_is_not_told_of_what_was_offered_again() -> None:
    async with floor_of(1) as floor:
        floor.adoption._keeps_newest = False
        floor.trainer.num_deaf = MANY
        await floor.adopt(0)
        await until(lambda: floor.trainer.num_deaf < MANY, "told, and not heard")
        newcomer = await floor.add()
        newcomer.gate.clear()
        floor.publish(0)
        adopting = asyncio.ensure_future(floor.adopter.adopt_pending())
        await until(lambda: "rollout/1" in floor.busy, "it reads those bytes")
        floor.trainer.num_deaf = 0
        await asyncio.sleep(0.2)
        assert floor.trainer.released == []
        newcomer.gate.set()
        await adopting
        await until(lambda: floor.trainer.released == [0], "now nobody does")


async def test_a_release_that_was_not_heard_is_not_told_a_trainer_that_went_back() -> None:
    async with floor_of(1) as floor:
        floor.trainer.num_deaf = 1
        await floor.adopt(0, 1)
        await until(lambda: floor.trainer.num_deaf == 0, "told, and not heard")
        floor.adoption.rewound()
        for version in (0, 1):
            floor.publish(version, location="anew")
            await floor.adopter.adopt_pending()
        await until(lambda: floor.trainer.released == [0], "the other version 0 may go")
        await asyncio.sleep(0.2)
        assert floor.trainer.released == [0] and floor.adoption.serving == {"rollout/0": 1}


async def test_a_fence_that_was_not_heard_is_told_again_and_never_meant_for_the_next_incarnation() -> None:
    async with floor_of(2) as floor:
        deaf, anew = floor.rollouts
        deaf.num_deaf = 2
        floor.adopter.fence("rollout/0", deaf.ctx.epoch, "its knobs are unknown")
        floor.adopter.fence("rollout/1", anew.ctx.epoch - 1, "that was another one")
        await until(lambda: deaf.fenced == ["its knobs are unknown"], "told until it was heard")
        await floor.adopt(0)
        assert floor.adoption.serving == {"rollout/1": 0} and not anew.fenced, "what is fenced gets nothing more"


async def test_what_is_fenced_or_followed_by_another_while_it_adopts_is_not_told_to_serve() -> None:
    async with floor_of(2, at_once=2) as floor:
        for engine in floor.rollouts:
            engine.gate.clear()
        floor.publish(0)
        adopting = asyncio.ensure_future(floor.adopter.adopt_pending())
        await until(lambda: len(floor.busy) == 2, "both are at it")
        floor.adopter.fence("rollout/0", floor.rollouts[0].ctx.epoch, "its knobs are unknown")
        join(floor.adoption, "rollout/1", floor.rollouts[1].ctx.epoch + 1)
        floor.adoption.gone("rollout/1", floor.rollouts[1].ctx.epoch + 1)
        for engine in floor.rollouts:
            engine.gate.set()
        await adopting
        assert not floor.adoption.serving


async def test_the_same_version_of_a_gang_that_was_started_again_is_taken_from_its_new_place() -> None:
    async with floor_of(1) as floor:
        engine = floor.rollouts[0]
        floor.publish(0, location="trainer/0")
        engine.refusals = [engine.ack(0, "trainer/0 is gone", is_whole=True)]
        adopting = asyncio.ensure_future(floor.adopter.adopt_pending())
        await until(lambda: not engine.refusals, "the sender is dead")
        floor.publish(0, location="trainer/0, anew")
        await adopting
        assert engine.locations[-1] == "trainer/0, anew" and floor.adoption.serving == {"rollout/0": 0}
